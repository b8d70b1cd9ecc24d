"""Checkpoints: the state of a run on disk, so that a killed run resumes and ends with the same bits.

A checkpoint is a manifest, ``checkpoint-ROUND.json``: round, metadata, and the size and SHA-256 sum of every file it
needs and of itself; a further one of the same round, after a damaged one, is ``checkpoint-ROUND.1.json``. One
safetensors file holds the server's state and the clients' initial state. The rows of clients that have trained are a
stack of layers: each save adds a layer with the rows changed since. A new layer is merged with those below it that have
at most twice its number of rows, so the stack stays low and the cost of a save is about that of the changed rows. A
large layer is split into several files. Files are written under a temporary name, flushed and renamed, the manifest
last: a checkpoint exists if its manifest does.

Checkpoints do not share files: a save builds on the oldest, which it replaces. A damaged file affects only one of them.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.engine.store import Rows, Store
from tdpfed.errors import TDPFedError
from tdpfed.files import make_folder, part_of, read_file, sync_folder, write_part
from tdpfed.runs.seals import is_sealed, sealed
from tdpfed.runs.snapshot import Snapshot as Snapshot
from tdpfed.runs.snapshot import split_by_size

FORMAT = 2

_NAME = re.compile(
    r"(?:checkpoint-(?P<round>[0-9]{6,})(?:\.(?P<again>[0-9]+))?|(?P<old>[0-9]{8,}))"
    r"(?P<kind>\.json|-server\.safetensors|-private(?:-[0-9]+)?\.safetensors)(\.part)?"
)
Serial = tuple[int, int]
"""What orders checkpoints: their round, and how many there were of it; (-1, number) for those of older versions."""
Make = Callable[[State, int], Rows]


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that this process has written or read completely."""

    serial: Serial
    server: _File
    layers: tuple[tuple[tuple[_File, ...], Tensor], ...]  # files and client ids; later layers take precedence
    changed: Tensor  # (K,) bool, which clients have changed since

    @property
    def files(self) -> list[_File]:
        return [self.server, *(file for files, _ in self.layers for file in files)]


class _DamagedError(Exception):
    """A file of a checkpoint is missing or was modified; the message names it."""


