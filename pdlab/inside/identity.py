"""What an instance is, in the terms in which a prefill and a decode instance must agree."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SAMPLES, SAMPLE_BYTES = 64, 1 << 16


def identity(vllm_config: Any) -> dict[str, Any]:
    """Facts of a running instance, from its `VllmConfig`.

    Returns:
        vllm_version, model, revision, weights_digest, tokenizer_digest, layers, dtype, kv_cache_dtype,
        block_size (tokens), max_model_len (tokens), tensor_parallel_size, kv_role, kv_connector.
    """
    import vllm

    model, cache, transfer = vllm_config.model_config, vllm_config.cache_config, vllm_config.kv_transfer_config
    folder = checkpoint_folder(model.model, model.revision)
    tokenizer = checkpoint_folder(model.tokenizer, model.tokenizer_revision)
    return {
        "vllm_version": vllm.__version__,
        "model": model.model,
        "revision": model.revision,
        "weights_digest": weights_digest(folder) if folder else None,
        "tokenizer_digest": tokenizer_digest(tokenizer) if tokenizer else None,
        "layers": model.get_num_layers(vllm_config.parallel_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": cache.cache_dtype,
        "block_size": cache.block_size,
        "max_model_len": model.max_model_len,
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "kv_connector": transfer and transfer.kv_connector,
        "kv_role": transfer and transfer.kv_role,
    }


def checkpoint_folder(model: str, revision: str | None) -> Path | None:
    """Where the files of `model` lie: the folder itself, or the hub's snapshot that is on disk; None if neither."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # nothing on disk to compare; the model's name and revision remain
        return None


def weights_digest(folder: Path) -> str | None:
    """A digest of the checkpoint's weight files: names, sizes and 64 samples of 64 KiB spread over each.

    Sampled so that a checkpoint of hundreds of GB takes no longer than a small one. None if there are none (that we
    know by their names): two of those must not pass for equal.
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("*.gguf")])
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for offset in sample_offsets(size):
                file.seek(offset)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def sample_offsets(size: int) -> Iterable[int]:
    """Where the samples of a file of `size` bytes begin: the whole file if it is small, else evenly to its very end."""
    if size <= SAMPLES * SAMPLE_BYTES:
        return range(0, size, SAMPLE_BYTES)
    return [(size - SAMPLE_BYTES) * i // (SAMPLES - 1) for i in range(SAMPLES)]


def tokenizer_digest(folder: Path) -> str | None:
    """A digest of what turns text into token ids, whitespace of the JSON aside; None without a tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    canonical = json.dumps(json.loads(path.read_bytes()), sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
