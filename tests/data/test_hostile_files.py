"""Data files that are damaged, or made to do harm: an error that names the file, in bounded memory, and never more."""

import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from spoil import mutated
from tdpfed.data import make_federation
from tdpfed.errors import TDPFedError

pytestmark = pytest.mark.hostile

MEBIBYTE = 1 << 20
COUNTS = [150, pytest.param(10_000, marks=pytest.mark.slow)]


def arrays(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(24, 4)).astype(np.float32), np.arange(24) % 3
    return {"x": x, "y": y, "client_ids": np.arange(24) // 8, "test_mask": np.arange(24) % 4 == 0}


def npz(path: Path, packed: bool = True, **more: Any) -> bytes:
    (np.savez_compressed if packed else np.savez)(path, **{**arrays(), **more})
    return path.read_bytes()


def parquet(path: Path) -> bytes:
    pyarrow: Any = pytest.importorskip("pyarrow")
    found = arrays()
    columns = {f"f{i}": found["x"][:, i] for i in range(4)} | {"y": found["y"], "test_mask": found["test_mask"]}
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table(columns | {"client": [f"ward {k}" for k in found["client_ids"]]}), path
    )
    return path.read_bytes()


def refused(path: Path) -> str | None:
    """Return why a file is refused; None if it is read."""
    try:
        make_federation(str(path))
        return None
    except TDPFedError as error:
        return str(error)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["npz", "npz, stored", "parquet"])
def test_a_mutated_file_is_read_or_refused(tmp_path: Path, kind: str, count: int) -> None:
    path = tmp_path / f"own.{kind.partition(',')[0]}"
    content = parquet(path) if kind == "parquet" else npz(path, kind == "npz")
    assert refused(path) is None
    random, answers = Random(0), []
    for _ in range(count):
        path.write_bytes(mutated(content, random))
        answers.append(refused(path))
    assert sum(answer is not None for answer in answers) > count // 3
    assert max(len(answer or "") for answer in answers) < 2000


# Arrays that lie


def header(text: str, version: tuple[int, int] = (1, 0), length: int | None = None) -> bytes:
    coded = text.encode()
    size = struct.pack("<H" if version == (1, 0) else "<I", len(coded) if length is None else length)
    return b"\x93NUMPY" + bytes(version) + size + coded


def described(shape: str, kind: str = "'<f8'", order: str = "False") -> str:
    return f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}}}\n"


LIES: dict[str, bytes] = {
    "a terabyte": header(described("(125000000000,)")) + bytes(64),
    "more than an address": header(described(f"({2**62}, {2**62})")) + bytes(64),
    "no machine's number": header(described(f"({10**40},)")) + bytes(64),
    "no values of endless shape": header(described(f"(0, {10**40})")),
    "as many dimensions as fit": header(described(f"({'1, ' * 900})")) + bytes(8),
    "a negative number": header(described("(-8,)")) + bytes(64),
    "true for a number": header(described("(True, 8)")) + bytes(64),
    "long text": header(described("(8,)", "'<U250000000'")) + bytes(64),
    "no text": header(described("(8,)", "'<U0'")),
    "objects": header(described("(8,)", "'|O'")) + bytes(64),
    "a structure": header(described("(8,)", "[('a', '<f4'), ('b', '<f4')]")) + bytes(64),
    "a structure without end": header(described("(8,)", "[('a', " * 200 + "'<f4'" + ")]" * 200)) + bytes(64),
    "void": header(described("(8,)", "'|V8'")) + bytes(64),
    "dates": header(described("(8,)", "'<M8[s]'")) + bytes(64),
    "complex": header(described("(4,)", "'<c16'")) + bytes(64),
    "brackets without end": header("(" * 5000 + "\n"),
    "an integer of many digits": header(described(f"({'9' * 6000},)")),
    "code": header("__import__('os').system('touch harm')\n"),
    "another key": header("{'descr': '<f8', 'fortran_order': False, 'shape': (8,), 'more': 1}\n") + bytes(64),
    "no dictionary": header("[1, 2, 3]\n"),
    "not text": b"\x93NUMPY\x01\x00\x04\x00\xff\xfe\xfd\xfc",
    "a header longer than the file": header(described("(8,)"), length=60_000),
    "a header of four gigabytes": header(described("(8,)"), (2, 0), 2**32 - 1),
    "a header of a megabyte": header(described("(8,)") + " " * MEBIBYTE, (2, 0)) + bytes(64),
    "a version to come": header(described("(8,)"), (9, 0)) + bytes(64),
    "no array": b"PK\x03\x04",
    "nothing": b"",
    "too few values": header(described("(9,)")) + bytes(64),
    "too many values": header(described("(7,)")) + bytes(64),
}


def in_zip(path: Path, lie: bytes, **options: Any) -> None:
    """Write a file whose array x is the lie."""
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("x.npy", lie)
        kept = io.BytesIO()
        np.save(kept, np.zeros(8, np.int64))
        file.writestr("y.npy", kept.getvalue())


