"""The proxy, watched: what happens to the two halves of a request, noted, and the gates before they leave."""

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from pdlab.errors import PdlabError
from pdlab.inside.holds import GIVEN_UP, LOOK, find
from pdlab.lab.bodies import Body
from pdlab.lab.failure import Failure
from pdlab.lab.proxy_half import Half
from pdlab.trace.event import Event
from pdlab.trace.reader import Reader
from pdlab.trace.writer import Writer

SILENCE = 1.5  # seconds in which an engine that is traced has written what it noted, however busy


def watched(folder: Path) -> Callable[..., Half]:
    """What makes halves that write into `folder`, and heed the holds in its `gates`."""
    return functools.partial(WatchedHalf, Writer(folder, "proxy", {"side": "proxy"}), folder / "gates")


class WatchedHalf(Half):
    def __init__(self, writer: Writer, gates: Path, hop: str, client: Any, url: str, headers: Any, body: Body) -> None:
        self.writer, self.gates, self.headers, self.body, self.url = writer, gates, headers, body, url
        self.role = "decode" if body["kv_transfer_params"]["do_remote_prefill"] else "prefill"
        self.transfer = body["kv_transfer_params"]["transfer_id"]
        self.closed = False
        super().__init__(hop, client, url, headers, body)

    async def start(self, streamed: bool) -> None:
        await self.pass_gate(f"before_{self.role}_send")
        # The prompt stays here: of the body, only what makes it a half is noted.
        fields = {key: self.body.get(key) for key in ("max_tokens", "max_completion_tokens", "stream", "ignore_eos")}
        self.note(
            "half.sent", url=self.url, kv_transfer_params=self.body["kv_transfer_params"], **fields,
            dp_rank=self.headers.get("X-data-parallel-rank"), fields=sorted(self.body),
        )  # fmt: skip
        try:
            await super().start(streamed)
        except Exception as error:
            # What an engine answers may repeat the prompt; what is said of one that did not is ours.
            said = {} if self.answer else {"error": str(error)[:300]}
            self.note("half.failed", status=getattr(error, "status", None), **said)
            raise await self.explained(error) from None
        self.note("half.answered", status=self.answer.status_code if self.answer else None)

    async def explained(self, error: Exception) -> Exception:
        """The error, with what D's worker says: where a load failed, D says no more than "Internal server error"."""
        if self.role != "decode" or not isinstance(error, Failure) or error.status != 500:
            return error
        deadline = time.monotonic() + SILENCE
        with suppress(PdlabError, OSError), closing(Reader(self.gates.parent, recent=True)) as reader:
            while time.monotonic() < deadline:
                await asyncio.to_thread(reader.poll)
                for event in reader.of_transfer.get(self.transfer, ()):
                    if event.name == "pull.failed":
                        return error.because(f"D's worker says: {event.facts['reason']}")
                await asyncio.sleep(LOOK)
        return error

    async def close(self) -> None:
        unanswered = not self.started.done()
        await super().close()
        if not self.closed:
            self.closed = True
            self.note("half.closed", unanswered=unanswered)

    async def pass_gate(self, point: str) -> None:
        while hold := find(self.gates, point, self.id) or find(self.gates, point, self.transfer):
            why, began = None, time.monotonic()
            self.note("gate.held", point=point, hold=hold.path.stem)
            try:
                while (why := hold.over()) is None:
                    await asyncio.sleep(LOOK)
            finally:
                seconds = time.monotonic() - began
                self.note("gate.released", point=point, hold=hold.path.stem, why=why or GIVEN_UP, seconds=seconds)

    def note(self, name: str, **facts: Any) -> None:
        thread, facts = threading.current_thread().name, {"role": self.role, **facts}
        self.writer.note(Event(time.monotonic(), name, "proxy", thread, (self.transfer,), self.id, facts))
