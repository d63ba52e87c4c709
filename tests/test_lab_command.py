"""The command line and the environment of one engine."""

import dataclasses
import json
import logging
import logging.config
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdlab.lab.command import INSTRUMENTS, LOGGING, Command, engine_command, instrumented
from pdlab.lab.settings import ROLES, Role, Settings

CPU = Settings(
    model="/path/to/model", profile="cpu", dtype="float32", max_model_len=4096, block_size=32,
    kv_cache_bytes=512 << 20, abort_timeout=15, protocol="tcp",
)  # fmt: skip
TWO_GPUS = Settings(
    model="some/model", profile="cuda", dtype="auto", max_model_len=8192, block_size=None, kv_cache_bytes=None,
    abort_timeout=20, protocol="rdma", gpus=("2", "5"),
)  # fmt: skip
ONE_GPU = dataclasses.replace(TWO_GPUS, gpus=("0", "0"), protocol="tcp")


def command(role: Role, settings: Settings, *extra: str) -> Command:
    bootstrap = 8998 if role == "prefill" else None
    return engine_command(role, settings, host="127.0.0.1", port=8100, bootstrap_port=bootstrap, extra=extra)


def option(made: Command, name: str) -> str | None:
    """The value of an option, None where it isn't given."""
    assert made.argv.count(name) <= 1
    return made.argv[made.argv.index(name) + 1] if name in made.argv else None


