"""Processes and files whose names are no UTF-8: the kernel takes any bytes, and so must whoever looks at them all."""

import mmap
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdlab.lab import nanny
from pdlab.lab.process import _with_tmpdir
from tests.helpers import Zoo, wait_until

PR_SET_NAME = 15
NAME = rb"\xff) Z 1"
NAMED = f"import ctypes, time; ctypes.CDLL(None).prctl({PR_SET_NAME}, b'{NAME.decode()}', 0, 0, 0); time.sleep(600)"


@pytest.fixture
def named() -> Iterator[int]:
    """Pid of a process with such a name."""
    zoo = Zoo()
    pid = zoo.run([sys.executable, "-I", "-S", "-c", NAMED]).pid
    wait_until(lambda: Path(f"/proc/{pid}/comm").read_bytes() == b"\xff) Z 1\n", "its name")
    yield pid
    zoo.clean()


def test_it_is_recognised(named: int) -> None:
    assert nanny.start_time(named)


def test_it_is_found_among_descendants(named: int) -> None:
    assert named in set(nanny.descendants(os.getpid()))


def test_it_keeps_no_lab_from_ending(named: int) -> None:
    assert list(_with_tmpdir("/tmp/pdlab-nobody")) == []


def test_a_mapped_file_with_such_a_name() -> None:
    path = Path(os.fsdecode(f"/dev/shm/psm_test{uuid.uuid4().hex[:8]}".encode() + b"\xff"))
    try:
        with path.open("w+b") as file:
            file.truncate(4096)
            with mmap.mmap(file.fileno(), 4096):
                assert path in nanny.shared_memory(os.getpid())
    finally:
        path.unlink(missing_ok=True)