class Checkpoints:
    """The checkpoints of one run in their own folder; the ``keep`` newest are kept. One process writes at a time."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise TDPFedError(f"checkpoint.keep: {keep} given, must be at least 1")
        self.folder, self.keep = folder, keep
        self._spec: dict[str, str] | None = None
        self._saved: list[_Saved] = []  # known to be good, oldest first
        self._damaged: set[Serial] = set()

    def save(self, snapshot: Snapshot, changed: Tensor | None) -> None:
        """Write a checkpoint; ``changed`` are the ids of clients changed since the last save, None means all.

        After it returns the checkpoint is on disk. If it raises, earlier checkpoints are unchanged.
        """
        self._refuse_link()
        self._mark_changed(snapshot.private, changed)
        try:
            if not self.folder.is_dir():
                make_folder(self.folder)
                sync_folder(self.folder.parent)
            self._clean()
            self._saved = [*self._saved, self._write(snapshot)][-self.keep :]
            self._clean()
        except OSError as error:
            with suppress(OSError):
                self._clean()
            raise TDPFedError(f"checkpoint: cannot write to {str(self.folder)!r} ({error.strerror})") from None

    def load(self, device: torch.device | str = "cpu", make: Make = Store) -> tuple[Snapshot, list[str]] | None:
        """Return the newest good checkpoint, and a warning for each damaged one that was skipped.

        Rows are put into the store that ``make`` returns for the clients' initial state and number. None if nothing was
        saved. If all checkpoints are damaged, the error names their files.
        """
        self._refuse_link()
        warnings = []
        try:
            serials = self._serials() if self.folder.exists() else []
        except OSError as error:
            raise TDPFedError(f"checkpoint: cannot read {str(self.folder)!r} ({error.strerror})") from None
        for serial in serials:
            try:
                snapshot, saved = self._read(serial, torch.device(device), make)
            except _DamagedError as damage:
                warnings.append(f"checkpoint: {damage}")
                self._damaged.add(serial)
            else:
                self._saved, self._spec = [saved], snapshot.private.spec
                return snapshot, warnings
        if warnings:
            raise TDPFedError(f"checkpoint: none in {str(self.folder)!r} is good; {'; '.join(warnings)}")
        return None

    def rounds(self) -> list[int]:
        """Return the rounds of checkpoints with intact manifests: those from which the run can resume."""
        found = []
        for serial in self._serials() if self.folder.exists() else []:
            with suppress(_DamagedError, KeyError, TypeError, ValueError):
                found.append(int(_manifest(self.folder / f"{_stem(serial)}.json")["round"]))
        return found

    def newest(self) -> tuple[int, dict[str, Any]] | None:
        """Return round and metadata of the newest checkpoint with an intact manifest; no other file is read."""
        with suppress(OSError):
            for serial in self._serials() if self.folder.is_dir() else ():
                with suppress(_DamagedError, KeyError, TypeError, ValueError):
                    body = _manifest(self.folder / f"{_stem(serial)}.json")
                    return body["round"], body["meta"]
        return None

    def _refuse_link(self) -> None:
        if self.folder.is_symlink():
            raise TDPFedError(f"checkpoint: {str(self.folder)!r} is a symbolic link, must be a folder")

    def _mark_changed(self, private: Rows, changed: Tensor | None) -> None:
        """Mark clients as changed; after a failed save they stay marked for the next."""
        spec, clients = private.spec, private.clients
        if spec != self._spec:
            self._spec, self._saved = spec, []
        ids = torch.arange(clients) if changed is None else changed.cpu()
        if ids.dtype == torch.bool or bool(((ids < 0) | (ids >= clients)).any()):
            raise TDPFedError(f"checkpoint: changed clients {ids.tolist()} given, must be ids below {clients}")
        for saved in self._saved:
            saved.changed[ids.to(torch.int64)] = True

    def _layers_for(self, private: Rows) -> tuple[tuple[tuple[tuple[_File, ...], Tensor], ...], Tensor]:
        """Return the layers that a new checkpoint keeps, and the ids of the clients in its new layer."""
        base = self._saved[0] if len(self._saved) == self.keep else None
        with os.scandir(self.folder) as entries:
            sizes = {entry.name: entry.stat(follow_symlinks=False).st_size for entry in entries}
        if base is None or any(sizes.get(file.name) != file.size for file in base.files):
            return (), private.touched.nonzero().flatten()
        layers, ids = list(base.layers), (base.changed & private.touched).nonzero().flatten()
        while layers and len(ids) and len(layers[-1][1]) <= 2 * len(ids):
            ids = torch.cat([ids, layers.pop()[1]]).unique()
        return tuple(layers), ids

    def _write(self, snapshot: Snapshot) -> _Saved:
        if bad := _not_finite(snapshot.server):
            raise TDPFedError(f"checkpoint: {bad!r} of the server's state is not finite, nothing is saved")
        there = [again for round_, again in self._names().values() if round_ == snapshot.round]
        serial = snapshot.round, max(there, default=-1) + 1
        stem, private = _stem(serial), snapshot.private
        layers, ids = self._layers_for(private)
        start = {f"start.{name}": value for name, value in private.start.items()}
        # All temporary names first, also the manifest's: data files without any manifest mean that it was deleted.
        server = self._part(f"{stem}-server.safetensors", to_bytes(for_safetensors(snapshot.server | start)))
        new: list[_File] = []
        for some in split_by_size(private, ids) if len(ids) or not layers else ():
            rows = {f"private.{name}": value for name, value in private.rows(some).items()}
            name = f"{stem}-private{f'-{len(new)}' if new else ''}.safetensors"
            new.append(self._part(name, to_bytes(for_safetensors(rows) | {"ids": some.clone()})))
        layers = (*layers, (tuple(new), ids)) if new else layers
        saved = _Saved(serial, server, layers, torch.zeros(private.clients, dtype=torch.bool))
        state = {"server": asdict(server), "private": [asdict(file) for file in saved.files[1:]]}
        body = {"format": FORMAT, "round": snapshot.round, "meta": snapshot.meta, "clients": private.clients} | state
        manifest = self._part(f"{stem}.json", sealed(json.dumps(body)).encode())
        for names in ([], [file.name for file in (server, *new)], [manifest.name]):
            for name in names:
                os.replace(part_of(self.folder / name), self.folder / name)
            sync_folder(self.folder)
        return saved

    def _part(self, name: str, data: bytes) -> _File:
        """Write ``data`` to disk under the temporary name."""
        write_part(part_of(self.folder / name), data)
        return _File(name, len(data), hashlib.sha256(data).hexdigest())

    def _read(self, serial: Serial, device: torch.device, make: Make) -> tuple[Snapshot, _Saved]:
        """Return a checkpoint, with all checksums verified."""
        path = self.folder / f"{_stem(serial)}.json"
        try:
            body = _manifest(path)
            server = _File(**body["server"])
            state = {name: value.to(device) for name, value in from_bytes(self._checked(server)).items()}
            start = {name: state.pop(f"start.{name}") for name in _names_after("start.", state)}
            if bad := _not_finite(state):
                raise _DamagedError(f"{str(self.folder / server.name)!r} holds {bad!r}, which is not finite")
            private = make(start, body["clients"])
            layers: dict[Serial, tuple[tuple[_File, ...], Tensor]] = {}
            for file in (_File(**entry) for entry in body["private"]):
                some = from_bytes(self._checked(file))
                ids, rows = some.pop("ids"), {name: some[f"private.{name}"] for name in _names_after("private.", some)}
                private.put(ids, rows)
                origin = _serial(file.name)
                files, known = layers.get(origin, ((), ids[:0]))
                layers[origin] = ((*files, file), torch.cat([known, ids]))
            saved = _Saved(serial, server, tuple(layers.values()), torch.zeros(private.clients, dtype=torch.bool))
            return Snapshot(body["round"], state, private, body["meta"]), saved
        except (TDPFedError, MemoryError, torch.OutOfMemoryError):  # not enough memory for the rows
            raise
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError) as error:
            raise _DamagedError(f"{str(path)!r} does not fit its files ({error})") from None

    def _checked(self, file: _File) -> bytes:
        _serial(file.name)  # no path to elsewhere
        data = _read_bytes(self.folder / file.name, file.size)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise _DamagedError(
                f"{str(self.folder / file.name)!r} is damaged, its SHA-256 sum differs from the manifest"
            )
        return data

    def _clean(self) -> None:
        """Remove files that no kept checkpoint needs: of old and damaged ones, and of interrupted saves."""
        keep = {saved.serial: {file.name for file in saved.files} for saved in self._saved}
        for serial in self._serials():
            if serial not in keep and serial not in self._damaged and len(keep) < self.keep:
                with suppress(_DamagedError, KeyError, TypeError, ValueError):
                    body = _manifest(self.folder / f"{_stem(serial)}.json")
                    keep[serial] = {entry["name"] for entry in (body["server"], *body["private"])}
        needed = {f"{_stem(serial)}.json" for serial in keep}.union(*keep.values())
        # A manifest is renamed to temporary before its files are removed, and removed last: it never seems deleted.
        for name in self._names():
            if name.endswith(".json") and name not in needed:
                os.replace(self.folder / name, part_of(self.folder / name))
        for name in sorted(self._names().keys() - needed, key=lambda name: name.endswith(".json.part")):
            os.unlink(self.folder / name)

    def _serials(self) -> list[Serial]:
        """Return the serials of checkpoints, newest first, including those whose manifest is missing."""
        names = self._names()
        complete = {serial for name, serial in names.items() if name.endswith(".json")}
        data = {serial for name, serial in names.items() if name.endswith("-server.safetensors")}
        return sorted(complete | {serial for serial in data if f"{_stem(serial)}.json.part" not in names}, reverse=True)

    def _names(self) -> dict[str, Serial]:
        """Return the file names of checkpoints, each with what orders them."""
        return {name: _serial(name) for name in os.listdir(self.folder) if _NAME.fullmatch(name)}


def _serial(name: str) -> Serial:
    """Return what orders the checkpoint that a file belongs to."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return (-1, int(found["old"])) if found["old"] else (int(found["round"]), int(found["again"] or 0))


