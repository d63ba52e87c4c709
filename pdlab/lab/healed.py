"""What `lab.heal()` did."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Healed:
    """What `heal` did.

    Attributes:
        started: servers that had died, and were started again.
        stuck: engines that held blocks of requests that had ended, for longer than P waits for a pull: started again.
        mute: whether P's writes went on failing, though both engines were well: P was started again.
        under_way: requests that were under way, and were left alone; beside them no prefix cache is emptied.
    """

    started: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    under_way: int = 0
    mute: bool = False

    def __repr__(self) -> str:
        did = [f"{server} had died: started again" for server in self.started]
        did += [f"{server} kept blocks that nobody waits for: started again" for server in self.stuck]
        did += ["prefill's writes to decode failed: prefill started again"] if self.mute else []
        left = "1 request" if self.under_way == 1 else f"{self.under_way} requests"
        did += [f"{left} under way: left alone" if self.under_way else "prefix caches emptied"]
        return f"<healed: {'; '.join(did)}>"
