"""Readers of file formats that never execute code from a file: IDX, CIFAR binary, ``.npz`` and Parquet.

Each reader validates the file and raises an error that names the file and what was expected.
"""

import gzip
import os
import tarfile
import zipfile
import zlib
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdpfed.errors import MOST_SHOWN, TDPFedError, unknown
from tdpfed.files import check_regular

Array = NDArray[Any]

_IDX_TYPES = {0x08: "u1", 0x0C: ">i4"}
_PIXELS = (3, 32, 32)
MOST_HEADER = 10_000
"""Most bytes of the header of an array in an ``.npz`` file."""
MOST_DEFLATED = 1032
"""Most bytes to which one byte of deflated data can expand."""


def _broken(path: Path | str, found: str, expected: str) -> TDPFedError:
    short = found if len(found) <= MOST_SHOWN else f"{found[:MOST_SHOWN]}..."  # it may quote a file
    return TDPFedError(f"data file {str(path)!r}: {short}; expected {expected}")


def _read(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, f"unreadable ({error})", "a complete file, gzip-compressed if it ends in .gz") from error


def read_idx(path: Path, code: int, *tail: int | None) -> Array:
    """Read an IDX file of type ``code`` (0x08 bytes, 0x0C integers) and shape (N, *tail), None for any length."""
    data = _read(path)
    head = 4 + 4 * (1 + len(tail))
    magic = bytes((0, 0, code, 1 + len(tail)))
    if data[:4] != magic or len(data) < head:
        raise _broken(path, f"starts with {data[:4].hex() or 'nothing'}", f"an IDX file that starts with {magic.hex()}")
    shape = tuple(np.frombuffer(data[4:head], ">u4").tolist())
    if any(want not in (None, got) for want, got in zip(tail, shape[1:], strict=True)):
        raise _broken(path, f"shape {shape}", f"shape (N, {', '.join(map(str, tail))})")
    kind = np.dtype(_IDX_TYPES[code])
    if len(data) - head != prod(shape) * kind.itemsize:
        raise _broken(path, f"{len(data)} bytes", f"{head + prod(shape) * kind.itemsize} bytes for shape {shape}")
    return np.frombuffer(data, kind, offset=head).reshape(shape).astype(kind.newbyteorder("="))


def check_labels(path: Path | str, labels: Array, classes: int) -> NDArray[np.int64]:
    """Return the labels as int64; reject labels outside 0..classes-1."""
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        found = f"labels from {labels.min()} to {labels.max()}"
        raise _broken(path, found, f"labels from 0 to {classes - 1}")
    return labels.astype(np.int64)


def count_classes(labels: Array) -> int:
    """Return one more than the largest label; reject labels that cannot be class numbers."""
    count = int(labels.max()) + 1
    if count > max(2, labels.size):
        raise TDPFedError(
            f"labels up to {count - 1} for {labels.size} samples; allowed: 0 to one less than the number of classes "
            "(set the option classes if there really are that many)",
            field="y",
        )
    return count


def read_cifar(
    paths: list[Path], members: tuple[str, ...], records: tuple[int, ...], label_bytes: int, classes: int
) -> tuple[list[Array], list[NDArray[np.int64]]]:
    """Read the files of a CIFAR binary version, unpacked or in their archive: images (n, 3, 32, 32) and labels.

    ``records`` is the number of images of each file: the format does not store it, and it reveals truncated files.
    """
    packed = read_members(paths, members, "the binary version of CIFAR, not the Python one")
    images, labels = [], []
    size = label_bytes + prod(_PIXELS)
    for member, data, count in zip(members, packed, records, strict=True):
        if len(data) != count * size:
            raise _broken(paths[0].parent / member, f"{len(data)} bytes", f"{count} records of {size} bytes")
        rows = np.frombuffer(data, np.uint8).reshape(count, size)
        images.append(rows[:, label_bytes:].reshape(count, *_PIXELS))
        labels.append(check_labels(paths[0].parent / member, rows[:, label_bytes - 1], classes))
    return images, labels


def read_members(paths: list[Path], members: tuple[str, ...], expected: str) -> list[bytes]:
    """Return the content of files that are there unpacked, or all together in one ``.tar.gz`` archive."""
    if not paths[0].name.endswith(".tar.gz"):
        return [_read(path) for path in paths]
    path = paths[0]
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as tar:
            for entry in tar:
                name = Path(entry.name).name
                if name in members and (stream := tar.extractfile(entry)) is not None:
                    found[name] = stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise _broken(path, f"unreadable ({error})", "a complete .tar.gz archive") from error
    if missing := [name for name in members if name not in found]:
        raise _broken(path, f"no {', '.join(missing)} in it", expected)
    return [found[name] for name in members]


