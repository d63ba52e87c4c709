"""P and D in this process, of vLLM's own classes: scheduler, connector, bootstrap server, their threads and ZMQ.

Not vLLM's are only the model, whose tokens are made up, and the Transfer Engine, which copies memory. Importing this
imports vLLM: do it in a fixture, by `tests.helpers.engine_module`.
"""

import asyncio
import contextlib
import ctypes
import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus  # noqa: F401  # the tests' own
from vllm.v1.structured_output import StructuredOutputManager

from pdlab.inside.probes import PROBES
from pdlab.inside.tracer import Probe, Seen, Tracer
from pdlab.lab.ports import Ports
from pdlab.trace.event import Event
from tests.helpers import PATIENCE, Noted

BLOCK_SIZE = 32
LAYERS = 3
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": LAYERS, "vocab_size": 1000,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip
N = 143  # tokens of a prompt: four full blocks, and 15 tokens in a fifth
PROMPT = range(7_000_000, 7_000_000 + N)  # no other number in an event looks like these
SAMPLED = 8_100_000  # the tokens "sampled" are this and the next ones: no other number looks like them
HASH = functools.partial(get_request_block_hasher, BLOCK_SIZE, sha256)


class TransferEngine:
    """Copies within this process; `result` is what a write returns."""

    result = 0

    def initialize(self, *_: Any) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 4711

    def batch_register_memory(self, *_: Any) -> int:
        return 0

    def batch_transfer_sync_write(self, session: str, src: list[int], dst: list[int], lengths: list[int]) -> int:
        if self.result == 0:
            for source, target, length in zip(src, dst, lengths, strict=True):
                ctypes.memmove(target, source, length)
        return self.result


class Worker(connector.MooncakeConnectorWorker):
    """A worker that `end` ends; vLLM's own waits for sockets that a loop still has open."""

    def shutdown(self) -> None:
        pass

    def end(self) -> None:
        for loop, thread in (("sender_loop", "_sender_listener_t"), ("receiver_loop", "_mooncake_receiver_t")):
            if hasattr(self, loop):
                asyncio.run_coroutine_threadsafe(cancel_others(), getattr(self, loop)).result(PATIENCE)
                getattr(self, loop).call_soon_threadsafe(getattr(self, loop).stop)
                getattr(self, thread).join(PATIENCE)
                getattr(self, loop).close()
        if hasattr(self, "_sender_executor"):
            self._sender_executor.shutdown()
        if hasattr(self, "bootstrap_server"):
            self.bootstrap_server.shutdown()
        self.async_zmq_ctx.destroy(linger=0)


async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Engine:
    """One instance: its scheduler, and with `worker` its worker, stepped by hand.

    Attributes:
        url: of P's bootstrap server.
    """

    def __init__(
        self, side: str, model: Path, *, blocks: int = 100, policy: str = "fail", worker: bool = False
    ) -> None:
        self.side, self.url = side, ""
        self.worker: Any = None
        init_none_hash(sha256)
        groups = [KVCacheGroupSpec([f"model.layers.{layer}.attn" for layer in range(LAYERS)], SPEC)]
        kv_config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.config = configured(model, "kv_producer" if side == "P" else "kv_consumer", policy)
        self.config.cache_config.num_gpu_blocks = blocks
        self.scheduler = Scheduler(self.config, kv_config, StructuredOutputManager(self.config), BLOCK_SIZE)
        self.manager, self.connector = self.scheduler.kv_cache_manager, self.scheduler.connector.connector_scheduler
        self.sampled = SAMPLED
        subjects = [self.scheduler, self.manager, self.connector]
        if worker:
            self.worker = self.started(kv_config)
            subjects += [self.worker, getattr(self.worker, "bootstrap_server", self.worker)]
        for subject in subjects:
            subject.side = side

    def started(self, kv_config: KVCacheConfig) -> Worker:
        with contextlib.ExitStack() as stack:
            ports = stack.enter_context(contextlib.closing(Ports("127.0.0.1")))
            port = ports.take("bootstrap")
            self.url = f"http://127.0.0.1:{port}"
            env = {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port), "VLLM_HOST_IP": "127.0.0.1"}
            stack.enter_context(mock.patch.dict(os.environ, env))
            instead = {
                "TransferEngine": TransferEngine, "get_tensor_model_parallel_rank": lambda: 0,
                "get_tensor_model_parallel_world_size": lambda: 1, "get_current_attn_backends": lambda _: [],
                "get_pp_group": lambda: SimpleNamespace(rank_in_group=0),
                "MooncakeBootstrapServer": lambda _, port: mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port),
            }  # fmt: skip
            stack.enter_context(mock.patch.multiple(connector, **instead))
            stack.enter_context(mock.patch.object(torch.accelerator, "current_device_index", lambda: 0))
            stack.enter_context(mock.patch.object(Worker, "_sync_block_size_with_kernel", lambda _: None))
            stack.enter_context(mock.patch.object(Worker, "_bind_sender_thread_device", lambda _: None))
            stack.enter_context(mock.patch.object(connector.current_platform, "set_device", lambda _: None))
            worker = Worker(self.config, f"engine-{self.side}", kv_config)
            worker.side = self.side
            self.memory = torch.zeros(LAYERS, kv_config.num_blocks, SPEC.page_size_bytes, dtype=torch.uint8)
            names = kv_config.kv_cache_groups[0].layer_names
            pages = self.memory.view(torch.bfloat16).view(LAYERS, kv_config.num_blocks, 2, BLOCK_SIZE, -1)
            worker.register_kv_caches(dict(zip(names, pages, strict=True)))
        return worker

    def add(
        self, request_id: str, tokens: Sequence[int], params: Any, max_tokens: int = 1, salt: str | None = None
    ) -> Request:
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        request = Request(request_id, list(tokens), sampling, None, cache_salt=salt, block_hasher=HASH())
        self.scheduler.add_request(request)
        return request

    def step(self, **reported: Any) -> Any:
        """One step; `reported` is what a worker would report (a `KVConnectorOutput`), where there is none."""
        output = self.scheduler.schedule()
        if self.worker:
            self.worker.start_load_kv(output.kv_connector_metadata)
            results = self.worker.get_transfer_results()
            reported = {
                "finished_sending": results.finished_sending, "finished_recving": results.finished_recving,
                "invalid_block_ids": self.worker.get_block_ids_with_load_errors(),
            }  # fmt: skip
        ids: list[str] = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([self.sampled + len(sampled)] if whole else [])
        self.sampled += len(ids)
        told = KVConnectorOutput(**reported) if any(reported.values()) else None
        numbers = {request_id: number for number, request_id in enumerate(ids)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(ids, numbers, sampled, kv_connector_output=told))
        return output

    def free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def end(self) -> None:
        if self.worker:
            self.worker.end()


SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)


def configured(model: Path, role: str, policy: str) -> VllmConfig:
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    with mock.patch.dict(os.environ, {"HF_HUB_OFFLINE": "1"}):  # and what vLLM sets besides is taken back
        return VllmConfig(
            model_config=ModelConfig(
                model=str(model), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=2048
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16, max_num_batched_tokens=512, max_model_len=2048, enable_chunked_prefill=True,
                is_encoder_decoder=False, async_scheduling=False,
            ),
            cache_config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True),
            kv_transfer_config=KVTransferConfig(
                kv_connector="MooncakeConnector", kv_role=role, kv_load_failure_policy=policy,
                kv_connector_extra_config={"mooncake_protocol": "tcp"},
            ),
        )  # fmt: skip


def for_p(transfer: str) -> dict[str, Any]:
    """kv_transfer_params, as the proxy sends them to P."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}


def for_d(transfer: str, url: str = "http://127.0.0.1:1", engine: str = "engine-P") -> dict[str, Any]:
    return {
        "do_remote_decode": False, "do_remote_prefill": True, "transfer_id": transfer,
        "remote_engine_id": engine, "remote_bootstrap_addr": url,
    }  # fmt: skip


def step_until(condition: Callable[[], object], *engines: Engine) -> None:
    """Step the engines, side by side, until then."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "stepped in vain"
        for engine in engines:
            engine.step()
        time.sleep(0.001)


class Pair:
    """P and D, with their workers, and what their probes noted."""

    def __init__(self, folder: Path, made: Mapping[str, tuple[Tracer, Noted]]) -> None:
        (self.p_trace, self.p_noted), (self.d_trace, self.d_noted) = made["P"], made["D"]
        self.p = Engine("P", folder / "model", worker=True)
        self.d = Engine("D", folder / "model", worker=True)

    def send(self, transfer: str, max_tokens: int = 20, prompt: Sequence[int] = PROMPT) -> None:
        """Send both halves of a request."""
        self.p.add(f"p-{transfer}", prompt, for_p(transfer))
        self.d.add(f"d-{transfer}", prompt, for_d(transfer, self.p.url), max_tokens)

    def run(self, until: Callable[[], object] = lambda: False) -> None:
        """Step both until then, or until both have nothing left."""
        both = self.p, self.d
        step_until(lambda: until() or not any(engine.scheduler.requests for engine in both), *both)

    @property
    def events(self) -> list[Event]:
        return sorted([*self.p_noted.events, *self.d_noted.events], key=lambda event: event.time)

    def fine(self) -> bool:
        return not self.p_trace.errors and not self.d_trace.errors

    def end(self) -> None:
        self.p.end()
        self.d.end()
        self.p_noted.close(), self.d_noted.close()


# The probes ----------------------------------------------------------------------------------------------------------


def owner_of(symbol: str) -> tuple[Any, str]:
    module, _, names = symbol.partition(":")
    *owners, name = names.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


@contextlib.contextmanager
def unwrapped_after(symbols: Iterable[str]) -> Iterator[None]:
    """What is wrapped meanwhile is itself again afterwards."""
    before = [(*owner_of(symbol), getattr(*owner_of(symbol))) for symbol in symbols]
    try:
        yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


@contextlib.contextmanager
def probed(traces: dict[str, Tracer]) -> Iterator[None]:
    """Install all the probes, for P and D in one process: each notes with the tracer of its side."""

    def on_its_side(look: Callable[..., Seen], any_trace: Tracer, subject: Any, *args: Any, **kwargs: Any) -> Seen:
        yield from look(traces[subject.side], subject, *args, **kwargs)

    def failed(probe: str, error: BaseException) -> None:
        for trace in traces.values():
            trace.failed(probe, error)

    probes = [Probe(p.symbol, p.event, functools.partial(on_its_side, p.look), p.captures) for p in PROBES]
    with unwrapped_after(probe.symbol for probe in probes):
        Tracer.install(SimpleNamespace(failed=failed), probes)  # type: ignore[arg-type]
        yield
