"""What the plugin does to a process of vLLM: nothing, unless pdlab started it. In processes of their own."""

import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

pytest.importorskip("vllm")

HERE = """
import ctypes, json, multiprocessing, os
import torch
from pdlab.inside.plugin import register
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils as utils

def index():
    try:
        return torch.accelerator.current_device_index()
    except Exception as error:
        return type(error).__name__

def death_signal():
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))  # PR_GET_PDEATHSIG
    return found.value

def in_child():
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=lambda: (register(), theirs.send(death_signal())))
    child.start()
    child.join()
    return mine.recv()

def facts():
    server = utils.MooncakeBootstrapServer
    hosts = [server(asked, 0).host for asked in ("0.0.0.0", "127.0.0.9")]
    started = server("0.0.0.0", 0)
    started.start()
    bound = started._socket.getsockname()[0]
    started.shutdown()
    return {
        "accelerator": torch.accelerator.is_available(), "index": index(), "hosts": hosts, "bound": bound,
        "class": [server.__module__, server.__name__], "death_signal": death_signal(), "in_child": in_child(),
    }
"""
LIFE = """
found = {"before": facts()}
register()
found["not ours"] = facts()
os.environ["PDLAB_INSTANCE"] = "prefill"
register()
init = utils.MooncakeBootstrapServer.__init__
found["ours"] = facts()
register()
found["same"] = init is utils.MooncakeBootstrapServer.__init__
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def life() -> dict[str, Any]:
    """Facts of a process before `register`, after it in one that pdlab did not start, and in one that it did."""
    env = {key: value for key, value in os.environ.items() if key != "PDLAB_INSTANCE"}
    done = subprocess.run(
        [sys.executable, "-c", HERE + LIFE], env={**env, "VLLM_HOST_IP": "127.0.0.5"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_elsewhere_it_does_nothing(life: dict[str, Any]) -> None:
    assert life["not ours"] == life["before"]
    assert life["before"]["hosts"] == ["0.0.0.0", "127.0.0.9"]
    assert (life["before"]["death_signal"], life["before"]["in_child"]) == (0, 0)


def test_the_bootstrap_server_binds_to_the_instance_s_address(life: dict[str, Any]) -> None:
    assert life["before"]["bound"] == "0.0.0.0"
    assert life["ours"]["bound"] == "127.0.0.5"
    assert life["ours"]["hosts"] == ["127.0.0.5", "127.0.0.9"]  # an address that was chosen stays
    assert life["ours"]["class"] == life["before"]["class"]


def test_a_second_call_changes_nothing(life: dict[str, Any]) -> None:
    assert life["same"]


def test_a_missing_accelerator_has_index_0(life: dict[str, Any]) -> None:
    if life["before"]["accelerator"]:
        assert life["ours"]["index"] == life["before"]["index"]
    else:
        assert life["ours"]["index"] == 0


def test_the_accelerator_fix_is_still_needed(life: dict[str, Any]) -> None:
    # When this fails, torch answers without an accelerator: pdlab.inside.plugin.fix_missing_accelerator can go.
    if life["before"]["accelerator"]:
        pytest.skip("this machine has an accelerator")
    assert life["before"]["index"] == "RuntimeError"


def test_the_fixes_are_still_needed_by_the_connector() -> None:
    # When this fails, look whether it runs without an accelerator, or takes an address for its bootstrap server.
    worker = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector")
    source = inspect.getsource(worker.MooncakeConnectorWorker.__init__)
    assert "torch.accelerator.current_device_index()" in source
    assert 'MooncakeBootstrapServer("0.0.0.0", port)' in source


def test_a_server_of_its_own_is_left_to_its_nanny(life: dict[str, Any]) -> None:
    assert life["ours"]["death_signal"] == 0


def test_what_vllm_starts_beneath_dies_with_its_parent(life: dict[str, Any]) -> None:
    assert life["ours"]["in_child"] == signal.SIGKILL


@pytest.mark.parametrize("group", ["general", "endpoint"])
def test_vllm_finds_it(group: str) -> None:
    (found,) = entry_points(group=f"vllm.{group}_plugins", name="pdlab")
    assert callable(found.load())