def _stem(serial: Serial) -> str:
    """Return how the names of a checkpoint's files begin."""
    round_, again = serial
    return f"{again:08}" if round_ < 0 else f"checkpoint-{round_:06}{f'.{again}' if again else ''}"


def _not_finite(state: State) -> str | None:
    """Return the name of an entry with a value that is infinite or NaN."""
    for name, values in state.items():
        numbers = values.float() if values.dtype.itemsize == 1 else values  # PyTorch cannot ask it of eight-bit floats
        if values.is_floating_point() and not bool(numbers.isfinite().all()):
            return name
    return None


def _names_after(prefix: str, state: State) -> list[str]:
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix)]


def for_safetensors(state: State) -> State:
    """Return the tensors on the CPU, contiguous, no two in the same storage, as safetensors requires."""
    plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    first = {value.untyped_storage().data_ptr(): name for name, value in reversed(plain.items())}
    return {name: v if first[v.untyped_storage().data_ptr()] == name else v.clone() for name, v in plain.items()}


def _manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and verify its checksum."""
    text = _read_bytes(path).decode("utf-8", "replace")
    if not is_sealed(text):
        raise _DamagedError(f"{str(path)!r} is damaged, its SHA-256 sum is wrong")
    try:
        body: dict[str, Any] = json.loads(text)
    except RecursionError:
        raise _DamagedError(f"{str(path)!r} is damaged, nested too deeply") from None
    if body["format"] != FORMAT:
        raise _DamagedError(f"{str(path)!r} has format {body['format']!r}, this version reads {FORMAT}")
    if type(body["round"]) is not int or type(body["clients"]) is not int or type(body["meta"]) is not dict:
        raise _DamagedError(f"{str(path)!r} is damaged, its round, clients or metadata have another type")
    named, _ = _serial(path.name)
    if named not in (body["round"], -1):  # older versions numbered them otherwise
        raise _DamagedError(f"{str(path)!r} is damaged, it is of round {body['round']}")
    return body


def _read_bytes(path: Path, size: int | None = None) -> bytes:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise _DamagedError(f"{str(path)!r} is no file")
        if size is not None and found.st_size != size:
            raise _DamagedError(f"{str(path)!r} has {found.st_size} bytes, must have {size}")
        return read_file(path, follow=False)
    except OSError as error:
        raise _DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
