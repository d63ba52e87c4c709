"""The default model: an ordinary checkpoint, whole or not there."""

import fcntl
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pdlab.setup import model, pins
from pdlab.setup.console import SetupError
from pdlab.setup.runner import Result
from tests.helpers import PATIENCE, wait_for_words


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "gguf_file", lambda: Path("some.gguf"))
    return tmp_path / "models" / model.NAME


def conversion(code: int, recipe: int = model.RECIPE) -> Any:
    def run(command: list[str], *_: object, **__: object) -> Result:
        target = Path(command[-1])
        target.mkdir()
        (target / "pdlab.json").write_text(json.dumps({"recipe": recipe}))
        return Result(code, "" if code == 0 else "Traceback (most recent call last):\nMemoryError: no memory\n")

    return run


def test_it_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "run", conversion(0))
    assert model.prepared() is None
    assert model.prepare() == cache
    monkeypatch.setattr(model, "run", conversion(1))
    assert model.prepare() == model.prepared() == cache
    assert model.resolve(None) == model.resolve(model.NAME) == str(cache)


def test_a_conversion_that_fails_leaves_nothing_and_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "run", conversion(1))
    with pytest.raises(SetupError, match="MemoryError: no memory") as caught:
        model.prepare()
    assert "\n" not in str(caught.value)
    assert [path for path in cache.parent.iterdir() if path.is_dir()] == []


def test_an_older_recipes_checkpoint_and_a_killed_conversion_are_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    (cache / "pdlab.json").write_text(json.dumps({"recipe": 0}))
    (cache.parent / f".{model.NAME}.new").mkdir()
    monkeypatch.setattr(model, "run", conversion(0))
    assert model.prepared() is None
    assert model.prepare() == cache
    assert [path for path in cache.parent.iterdir() if path.is_dir()] == [cache]


def test_other_models_are_folders_or_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert model.resolve("m") == str(tmp_path / "m")
    assert model.resolve("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    with pytest.raises(SetupError, match="no model folder"):
        model.resolve("./missing")
    (tmp_path / "empty").mkdir()
    for name in ("empty", "./empty", str(tmp_path / "empty")):
        with pytest.raises(SetupError, match=r"empty holds no config\.json") as caught:
            model.resolve(name)
        assert "\n" not in str(caught.value)


def test_only_who_really_waits_for_another_process_says_so(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare() -> threading.Thread:
        thread = threading.Thread(target=model.prepare, daemon=True)
        thread.start()
        return thread

    made: list[object] = []
    monkeypatch.setattr(model, "_make", made.append)
    prepare().join(PATIENCE)
    assert made == [cache] and capsys.readouterr().err == "", "the lock was free"
    with (cache.parent / f".{model.NAME}.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        waiting = prepare()
        said = wait_for_words(capsys, "waiting for it")
        assert waiting.is_alive() and said.err.count("waiting for it") == 1 and said.out == ""
        cache.mkdir()
        (cache / "pdlab.json").write_text(json.dumps({"recipe": model.RECIPE}))  # the other one is done…
        another = prepare()
        another.join(PATIENCE)
        assert not another.is_alive() and capsys.readouterr().err == "", "nothing to wait for"
        fcntl.flock(held, fcntl.LOCK_UN)
        waiting.join(PATIENCE)
    assert made == [cache], "…and it isn't done again"


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    if pins.find(pins.MODEL_PACKAGE) is None:
        pytest.skip(f"{pins.MODEL_PACKAGE} isn't installed here")
    return model.prepare()


def test_the_checkpoint_is_an_ordinary_one(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (30, 3, 64)
    assert "quantization_config" not in config
    ends = json.loads((checkpoint / "generation_config.json").read_text())
    assert (ends["bos_token_id"], ends["eos_token_id"]) == (1, 2)
    assert (checkpoint / "model.safetensors").stat().st_size > 2 * 134_000_000


def test_the_tokenizer_is_smollm2s(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert tokenizer.encode("in 2024").tokens == ["in", "Ġ", "2", "0", "2", "4"]
    text = "Café, naïve; 12  apples\n\tdef f(x): return x**2 — ok?"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>").ids[0::3] == [1, 2]
    template = (checkpoint / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template and "add_generation_prompt" in template and "named SmolLM" in template
