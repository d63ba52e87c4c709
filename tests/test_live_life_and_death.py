"""Nothing of a lab outlives what the reader asked for, whichever of its processes is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdlab
from pdlab.errors import PdlabError
from pdlab.lab.lab import Lab
from tests.live import command, left_of, new_since, traces, until

NAME = "mortal"
# (server, what) to kill -9, in rounds: after each round the lab is broken, and heal() brings it back.
ROUNDS = [
    [("prefill", "EngineCore"), ("decode", "API server"), ("proxy", "proxy")],
    [("prefill", "API server"), ("decode", "nanny"), ("proxy", "nanny")],
    pytest.param([("prefill", "nanny"), ("decode", "EngineCore")], marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def before(lab: Lab) -> dict[str, set[str]]:
    """What is on the machine without the lab that these tests start and kill; the session's lab is part of it."""
    return traces()


@pytest.fixture(scope="module", autouse=True)
def _end() -> Iterator[None]:
    yield
    from pdlab.lab.lab import down

    down(NAME)


@pytest.mark.parametrize("victims", ROUNDS)
def test_kill_minus_nine(before: dict[str, set[str]], victims: list[tuple[str, str]]) -> None:
    lab = pdlab.up(name=NAME)  # the first time a start
    for server, what in victims:
        rows = lab.processes()
        victim = next(row for row in rows if (row.server, row.what) == (server, what))
        os.kill(victim.pid, signal.SIGKILL)
        pids = [row.pid for row in rows if row.server == server]
        assert until(lambda pids=pids: not left_of(pids), 30), left_of(pids)  # type: ignore[misc]
    assert not lab.status()["up"]
    with pytest.raises(PdlabError, match=r"broken: .*died"):
        pdlab.attach(NAME)
    assert lab.heal().started == tuple(server for server, _ in victims)
    assert lab.status()["up"]
    assert lab.send("Hello").token_ids


def test_down_leaves_the_machine_as_it_was(before: dict[str, set[str]]) -> None:
    lab = pdlab.up(name=NAME)
    assert len(lab.processes()) >= 8
    assert new_since(before)["processes"]
    for row in lab.processes():
        if row.what == "resource tracker":
            os.kill(row.pid, signal.SIGKILL)
    assert lab.send("Hello").token_ids  # the lab goes on
    lab.down()
    assert new_since(before) == {}


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_tour_that_is_ended_in_mid_start(before: dict[str, set[str]], tmp_path: Path, ending: signal.Signals) -> None:
    tour = command("tour", PDLAB_STATE=str(tmp_path), PDLAB_OWNER="")
    assert tour.stderr is not None
    while "prefill" not in (line := tour.stderr.readline()):
        assert line, tour.communicate()
    assert until(lambda: sum("api_server" in line for line in new_since(before)["processes"]) == 2)
    os.kill(tour.pid, ending)
    out, err = tour.communicate(timeout=60)
    assert tour.returncode == (-ending if ending == signal.SIGKILL else 128 + ending), (out, err)
    assert until(lambda: new_since(before) == {}, 30), new_since(before)


@pytest.mark.parametrize("ending", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_lab_that_is_ended_takes_its_engines_along(
    before: dict[str, set[str]], tmp_path: Path, ending: signal.Signals
) -> None:
    process = command("lab", "--no-browser", PDLAB_STATE=str(tmp_path), PDLAB_OWNER="")
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("JupyterLab: "):
        assert line, process.communicate()[1]
    started = new_since(before)["processes"]
    assert sum("api_server" in line for line in started) == 2
    assert any("jupyterlab" in line for line in started)
    os.kill(process.pid, ending)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-ending if ending == signal.SIGKILL else 128 + ending), err
    assert until(lambda: new_since(before) == {}, 30), new_since(before)


def test_the_other_lab_was_left_alone(lab: Lab) -> None:
    assert lab.status()["up"]
    assert lab.send("Hello").token_ids
