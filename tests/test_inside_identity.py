"""What an instance is, in the terms in which two must agree."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from pdlab.inside import identity
from pdlab.inside.identity import (
    SAMPLE_BYTES,
    SAMPLES,
    checkpoint_folder,
    sample_offsets,
    tokenizer_digest,
    weights_digest,
)

LARGE = 3 * SAMPLES * SAMPLE_BYTES + 12345  # bytes: more than is sampled


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Weights in two files, a small one and one of which samples are taken."""
    (tmp_path / "a.safetensors").write_bytes(bytes(1000))
    (tmp_path / "b.safetensors").write_bytes(bytes(LARGE))
    return tmp_path


class TestSampleOffsets:
    @pytest.mark.parametrize("size", [1, SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLES * SAMPLE_BYTES])
    def test_cover_a_small_file(self, size: int) -> None:
        covered = {byte for offset in sample_offsets(size) for byte in (offset, offset + SAMPLE_BYTES - 1)}
        assert list(sample_offsets(size)) == list(range(0, size, SAMPLE_BYTES))
        assert min(covered) == 0
        assert max(covered) >= size - 1

    @pytest.mark.parametrize("size", [SAMPLES * SAMPLE_BYTES + 1, LARGE, 137_000_000_001])
    def test_go_from_start_to_end_of_a_large_one(self, size: int) -> None:
        offsets = list(sample_offsets(size))
        assert len(offsets) == SAMPLES
        assert offsets[0] == 0
        assert offsets[-1] + SAMPLE_BYTES == size
        gaps = [second - first for first, second in pairwise(offsets)]
        assert max(gaps) - min(gaps) <= 1

    def test_of_an_empty_file(self) -> None:
        assert list(sample_offsets(0)) == []


class TestWeightsDigest:
    def test_is_the_same_again_and_elsewhere(self, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        digest = weights_digest(checkpoint)
        assert digest == weights_digest(checkpoint)
        copy = tmp_path_factory.mktemp("copy")
        for path in checkpoint.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        (copy / "config.json").write_text("{}")
        assert weights_digest(copy) == digest

    @pytest.mark.parametrize("sample", [0, 1, SAMPLES // 2, SAMPLES - 1])
    @pytest.mark.parametrize("place", [0, SAMPLE_BYTES - 1])
    def test_changes_with_any_sampled_byte(self, sample: int, place: int, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        with (checkpoint / "b.safetensors").open("r+b") as file:
            file.seek(list(sample_offsets(LARGE))[sample] + place)
            file.write(b"\1")
        assert weights_digest(checkpoint) != before

    def test_changes_with_any_byte_of_a_small_file(self, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        (checkpoint / "a.safetensors").write_bytes(bytes(500) + b"\1" + bytes(499))
        assert weights_digest(checkpoint) != before

    def test_changes_with_a_size(self, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        (checkpoint / "b.safetensors").write_bytes(bytes(LARGE + 1))
        assert weights_digest(checkpoint) != before

    def test_changes_with_a_name(self, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        (checkpoint / "b.safetensors").rename(checkpoint / "c.safetensors")
        assert weights_digest(checkpoint) != before

    @pytest.mark.parametrize("suffix", ["safetensors", "bin", "gguf"])
    def test_changes_with_one_file_more(self, suffix: str, checkpoint: Path) -> None:
        before = weights_digest(checkpoint)
        (checkpoint / f"more.{suffix}").touch()
        assert weights_digest(checkpoint) != before

    def test_reads_no_more_than_the_samples(self, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        read = 0
        original = identity.hashlib.sha256

        class Counting:
            def __init__(self) -> None:
                self.digest = original()

            def update(self, data: bytes) -> None:
                nonlocal read
                read += len(data)

            def hexdigest(self) -> str:
                return self.digest.hexdigest()

        monkeypatch.setattr(identity.hashlib, "sha256", Counting)
        weights_digest(checkpoint)
        assert SAMPLES * SAMPLE_BYTES <= read < SAMPLES * SAMPLE_BYTES + 2000

    def test_nothing_to_digest_is_not_equal_to_nothing(self, tmp_path: Path) -> None:
        assert weights_digest(tmp_path) is None


class TestTokenizerDigest:
    def write(self, folder: Path, text: str) -> str | None:
        (folder / "tokenizer.json").write_text(text)
        return tokenizer_digest(folder)

    def test_ignores_the_whitespace_and_order_of_json(self, tmp_path: Path) -> None:
        tokenizer = {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}, "version": "1.0"}
        digest = self.write(tmp_path, json.dumps(tokenizer))
        assert digest
        assert digest == self.write(tmp_path, json.dumps(tokenizer, indent=3))
        assert digest == self.write(tmp_path, json.dumps(dict(reversed(tokenizer.items()))))

    def test_changes_with_an_id_a_merge_or_a_space_in_a_token(self, tmp_path: Path) -> None:
        tokenizers = [
            {"vocab": {"a": 0, "b": 1}, "merges": ["a b", "b a"]},
            {"vocab": {"a": 1, "b": 0}, "merges": ["a b", "b a"]},
            {"vocab": {"a": 0, "b": 1}, "merges": ["b a", "a b"]},
            {"vocab": {"a ": 0, "b": 1}, "merges": ["a b", "b a"]},
        ]
        digests = {self.write(tmp_path, json.dumps(tokenizer)) for tokenizer in tokenizers}
        assert len(digests) == len(tokenizers)

    def test_without_one(self, tmp_path: Path) -> None:
        assert tokenizer_digest(tmp_path) is None


class TestCheckpointFolder:
    def test_is_the_folder_itself(self, tmp_path: Path) -> None:
        assert checkpoint_folder(str(tmp_path), None) == tmp_path

    def test_or_the_snapshot_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = {}

        def snapshot_download(model: str, **options: object) -> str:
            asked.update({"model": model, **options})
            return str(tmp_path)

        pytest.importorskip("huggingface_hub")
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        assert checkpoint_folder("some/model", "main") == tmp_path
        assert asked == {"model": "some/model", "revision": "main", "local_files_only": True}

    def test_or_none(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        pytest.importorskip("huggingface_hub")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert checkpoint_folder("nobody/nothing", None) is None
