import gzip
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tdpfed.data.formats import check_labels, read_cifar, read_idx, read_npz, read_parquet
from tdpfed.errors import TDPFedError

from .files import cifar_records, idx, write_tar

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
TABLE = np.arange(24, dtype=np.int32).reshape(3, 8) - 5


@pytest.mark.parametrize(("values", "code", "tail"), [(IMAGES, 0x08, (3, 4)), (TABLE, 0x0C, (8,))])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_reads_back(tmp_path: Path, values: NDArray[Any], code: int, tail: tuple[int, ...], packed: bool) -> None:
    path = tmp_path / ("file.gz" if packed else "file")
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    read = read_idx(path, code, *tail)
    assert np.array_equal(read, values)
    assert read.dtype == values.dtype
    assert read.dtype.isnative
    assert np.array_equal(read_idx(path, code, *(None for _ in tail)), values)


@given(cut=st.integers(0, len(idx(IMAGES)) - 1), extra=st.booleans())
def test_idx_of_another_length_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int, extra: bool) -> None:
    path = tmp_path_factory.mktemp("idx") / "broken"
    path.write_bytes(idx(IMAGES) + bytes(cut + 1) if extra else idx(IMAGES)[:cut])
    with pytest.raises(TDPFedError, match=r"data file '.*broken': .*; expected "):
        read_idx(path, 0x08, 3, 4)


def test_idx_of_another_kind_or_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(idx(IMAGES))
    with pytest.raises(TDPFedError, match="starts with 00000803; expected an IDX file that starts with 00000c03"):
        read_idx(path, 0x0C, 3, 4)
    with pytest.raises(TDPFedError, match="starts with 00000803; expected an IDX file that starts with 00000801"):
        read_idx(path, 0x08)
    with pytest.raises(TDPFedError, match=r"shape \(2, 3, 4\); expected shape \(N, 3, 5\)"):
        read_idx(path, 0x08, 3, 5)


@pytest.mark.parametrize(
    "content", [b"no gzip at all", gzip.compress(idx(IMAGES))[:-9], b""], ids=["no", "cut", "empty"]
)
def test_broken_gzip_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.gz"
    path.write_bytes(content)
    with pytest.raises(TDPFedError, match=r"data file '.*file\.gz': .*expected"):
        read_idx(path, 0x08, 3, 4)


def test_corrupt_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    data = bytearray(gzip.compress(np.random.default_rng(0).bytes(4000)))
    data[1000:1010] = bytes(10)
    path.write_bytes(data)
    with pytest.raises(TDPFedError, match=r"unreadable \(.*expected a complete file"):
        read_idx(path, 0x08, 3, 4)


def test_labels_out_of_range_are_refused() -> None:
    assert check_labels("f", np.array([0, 9], np.uint8), 10).dtype == np.int64
    for bad in ([0, 10], [-1, 3]):
        with pytest.raises(TDPFedError, match=rf"'f': labels from {bad[0]} to {bad[1]}; expected labels from 0 to 9"):
            check_labels("f", np.array(bad), 10)


def test_cifar_reads_the_same_unpacked_and_from_its_archive(tmp_path: Path) -> None:
    members = {"one.bin": cifar_records(2, 7, 42, seed=1), "two.bin": cifar_records(1, 0, 99, seed=2)}
    write_tar(tmp_path / "c.tar.gz", {**members, "readme.txt": b"hello"})
    for name, data in members.items():
        (tmp_path / name).write_bytes(data)
    names = ("one.bin", "two.bin")
    packed = read_cifar([tmp_path / "c.tar.gz"], names, (2, 1), 2, 100)
    loose = read_cifar([tmp_path / name for name in names], names, (2, 1), 2, 100)
    for images, labels in (packed, loose):
        assert [x.shape for x in images] == [(2, 3, 32, 32), (1, 3, 32, 32)]
        assert [y.tolist() for y in labels] == [[42, 42], [99]]
        assert images[0][1].tobytes() == members["one.bin"][-3072:]


def test_cifar_cut_wrong_or_incomplete_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.bin"
    for data in (cifar_records(2, 1)[:-1], cifar_records(1, 1), b""):
        path.write_bytes(data)
        with pytest.raises(TDPFedError, match=rf"one\.bin': {len(data)} bytes; expected 2 records of 3073 bytes"):
            read_cifar([path], ("one.bin",), (2,), 1, 10)
    path.write_bytes(cifar_records(2, 10))
    with pytest.raises(TDPFedError, match=r"one\.bin': labels from 10 to 10"):
        read_cifar([path], ("one.bin",), (2,), 1, 10)
    archive = tmp_path / "c.tar.gz"
    write_tar(archive, {"data_batch_1": b"pickled"})
    with pytest.raises(TDPFedError, match=r"no one\.bin in it; expected the binary version"):
        read_cifar([archive], ("one.bin",), (2,), 1, 10)
    write_tar(archive, {"one.bin": cifar_records(2, 1)})
    archive.write_bytes(archive.read_bytes()[:2000])
    with pytest.raises(TDPFedError, match=r"c\.tar\.gz': unreadable .*complete \.tar\.gz archive"):
        read_cifar([archive], ("one.bin",), (2,), 1, 10)


