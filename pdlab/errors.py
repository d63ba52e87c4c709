"""What pdlab raises: one line that says what is wrong, and what to do about it."""


class PdlabError(Exception):
    """A problem the reader can act on.

    Args:
        message: one line, what is wrong.
        hint: what to do; shown beneath the message.
    """

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message if hint is None else f"{message}\n  {hint}")
        self.message = message
        self.hint = hint

    def _render_traceback_(self, *_: object) -> list[str]:
        """What IPython shows in place of a traceback: the reader can act on the line, not on our code."""
        return [f"{type(self).__name__}: {self}"]


class StartError(PdlabError):
    """An instance did not come up; nothing of it is left running."""


class MismatchError(PdlabError):
    """A prefill and a decode instance that must not be paired (stock vLLM would answer with wrong text)."""


class RequestError(PdlabError):
    """A request that an instance or the proxy refused or failed.

    Attributes:
        status: the HTTP status; 0: no answer came.
        hop: what failed, as the proxy names it in X-Failed-Hop; "" where it does not.
        journey: how far it came, where it was sent through a lab.
    """

    journey: object = None

    def __init__(self, status: int, message: str, hint: str | None = None, hop: str = ""):
        super().__init__(message, hint)
        self.status, self.hop = status, hop


class Refuted(Exception):
    """What was found on live engines is not what pdlab says of them."""


def must(condition: object, what: str) -> None:
    """Raises Refuted, with `what` was found instead, where `condition` does not hold."""
    if not condition:
        raise Refuted(what)
