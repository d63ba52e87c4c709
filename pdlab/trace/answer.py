"""What a client gets for its request."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Attributes:
    text: what was generated; token_ids: the same as ids.
    prompt_tokens: N, as the engine counted them.
    finish_reason: "length" or "stop".
    request_id: the X-Request-Id; both engines make their internal ids from it, each with a suffix of its own.
    transfer_id: what links the two halves; None when one engine answered alone.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: str
    request_id: str
    transfer_id: str | None = None

    def __repr__(self) -> str:
        return f"<Answer to {self.prompt_tokens} prompt tokens: {self.text!r}>"