def read_npz(path: Path) -> dict[str, Array]:
    """Read ``x`` and ``y``, optionally ``client_ids``, ``test_mask`` and ``class_names``, from an ``.npz`` file."""
    allowed = ("x", "y", "client_ids", "test_mask", "class_names")
    try:
        check_regular(path)
        with zipfile.ZipFile(path) as file:
            members = {info.filename.removesuffix(".npy"): info for info in file.infolist()}
            for name in members:
                if name not in allowed:
                    raise unknown(f"array of {str(path)!r}", name, allowed)
            if sum(info.compress_size for info in members.values()) > path.stat().st_size:
                raise ValueError("its arrays are longer than the file")
            _check_size(sum(info.file_size for info in members.values()), path)
            arrays = {name: _member(file, info) for name, info in members.items()}
    except TDPFedError:
        raise
    except MemoryError:
        raise _broken(path, "too large for this machine's memory", "arrays that fit in memory") from None
    except Exception as error:  # a damaged file may make any part of the readers fail
        reason = " ".join(str(error).split()) or type(error).__name__
        raise _broken(
            path, f"unreadable ({reason})", "an .npz file of plain arrays, as numpy.savez writes it"
        ) from error
    for name in ("x", "y"):
        if name not in arrays:
            raise _broken(
                path, f"no array {name!r}", "arrays x and y, optionally client_ids, test_mask and class_names"
            )
    return arrays


def _member(file: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """Read an array of an ``.npz`` file; no more memory is taken than its bytes in the file can fill."""
    if info.flag_bits & 1:
        raise ValueError(f"{info.filename} is encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} is compressed by an unknown method")
    if info.file_size > MOST_DEFLATED * info.compress_size + MOST_HEADER:
        raise ValueError(f"{info.filename} claims {info.file_size:,} bytes in {info.compress_size:,} of the file")
    with file.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{info.filename} has version {version} of the format")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(stream, max_header_size=MOST_HEADER)
        if dtype.hasobject or dtype.kind not in "biufUS":
            raise ValueError(f"{info.filename} holds {dtype}")
        size = prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or size != info.file_size - stream.tell():
            raise ValueError(f"{info.filename} of shape {shape} and {dtype} has {info.file_size:,} bytes")
        values = np.empty(shape[::-1] if fortran else shape, dtype)
        filled, content = 0, values.reshape(-1).view(np.uint8) if size else values
        while part := stream.read(1 << 20):  # at the end the checksum is verified
            content[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
            filled += len(part)
        if filled != size:
            raise ValueError(f"{info.filename} ends before its last value")
    values = values.view(np.uint8) != 0 if values.dtype == np.bool_ else values  # no other bytes than 0 and 1
    return values.T if fortran else values


def _check_size(size: int, path: Path) -> None:
    """Refuse data that no memory of this machine could hold, whatever is free."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise _broken(path, f"{size:,} bytes", f"at most {memory:,}, the memory of this machine")


def _is_plain(types: Any, kind: Any) -> bool:
    """Whether a column of this type holds one number, truth value or text in each row."""
    if types.is_dictionary(kind):
        kind = kind.value_type
    return any(
        check(kind)
        for check in (
            types.is_integer, types.is_floating, types.is_boolean, types.is_string, types.is_large_string,
            types.is_null,
        )
    )  # fmt: skip


def read_parquet(path: Path) -> dict[str, Array]:
    """Read a table: the label in ``y`` or ``label``, optionally ``client`` and ``test_mask``, the rest features."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise TDPFedError(f"data file {str(path)!r}: needs pyarrow; pip install 'tdpfed[parquet]'") from error
    try:
        check_regular(path)
        file = parquet.ParquetFile(path)
        schema, rows = file.schema_arrow, file.metadata.num_rows
        for field in schema:
            if not _is_plain(pyarrow.types, field.type):
                raise _broken(path, f"column {field.name!r} of type {field.type}", "numbers, true and false, or text")
        if len(set(schema.names)) < len(schema.names):
            raise _broken(path, f"columns {', '.join(schema.names)}", "different names")
        _check_size(rows * len(schema) * 4, path)
        table = file.read()
        columns = {name: table[name].to_numpy() for name in table.column_names}
    except TDPFedError:
        raise
    except MemoryError:
        raise _broken(path, "too large for this machine's memory", "a table that fits in memory") from None
    except Exception as error:  # a damaged file may make any part of the reader fail
        raise _broken(path, f"unreadable ({' '.join(str(error).split())})", "a Parquet file") from error
    if empty := [name for name in table.column_names if table[name].null_count]:
        raise _broken(path, f"missing values in column {empty[0]!r}", "a value in every row")
    labels = [name for name in ("y", "label") if name in columns]
    if len(labels) != 1:
        raise _broken(path, f"columns {', '.join(columns)}", "one column y or label")
    roles = {"y": columns.pop(labels[0])}
    roles |= {role: columns.pop(name) for role, name in _PARQUET_ROLES.items() if name in columns}
    for name, values in columns.items():
        if values.dtype.kind not in "biuf":
            raise _broken(path, f"column {name!r} of type {values.dtype}", "numeric feature columns")
    if not columns:
        raise _broken(path, "no feature columns", "at least one numeric column besides label and client")
    return {"x": np.stack([values.astype(np.float32) for values in columns.values()], axis=1), **roles}


_PARQUET_ROLES = {"client_ids": "client", "test_mask": "test_mask"}
