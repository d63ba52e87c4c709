"""The command line and the environment of one engine: what one would type in production, and what pdlab adds."""

import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from pdlab.checks import make_folder
from pdlab.lab.settings import KV_ROLES, Role, Settings

# For what only a worker knows of the memory it registered: see pdlab/inside.
INSTRUMENTS = ("--worker-extension-cls", "pdlab.inside.worker.RegisteredKV")
SINGLE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


@dataclass(frozen=True)
class Command:
    """Attributes:
    argv: vLLM's OpenAI API server with stock arguments.
    env: variables that matter to anyone who would run it.
    instruments: arguments that pdlab adds to look inside.
    instrument_env: variables that pdlab adds for the same.
    """

    argv: list[str]
    env: dict[str, str]
    instruments: list[str] = field(default_factory=list)
    instrument_env: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The shell line that one would type in production."""
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        return " ".join([*variables, "python", shlex.join(self.argv[1:])])

    def full_argv(self) -> list[str]:
        return [*self.argv, *self.instruments]

    def full_env(self) -> dict[str, str]:
        """This process's environment with ours on top, less what would change an engine behind the reader's back."""
        return {**inherited_env(), **self.env, **self.instrument_env}


# VLLM_CPU_KVCACHE_SPACE overrides --kv-cache-memory-bytes (an empty one crashes the engine); a fixed VLLM_PORT would
# be fought over by two engines; through an HTTP proxy no engine reaches the bootstrap server.
UNWANTED = {"VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_LOGGING_CONFIG_PATH"}
UNWANTED |= {"http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"}


def inherited_env() -> dict[str, str]:
    """This process's environment, as an engine may have it."""
    return {key: value for key, value in os.environ.items() if key not in UNWANTED}


def engine_command(
    role: Role, settings: Settings, *, host: str, port: int, bootstrap_port: int | None, extra: Iterable[str] = ()
) -> Command:
    """The command of one instance.

    Args:
        bootstrap_port: of the prefill instance; a decode instance has none.
        extra: arguments appended as they are, after ours (vLLM takes the last).
    """
    transfer = {
        "kv_connector": "MooncakeConnector",
        "kv_role": KV_ROLES[role],
        "kv_connector_extra_config": {"mooncake_protocol": settings.protocol},
    }
    argv = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model,
        "--host", host, "--port", str(port), "--dtype", settings.dtype,
        "--max-model-len", str(settings.max_model_len), "--enforce-eager",
        "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    if settings.block_size:
        argv += ["--block-size", str(settings.block_size)]
    if settings.kv_cache_bytes:
        argv += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    env = {"VLLM_HOST_IP": host, "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(settings.abort_timeout)}
    if bootstrap_port:
        env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap_port)
    if settings.profile == "cpu":
        argv += ["--distributed-executor-backend", SINGLE_PROCESS]
        env["OMP_NUM_THREADS"] = "1"
    elif settings.gpus:
        env["CUDA_VISIBLE_DEVICES"] = settings.gpus[role == "decode"]
        if settings.gpus[0] == settings.gpus[1]:
            argv += ["--gpu-memory-utilization", "0.4"]
    if Path(settings.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    return Command([*argv, *extra], env, list(INSTRUMENTS))


def instrumented(command: Command, role: Role, folder: Path, trace: bool = False, token: str = "") -> Command:
    """The command with what pdlab needs to look inside: its plugin, and the connector's own log.

    Args:
        trace: install the probes and the gates, which write into `folder`/trace.
        token: without which nobody reads the engine's KV memory; "": nobody does.

    Raises:
        PdlabError: there can be no such folder.
    """
    logging_config = make_folder(folder, role) / f"{role}.logging.json"
    logging_config.write_text(json.dumps(LOGGING))
    env = {
        "PDLAB_INSTANCE": role,
        "VLLM_PLUGINS": "pdlab",
        "VLLM_LOGGING_CONFIG_PATH": str(logging_config),
        "PYTHONUNBUFFERED": "1",
        "NO_COLOR": "1",
        # vLLM otherwise reports usage over the network.
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    env |= {"PDLAB_TRACE": str(folder / "trace")} if trace else {}
    env |= {"PDLAB_KV_TOKEN": token} if token else {}
    return Command(command.argv, command.env, command.instruments, env)


# vLLM's default format; the Mooncake connector, and it alone, at DEBUG: it says what it matched, asked for and sent.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "vllm": {
            "class": "vllm.logging_utils.NewLineFormatter",
            "datefmt": "%m-%d %H:%M:%S",
            "format": "%(levelname)s %(asctime)s.%(msecs)03d [%(filename)s:%(lineno)d] %(message)s",
        }
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "vllm", "stream": "ext://sys.stderr"}},
    "loggers": {
        "vllm": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake": {"level": "DEBUG"},
    },
}
