"""The commands, as a reader types them, on the session's lab."""

import json
import os
import signal

import httpx
import pytest

from pdlab.lab.lab import Lab
from tests.live import command, new_since, traces, until


def run(*words: str) -> tuple[int, str, str]:
    process = command(*words)
    out, err = process.communicate(timeout=180)
    return process.returncode, out, err


def test_tour_as_json(lab: Lab) -> None:
    code, out, err = run("tour", "--json")
    assert code == 0, err
    facts = json.loads(out)
    transfer = facts["transfer"]
    assert facts["equal"] is True
    assert facts["text"] == facts["single_engine_text"] != ""
    assert facts["computed_on_prefill"] == facts["prompt_tokens"] > 128
    assert facts["computed_on_decode"] == 1
    assert transfer["bytes"] == transfer["regions"] * transfer["blocks"] * transfer["block_bytes"]
    assert {"descriptors", "seconds"} <= set(transfer)
    assert {"vllm", "torch", "pdlab"} <= set(facts["versions"])
    assert facts["versions"]["vllm"].startswith("0.32.0")
    assert {step["number"] for step in facts["steps"]} == set(range(1, 24))
    assert facts["missing"] == []
    assert lab.status()["up"]  # it was up before the tour, so it stays


def test_tour_tells_the_steps_in_order(lab: Lab) -> None:
    code, out, err = run("tour", "A prompt that nobody has sent before, of quite some tokens, for the tour.")
    assert code == 0, err
    told = [
        "D parks the request: WAITING_FOR_REMOTE_KVS",
        "sends the pull message",
        "plans the transfer",
        "writes into D's",
    ]
    told += [
        "answers D",
        "D promotes the request",
        "D resumes it",
        "regions × ",
        "descriptors",
        "equal, token for token",
    ]
    places = [out.index(words) for words in told]
    assert places == sorted(places)
    assert "NOT EQUAL" not in out


def test_send(lab: Lab) -> None:
    code, out, _ = run("send", "1, 2, 3, 4,", "--max-tokens", "6")
    assert code == 0
    assert out.rstrip("\n") == lab.decode.complete("1, 2, 3, 4,", 6).text
    code, out, _ = run("send", "1, 2, 3, 4,", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["transfer_id"].startswith("xfer-")
    assert len(answer["token_ids"]) == 16


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["send", ""], 1, "give text"),
        (["send", "x", "--max-tokens", "0"], 2, "--max-tokens"),
        (["send"], 2, "prompt"),
        (["send", "x", "--name", "nobody"], 1, "no lab 'nobody' is running"),
        (["send", "x", "--name", "../up"], 1, "cannot be called"),
        (["up", "--dtype", "bfloat16"], 1, "asked for: bfloat16"),
        (["up", "--model", "./nowhere"], 1, "nowhere"),
        (["up", "--profile", "tpu"], 1, "tpu"),
        (["serve", "both"], 1, "choose prefill or decode"),
        (["serve", "decode", "--host", "0.0.0.0"], 1, "give the address"),
        (["serve", "decode", "--host", "192.0.2.7"], 1, "cannot take"),
        (["serve", "decode", "--port", "70000"], 2, "--port"),
        (["nonsense"], 2, "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_clear_line(lab: Lab, words: list[str], code: int, said: str) -> None:
    before = traces()
    returned, out, err = run(*words)
    assert returned == code
    assert said in err
    assert "Traceback" not in err
    assert out == ""
    assert new_since(before) == {}
    assert lab.status()["up"]


def test_status(lab: Lab) -> None:
    code, out, _ = run("status", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(lab.status()))
    code, out, _ = run("status", "--name", "nobody")
    assert code == 1
    assert "is not running" in out


def test_doctor_finds_this_machine_fit(lab: Lab) -> None:
    code, out, err = run("doctor", "--json")
    assert code == 0, err
    assert json.loads(out)["ok"]


def test_lab_serves_the_first_notebook_and_ends_with_ctrl_c(lab: Lab) -> None:
    before = traces()
    process = command("lab", "--no-browser")
    assert process.stdout is not None
    line = ""
    while not line.startswith("JupyterLab: "):
        line = process.stdout.readline()
        assert line, process.communicate()[1]
    url = line.removeprefix("JupyterLab: ").strip()
    assert httpx.get(url, trust_env=False, follow_redirects=True).status_code == 200
    assert "/notebooks/00_the_lab.ipynb?token=" in url
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert until(lambda: new_since(before) == {}, 20), new_since(before)
    assert lab.status()["up"]
