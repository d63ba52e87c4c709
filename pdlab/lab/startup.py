"""Waiting until servers answer, showing how far each has come, and saying why one did not."""

import time
from collections.abc import Callable
from pathlib import Path

from pdlab.errors import StartError
from pdlab.lab import engine_log
from pdlab.lab.http import healthy
from pdlab.lab.process import Process

# Called with (instance name, stage, seconds since its start), each time the stage is another.
Report = Callable[[str, str, float], None]
PATIENCE = 600.0
POLL = 0.25
STAGE_OF_PROXY = "waiting for both engines"


def wait_until_serving(processes: dict[str, tuple[Process, str]], report: Report, patience: float = PATIENCE) -> None:
    """Return when every server answers at its `/health`; `processes` maps a name to (process, url).

    Raises:
        StartError: one of them ended, or `patience` seconds passed; says the first real error of its log.
    """
    began, stages = time.monotonic(), dict.fromkeys(processes, "")
    waiting = set(processes)
    while waiting:
        for name in sorted(waiting):
            process, url = processes[name]
            if not process.alive:
                raise failure(name, process)
            stage = engine_log.SERVING if healthy(url) else _stage(name, process)
            if stage != stages[name]:
                stages[name] = stage
                report(name, stage, time.monotonic() - began)
            if stage == engine_log.SERVING:
                waiting.discard(name)
        if time.monotonic() - began > patience:
            late = ", ".join(f"{name} ({stages[name]})" for name in sorted(waiting))
            logs = ", ".join(processes[name][0].log for name in sorted(waiting))
            raise StartError(f"not ready after {patience:.0f} s: {late}", f"see {logs}")
        time.sleep(POLL)


def _stage(name: str, process: Process) -> str:
    return STAGE_OF_PROXY if name == "proxy" else engine_log.stage(Path(process.log).read_text(errors="replace"))


def failure(name: str, process: Process, what: str = "did not start") -> StartError:
    """What to tell the reader about a server that ended: its first real error, and what to try."""
    log = Path(process.log).read_text(errors="replace")
    error = engine_log.first_error(log)
    if error is None:
        last = next((line for line in reversed(log.splitlines()) if line.strip()), "it printed nothing")
        error = f"{process.why_ended()}; last line: {last.strip()}"
    advice = engine_log.hint(error)
    return StartError(f"{name} {what}: {error}", "\n  ".join(filter(None, [advice, f"log: {process.log}"])))
