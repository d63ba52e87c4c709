"""Free ports without races: a port is held from the moment it is chosen until the server has it."""

import socket
from dataclasses import dataclass, field

from pdlab.errors import PdlabError

FREE = "choose another, or leave it out: a free one is picked"


@dataclass
class Ports:
    """Ports of one host, each held by a bound socket that does not listen.

    Linux lets a server with SO_REUSEADDR (uvicorn, `socket.create_server`) bind and listen on such a port, while the
    kernel gives it to nobody who asks for a free one. The nanny inherits the sockets and holds them as long as it
    lives, so that an instance that is restarted finds its ports again.
    """

    host: str
    sockets: dict[str, socket.socket] = field(default_factory=dict)

    def take(self, name: str, port: int = 0) -> int:
        """Hold `port` (0: any free one) under `name` and return its number.

        Raises:
            PdlabError: another process has the port, or the host is not an address of this machine.
        """
        if port and port in (held.getsockname()[1] for held in self.sockets.values()):
            raise PdlabError(f"cannot take port {port} for {name}: it is asked for twice", FREE)
        holder = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind((self.host, port))
        except (OSError, OverflowError) as error:
            holder.close()
            where = f"port {port} of {self.host}" if port else f"any port of {self.host}"
            why = getattr(error, "strerror", None) or str(error)
            raise PdlabError(
                f"cannot take {where} for {name}: {why}", FREE if port else "give an address of this machine"
            ) from None
        self.sockets[name] = holder
        return int(holder.getsockname()[1])

    def fds(self) -> list[int]:
        return [holder.fileno() for holder in self.sockets.values()]

    def close(self) -> None:
        """Let go of this process's copies; the nanny that inherited them still holds the ports."""
        for holder in self.sockets.values():
            holder.close()
        self.sockets.clear()
