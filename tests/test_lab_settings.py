"""What a reader chooses about a lab, and what a machine chooses for them."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from pdlab.errors import PdlabError
from pdlab.lab import profile as profiles
from pdlab.lab.settings import Settings, checked

CPU = Settings(
    model="/path/to/model", profile="cpu", dtype="float32", max_model_len=4096, block_size=32,
    kv_cache_bytes=512 << 20, abort_timeout=15, protocol="tcp",
)  # fmt: skip


class TestSettings:
    def test_survive_json(self) -> None:
        for settings in (CPU, dataclasses.replace(CPU, profile="cuda", gpus=("0", "1"))):
            assert Settings.from_dict(json.loads(json.dumps(settings.as_dict()))) == settings

    def test_differences_in_words(self) -> None:
        assert CPU.differences(CPU) == ""
        other = dataclasses.replace(CPU, dtype="bfloat16", block_size=None)
        words = "dtype float32 (asked for: bfloat16), block_size 32 (asked for: None)"
        assert CPU.differences(other) == words

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("max_model_len", 0, "max_model_len is 0"),
            ("abort_timeout", 0, "abort_timeout is 0"),
            ("block_size", 48, "block_size is 48"),
            ("block_size", 0, "block_size is 0"),
            ("block_size", -32, "block_size is -32"),
            ("kv_cache_bytes", 512, "kv_cache_bytes is 512"),
            ("kv_cache_bytes", 0, "kv_cache_bytes is 0"),
        ],
    )
    def test_checked_refuses_what_no_engine_takes(self, field: str, value: int, words: str) -> None:
        with pytest.raises(PdlabError) as raised:
            checked(dataclasses.replace(CPU, **{field: value}))
        assert raised.value.message == words
        assert raised.value.hint

    def test_checked_takes_the_rest(self) -> None:
        good = [
            CPU,
            dataclasses.replace(CPU, block_size=64, kv_cache_bytes=1 << 20, max_model_len=1, abort_timeout=1),
            dataclasses.replace(CPU, profile="cuda", block_size=16, kv_cache_bytes=None),
        ]
        assert [checked(settings) for settings in good] == good


class TestProfile:
    @pytest.fixture(autouse=True)
    def machine(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """One without GPU and RDMA device, where no profile is asked for."""
        (tmp_path / "config.json").touch()
        monkeypatch.delenv("PDLAB_PROFILE", raising=False)
        monkeypatch.setattr(profiles, "visible_gpus", list)
        monkeypatch.setattr(profiles, "profile_of", lambda: None)
        monkeypatch.setattr(profiles, "rdma_devices", list)

    def test_cpu_is_the_default_without_a_gpu(self, tmp_path: Path) -> None:
        expected = Settings(
            model=str(tmp_path), profile="cpu", dtype="float32", max_model_len=4096, block_size=32,
            kv_cache_bytes=512 << 20, abort_timeout=15, protocol="tcp", gpus=None,
        )  # fmt: skip
        assert profiles.settings(str(tmp_path)) == expected

    @pytest.mark.parametrize(("gpus", "chosen"), [(["0"], ("0", "0")), (["2", "3", "5"], ("2", "3"))])
    def test_cuda_is_the_default_with_one(
        self, gpus: list[str], chosen: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(profiles, "visible_gpus", lambda: gpus)
        expected = Settings(
            model=str(tmp_path), profile="cuda", dtype="auto", max_model_len=4096, block_size=None,
            kv_cache_bytes=None, abort_timeout=15, protocol="tcp", gpus=chosen,
        )  # fmt: skip
        assert profiles.settings(str(tmp_path)) == expected
        assert profiles.settings(str(tmp_path), "cpu").profile == "cpu"

    def test_the_variable_chooses_and_the_argument_wins(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(profiles, "visible_gpus", lambda: ["0"])
        monkeypatch.setenv("PDLAB_PROFILE", "cpu")
        assert profiles.settings(str(tmp_path)).profile == "cpu"
        assert profiles.settings(str(tmp_path), "cuda").profile == "cuda"

    def test_rdma_where_a_device_is_on_cuda_only(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(profiles, "visible_gpus", lambda: ["0"])
        monkeypatch.setattr(profiles, "rdma_devices", lambda: ["mlx5_0"])
        assert profiles.settings(str(tmp_path), "cuda").protocol == "rdma"
        assert profiles.settings(str(tmp_path), "cuda", protocol="tcp").protocol == "tcp"
        assert profiles.settings(str(tmp_path), "cpu").protocol == "tcp"

    @pytest.mark.parametrize("profile", ["cpu", "cuda"])
    def test_what_is_given_wins(self, profile: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(profiles, "visible_gpus", lambda: ["0"])
        given = {
            "dtype": "bfloat16", "max_model_len": 100, "kv_cache_bytes": 1 << 21, "block_size": 64,
            "abort_timeout": 3, "protocol": "rdma",
        }  # fmt: skip
        chosen = profiles.settings(str(tmp_path), profile, **given).as_dict()  # type: ignore[arg-type]
        assert {key: chosen[key] for key in given} == given

    @pytest.mark.parametrize(
        ("asked", "message", "hint"),
        [
            ({"profile": "tpu"}, "there is no profile 'tpu'", "cpu or cuda"),
            ({"protocol": "smoke"}, "there is no protocol 'smoke'", "tcp or rdma"),
            ({"profile": "cuda"}, "the cuda profile needs a GPU and none is visible", "--profile cpu"),
            ({"kv_cache_bytes": 0}, "kv_cache_bytes is 0", "MiB"),
            ({"block_size": 0}, "block_size is 0", "at least 1"),
        ],
    )
    def test_errors_say_what_to_do(self, asked: dict[str, str], message: str, hint: str, tmp_path: Path) -> None:
        with pytest.raises(PdlabError) as raised:
            profiles.settings(str(tmp_path), **asked)  # type: ignore[arg-type]
        assert raised.value.message == message
        assert hint in str(raised.value.hint)
        assert "\n" not in raised.value.message

    def test_the_model_goes_through_resolve(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(profiles, "resolve", lambda model: f"resolved {model}")
        assert profiles.settings("m").model == "resolved m"
        assert profiles.settings().model == "resolved None"

    def test_each_instance_gets_a_core_where_there_are_two(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for cores, expected in (({3}, [(), ()]), ({5, 3, 4}, [(3,), (4,)])):
            monkeypatch.setattr("os.sched_getaffinity", lambda _, cores=cores: cores)
            assert [profiles.cores_for(role) for role in ("prefill", "decode")] == expected


class TestVisibleGpus:
    @pytest.mark.parametrize(
        ("count", "variable", "expected"),
        [
            (2, None, ["0", "1"]),
            (4, "2,3", ["2", "3"]),
            (4, " 3 , 1 ", ["3", "1"]),
            (2, "GPU-5f3a,GPU-77b1", ["GPU-5f3a", "GPU-77b1"]),
            (2, "", []),
            (2, "-1", []),
            (2, "1,7,0", ["1"]),
            (2, "NoDevFiles", []),
            (0, "0,1", []),
            (0, None, []),
        ],
    )
    def test_are_what_cuda_would_see(
        self, count: int, variable: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        listed = "".join(
            f"GPU {index}: NVIDIA H200 (UUID: GPU-{index})\n  MIG 1g (UUID: MIG-9)\n" for index in range(count)
        )
        answer = subprocess.CompletedProcess([], 0, stdout=listed)
        monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if variable is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert profiles.visible_gpus() == expected

    def test_none_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        assert profiles.visible_gpus() == []
