"""A lab of fakes to be recorded: it answers from real journeys, kept in tests/recorded/journeys."""

import hashlib
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError, RequestError
from pdlab.faults.outcome import Outcome
from pdlab.lab.command import Command
from pdlab.lab.comparison import Comparison, Pair, Rewritten
from pdlab.lab.healed import Healed
from pdlab.lab.hold import Hold
from pdlab.lab.kv import KVBlock
from pdlab.lab.processes import Processes, Row
from pdlab.lab.settings import Role, Settings
from pdlab.lab.usage import Usage
from pdlab.trace.answer import Answer
from pdlab.trace.event import Event
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace

JOURNEYS = Path(__file__).parent / "recorded" / "journeys"
PROMPT = list(range(1000, 1143))
ABOUT = {
    "when": "2026-11-30 02:10", "where": "Some(R) CPU @ 2.10GHz, 2 cores, Debian GNU/Linux 12 (bookworm)",
    "versions": {"vllm": "0.32.0"}, "model": "SmolLM2-135M-Instruct", "profile": "cpu",
}  # fmt: skip
NOTE = f"; recorded {ABOUT['when']} on {ABOUT['where']}"
SETTINGS = Settings(
    model="/models/SmolLM2-135M-Instruct", profile="cpu", dtype="float32", max_model_len=4096, block_size=32,
    kv_cache_bytes=512 << 20, abort_timeout=15, protocol="tcp",
)  # fmt: skip


def sample(name: str) -> Journey:
    """A journey of real engines: plain, partial_hit, held (while it was), was_held (the same later), p_first, batch."""
    return Journey.load(JOURNEYS / f"{name}.json.gz")


def another(name: str, number: int) -> Journey:
    """The same with other ids, as if it had been sent once more."""
    text = json.dumps(sample(name).as_dict())
    for known in (r"pdlab-[0-9a-f]{12}", r"xfer-[0-9a-f-]{36}", r"before_[a-z_]+\.[0-9a-f]{8}"):
        text = re.sub(rf"{known}", lambda found: f"{found[0][:-2]}{number:02x}", text)
    return Journey.from_dict(json.loads(text))


