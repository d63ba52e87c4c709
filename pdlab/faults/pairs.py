"""Faults of a pair: a D that has other weights, more layers, another dtype or other blocks than P."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdlab.claims.bench import PROMPT, TOKENS
from pdlab.errors import MismatchError, PdlabError, Refuted, must
from pdlab.faults.hands import Hands
from pdlab.faults.outcome import Seen
from pdlab.lab.compare import check_pair
from pdlab.lab.halves import Asked, Got, ask, body_of, new_transfer_id, prefill_half
from pdlab.lab.instance import Instance

Weights = dict[str, Any]
DIGESTS = re.compile(r": prefill [0-9a-f]{16}, decode [0-9a-f]{16}")
LAYER = "model.layers.{}."


def other_models(h: Hands) -> Seen:
    """D has other weights than P; or one layer more."""
    with (
        changed(h, negate_keys) as weights,
        changed(h, add_layer) as layers,
        h.others(["--model", str(weights)], ["--model", str(layers)]) as engines,
    ):
        pulled = [pull(h, d) for d in engines]
        alone = [d.complete(PROMPT, TOKENS).token_ids for d in engines]
    for (got, _), own in zip(pulled, alone, strict=True):
        must(got.status == 200 and got.token_ids != own, f"D's half got {got}, alone it says {own}")
    return Seen(
        "200 both times, and wrong text without a warning; a layer that P does not have keeps what was in that memory",
        f"refused before any request. Other weights: {pulled[0][1]}. Another layer: {pulled[1][1]}",
    )


def negate_keys(weights: Weights, _: dict[str, Any]) -> None:
    for name in weights:
        if name.endswith("k_proj.weight"):
            weights[name] = -weights[name]


def add_layer(weights: Weights, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    config["num_hidden_layers"] = layers + 1
    last, new = LAYER.format(layers - 1), LAYER.format(layers)
    for name in [name for name in weights if name.startswith(last)]:
        weights[name.replace(last, new)] = weights[name].clone()


def other_layouts(h: Hands) -> Seen:
    """D has another dtype than P; or blocks of another size."""
    dtype = "bfloat16" if h.settings.dtype == "float32" else "float32"
    size = 2 * int(h.d.registered_kv["block_size"])
    with h.others(["--dtype", dtype], ["--block-size", str(size)]) as engines:
        pulled = [pull(h, d) for d in engines]
        logged = [d.log is not None and "region length mismatch" in d.log.read_text(errors="replace") for d in engines]
    must(all(logged), f"in D's logs: {logged}")
    must(all(got.status == 500 and got.seconds < h.timeout for got, _ in pulled), f"D's halves got {pulled}")
    return Seen(
        "500 at once; that the lengths of the regions' blocks differ is only in D's log",
        f"refused before any request. {pulled[0][1]}. {pulled[1][1]}",
    )


def recompute_policy(h: Hands) -> Seen:
    """A load fails on a D whose kv_load_failure_policy is "recompute"."""
    assert h.d.command is not None, "of a lab that pdlab.up() started"
    argv = h.d.command.argv
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1]) | {"kv_load_failure_policy": "recompute"}
    with h.others(["--kv-transfer-config", json.dumps(config)]) as (d,):
        half = h.decode_half(body_of(PROMPT, TOKENS), new_transfer_id(), remote_engine_id="nobody")
        got = ask(d.url, half, h.longer(10))
    failed = ask(h.d.url, half, h.longer(10))
    must(got.status == 200 and got.token_ids == h.right, f"D's half got {got}")
    must(failed.status == 500, f"with the policy 'fail' it got {failed}")
    return Seen(
        "with 'fail', the default, 500; with 'recompute' D prefills the prompt itself: 200 and the right answer",
        'the default is vLLM\'s; decode_args=["--kv-transfer-config", …] sets another',
        {"recompute_seconds": got.seconds, "fail_seconds": failed.seconds},
    )


def pull(h: Hands, d: Instance) -> tuple[Got, str]:
    """Have `d` pull from the lab's P, which stock engines do; and what pdlab says of the pair."""
    transfer, body = new_transfer_id(), body_of(PROMPT, TOKENS)
    Asked(h.p.url, prefill_half(body, transfer))
    got = ask(d.url, h.decode_half(body, transfer), h.longer(10))
    try:
        check_pair(h.p.facts, d.facts)
    except MismatchError as error:
        return got, DIGESTS.sub("", error.message.removeprefix("prefill and decode do not match: "))
    raise Refuted("pdlab takes them for a pair")


@contextmanager
def changed(h: Hands, change: Callable[[Weights, dict[str, Any]], None]) -> Iterator[Path]:
    """A copy of the lab's model with other weights or another config; removed with the block."""
    from safetensors.torch import load_file, save_file

    model = Path(h.settings.model)
    if not model.is_dir():
        raise PdlabError(f"{model} is no folder", "this fault changes a checkpoint that lies on this machine")
    folder = Path(tempfile.mkdtemp(prefix="pdlab-model-", dir="/tmp"))
    try:
        for path in model.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        weights = {name: tensor for path in model.glob("*.safetensors") for name, tensor in load_file(path).items()}
        config = json.loads((model / "config.json").read_text())
        change(weights, config)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
