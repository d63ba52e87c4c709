"""Which processes a lab consists of, on which cores, holding how much memory, listening where."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # where recorded runs play, there need be neither
    import psutil

    from pdlab.lab.process import Process


@dataclass(frozen=True)
class Row:
    """One process.

    Attributes:
        server: prefill, decode or proxy.
        what: its part in that server.
        cores: it may run on.
        rss: resident memory, bytes.
        listens: addresses it accepts TCP connections at.
    """

    server: str
    what: str
    pid: int
    cores: tuple[int, ...]
    rss: int
    listens: tuple[str, ...]


class Processes(list[Row]):
    """The processes of a lab; prints as one line each."""

    def __repr__(self) -> str:
        lines = ["server   process           pid      memory  core(s)  listens at"]
        for row in self:
            cores = ",".join(map(str, row.cores))
            listens = row.listens[0] if len(row.listens) == 1 else f"{len(row.listens)} ports" if row.listens else ""
            line = f"{row.server:<8} {row.what:<17} {row.pid:<7} {row.rss >> 20:>5} MB  {cores:<8} {listens}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def processes_of(servers: "dict[str, Process | None]") -> Processes:
    """The living processes of each server: its nanny and all beneath it."""
    import psutil

    rows = Processes()
    for server, process in servers.items():
        for pid in process.pids() if process else ():
            try:
                rows.append(_row(server, psutil.Process(pid), is_nanny=process is not None and pid == process.pid))
            except psutil.NoSuchProcess:  # ended while we looked
                continue
    return rows


def _row(server: str, process: "psutil.Process", is_nanny: bool) -> Row:
    import psutil

    with process.oneshot():
        listening = [c.laddr for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return Row(
            server=server,
            what="nanny" if is_nanny else _what(server, process),
            pid=process.pid,
            cores=tuple(process.cpu_affinity()),
            rss=process.memory_info().rss,
            listens=tuple(sorted(f"{address.ip}:{address.port}" for address in listening)),
        )


def _what(server: str, process: "psutil.Process") -> str:
    line = " ".join(process.cmdline())
    if "EngineCore" in line:
        return "EngineCore"
    if "Worker" in line:
        return "worker"
    if "resource_tracker" in line:
        return "resource tracker"
    return "proxy" if server == "proxy" else "API server"