class FakeInstance:
    """Its metrics count the calls."""

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.url, self.bootstrap = f"http://127.0.0.1:{len(role)}000", "http://127.0.0.1:8998"
        self.command = Command(["python", "-m", "vllm"], {"OMP_NUM_THREADS": "1"})
        self.facts = {"vllm_version": "0.32.0", "workers": [{"engine_id": f"id of {role}", "regions": [1, 2]}]}
        self.alive = self.healthy = True
        self.process, self.log, self.token = None, None, "a secret"
        self.calls = 0.0

    @property
    def engine_id(self) -> str:
        return str(self.facts["workers"][0]["engine_id"])  # type: ignore[index]

    @property
    def registered_kv(self) -> Any:
        return self.facts["workers"][0]

    def bootstrap_query(self) -> dict[str, Any]:
        return {"0": {"engine_id": self.engine_id}}

    def metric(self, name: str, **labels: str) -> float:
        if name == "none":
            raise PdlabError("it has no metric none", "see /metrics")
        self.calls += 1
        return self.calls

    def complete(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = True, **body: Any) -> Answer:
        return Answer(" yes", (1, 2), len(prompt), "length", "pdlab-000000000001")

    def kv(self, layer: int, block: int) -> KVBlock:
        data = bytes([layer, block]) * 64
        digest = hashlib.sha256(data).hexdigest()[:16]
        return KVBlock(
            self.role, layer, f"layers.{layer}", block, 4096, 128, 128, 4096 + block * 128, (3, 32, 128), "float32",
            "cpu", data, digest,
        )  # fmt: skip

    def kv_digests(self, blocks: list[int], layers: list[int] | None = None) -> list[list[str]]:
        return [[f"{layer}:{block}" for block in blocks] for layer in layers or (0, 1)]

    def usage(self) -> Usage:
        return Usage(363, 5 if self.role == "prefill" else 0, kept=1)

    def reset_prefix_cache(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{self.role} instance {self.url} {'up' if self.alive else 'down'}>"


class FakeProxy:
    url, alive, log, process = "http://127.0.0.1:9000", True, None, None

    def __repr__(self) -> str:
        return f"<proxy {self.url} up>"


class FakeComparison(Comparison):
    def rewritten(self) -> list[Rewritten]:
        return [Rewritten(0, 7, ((3, 5), (9, 10)))]


class FakeHold(Hold):
    """A real hold, that knows what it holds from the journeys of the fake lab."""

    def __init__(self, lab: "FakeLab", point: str, match: str, seconds: float) -> None:
        super().__init__(lab.trace_folder, point, match, seconds)
        self.lab = lab

    @property
    def stands(self) -> bool:
        return self._holder.hold.path.exists()

    def _events(self) -> list[Event]:
        events = [event for journey in self.lab.sent for event in journey.events]
        return [event for event in events if event.name.startswith("gate.") and event.facts["hold"] == self.name]


class FakeLab:
    """Every `send` and `submit` is one of the samples, in their order.

    Args:
        folder: for holds, which are real ones.
    """

    def __init__(self, folder: Path, *samples: str, name: str = "default") -> None:
        self.name, self.settings, self.started, self.trace_folder = name, SETTINGS, True, folder
        self.prefill, self.decode, self.proxy = FakeInstance("prefill"), FakeInstance("decode"), FakeProxy()
        self.samples, self.sent, self.standing = list(samples), list[Journey](), list[FakeHold]()
        self.ended, self.submitted = False, 0

    def send(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        if body.get("n"):
            error = RequestError(400, "the proxy answered 400: more than one answer", "ask for one")
            error.journey = Journey("pdlab-refused", error=error)
            raise error
        self.sent.append(sample(self.samples.pop(0)))
        return self.sent[-1]

    def submit(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        """While a hold stands it shows what it had come to before that."""
        whole = self.next_submitted()
        self.submitted += 1
        self.samples.pop(0)
        journey = Journey(whole.request_id, feed=partial(self._feed, whole))
        self.sent.append(journey)
        return journey

    def next_submitted(self) -> Journey:
        return another(self.samples[0], self.submitted) if self.submitted else sample(self.samples[0])

    def _feed(self, whole: Journey, journey: Journey) -> None:
        names = [event.name for event in whole.events]
        held = any(hold.stands for hold in self.standing)
        journey.fill(whole.events[: names.index("gate.released") if held else None], whole.transfer_id)
        if not held:
            journey.answered(whole.answer)
            journey.close()

    def trace(self, since: float = 0.0) -> Trace:
        return Trace([Journey(j.request_id, j.events, transfer_id=j.transfer_id) for j in self.sent], [])

    def hold(self, point: str, match: str = "*", seconds: float | None = None) -> Hold:
        if point == "nowhere":
            raise PdlabError("there is no gate 'nowhere'", "choose one")
        hold = FakeHold(self, point, match, seconds or 60.0)
        events = self.next_submitted().events if self.samples else []
        for event in events:
            if event.name == "gate.held":  # the one that held the journey that comes next
                hold.name = event.facts["hold"]
        self.standing.append(hold)
        return hold

    def release(self) -> None:
        for hold in self.standing:
            hold.release()

    def held(self) -> dict[str, str]:
        return {str(journey.transfer_id): journey.held for journey in self.sent if journey.held}

    def compare(self, journey: Journey) -> Comparison:
        pairs = tuple(Pair(layer, 1, 2, True) for layer in range(30))
        return FakeComparison(pairs, 49152, str(journey.held), self.decode, (self.decode.kv(0, 7),))  # type: ignore[arg-type]

    def usage(self) -> dict[str, Usage]:
        return {"prefill": self.prefill.usage(), "decode": self.decode.usage()}

    def heal(self, report: Any = None) -> Healed:
        return Healed(("prefill",))

    def fault(self, name: str) -> Outcome:
        journey = sample("plain")
        return Outcome(name, "something fails", "500", "400", "", {"seconds": 5.0}, Healed(), journey)

    def status(self) -> dict[str, Any]:
        return {"name": self.name, "up": True, "servers": {"proxy": {"pids": [1, 2], "log": f"{Path.home()}/p.log"}}}

    def processes(self) -> Processes:
        return Processes([Row("prefill", "EngineCore", 5, (0, 1), 1 << 30, ("127.0.0.1:80",))])

    def down(self) -> None:
        self.ended = True

    def __enter__(self) -> "FakeLab":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def __repr__(self) -> str:
        return f"Lab {self.name!r}\n  {self.prefill!r}\n  {self.decode!r}\n  {self.proxy!r}"
