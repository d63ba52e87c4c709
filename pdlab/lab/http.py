"""One HTTP client for this process: making one costs more than a request on loopback."""

import functools

import httpx


@functools.cache
def client() -> httpx.Client:
    """A client without read timeout (a generation may take any time) that ignores proxy settings of the environment."""
    # Servers close a connection that was idle for 5 s: ours expire earlier, or one would be used as it closes.
    limits = httpx.Limits(keepalive_expiry=2)
    return httpx.Client(timeout=httpx.Timeout(None, connect=5), trust_env=False, limits=limits)


def why(error: Exception) -> str:
    """What an error says, in one line: httpx adds where to read on about the status."""
    return str(error).partition("\n")[0] or type(error).__name__


def healthy(url: str, timeout: float = 2) -> bool:
    """Whether the server at `url` answers 200 at /health within `timeout` seconds."""
    try:
        return client().get(f"{url}/health", timeout=timeout).status_code == 200
    except httpx.HTTPError:
        return False
