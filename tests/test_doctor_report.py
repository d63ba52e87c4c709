"""`doctor` as a whole: what it prints, its JSON and its exit code, and a look at this machine."""

import io
import json
import platform
import re
import subprocess
import sys

import pytest
from rich.console import Console

from pdlab import doctor
from pdlab.doctor import Check, machine
from pdlab.paths import repo_root
from pdlab.setup import pins

OK = Check("memory", "ok", "22.8 GiB available", "Two engines hold about 2.2 GB each.")
FAIL = Check("GPUs", "fail", "[N/A] [bold]x[/bold]", "No device to run on.", "install the CPU build")
WARN = Check("cores", "warn", "1", "Prefill and decode share one core.", "give it two")


def printed(checks: list[Check], width: int = 80) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(doctor.render(checks))
    return screen.getvalue()


def test_verdict_is_1_only_where_something_fails() -> None:
    assert doctor.verdict([OK, WARN]) == 0
    assert doctor.verdict([OK, FAIL, WARN]) == 1


def test_json() -> None:
    report = json.loads(json.dumps(doctor.as_json([OK, FAIL, WARN])))
    assert report["ok"] is False
    assert report["counts"] == {"ok": 1, "info": 0, "warn": 1, "fail": 1}
    assert report["checks"][2] == {
        "name": "cores", "status": "warn", "found": "1",
        "meaning": "Prefill and decode share one core.", "remedy": "give it two",
    }  # fmt: skip


def test_rendered_without_colour_it_says_everything_in_80_columns() -> None:
    text = printed([OK, FAIL, WARN])
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[0] == "ok   memory 22.8 GiB available"
    fail = next(i for i, line in enumerate(lines) if line.startswith("FAIL GPUs"))
    assert lines[fail].endswith("[N/A] [bold]x[/bold]"), "what was found is not markup"
    assert lines[fail + 1].strip() == "No device to run on."
    assert lines[fail + 2].strip() == "fix: install the CPU build"
    assert lines[-1] == "1 ok, 1 warn, 1 fail. The lab cannot run here yet: GPUs."
    assert printed([OK, WARN]).rstrip().endswith("1 ok, 1 warn. The lab can run here.")


def test_a_long_path_is_folded_not_cut() -> None:
    path = "/dev/shm/psm_" + "0123456789" * 12
    text = printed([Check("/dev/shm", "warn", "1", "Left behind.", f"rm {path}")])
    assert max(map(len, text.splitlines())) <= 80
    assert path in "".join(text.split())


def test_a_check_that_raises_becomes_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Check:
        raise PermissionError("not for you")

    monkeypatch.setattr(machine, "check_cores", broken)
    (line,) = [check for check in doctor.examine() if check.name == "cores"]
    assert (line.status, line.found) == ("warn", "PermissionError: not for you")


def test_without_pins_the_rest_is_still_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(profile: str) -> dict[str, str]:
        raise FileNotFoundError("no lock")

    monkeypatch.setattr(pins, "locked", none)
    lines = {check.name: check for check in doctor.examine()}
    assert lines["vLLM"].found == "FileNotFoundError: no lock"
    assert lines["system"].found.startswith(platform.system())


def test_this_machine() -> None:
    checks = doctor.examine()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) == 19
    assert all(check.meaning.endswith((".", ")")) and check.found for check in checks)
    assert not [check for check in checks if re.match(r"\w*(Error|Exception): ", check.found)]
    assert max(map(len, printed(checks).splitlines())) <= 80
    json.dumps(doctor.as_json(checks))


def test_nothing_that_is_looked_at_is_imported() -> None:
    code = "import sys, pdlab.doctor as d; d.examine(); print({'vllm', 'torch', 'mooncake'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=repo_root(), capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
