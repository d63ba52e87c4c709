"""Sending requests through the proxy and following each as a journey."""

import threading
import time
from pathlib import Path
from typing import Any

from pdlab.errors import RequestError
from pdlab.lab.answer import check, complete, new_request_id
from pdlab.trace.journey import Journey
from pdlab.trace.reader import Reader

PATIENCE = 3.0  # seconds, after the answer, for what both engines do then: P hears that all is sent, both free
SILENCE = 0.5  # seconds, after it, in which an engine that is traced has written something


class Journeys:
    """Follows the requests of one lab.

    Args:
        folder: where its engines and its proxy write their events; None: they write none.
    """

    def __init__(self, proxy_url: str, folder: Path | None) -> None:
        self.proxy_url, self.folder = proxy_url, folder
        self._reader = Reader(folder, from_now=True) if folder else None

    def send(self, prompt: str | list[int], max_tokens: int, fresh: bool, body: dict[str, Any]) -> Journey:
        """Send and wait; see `Lab.send`."""
        journey = self._new(prompt, max_tokens, body)
        self._ask(journey, prompt, max_tokens, fresh, body)
        if isinstance(journey.error, RequestError):
            journey.error.journey = journey
        if journey.error is not None:
            raise journey.error
        self._settle(journey)
        return journey

    def submit(self, prompt: str | list[int], max_tokens: int, fresh: bool, body: dict[str, Any]) -> Journey:
        """Send and do not wait; see `Lab.submit`."""
        journey = self._new(prompt, max_tokens, body)
        arguments = (journey, prompt, max_tokens, fresh, body)
        threading.Thread(target=self._ask, args=arguments, name=f"pdlab-{journey.request_id}", daemon=True).start()
        return journey

    def _new(self, prompt: str | list[int], max_tokens: int, body: dict[str, Any]) -> Journey:
        """Its journey. PdlabError at once, and not in a thread, where there is nothing to be sent."""
        request_id = body.pop("request_id", None) or new_request_id()
        check(prompt, max_tokens, body, request_id)
        return Journey(request_id, feed=self._feed if self._reader else None)

    def _ask(
        self, journey: Journey, prompt: str | list[int], max_tokens: int, fresh: bool, body: dict[str, Any]
    ) -> None:
        try:
            answer = complete(
                self.proxy_url, prompt, max_tokens, body, who="the proxy", fresh=fresh, request_id=journey.request_id
            )
            journey.answered(answer)
        except Exception as error:  # whatever it is, who waits for the journey has to hear of it
            journey.answered(None, error)

    def _feed(self, journey: Journey) -> None:
        assert self._reader is not None
        self._reader.poll()
        transfer = self._reader.transfer_of.get(journey.request_id)
        if transfer:
            journey.fill(self._reader.of_transfer.get(transfer, []), transfer)

    def _settle(self, journey: Journey) -> None:
        """Wait for the rest of its events, but not for those of an engine that writes none."""
        began = time.monotonic()
        while self._reader and not journey.complete and time.monotonic() - began < PATIENCE:
            if time.monotonic() - began > SILENCE and all(event.actor == "proxy" for event in journey.events):
                break
            time.sleep(0.01)
        journey.close()
