"""pdlab: take vLLM's prefill/decode disaggregation apart, on real engines.

`lab = pdlab.up()` brings up a prefill instance, a decode instance and the proxy, or attaches to those that run;
`lab.send(prompt)` sends one request through all three; `lab.down()` ends them. With PDLAB_RUN=recorded the same calls
play a recorded run, on any system.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.errors import PdlabError as PdlabError
    from pdlab.lab.lab import Lab as Lab
    from pdlab.recorded.mode import attach as attach
    from pdlab.recorded.mode import join as join
    from pdlab.recorded.mode import up as up

__version__ = "0.1.0"
_HOMES = {
    "up": "pdlab.recorded.mode",
    "attach": "pdlab.recorded.mode",
    "join": "pdlab.recorded.mode",
    "Lab": "pdlab.lab.lab",
    "PdlabError": "pdlab.errors",
}
__all__ = ["Lab", "PdlabError", "attach", "join", "up"]


def __getattr__(name: str) -> Any:
    # Lazy: `python3 -m pdlab` imports this package before anything is installed.
    if name not in _HOMES:
        raise AttributeError(f"module 'pdlab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
