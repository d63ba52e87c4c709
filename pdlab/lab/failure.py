"""What the proxy tells a client when a request fails: the status, the body, and which hop it was."""

import json
from collections.abc import Mapping

import httpx
from starlette.responses import Response


class Failure(Exception):
    """An HTTP error for the client: an engine's own, word for word, or one of ours that names the hop."""

    def __init__(self, hop: str, status: int, body: bytes, content_type: str | None = "application/json") -> None:
        super().__init__(f"{hop}: status {status}: {body[:300].decode(errors='replace')}")
        self.hop, self.status, self.body, self.content_type = hop, status, body, content_type

    @classmethod
    def at(cls, hop: str, status: int, why: str) -> "Failure":
        kind = {400: "BadRequestError", 502: "BadGatewayError", 503: "ServiceUnavailableError"}[status]
        error = {"message": f"{hop}: {why}", "type": kind, "param": None, "code": status}
        return cls(hop, status, json.dumps({"error": error}).encode())

    def because(self, why: str) -> "Failure":
        """The same with a reason at the end of its message; as it is where its body is none of OpenAI's API."""
        try:
            fields = json.loads(self.body)
            fields["error"]["message"] = f"{fields['error']['message']}; {why}"
        except (ValueError, KeyError, TypeError):
            return self
        return Failure(self.hop, self.status, json.dumps(fields).encode())

    def response(self, ids: Mapping[str, str]) -> Response:
        return Response(self.body, self.status, {**ids, "X-Failed-Hop": self.hop}, self.content_type)


def reason(error: BaseException) -> str:
    root = error
    while cause := root.__cause__ or root.__context__:
        root = cause
    if isinstance(root, ConnectionRefusedError):
        return "connection refused"
    return "does not answer" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
