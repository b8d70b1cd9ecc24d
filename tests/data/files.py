"""Tiny data files in the real formats, for the tests to read back and to damage."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def idx(values: NDArray[np.uint8] | NDArray[np.int32]) -> bytes:
    code = {"u": 0x08, "i": 0x0C}[values.dtype.kind]
    shape = np.array(values.shape, ">u4").tobytes()
    return bytes((0, 0, code, values.ndim)) + shape + values.astype(values.dtype.newbyteorder(">")).tobytes()


def write_mnist(folder: Path, *, packed: bool = True, train: int = 12, test: int = 4, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            data = idx(values)
            name = f"{part}-{kind}-ubyte"
            if packed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(data))
            else:
                (folder / name).write_bytes(data)


def write_qmnist(folder: Path, *, train: int = 12, test: int = 6, shift: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, first in (("train", train, 100), ("test", test, 200)):
        rows = np.zeros((count, 8), np.int32)
        rows[:, 0] = (np.arange(count) + shift) % 10
        rows[:, 2] = first + np.arange(count) // 3
        (folder / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(rows)))


def cifar_records(count: int, *labels: int, seed: int = 0) -> bytes:
    """Records of the given label bytes, then random pixels."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 256, (count, len(labels) + 3072), dtype=np.uint8)
    rows[:, : len(labels)] = labels
    return rows.tobytes()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(f"some-folder/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
