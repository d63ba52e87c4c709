"""`doctor` on the shared libraries under Mooncake."""

from pdlab.doctor import libraries


def test_libibverbs_is_there() -> None:
    assert libraries.check_libibverbs(lambda: ["libnuma.so.1"]).status == "ok"


def test_libibverbs_missing_names_what_to_do() -> None:
    check = libraries.check_libibverbs(lambda: ["libibverbs.so.1"])
    assert (check.status, check.found) == ("fail", "missing: libibverbs.so.1")
    assert check.remedy


def test_the_others_name_only_what_is_missing() -> None:
    assert libraries.check_other_libraries(lambda: ["libibverbs.so.1"]).status == "ok"
    check = libraries.check_other_libraries(lambda: ["libibverbs.so.1", "libnuma.so.1"])
    assert (check.status, check.found) == ("fail", "missing: libnuma.so.1")
    assert "libcurl" not in (check.remedy or "") and "verbs" not in (check.remedy or "")
