"""How a picture of a journey says that it failed: beneath it, in a sign and in words, once its last step is there."""

from textwrap import wrap

from pdlab.trace.journey import Journey
from pdlab.views.picture import Picture

SIZE, ROW, WIDE = 12, 17, 0.72  # of a text in pixels; from row to row; width of a letter for its size


def add_failure(picture: Picture, journey: Journey) -> None:
    """Say which hop failed, beneath what the picture has. Nothing where none did."""
    if (words := failed(journey)) is None:
        return
    last = max(len(journey.steps) - 1, 0)
    for row in wrap(words, int((picture.width - 16) / (SIZE * WIDE))):
        picture.text(8, picture.height + SIZE, row, role="unequal", size=SIZE, bold=True, since=last)
        picture.height += ROW
    picture.height += 4
    picture.line += f"; {words}"


def failed(journey: Journey) -> str | None:
    """A sign and words; None while it has not failed."""
    return f"✗ failed: {failure}" if (failure := journey.failure) else None
