"""A recorded lab: the same calls as a live one has, answered from a tape."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlab.errors import PdlabError
from pdlab.faults.outcome import Outcome
from pdlab.lab.command import Command
from pdlab.lab.comparison import Comparison, Rewritten
from pdlab.lab.healed import Healed
from pdlab.lab.kv import KVBlock
from pdlab.lab.processes import Processes
from pdlab.lab.settings import Role, Settings
from pdlab.lab.usage import Usage
from pdlab.recorded.calls import Arguments, named
from pdlab.recorded.codec import Decoder, Held, Made
from pdlab.recorded.needle import LIVE, Needle
from pdlab.recorded.noted import note, noted, with_note
from pdlab.recorded.panel import tell
from pdlab.recorded.stage import RecordedHold, Stage
from pdlab.recorded.tape import Tape, path_of
from pdlab.trace.answer import Answer
from pdlab.trace.journey import Journey
from pdlab.trace.trace import Trace

if TYPE_CHECKING:
    from pdlab.lab.startup import Report

DEFAULT = "journey"


class Run:
    """A tape that plays.

    Attributes:
        note: what everything it displays ends with.
        where: what an error calls it: its name and date.
        folder: in which the tape lies.
    """

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.folder, self.tape = name, path.parent, Tape.load(path)
        tape, about = self.tape, self.tape.about
        self.note, self.where = note(about), f"{name!r} of {about['when']}"
        self._decoder, self._needle = Decoder(tape.pool, tape.about), Needle(tape.calls, self.where)

    def play(self, of: int | None, path: str, arguments: Arguments) -> Any:
        """What the call returned; where it is an object with calls of its own: that, played.

        Raises:
            PdlabError: what the call raised, or that there was no such call.
        """
        place = self._needle.find(of, path, arguments)
        call = self.tape.calls[place]
        if call.error is not None:
            raise self._decoder.decode(call.error)
        result = self._decoder.decode(call.result)
        if isinstance(result, Made):
            return RecordedLab(self, place)
        if isinstance(result, Comparison):
            return noted(RecordedComparison, self.note)(result, partial(self.play, place, "compare().rewritten", {}))
        return result

    def constant(self, of: int | None, path: str) -> Any:
        """What does not change while a lab runs."""
        return self._decoder.decode(self.tape.calls[self._needle.constant(of, path)].result)


class Played:
    """An object whose calls are on the tape.

    Args:
        of: index of the call that gave it, or what it is a part of.
        path: of its calls, before their names.
    """

    def __init__(self, run: Run, of: int, path: str = "") -> None:
        self._run, self._of, self._path = run, of, path

    def _play(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._run.play(self._of, self._path + method, named(getattr(self, method), args, kwargs))

    def _now(self, name: str) -> Any:
        """A property that changes."""
        return self._run.play(self._of, self._path + name, {})

    def _ever(self, name: str) -> Any:
        """A property that does not."""
        return self._run.constant(self._of, self._path + name)

    def __repr__(self) -> str:
        return with_note(self._now("__repr__"), self._run.note)


class RecordedServer(Played):
    """What the engines and the proxy have in common."""

    log = None

    @property
    def url(self) -> str:
        return self._ever("url")

    @property
    def alive(self) -> bool:
        return self._now("alive")

    @property
    def process(self) -> Any:
        """Live only. PdlabError."""
        raise PdlabError("in a recorded run there is no process", LIVE)


class RecordedInstance(RecordedServer):
    """`lab.prefill` and `lab.decode` of a recorded run; see `pdlab.lab.instance.Instance`.

    Attributes:
        log, token: None and "", as of an instance that was started elsewhere.
    """

    token = ""

    @property
    def role(self) -> Role:
        return self._ever("role")

    @property
    def bootstrap(self) -> str | None:
        return self._ever("bootstrap")

    @property
    def command(self) -> Command | None:
        return self._ever("command")

    @property
    def facts(self) -> dict[str, Any]:
        return self._ever("facts")

    @property
    def engine_id(self) -> str:
        return str(self.facts["workers"][0]["engine_id"])

    @property
    def registered_kv(self) -> dict[str, Any]:
        return dict(self.facts["workers"][0])

    @property
    def healthy(self) -> bool:
        return self._now("healthy")

    def bootstrap_query(self) -> dict[str, Any]:
        """What its bootstrap server answered. PdlabError on a decode instance."""
        return self._play("bootstrap_query")

    def metric(self, name: str, **labels: str) -> float:
        """A metric of the engine, as it stood then."""
        return self._play("metric", name, **labels)

    def complete(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = True, **body: Any) -> Answer:
        """What this engine alone answered. RequestError where it refused."""
        return self._play("complete", prompt, max_tokens, fresh, **body)

    def kv(self, layer: int, block: int) -> KVBlock:
        """The bytes of a block, as they were read then."""
        return self._play("kv", layer, block)

    def kv_digests(self, blocks: list[int], layers: list[int] | None = None) -> list[list[str]]:
        """Digests of blocks, [layer][block]."""
        return self._play("kv_digests", blocks, layers)

    def usage(self) -> Usage:
        """What it held, when that was asked."""
        return self._play("usage")

    def reset_prefix_cache(self) -> bool:
        """There is none that it could empty."""
        return True


class RecordedProxy(RecordedServer):
    """`lab.proxy` of a recorded run; see `pdlab.lab.proxy_server.ProxyServer`."""


class RecordedComparison(Comparison):
    """A comparison whose `rewritten` is what D had changed then."""

    def __init__(self, found: Comparison, rewritten: Any) -> None:
        super().__init__(found.pairs, found.block_len, found.held, _decode=rewritten, _last=())

    def rewritten(self) -> list[Rewritten]:
        """What D had changed, when that was asked."""
        return self._decode()  # type: ignore[operator]


class RecordedLab(Played):
    """A lab of a recorded run; see `pdlab.lab.lab.Lab`.

    Attributes:
        prefill, decode, proxy: its engines and its proxy, played.
        started: False.
    """

    started = False

    def __init__(self, run: Run, of: int) -> None:
        super().__init__(run, of)
        self.prefill, self.decode = (RecordedInstance(run, of, f"{role}.") for role in ("prefill", "decode"))
        self.proxy = RecordedProxy(run, of, "proxy.")
        self._stage = Stage()

    @property
    def name(self) -> str:
        return self._ever("name")

    @property
    def settings(self) -> Settings | None:
        return self._ever("settings")

    @property
    def engines(self) -> tuple[RecordedInstance, RecordedInstance]:
        """P and D."""
        return self.prefill, self.decode

    @property
    def trace_folder(self) -> Path | None:
        """Where the tape lies that has its journeys; None: it was not traced."""
        return self._run.folder if self.settings and self.settings.trace else None

    def send(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        """The whole journey of a prompt that was sent. RequestError where it was refused."""
        return self._stage.sent(self._play("send", prompt, max_tokens, fresh, **body))

    def submit(self, prompt: str | list[int], max_tokens: int = 16, fresh: bool = False, **body: Any) -> Journey:
        """The journey of a prompt that was submitted: as far as it came while the holds stood that stand now."""
        return self._stage.submitted(self._play("submit", prompt, max_tokens, fresh, **body))

    def trace(self, since: float = 0.0) -> Trace:
        """All journeys that the trace had."""
        return self._play("trace", since)

    def hold(self, point: str, match: str = "*", seconds: float | None = None) -> RecordedHold:
        """Hold what was held there, until the `with` block is left."""
        held: Held = self._play("hold", point, match, seconds)
        return noted(RecordedHold, self._run.note)(held, self._stage)

    def release(self) -> None:
        """End every hold."""
        self._stage.release()

    def held(self) -> dict[str, str]:
        """What is held now: the point, by transfer_id."""
        return self._stage.held()

    def compare(self, journey: Journey) -> Comparison:
        """How the blocks of both sides compared, while this request was held."""
        return self._play("compare", journey)

    def usage(self) -> dict[str, Usage]:
        """What each engine held, when that was asked."""
        return self._play("usage")

    def heal(self, report: "Report | None" = None) -> Healed:
        """What was done to bring it back."""
        self.release()
        return self._play("heal")

    def fault(self, name: str) -> Outcome:
        """What came of a fault."""
        return self._play("fault", name)

    def status(self) -> dict[str, Any]:
        """What ran."""
        return self._play("status")

    def processes(self) -> Processes:
        """The processes there were."""
        return self._play("processes")

    def reset(self) -> None:
        """Nothing is held any more; there is nothing else that it could reset."""
        self.release()

    def down(self) -> None:
        """Nothing runs that it could end."""

    def must_agree(self, asked: dict[str, Any]) -> None:
        """Raises:
        PdlabError: the lab was recorded with other settings than those asked for.
        """
        had = self.settings.as_dict() if self.settings else {}
        for key, value in asked.items():
            if key not in had:
                raise PdlabError(f"up() does not take {key}", "it takes model, profile and the fields of Settings")
            if not _same(had[key], value):
                raise PdlabError(f"the recorded run {self._run.where} has {key} {had[key]} (asked for: {value})", LIVE)

    def __enter__(self) -> "RecordedLab":
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def __repr__(self) -> str:
        return self._now("__repr__") + self._run.note


def _same(had: Any, asked: Any) -> bool:
    """Whether a setting is the one asked for; a model is known by its name, wherever it lies."""
    if isinstance(had, str) and isinstance(asked, str | Path):
        return had == str(asked) or Path(had).name == Path(asked).name
    return had == (tuple(asked) if isinstance(asked, list) else asked)


_runs: dict[tuple[Path, int], Run] = {}
_last: list[str] = [DEFAULT]


def play(name: str | None, lab: str, asked: dict[str, Any], report: "Report | None") -> RecordedLab:
    """The lab that was recorded.

    Args:
        name: of the run; None: of the last one.
        lab: which lab of it, by name.
        asked: settings that it must have had; None: any.

    Raises:
        PdlabError: there is no such run, lab or setting on it.
    """
    _last[0] = name or _last[0]
    run = _run(_last[0])
    played: RecordedLab = run.play(None, "up", {} if lab == "default" else {"name": lab})
    played.must_agree({key: value for key, value in asked.items() if value is not None})
    tell(run.name, run.note, report)
    return played


def _run(name: str) -> Run:
    """The run of that name, read again where it was recorded again."""
    path = path_of(name)
    key = path, path.stat().st_mtime_ns if path.exists() else 0
    if key not in _runs:
        _runs[key] = Run(name, path)
    return _runs[key]
