"""`pdlab.join()`: a lab of instances that were started elsewhere, on another GPU or another host."""

import shutil
from typing import Any

import httpx

from pdlab.errors import PdlabError, StartError
from pdlab.lab.compare import check_pair
from pdlab.lab.instance import Instance
from pdlab.lab.lab import Lab
from pdlab.lab.ports import Ports
from pdlab.lab.process import myself
from pdlab.lab.progress import progress
from pdlab.lab.proxy_server import ProxyServer, spawn_proxy
from pdlab.lab.start import LOOPBACK
from pdlab.lab.startup import wait_until_serving
from pdlab.paths import state_dir

BOOTSTRAP_HINT = "give the bootstrap URL that its `pdlab serve prefill` printed"


def join(*, prefill: str, decode: str, bootstrap: str) -> Lab:
    """A lab of two instances that run already, with a proxy here. The proxy ends with this process; they do not.

    Args:
        prefill, decode: URLs of instances started with `python3 -m pdlab serve prefill` and `serve decode`.
        bootstrap: URL of the prefill instance's bootstrap server, as the DECODE instance reaches it.

    Raises:
        PdlabError: a URL is none, or an instance does not answer.
        MismatchError: the two must not be paired.
    """
    for name, url in (("prefill", prefill), ("decode", decode), ("bootstrap", bootstrap)):
        if not _is_url(url):
            raise PdlabError(f"{name}={url!r} is not a URL", "give it as `pdlab serve` prints it: http://host:port")
    p = Instance("prefill", prefill.rstrip("/"), bootstrap.rstrip("/"))
    d = Instance("decode", decode.rstrip("/"))
    check_pair(p.facts, d.facts)
    named = _named(p)
    if p.engine_id not in named:
        raise PdlabError(
            f"the bootstrap server {bootstrap} names {sorted(named)}, not the instance {prefill}", BOOTSTRAP_HINT
        )
    ports = Ports(LOOPBACK)
    port = ports.take("proxy")
    folder = state_dir() / "labs" / f"joined-{port}"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier lab at this port: its trace is not this one's
    process = spawn_proxy(folder, ports, port, prefill=p.url, bootstrap=str(p.bootstrap), decode=d.url, owner=myself())
    ports.close()
    proxy = ProxyServer(f"http://{LOOPBACK}:{port}", process)
    try:
        with progress() as tell:
            wait_until_serving({"proxy": (process, proxy.url)}, tell, patience=60)
    except BaseException as error:
        process.stop()
        if not isinstance(error, StartError):  # that one names the log
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return Lab(f"joined-{port}", None, p, d, proxy, trace_folder=folder / "trace")


def _named(prefill: Instance) -> set[str]:
    """The engine ids that its bootstrap server knows. PdlabError if something else answers there."""
    try:
        return {str(entry["engine_id"]) for entry in prefill.bootstrap_query().values()}
    except (KeyError, TypeError):
        raise PdlabError(f"{prefill.bootstrap} does not answer as a bootstrap server", BOOTSTRAP_HINT) from None


def _is_url(given: Any) -> bool:
    try:
        url = httpx.URL(given)
    except (httpx.InvalidURL, TypeError):
        return False
    return isinstance(given, str) and url.scheme in ("http", "https") and bool(url.host)
