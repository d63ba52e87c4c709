"""`lab.heal()`: whatever a reader, or an experiment, did to the lab, it serves again, and holds nothing of the past."""

import time
from typing import TYPE_CHECKING

from pdlab.errors import PdlabError, RequestError
from pdlab.lab import record as records
from pdlab.lab import start
from pdlab.lab.answer import complete
from pdlab.lab.healed import Healed
from pdlab.lab.instance import Instance
from pdlab.lab.progress import progress
from pdlab.lab.record import SERVERS, Record
from pdlab.lab.settings import ROLES
from pdlab.lab.startup import Report

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab

RECOVERY = 5.0  # seconds in which Mooncake's transport takes writes again, if it refused a few pieces
MARGIN = 3.0  # seconds after VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, at which P gives up


def heal(lab: "Lab", report: Report | None = None) -> Healed:
    """See `Lab.heal`."""
    if lab.settings is None:
        raise PdlabError("these instances were started elsewhere", "start what died again where it was started")
    patience = lab.settings.abort_timeout + MARGIN
    _record_of(lab)  # before there is a lock to be left behind
    with records.locked(lab.name):
        record = _record_of(lab)
        if lab.trace_folder is not None:
            lab.release()
        died, stuck = _broken(record), []
        if "prefill" in died and "decode" not in died and _keeps_only(start.instance(record, "decode")):
            stuck = ["decode"]  # what it keeps for the dead P's writes it would keep for another minute
        _start_again(lab, record, [*died, *stuck], report)
        late = _stuck(lab, patience)
        _start_again(lab, record, late, report)
        mute = _is_mute(lab)
        if mute:  # the refused pieces are on the account of this P's Transfer Engine
            _start_again(lab, record, ["prefill"], report)
    return Healed(tuple(died), (*stuck, *late), _empty_caches(lab), mute)


def catch_up(lab: "Lab") -> None:
    """Go on with the processes that another process healed this lab with; nothing if it ended, or was started anew."""
    record = records.load(lab.name) if lab.settings is not None else None
    if record is not None and record.ready and _is_of(record, lab):
        _take(lab, record)


def _record_of(lab: "Lab") -> Record:
    record = records.load(lab.name)
    if record is None or not record.ready:
        raise PdlabError(f"no lab {lab.name!r} is running", "start it: pdlab.up()")
    if not _is_of(record, lab):
        raise PdlabError(f"lab {lab.name!r} was ended and started anew", "attach to it: pdlab.up()")
    return record


def _is_of(record: Record, lab: "Lab") -> bool:
    return record.token == lab.prefill.token


def _broken(record: Record) -> list[str]:
    """What died, and engines that do not say what they hold, though they seem healthy: for a minute, see `usage`."""
    died = start.broken(record)
    for role in ROLES:
        if role not in died:
            try:
                start.instance(record, role).usage()
            except PdlabError:
                died = [server for server in SERVERS if server in (*died, role)]
    return died


def _start_again(lab: "Lab", record: Record, servers: list[str], report: Report | None) -> None:
    """Start these, and go on with the record's processes."""
    if servers:
        with progress(report) as tell:
            start.restart(lab.name, record, servers, tell)
    _take(lab, record)


def _take(lab: "Lab", record: Record) -> None:
    """Who holds `lab.prefill` or `lab.decode` has the record's processes too."""
    for engine in lab.engines:
        if engine.process != record.processes[engine.role]:
            engine.process, engine._facts = record.processes[engine.role], None
    lab.proxy.process = record.processes["proxy"]


def _stuck(lab: "Lab", patience: float) -> list[str]:
    """Engines that go on keeping blocks of requests that ended, though they have nothing else to do."""
    deadline = time.monotonic() + patience
    while keeping := [engine for engine in lab.engines if _keeps_only(engine)]:
        if time.monotonic() > deadline:
            return [engine.role for engine in keeping]
        time.sleep(0.1)
    return []


def _keeps_only(engine: Instance) -> bool:
    """Whether all that it has to do is to keep the blocks of requests that ended."""
    usage = engine.usage()
    return bool(usage.kept) and not usage.under_way


def _is_mute(lab: "Lab") -> bool:
    """Whether P's writes to D go on failing, though both engines are well; not asked beside other requests."""
    deadline = time.monotonic() + RECOVERY
    while not sum(engine.usage().under_way for engine in lab.engines):
        try:
            complete(lab.proxy.url, "Hello", 1, {}, who="the proxy", fresh=True)
            return False
        except RequestError as error:
            if error.status != 500:  # that is no matter of a write
                return False
            if time.monotonic() > deadline:
                return True
    return False


def _empty_caches(lab: "Lab") -> int:
    """Empty both prefix caches, unless requests are under way; how many are."""
    under_way = sum(engine.usage().under_way for engine in lab.engines)
    if not under_way:
        lab.reset()
    return under_way
