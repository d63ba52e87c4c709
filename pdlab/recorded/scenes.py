"""What the run "journey" shows: each scene is a few calls of a lab, live and played back alike."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pdlab.errors import PdlabError, RequestError
from pdlab.lab.comparison import Comparison, Rewritten
from pdlab.trace.journey import Journey

if TYPE_CHECKING:
    from pdlab.lab.lab import Lab

PROMPT = list(range(1000, 1143))  # 143 token ids: with blocks of 32, four full ones and 15 tokens of a fifth
OTHER = list(range(3000, 3040))
PATIENCE = 10.0  # seconds
LENGTHS = (40, 72, 104, 136, 168)  # tokens: some full blocks, and half of one of 16 or a quarter of one of 32


def whole(lab: "Lab") -> Journey:
    """One request from end to end, known to no prefix cache."""
    return lab.send(PROMPT, max_tokens=6, fresh=True)


def again(lab: "Lab") -> tuple[Journey, Journey]:
    """The same prompt twice: the second time D has all of it but its last block."""
    salt = uuid.uuid4().hex  # not fresh, and yet unknown at first, however often this is recorded
    return lab.send(PROMPT, max_tokens=6, cache_salt=salt), lab.send(PROMPT, max_tokens=6, cache_salt=salt)


def fragmented(lab: "Lab") -> Journey:
    """Into blocks of D that lie apart.

    What D frees without a hash, which is the last block of each request here, comes back to the FRONT of its free
    list; full blocks, which have one, to its end. Requests that run side by side have their last blocks apart, so the
    next request is given blocks that are.
    """

    def occupy(tokens: int) -> object:
        return lab.decode.complete(list(range(2000, 2000 + tokens)), max_tokens=6)

    with ThreadPoolExecutor(len(LENGTHS)) as pool:
        list(pool.map(occupy, LENGTHS))
    return lab.send(PROMPT, max_tokens=4, fresh=True)


def held(lab: "Lab") -> Journey:
    """Held before the write, while D answers another request."""
    with lab.hold("before_write") as hold:
        journey = lab.submit(PROMPT, max_tokens=3, fresh=True)
        hold.wait()
        lab.decode.complete(OTHER, max_tokens=4)
    return journey.wait()


def compared(lab: "Lab") -> tuple[Journey, Comparison, list[Rewritten]]:
    """All bytes of both sides, held before the answer; and what D has changed of them when it is done."""
    with lab.hold("before_answer") as hold:
        journey = lab.submit(PROMPT, max_tokens=1, fresh=True)
        hold.wait()
        comparison = lab.compare(journey)
    journey.wait()
    return journey, comparison, comparison.rewritten()


def p_first(lab: "Lab") -> Journey:
    """D's half waits in the proxy until P has computed all and is ready to send."""
    with lab.hold("before_decode_send") as hold:
        journey = lab.submit(PROMPT, max_tokens=2, fresh=True)
        hold.wait()
        journey.until(6, PATIENCE)
    return journey.wait()


def refused(lab: "Lab") -> RequestError:
    """What prefill/decode cannot do, refused by the proxy."""
    try:
        lab.send(PROMPT, n=2)
    except RequestError as error:
        return error
    raise PdlabError("the proxy took a request for two answers", "see pdlab.lab.bodies")


def toured(lab: "Lab") -> tuple[Journey, dict[str, Any]]:
    """What `python3 -m pdlab tour` tells, so that it plays too."""
    from pdlab.tour import tour

    return tour(lab)


SCENES: "dict[str, Callable[[Lab], object]]" = {
    scene.__name__: scene for scene in (whole, again, fragmented, held, compared, p_first, refused, toured)
}
