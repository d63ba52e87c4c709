"""A lab and the notebook kernels that use it: interrupted, restarted, killed."""

import os
import signal
from collections.abc import Iterator

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from pdlab.lab.lab import Lab
from tests.live import in_flight, until

Kernel = tuple[KernelManager, BlockingKernelClient]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: BlockingKernelClient, code: str) -> str:
    """What `code` prints; raises if it raises."""
    printed = []

    def collect(message: dict) -> None:  # type: ignore[type-arg]
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            printed.append(message["content"]["text"])
        if message["msg_type"] == "error":
            raise AssertionError("\n".join(message["content"]["traceback"]))

    client.execute_interactive(code, output_hook=collect, timeout=120)
    return "".join(printed).strip()


PIDS = "import pdlab; lab = pdlab.up(); print(sorted(row.pid for row in lab.processes()))"


def test_restarting_the_kernel_attaches_again(lab: Lab, kernel: Kernel) -> None:
    manager, client = kernel
    first = run(client, PIDS)
    manager.restart_kernel(now=True)
    client.wait_for_ready(timeout=60)
    assert run(client, PIDS) == first
    assert first == str(sorted(row.pid for row in lab.processes()))


def test_interrupting_the_kernel_leaves_the_engines_alive(lab: Lab, kernel: Kernel) -> None:
    manager, client = kernel
    run(client, PIDS)
    client.execute("lab.send('Tell me a story.', max_tokens=3000, ignore_eos=True)", stop_on_error=False)
    assert until(lambda: in_flight(lab.decode) == 1)
    manager.interrupt_kernel()
    while (message := client.get_iopub_msg(timeout=30))["msg_type"] != "error":
        pass
    assert message["content"]["ename"] == "KeyboardInterrupt"
    assert until(lambda: in_flight(lab.decode) == 0)  # the interrupted cell's request went with it
    assert run(client, "print(lab.status()['up'], len(lab.send('Hello').token_ids))") == "True 16"


def test_killing_the_kernel_leaves_the_engines_alive(lab: Lab, kernel: Kernel) -> None:
    _, client = kernel
    run(client, PIDS)
    pid = int(run(client, "import os; print(os.getpid())"))
    os.kill(pid, signal.SIGKILL)
    assert lab.send("Hello").token_ids
    assert lab.status()["up"]
