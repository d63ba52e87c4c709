"""One lab for the whole test session, notebooks included; and no notebook cell that nbval would silently skip.

Where $PDLAB_RUN asks for recorded runs there are no engines: notebooks play what was recorded, live tests are skipped.
"""

import tempfile
from collections.abc import Iterator

import pytest

from pdlab.errors import PdlabError
from pdlab.recorded.mode import RECORD, RECORDED, mode

PLAYS = pytest.StashKey[bool]()  # whether this session plays recorded runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the faults too that start engines of their own (minutes)")


def pytest_configure(config: pytest.Config) -> None:
    import os

    try:
        if mode() == RECORD:
            raise PdlabError("PDLAB_RUN is 'record': tests would overwrite data/", "unset it, or set it to 'recorded'")
        config.stash[PLAYS] = mode() == RECORDED
    except PdlabError as error:
        raise pytest.UsageError(str(error)) from None
    if config.stash[PLAYS]:
        return
    from pdlab.lab.process import myself

    # A lab of this session's own: a reader's lab on the same machine is left alone, and all of ours ends with pytest.
    os.environ["PDLAB_STATE"] = tempfile.mkdtemp(prefix="pdlab-test-")
    os.environ["PDLAB_OWNER"] = os.environ["PDLAB_TEST_SESSION"] = myself()


def pytest_unconfigure(config: pytest.Config) -> None:
    import os
    import shutil

    if config.stash.get(PLAYS, True):  # or it never came to be configured
        return
    from pdlab.lab.lab import down

    down()
    shutil.rmtree(os.environ["PDLAB_STATE"], ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> "Iterator[object]":
    """The session's lab: real engines, started once."""
    import pdlab

    running = pdlab.up()
    yield running


@pytest.fixture(autouse=True)
def no_mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """$PDLAB_RUN is for the notebooks of a session that plays: a test of `pdlab` itself says what it is about."""
    if request.config.stash[PLAYS]:
        monkeypatch.delenv("PDLAB_RUN")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if type(item).__name__ == "IPyNbCell" and item.cell.source.strip() and item.cell.execution_count is None:
            raise pytest.UsageError(f"{item.nodeid} was never run: nbval would compare nothing (notebooks/refresh.py)")
        if item.path.name.startswith("test_live"):
            item.add_marker(pytest.mark.live)
        if item.get_closest_marker("live") and config.stash[PLAYS]:
            item.add_marker(pytest.mark.skip(reason="needs engines: unset PDLAB_RUN"))
        elif item.get_closest_marker("slow") and not config.option.slow:
            item.add_marker(pytest.mark.skip(reason="starts engines of its own: --slow"))
