"""One lab for the whole test session, notebooks included; and no notebook cell that nbval would silently skip."""

import tempfile
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    import os

    from pdlab.lab.process import myself

    # A lab of this session's own: a reader's lab on the same machine is left alone, and all of ours ends with pytest.
    os.environ["PDLAB_STATE"] = tempfile.mkdtemp(prefix="pdlab-test-")
    os.environ["PDLAB_OWNER"] = os.environ["PDLAB_TEST_SESSION"] = myself()


def pytest_unconfigure(config: pytest.Config) -> None:
    import os
    import shutil

    from pdlab.lab.lab import down

    down()
    shutil.rmtree(os.environ["PDLAB_STATE"], ignore_errors=True)


@pytest.fixture(scope="session")
def lab() -> "Iterator[object]":
    """The session's lab: real engines, started once."""
    import pdlab

    running = pdlab.up()
    yield running


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if type(item).__name__ == "IPyNbCell" and item.cell.source.strip() and item.cell.execution_count is None:
            raise pytest.UsageError(f"{item.nodeid} was never run: nbval would compare nothing (notebooks/refresh.py)")
        if item.path.name.startswith("test_live"):
            item.add_marker(pytest.mark.live)
