"""The shared libraries that Mooncake's wheels link and do not carry."""

from collections.abc import Callable, Sequence

from pdlab.doctor.check import Check
from pdlab.setup.libraries import LIBRARIES, absent, remedy

Absent = Callable[[], list[str]]


def check_libibverbs(look: Absent = absent) -> Check:
    meaning = "Mooncake's Transfer Engine links the RDMA verbs library, and so wants it for TCP as well."
    return _libraries("libibverbs", LIBRARIES[:1], meaning, look())


def check_other_libraries(look: Absent = absent) -> Check:
    meaning = "Mooncake's wheel links these two as well: memory placement, and its metadata client."
    return _libraries("libnuma, libcurl", LIBRARIES[1:], meaning, look())


def _libraries(name: str, wanted: Sequence[str], meaning: str, absent: list[str]) -> Check:
    missing = [library for library in wanted if library in absent]
    if not missing:
        return Check(name, "ok", f"found: {', '.join(wanted)}", meaning)
    command = remedy(missing) or "install your system's packages that hold them"
    return Check(name, "fail", f"missing: {', '.join(missing)}", meaning, command)
