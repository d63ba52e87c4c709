"""`serve` and `join`: instances started by hand, on another host too, and pairs that must not be joined."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import pdlab
from pdlab.errors import MismatchError, RequestError
from pdlab.lab.lab import Lab
from pdlab.lab.ports import Ports
from tests.live import ROOT, new_since, traces, until

SERVE = [sys.executable, "-m", "pdlab", "serve"]


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Holds the ports of servers that are started by hand, also before they listen and while they are restarted."""
    with closing(Ports("127.0.0.1")) as ports:
        yield ports


def start(*words: str, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([*words], cwd=ROOT, stdout=out, stderr=out, start_new_session=True)


def says(log: Path, words: str, process: subprocess.Popen[bytes]) -> bool:
    assert until(lambda: words in log.read_text(errors="replace") or process.poll() is not None, 180)
    assert process.poll() is None, log.read_text(errors="replace")[-2000:]
    return True


def end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGINT)
    return process.wait(60)


def test_other_weights_and_another_dtype_are_refused_in_words(lab: Lab, ports: Ports, tmp_path: Path) -> None:
    before = traces()
    other = tmp_path / "other"
    shutil.copytree(lab.decode.facts["model"], other)
    weights = next(other.glob("*.safetensors"))
    with weights.open("r+b") as file:  # some values in the last tensor
        file.seek(-4096, os.SEEK_END)
        file.write(b"\x3c" * 2048)
    port, log = ports.take("D"), tmp_path / "serve.log"
    options = ["--model", str(other), "--dtype", "bfloat16", "--port", str(port)]
    process = start(*SERVE, "decode", *options, log=log)
    try:
        says(log, "the decode instance answers at", process)
        with pytest.raises(MismatchError) as refused:
            pdlab.join(prefill=lab.prefill.url, decode=f"http://127.0.0.1:{port}", bootstrap=str(lab.prefill.bootstrap))
    finally:
        code = end(process)
    assert "the weights differ" in refused.value.message
    assert "the dtype differs: prefill float32, decode bfloat16" in refused.value.message
    assert "wrong text" in refused.value.message
    assert code == 130
    assert until(lambda: new_since(before) == {}, 30), new_since(before)


@pytest.mark.slow
def test_a_prefill_instance_that_came_back_is_found_again(lab: Lab, ports: Ports, tmp_path: Path) -> None:
    """It has the same address and a new engine id, of which the proxy must tell D."""
    before = traces()
    port, bootstrap, log = ports.take("P"), ports.take("its bootstrap server"), tmp_path / "serve.log"
    serve = [*SERVE, "prefill", "--port", str(port), "--bootstrap-port", str(bootstrap)]
    process = start(*serve, log=log)
    try:
        says(log, "the prefill instance answers at", process)
        urls = {"prefill": f"http://127.0.0.1:{port}", "bootstrap": f"http://127.0.0.1:{bootstrap}"}
        with pdlab.join(decode=lab.decode.url, **urls) as joined:
            expected = lab.decode.complete("1, 2, 3,").token_ids
            first = joined.prefill.bootstrap_query()["0"]["engine_id"]
            assert joined.send("1, 2, 3,", fresh=True).token_ids == expected
            assert end(process) == 130
            with pytest.raises(RequestError, match=r"bootstrap|prefill") as gone:
                joined.send("1, 2, 3,")
            assert gone.value.status in (502, 503)
            process = start(*serve, log=log)
            says(log, "the prefill instance answers at", process)
            assert joined.prefill.bootstrap_query()["0"]["engine_id"] != first
            assert joined.send("1, 2, 3,", fresh=True).token_ids == expected
    finally:
        end(process)
    assert until(lambda: new_since(before) == {}, 30), new_since(before)


# Two hosts on one machine: network namespaces, joined by a veth pair. ------------------------------------------------

P_HOST, D_HOST = "10.77.31.1", "10.77.31.2"
ON_D_HOST = """
import json, sys, pdlab
p, d, bootstrap = sys.argv[1:]
def wire():
    line = next(line for line in open("/proc/net/dev") if "pdlab-d" in line)
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])
with pdlab.join(prefill=p, decode=d, bootstrap=bootstrap) as lab:
    alone = lab.decode.complete(list(range(1000, 1143)), 8)
    received, sent = wire()
    answer = lab.send(list(range(1000, 1143)), 8)
    now_received, now_sent = wire()
    layout = lab.decode.registered_kv
    print(json.dumps({
        "equal": answer.token_ids == alone.token_ids, "received": now_received - received, "sent": now_sent - sent,
        "regions": len(layout["regions"]), "block_bytes": layout["regions"][0]["block_len"],
    }))
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces, P's and D's, joined by a veth pair."""
    p, d = f"pdlab-p-{os.getpid()}", f"pdlab-d-{os.getpid()}"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and `ip` (iproute2)")
    try:
        ip("netns", "add", p)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    try:
        ip("netns", "add", d)
        ip("link", "add", "pdlab-p", "netns", p, "type", "veth", "peer", "name", "pdlab-d", "netns", d)
        for namespace, device, address in ((p, "pdlab-p", P_HOST), (d, "pdlab-d", D_HOST)):
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
        yield p, d
    finally:
        for namespace in (p, d):
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def test_kv_bytes_go_over_the_wire_between_two_hosts(lab: Lab, two_hosts: tuple[str, str], tmp_path: Path) -> None:
    p_namespace, d_namespace = two_hosts
    before = traces()
    p_log, d_log = tmp_path / "p.log", tmp_path / "d.log"
    on_p, on_d = (["ip", "netns", "exec", namespace] for namespace in (p_namespace, d_namespace))
    ports = ["--port", "8100", "--bootstrap-port", "8998"]
    p = start(*on_p, *SERVE, "prefill", "--host", P_HOST, *ports, log=p_log)
    d = start(*on_d, *SERVE, "decode", "--host", D_HOST, "--port", "8200", log=d_log)
    try:
        says(p_log, "the prefill instance answers at", p)
        says(d_log, "the decode instance answers at", d)
        urls = [f"http://{P_HOST}:8100", f"http://{D_HOST}:8200", f"http://{P_HOST}:8998"]
        joined = subprocess.run(
            [*on_d, sys.executable, "-c", ON_D_HOST, *urls], cwd=ROOT, capture_output=True, text=True, timeout=180
        )
        assert joined.returncode == 0, joined.stderr
    finally:
        codes = [end(p), end(d)]
    seen = json.loads(joined.stdout)
    kv_bytes = seen["regions"] * 5 * seen["block_bytes"]  # 143 tokens are 5 blocks of 32
    assert seen["equal"]
    assert kv_bytes < seen["received"] < 1.2 * kv_bytes  # D's host receives the KV …
    assert seen["sent"] < 0.2 * kv_bytes  # … and sends little
    assert codes == [130, 130]
    assert until(lambda: new_since(before) == {}, 30), new_since(before)
