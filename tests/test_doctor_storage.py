"""`doctor` on the disk, the model and /dev/shm."""

from pathlib import Path

import pytest

from pdlab.doctor import storage
from pdlab.doctor.check import GIB, MIB, size
from pdlab.paths import cache_dir


@pytest.mark.parametrize(("free", "status"), [(2 * GIB, "ok"), (GIB, "warn"), (100 * MIB, "fail")])
def test_disk_looks_at_the_nearest_folder_that_exists(tmp_path: Path, free: int, status: str) -> None:
    looked_at: list[Path] = []

    def usage(path: Path) -> tuple[int, int, int]:
        looked_at.append(path)
        return 10 * GIB, 0, free

    assert storage.check_disk(tmp_path / "not" / "there", usage).status == status
    storage.check_disk(tmp_path, usage)
    assert looked_at == [tmp_path, tmp_path]


def test_disk_is_that_of_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    assert storage.check_disk().found.endswith(f"free at {tmp_path}")


def test_model(tmp_path: Path) -> None:
    assert storage.check_model(lambda: None).status == "info"
    checkpoint = tmp_path / "SmolLM2-135M-Instruct"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(bytes(3 * MIB))
    assert storage.check_model(lambda: checkpoint).found == "SmolLM2-135M-Instruct: 3 MiB"


def test_shared_memory() -> None:
    def look(free: int) -> str | None:
        return storage.check_shared_memory(usage=lambda path: (GIB, 0, free)).remedy

    assert look(GIB) is None
    assert look(64 * MIB) == "Docker: --shm-size=1g"


def test_sizes_read_well() -> None:
    sizes = [size(n) for n in (900, 64 * 1024, 8 * MIB, 1.5 * GIB, 2048 * GIB)]
    assert sizes == ["900 B", "64 KiB", "8 MiB", "1.5 GiB", "2048.0 GiB"]
