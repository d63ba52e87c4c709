"""The gates inside an engine: what makes a matching request, and no other, wait at a point of the connector.

A gate only waits where vLLM would wait anyway (a coroutine, a thread of the sender pool): the engine goes on. Requests
that share a message or a batch with a held one are not held: the held one is taken out and goes on alone. But where a
hold in P is made when the message has left D already, the whole message waits.
"""

import asyncio
import copy
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pdlab.inside.holds import GIVEN_UP, LIMIT, LOOK, Hold, find
from pdlab.inside.probes import MCW
from pdlab.inside.tracer import Tracer, wrap

IN_P = ("before_write", "before_answer")


class Gates:
    """Attributes:
    waiting: how many requests each point holds now.
    """

    def __init__(self, trace: Tracer, folder: Path) -> None:
        self.trace, self.folder = trace, folder
        self.waiting: Counter[str] = Counter()
        self._lock = threading.Lock()  # of waiting: the sender pool's threads wait too
        self.writing: dict[int, list[tuple[str, str]]] = {}  # as in pdlab.inside.worker_probes.planned
        self._tasks: set[asyncio.Future[None]] = set()

    def install(self) -> None:
        """Wrap the points; after the probes, so that these see what passes and not what waits."""
        wrap(f"{MCW}.receive_kv", self.before_pull)
        wrap(f"{MCW}.record_send_reqs", self.before_ready)
        wrap(f"{MCW}._build_transfer_params", self.before_write)
        wrap(f"{MCW}._send_blocks", self.before_answer)

    def taken_by(self, point: str, request_id: str, transfer: str) -> Hold | None:
        """The hold that takes this request there."""
        try:
            return find(self.folder, point, request_id) or find(self.folder, point, transfer)
        except Exception as error:
            self.trace.failed(f"gate.{point}", error)
            return None

    def close_for(self, point: str, request_id: str, transfer: str) -> Hold | None:
        """The hold that takes this request, which then has to wait; None: none does, or the point holds too many."""
        if not (hold := self.taken_by(point, request_id, transfer)):
            return None
        with self._lock:
            full = self.waiting[point] >= LIMIT
            self.waiting[point] += not full
        facts = {"point": point, "hold": hold.path.stem}
        if full:
            self.trace.note("worker", "gate.passed", transfer, request_id, **facts, why=f"it holds {LIMIT}")
            return None
        self.trace.note("worker", "gate.held", transfer, request_id, **facts)
        return hold

    async def wait(self, hold: Hold | None, request_id: str, transfer: str) -> None:
        """Return when this hold is over, and no other has the request wait here."""
        while hold:
            why, began = None, time.monotonic()
            try:
                while (why := hold.over()) is None:
                    await asyncio.sleep(LOOK)
            finally:
                self._open(hold, request_id, transfer, why, began)
            hold = self.close_for(hold.point, request_id, transfer)

    def wait_in_thread(self, hold: Hold | None, request_id: str, transfer: str) -> None:
        while hold:
            began = time.monotonic()
            while (why := hold.over()) is None:
                time.sleep(LOOK)
            self._open(hold, request_id, transfer, why, began)
            hold = self.close_for(hold.point, request_id, transfer)

    def _open(self, hold: Hold, request_id: str, transfer: str, why: str | None, began: float) -> None:
        with self._lock:
            self.waiting[hold.point] -= 1
        self.trace.note(
            "worker", "gate.released", transfer, request_id, point=hold.point, hold=hold.path.stem,
            why=why or GIVEN_UP, seconds=time.monotonic() - began,
        )  # fmt: skip

    def _later(self, waiting: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(waiting)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # The points ---------------------------------------------------------------------------------------------------

    def before_pull(self, original: Callable[..., None]) -> Callable[..., None]:
        """`MooncakeConnectorWorker.receive_kv`, on D's receiver loop, starts a pull message for each P worker."""

        @functools.wraps(original)
        def receive_kv(worker: Any, remote_engine_id: str, pull_metas: dict[str, Any]) -> None:
            free, alone = {}, []
            for request_id, pull in pull_metas.items():
                hold = self.close_for("before_pull", request_id, pull.transfer_id)
                in_p = (self.taken_by(point, request_id, pull.transfer_id) for point in IN_P)
                if hold or any(in_p):
                    # To be held here, or in P, where it must not hold others of its message.
                    alone.append((hold, request_id, pull))
                else:
                    free[request_id] = pull
            for hold, request_id, pull in alone:
                self._later(held(worker, remote_engine_id, hold, request_id, pull))
            if free:
                original(worker, remote_engine_id, free)

        async def held(worker: Any, engine: str, hold: Hold | None, request_id: str, pull: Any) -> None:
            await self.wait(hold, request_id, pull.transfer_id)
            original(worker, engine, {request_id: pull})

        return receive_kv

    def before_ready(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`MooncakeConnectorWorker.record_send_reqs`, on P's sender loop, makes entries ready (or only makes them)."""

        @functools.wraps(original)
        async def record_send_reqs(worker: Any, metadata: Any) -> None:
            held = []
            for request_id, (transfer, block_ids) in metadata.reqs_to_send.items():
                hold = self.close_for("before_ready", request_id, transfer) if block_ids else None
                if hold:
                    held.append((hold, request_id, transfer))
            if held:
                metadata, late = split(metadata, {request_id for _, request_id, _ in held})
                for hold, request_id, transfer in held:
                    self._later(ready_later(worker, late[request_id], hold, request_id, transfer))
            await original(worker, metadata)

        async def ready_later(worker: Any, metadata: Any, hold: Hold, request_id: str, transfer: str) -> None:
            await self.wait(hold, request_id, transfer)
            await original(worker, metadata)

        return record_send_reqs

    def before_write(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`MooncakeConnectorWorker._build_transfer_params`, on P's sender loop: the next thing is the write."""

        @functools.wraps(original)
        async def build_transfer_params(worker: Any, ready_reqs: Any, *args: Any) -> Any:
            result = await original(worker, ready_reqs, *args)
            for request_id, entry in ready_reqs:
                hold = self.close_for("before_write", request_id, entry.transfer_id)
                await self.wait(hold, request_id, entry.transfer_id)
            if result[0]:  # else there is nothing to write: no call of _send_blocks follows
                self.writing[id(result[0])] = [(request_id, entry.transfer_id) for request_id, entry in ready_reqs]
            return result

        return build_transfer_params

    def before_answer(self, original: Callable[..., int]) -> Callable[..., int]:
        """`MooncakeConnectorWorker._send_blocks`, in a thread of P's sender pool: once it returns, P answers D."""

        @functools.wraps(original)
        def send_blocks(worker: Any, remote_session: str, src_ptrs: Any, *args: Any) -> int:
            requests = self.writing.pop(id(src_ptrs), [])
            result = original(worker, remote_session, src_ptrs, *args)
            for request_id, transfer in requests:
                self.wait_in_thread(self.close_for("before_answer", request_id, transfer), request_id, transfer)
            return result

        return send_blocks


def split(metadata: Any, request_ids: set[str]) -> tuple[Any, dict[str, Any]]:
    """A `MooncakeConnectorMetadata` without these requests to send, and one of its own for each of them."""
    rest, parts = copy.copy(metadata), {}
    rest.reqs_to_send = {key: value for key, value in metadata.reqs_to_send.items() if key not in request_ids}
    for request_id in request_ids:
        part = parts[request_id] = copy.copy(metadata)
        part.reqs_to_recv, part.reqs_not_processed = {}, set()
        part.reqs_to_send = {request_id: metadata.reqs_to_send[request_id]}
    return rest, parts
