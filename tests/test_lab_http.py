"""The HTTP client of this process."""

from typing import Any

import pytest

from pdlab.lab import http

SERVERS_KEEP = 5  # seconds: uvicorn's, and so vLLM's


def test_it_keeps_no_connection_until_its_server_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(http.httpx, "Client", lambda **options: asked.update(options))
    http.client.__wrapped__()
    assert asked["limits"].keepalive_expiry < SERVERS_KEEP