def test_npz_reads_back_and_refuses_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    arrays = {"x": np.ones((2, 3)), "y": np.array([0, 1]), "client_ids": np.array(["a", "b"])}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    read = read_npz(path)
    assert read.keys() == arrays.keys()
    assert all(np.array_equal(read[name], arrays[name]) for name in arrays)
    np.savez(path, x=arrays["x"], Y=arrays["y"])
    with pytest.raises(TDPFedError, match=r"array of '.*': unknown 'Y'"):
        read_npz(path)
    np.savez(path, x=arrays["x"])
    with pytest.raises(TDPFedError, match="no array 'y'"):
        read_npz(path)
    np.savez(path, x=arrays["x"], y=np.array([0, None]))
    with pytest.raises(TDPFedError, match=r"own\.npz': unreadable .*plain arrays"):
        read_npz(path)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(TDPFedError, match=r"own\.npz': unreadable .*expected an \.npz file"):
        read_npz(path)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes().replace(np.ones(6).tobytes(), np.zeros(6).tobytes()))
    with pytest.raises(TDPFedError, match=r"own\.npz': unreadable .*CRC"):
        read_npz(path)
    np.save(tmp_path / "array.npy", arrays["x"])
    (tmp_path / "array.npy").rename(path)
    with pytest.raises(TDPFedError, match=r"own\.npz': unreadable"):
        read_npz(path)


@pytest.fixture
def table(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Write a Parquet file."""
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")

    def write(columns: dict[str, Any]) -> Path:
        parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    return write


GOOD: dict[str, list[Any]] = {
    "a": [1, 2],
    "label": [0, 1],
    "b": [0.5, 1.5],
    "client": ["u", "v"],
    "test_mask": [True, False],
}


@pytest.mark.parametrize("label", ["y", "label"])
def test_parquet_columns_take_their_roles(table: Callable[[dict[str, Any]], Path], label: str) -> None:
    read = read_parquet(table({label if name == "label" else name: values for name, values in GOOD.items()}))
    assert read["x"].dtype == np.float32
    assert {name: values.tolist() for name, values in read.items()} == {
        "x": [[1, 0.5], [2, 1.5]],
        "y": [0, 1],
        "client_ids": ["u", "v"],
        "test_mask": [True, False],
    }


STRUCTS = [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1]}, "columns a; expected one column y or label"),
        ({"a": [1], "y": [0], "label": [0]}, "columns a, y, label; expected one column y or label"),
        ({"y": [1]}, "no feature columns"),
        ({"y": [1], "a": ["text"]}, "column 'a' of type .*numeric"),
        ({"y": [1, 2], "client": [None, "u"], "a": [1, 2]}, "missing values in column 'client'"),
        ({"y": STRUCTS, "a": [1, 2]}, "column 'y' of type struct"),
        ({"y": [0, 1], "a": STRUCTS}, "column 'a' of type struct"),
        ({"y": [0, 1], "a": [1, 2], "client": STRUCTS}, "column 'client' of type struct"),
        ({"y": [0, 1], "a": [1, 2], "test_mask": STRUCTS}, "column 'test_mask' of type struct"),
        ({"y": [[0], [1, 2]], "a": [1, 2]}, "column 'y' of type list"),
        ({"y": [0, 1], "a": [b"1", b"2"]}, "column 'a' of type binary"),
    ],
)
def test_parquet_refuses(table: Callable[[dict[str, Any]], Path], columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(TDPFedError, match=r"data file '.*t\.parquet': " + message):
        read_parquet(table(columns))


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TDPFedError, match=r"pip install 'tdpfed\[parquet\]'"):
        read_parquet(Path("t.parquet"))


def test_parquet_with_the_real_pyarrow(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table(GOOD), path)
    read = SimpleNamespace(**read_parquet(path))
    assert read.x.tolist() == [[1, 0.5], [2, 1.5]]
    assert read.y.tolist() == [0, 1]
    assert read.client_ids.tolist() == ["u", "v"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TDPFedError, match="unreadable"):
        read_parquet(path)