class TestWritten:
    def test_on_a_cpu(self) -> None:
        made = command("prefill", CPU)
        transfer = {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        assert made.argv == [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "/path/to/model",
            "--host", "127.0.0.1", "--port", "8100", "--dtype", "float32", "--max-model-len", "4096",
            "--enforce-eager", "--kv-transfer-config", json.dumps(transfer), "--block-size", "32",
            "--kv-cache-memory-bytes", "536870912",
            "--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ]  # fmt: skip
        assert made.env == {
            "VLLM_HOST_IP": "127.0.0.1", "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "15",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    @pytest.mark.parametrize("settings", [CPU, TWO_GPUS])
    def test_decode_differs_in_role_and_bootstrap_alone(self, settings: Settings) -> None:
        p, d = command("prefill", settings), command("decode", settings)
        assert [(a, b) for a, b in zip(p.argv, d.argv, strict=True) if a != b] == [
            (option(p, "--kv-transfer-config"), option(d, "--kv-transfer-config"))
        ]
        role = {"kv_role": "kv_consumer"}
        assert json.loads(str(option(d, "--kv-transfer-config"))) == {
            **json.loads(str(option(p, "--kv-transfer-config"))), **role
        }  # fmt: skip
        assert p.env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] == "8998"
        assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in d.env

    def test_on_two_gpus(self) -> None:
        for role, gpu in (("prefill", "2"), ("decode", "5")):
            made = command(role, TWO_GPUS)
            assert made.env["CUDA_VISIBLE_DEVICES"] == gpu
            assert option(made, "--gpu-memory-utilization") is None

    def test_two_share_a_gpu(self) -> None:
        for role in ROLES:
            made = command(role, ONE_GPU)
            assert made.env["CUDA_VISIBLE_DEVICES"] == "0"
            assert option(made, "--gpu-memory-utilization") == "0.4"

    @pytest.mark.parametrize("settings", [TWO_GPUS, ONE_GPU])
    def test_nothing_of_the_cpu_on_a_gpu(self, settings: Settings) -> None:
        made = command("prefill", settings)
        for name in ("--block-size", "--kv-cache-memory-bytes", "--distributed-executor-backend"):
            assert option(made, name) is None
        assert "OMP_NUM_THREADS" not in made.env

    def test_offline_where_the_model_is_a_folder(self, tmp_path: Path) -> None:
        local = dataclasses.replace(CPU, model=str(tmp_path))
        assert command("decode", local).env["HF_HUB_OFFLINE"] == "1"
        assert "HF_HUB_OFFLINE" not in command("decode", TWO_GPUS).env

    def test_more_arguments_come_last(self) -> None:
        assert command("decode", CPU, "--dtype", "auto").full_argv()[-4:-2] == ["--dtype", "auto"]


class TestShellLine:
    @pytest.mark.parametrize("settings", [CPU, TWO_GPUS, ONE_GPU])
    @pytest.mark.parametrize("role", ROLES)
    def test_says_what_is_run(self, role: Role, settings: Settings) -> None:
        settings = dataclasses.replace(settings, model="/a b/it's $HOME")
        made = command(role, settings)
        words = shlex.split(str(made))
        count = len(made.env)
        assert dict(word.split("=", 1) for word in words[:count]) == made.env
        assert words[count:] == ["python", *made.argv[1:]]

    def test_quotes_variables(self) -> None:
        made = Command(["/venv/bin/python", "-c", "1"], {"NAME": "it's $HOME"})
        assert shlex.split(str(made)) == ["NAME=it's $HOME", "python", "-c", "1"]

    def test_holds_nothing_that_pdlab_adds(self, tmp_path: Path) -> None:
        made = instrumented(command("prefill", CPU), "prefill", tmp_path)
        assert made.instruments == list(INSTRUMENTS)
        assert str(made) == str(command("prefill", CPU))
        assert "pdlab" not in str(made).lower()


class TestEnvironment:
    def test_ours_wins_and_the_unwanted_goes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        unwanted = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_PORT", "VLLM_CPU_OMP_THREADS_BIND")
        for name in (*unwanted, "VLLM_HOST_IP", "VLLM_PLUGINS", "VLLM_LOGGING_CONFIG_PATH", "KEPT"):
            monkeypatch.setenv(name, "the reader's")
        made = instrumented(command("prefill", CPU), "prefill", tmp_path)
        env = made.full_env()
        assert env.keys().isdisjoint(unwanted)
        assert env["VLLM_HOST_IP"] == "127.0.0.1"
        assert env["VLLM_PLUGINS"] == "pdlab"
        assert env["VLLM_LOGGING_CONFIG_PATH"] == str(tmp_path / "prefill.logging.json")
        assert env["KEPT"] == "the reader's"
        assert "VLLM_LOGGING_CONFIG_PATH" not in command("prefill", CPU).full_env()
        assert os.environ["VLLM_PORT"] == "the reader's"

    def test_instruments_name_the_role_and_its_files(self, tmp_path: Path) -> None:
        made = instrumented(command("decode", CPU), "decode", tmp_path)
        assert made.instrument_env["PDLAB_INSTANCE"] == "decode"
        assert "PDLAB_TRACE" not in made.instrument_env and "PDLAB_KV_TOKEN" not in made.instrument_env
        assert made.full_argv() == [*made.argv, *INSTRUMENTS]

    def test_tracing_and_memory_are_asked_for(self, tmp_path: Path) -> None:
        env = instrumented(command("decode", CPU), "decode", tmp_path, trace=True, token="secret").instrument_env
        assert env["PDLAB_TRACE"] == str(tmp_path / "trace")
        assert env["PDLAB_KV_TOKEN"] == "secret"

    def test_no_usage_is_reported(self, tmp_path: Path) -> None:
        env = instrumented(command("decode", CPU), "decode", tmp_path).full_env()
        assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"


class TestLogging:
    @pytest.fixture
    def loggers(self) -> Iterator[Callable[[str], logging.Logger]]:
        """Get a logger; what the configuration changes is put back."""
        loggers = [logging.getLogger(name) for name in LOGGING["loggers"]]  # type: ignore[attr-defined]
        before = [(logger.level, logger.handlers[:], logger.propagate) for logger in loggers]
        yield logging.getLogger
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers[:], logger.propagate = handlers, propagate

    def test_shows_the_connector_at_debug_and_the_rest_at_info(
        self, loggers: Callable[[str], logging.Logger], tmp_path: Path
    ) -> None:
        pytest.importorskip("vllm.logging_utils")
        instrumented(command("prefill", CPU), "prefill", tmp_path)
        logging.config.dictConfig(json.loads((tmp_path / "prefill.logging.json").read_text()))
        connector = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
        assert loggers(f"{connector}.mooncake_connector").isEnabledFor(logging.DEBUG)
        assert not loggers("vllm.v1.engine").isEnabledFor(logging.DEBUG)
        assert loggers("vllm.v1.engine").isEnabledFor(logging.INFO)

    def test_has_the_name_of_the_connector_s_logger(self) -> None:
        mooncake = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.mooncake")
        assert mooncake.__name__ in LOGGING["loggers"]  # type: ignore[operator]

    def test_writes_lines_as_vllm_does(self) -> None:
        NewLineFormatter = pytest.importorskip("vllm.logging_utils").NewLineFormatter
        fields = LOGGING["formatters"]["vllm"]  # type: ignore[index]
        path = "/x/mooncake_connector.py"
        record = logging.LogRecord("vllm", logging.DEBUG, path, 7, "Sending to %s done", ("D",), None)
        line = NewLineFormatter(fields["format"], fields["datefmt"]).format(record)
        assert len(line.split()[2]) == len("12:34:56.789")
        assert line.endswith("[mooncake_connector.py:7] Sending to D done")


@pytest.fixture(scope="module")
def parse() -> Callable[[Command], Namespace]:
    """Have vLLM's own argument parser read a command."""
    pytest.importorskip("vllm")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return lambda made: parser.parse_args(made.full_argv()[3:])


class TestVllmParser:
    """What vLLM makes of the command lines."""

    @pytest.mark.parametrize("settings", [CPU, TWO_GPUS, ONE_GPU], ids=["cpu", "two GPUs", "one GPU"])
    @pytest.mark.parametrize("role", ROLES)
    def test_takes_every_one(self, role: Role, settings: Settings, parse: Callable[[Command], Namespace]) -> None:
        args = parse(command(role, settings))
        transfer: Any = args.kv_transfer_config
        assert transfer.kv_connector == "MooncakeConnector"
        assert transfer.kv_role == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
        assert transfer.kv_connector_extra_config == {"mooncake_protocol": settings.protocol}
        assert transfer.kv_connector_module_path is None  # the stock class
        assert transfer.is_kv_producer == (role == "prefill")
        assert (args.host, args.port, args.model) == ("127.0.0.1", 8100, settings.model)
        assert (args.dtype, args.max_model_len) == (settings.dtype, settings.max_model_len)
        assert (args.block_size, args.kv_cache_memory_bytes) == (settings.block_size, settings.kv_cache_bytes)
        assert args.enforce_eager
        assert args.worker_extension_cls == "pdlab.inside.worker.RegisteredKV"

    def test_takes_the_memory_of_a_shared_gpu(self, parse: Callable[[Command], Namespace]) -> None:
        shared, own = (parse(command("decode", settings)) for settings in (ONE_GPU, TWO_GPUS))
        assert shared.gpu_memory_utilization == 0.4
        assert own.gpu_memory_utilization > 0.8

    def test_takes_the_last_of_two(self, parse: Callable[[Command], Namespace]) -> None:
        assert parse(command("decode", CPU, "--max-model-len", "64")).max_model_len == 64

    def test_knows_the_variables(self) -> None:
        envs = pytest.importorskip("vllm.envs")
        wanted = {name for role in ROLES for name in command(role, CPU).env if name.startswith("VLLM_")}
        assert len(wanted) == 3
        assert wanted <= set(envs.environment_variables)