@pytest.mark.parametrize("lie", LIES)
def test_an_array_that_lies_is_refused_in_little_memory(tmp_path: Path, lie: str, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    in_zip(tmp_path / "own.npz", LIES[lie])
    tracemalloc.start()
    try:
        assert refused(tmp_path / "own.npz") is not None
        assert tracemalloc.get_traced_memory()[1] < 16 * MEBIBYTE
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "harm").exists()


def edited(path: Path, change: Callable[[bytearray, int, int], None]) -> None:
    """Change the headers of the first member: ``change`` gets the file, the local and the central header's place."""
    data = bytearray(path.read_bytes())
    change(data, data.index(b"PK\x03\x04"), data.index(b"PK\x01\x02"))
    path.write_bytes(data)


def word(at: int, value: int, size: str = "<I") -> Callable[[bytearray, int, int], None]:
    """Set a field of the central header, and the one of the local header that is two bytes nearer to its begin."""

    def change(data: bytearray, local: int, central: int) -> None:
        for place in (local + at - 2, central + at):
            struct.pack_into(size, data, place, value)

    return change


HEADERS: dict[str, Callable[[bytearray, int, int], None]] = {
    "encrypted": word(8, 1, "<H"),
    "strongly encrypted": word(8, 0x41, "<H"),
    "bzip2": word(10, 12, "<H"),
    "lzma": word(10, 14, "<H"),
    "no known method": word(10, 99, "<H"),
    "packed longer than the file": word(20, 2**31),
    "unpacked to four gigabytes": word(24, 2**32 - 2),
    "both": lambda *place: [word(20, 2**31)(*place), word(24, 2**32 - 2)(*place)].clear(),
    "unpacked to nothing": word(24, 0),
    "elsewhere": lambda data, _, central: struct.pack_into("<I", data, central + 42, 2**31),
    "a sum of another array": word(16, 0),
    "a version to come": word(6, 255, "<H"),
}  # fmt: skip


@pytest.mark.parametrize("how", HEADERS)
def test_a_member_that_lies_is_refused_in_little_memory(tmp_path: Path, how: str) -> None:
    path = tmp_path / "own.npz"
    npz(path)
    edited(path, HEADERS[how])
    tracemalloc.start()
    try:
        assert refused(path) is not None
        assert tracemalloc.get_traced_memory()[1] < 16 * MEBIBYTE
    finally:
        tracemalloc.stop()


def test_what_expands_beyond_the_memory_of_the_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_zip(tmp_path / "own.npz", header(described(f"({MEBIBYTE},)")) + bytes(8 * MEBIBYTE), compression=8)
    assert (tmp_path / "own.npz").stat().st_size < MEBIBYTE // 8
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1000 if name == "SC_PHYS_PAGES" else real(name))
    assert "the memory of this machine" in (refused(tmp_path / "own.npz") or "")


ODD: dict[str, dict[str, Any]] = {
    "no features": {"x": np.zeros((24, 0), np.float32)},
    "a number for an array": {"x": np.float32(1)},
    "one dimension": {"x": np.zeros(24)},
    "beyond float32": {"x": np.full((24, 4), 1e300)},
    "NaN": {"x": np.full((24, 4), np.nan)},
    "complex": {"x": np.zeros((24, 4), complex)},
    "text": {"x": np.full((24, 4), "1")},
    "labels of text": {"y": np.full(24, "1")},
    "labels below 0": {"y": np.arange(24) - 1},
    "labels of billions": {"y": np.arange(24) * 10**9},
    "labels at the end of the range": {"y": np.full(24, 2**64 - 1, np.uint64)},
    "targets that are infinite": {"y": np.full(24, np.inf)},
    "tokens below 0": {"y": np.full((24, 3), -1)},
    "owners with fractions": {"client_ids": np.zeros(24)},
    "owners that are too few": {"client_ids": np.arange(23)},
    "a mask of numbers": {"test_mask": np.arange(24)},
    "a mask of nothing but tests": {"test_mask": np.ones(24, bool)},
    "an array of no use": {"z": np.zeros(3)},
}


@pytest.mark.parametrize("how", ODD)
def test_odd_arrays_are_refused(tmp_path: Path, how: str) -> None:
    npz(tmp_path / "own.npz", **ODD[how])
    assert refused(tmp_path / "own.npz") is not None


@pytest.mark.parametrize("ending", ["npz", "parquet"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/dev/null", "loop", "nothing"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, ending: str, kind: str) -> None:
    path = tmp_path / f"own.{ending}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "nothing":
        path.touch()
    else:
        path.symlink_to(kind)
    assert str(path) in (refused(path) or "")


@pytest.mark.parametrize("classes", ["ten", 0, -1, 2.0, True, [1], 2**62])
def test_classes_of_a_file_are_a_number(tmp_path: Path, classes: Any) -> None:
    npz(tmp_path / "own.npz")
    with pytest.raises(TDPFedError) as error:
        make_federation(str(tmp_path / "own.npz"), options={"classes": classes})
    assert error.value.field == "options.classes"
