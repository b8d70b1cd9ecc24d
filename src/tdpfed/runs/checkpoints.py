"""Checkpoints: the state of a run on disk, so that a killed run resumes and ends with the same bits.

A checkpoint is a manifest, ``SERIAL.json``: round, metadata, and the size and SHA-256 sum of every file it needs and of
itself. One safetensors file holds the server's state and the clients' initial state. The rows of clients that have
trained are a stack of layers: each save adds a layer with the rows changed since. A new layer is merged with those
below it that have at most twice its number of rows, so the stack stays low and the cost of a save is about that of the
changed rows. A large layer is split into several files. Files are written under a temporary name, flushed and renamed,
the manifest last: a checkpoint exists if its manifest does.

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

from tdpfed.core.setting import plain
from tdpfed.core.state import State
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Rows, Store
from tdpfed.errors import TDPFedError, wrong
from tdpfed.files import part_of, sync_folder, write_part
from tdpfed.server.step import ServerStep
from tdpfed.wire import Wire

FORMAT = 2
FILE_BYTES = 1 << 27
"""Bytes of rows in one file; as much extra memory is needed while it is written or read."""

_NAME = re.compile(r"([0-9]{8,})(\.json|-server\.safetensors|-private(?:-[0-9]+)?\.safetensors)(\.part)?")
Make = Callable[[State, int], Rows]


@dataclass(frozen=True)
class Snapshot:
    """The state from which a run resumes: the server's state, the clients' rows, and metadata for JSON."""

    round: int
    server: State
    private: Rows
    meta: dict[str, Any]


def snapshot_of(simulation: Simulation, **meta: Any) -> Snapshot:
    """Return the state of a run, with ``meta`` added; the rows are not copied: save before the next round."""
    own = {"algorithm": simulation.algorithm.name, "seed": simulation.seed, "ledger": asdict(simulation.ledger)}
    own |= {section: plain(settings) for section, settings in _form(simulation).items()}
    return Snapshot(simulation.round, dict(simulation.server), simulation.store, own | meta)


def _form(simulation: Simulation) -> dict[str, Wire | ServerStep]:
    """Return the settings, by section, on which the entries of a checkpoint and their meaning depend."""
    return {"wire": simulation.channel.wire, "server": simulation.server_round.step}


def restore(simulation: Simulation, snapshot: Snapshot, *, take: bool = False) -> None:
    """Resume a run from ``snapshot``; one of another run is refused, and the simulation does not change.

    Rows are copied, so that two runs never share state; with ``take`` the run uses the snapshot's store itself.
    """
    meta = snapshot.meta
    for name, mine in (("algorithm", simulation.algorithm.name), ("seed", simulation.seed)):
        if meta.get(name) != mine:
            raise TDPFedError(f"checkpoint: {name} {meta.get(name)!r} saved, must be {mine!r} as in this run")
    for section, settings in _form(simulation).items():
        known = plain(type(settings)()) | meta.get(section, {})  # an older version had the defaults
        for name, value in plain(settings).items():
            if known[name] != value:
                raise wrong(f"{section}.{name}", value, f"{known[name]!r} as in the run's checkpoint")
    for place, saved, have in (
        ("server", _spec(snapshot.server), _spec(simulation.server)),
        ("private", snapshot.private.spec, simulation.store.spec),
    ):
        if saved != have:
            raise TDPFedError(f"checkpoint: {place} state {saved} saved, must be {have} as in this run")
    try:
        ledger = type(simulation.ledger)(**meta["ledger"])
    except (KeyError, TypeError):
        raise TDPFedError(f"checkpoint: ledger {meta.get('ledger')!r} saved, which this version cannot read") from None
    # A copy, since tensors that torch allocates are aligned: the last bit may depend on alignment.
    server = {name: snapshot.server[name].to(v.device, copy=True) for name, v in simulation.server.items()}
    if take and isinstance(snapshot.private, Store):
        store = snapshot.private
    else:
        start = {name: value.to(simulation.store.start[name].device) for name, value in snapshot.private.start.items()}
        store = simulation.store.like(start, snapshot.private.clients)
        for ids in _split_by_size(snapshot.private, snapshot.private.touched.nonzero().flatten()):
            store.put(ids, snapshot.private.rows(ids))
    simulation.resume_from(snapshot.round, server, store, ledger)


@dataclass(frozen=True)
class _File:
    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class _Saved:
    """A checkpoint that this process has written or read completely."""

    serial: int
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
        self._damaged: set[int] = set()

    def save(self, snapshot: Snapshot, changed: Tensor | None) -> None:
        """Write a checkpoint; ``changed`` are the ids of clients changed since the last save, None means all.

        After it returns the checkpoint is on disk. If it raises, earlier checkpoints are unchanged.
        """
        self._mark_changed(snapshot.private, changed)
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
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
                found.append(int(_manifest(self.folder / f"{serial:08}.json")["round"]))
        return found

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
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder)}
        if base is None or any(sizes.get(file.name) != file.size for file in base.files):
            return (), private.touched.nonzero().flatten()
        layers, ids = list(base.layers), (base.changed & private.touched).nonzero().flatten()
        while layers and len(ids) and len(layers[-1][1]) <= 2 * len(ids):
            ids = torch.cat([ids, layers.pop()[1]]).unique()
        return tuple(layers), ids

    def _write(self, snapshot: Snapshot) -> _Saved:
        serial = 1 + max(self._names().values(), default=0)
        private = snapshot.private
        layers, ids = self._layers_for(private)
        start = {f"start.{name}": value for name, value in private.start.items()}
        # All temporary names first, also the manifest's: data files without any manifest mean that it was deleted.
        server = self._part(f"{serial:08}-server.safetensors", to_bytes(_for_safetensors(snapshot.server | start)))
        new: list[_File] = []
        for some in _split_by_size(private, ids) if len(ids) or not layers else ():
            rows = {f"private.{name}": value for name, value in private.rows(some).items()}
            name = f"{serial:08}-private{f'-{len(new)}' if new else ''}.safetensors"
            new.append(self._part(name, to_bytes(_for_safetensors(rows) | {"ids": some.clone()})))
        layers = (*layers, (tuple(new), ids)) if new else layers
        saved = _Saved(serial, server, layers, torch.zeros(private.clients, dtype=torch.bool))
        state = {"server": asdict(server), "private": [asdict(file) for file in saved.files[1:]]}
        body = {"format": FORMAT, "round": snapshot.round, "meta": snapshot.meta, "clients": private.clients} | state
        manifest = self._part(f"{serial:08}.json", _sealed(json.dumps(body).encode()))
        for names in ([], [file.name for file in (server, *new)], [manifest.name]):
            for name in names:
                os.replace(part_of(self.folder / name), self.folder / name)
            sync_folder(self.folder)
        return saved

    def _part(self, name: str, data: bytes) -> _File:
        """Write ``data`` to disk under the temporary name."""
        write_part(part_of(self.folder / name), data)
        return _File(name, len(data), hashlib.sha256(data).hexdigest())

    def _read(self, serial: int, device: torch.device, make: Make) -> tuple[Snapshot, _Saved]:
        """Return a checkpoint, with all checksums verified."""
        path = self.folder / f"{serial:08}.json"
        try:
            body = _manifest(path)
            server = _File(**body["server"])
            state = {name: value.to(device) for name, value in from_bytes(self._checked(server)).items()}
            start = {name: state.pop(f"start.{name}") for name in _names_after("start.", state)}
            private = make(start, body["clients"])
            layers: dict[str, tuple[tuple[_File, ...], Tensor]] = {}
            for file in (_File(**entry) for entry in body["private"]):
                some = from_bytes(self._checked(file))
                ids, rows = some.pop("ids"), {name: some[f"private.{name}"] for name in _names_after("private.", some)}
                private.put(ids, rows)
                number = file.name.partition("-")[0]
                files, known = layers.get(number, ((), ids[:0]))
                layers[number] = ((*files, file), torch.cat([known, ids]))
            saved = _Saved(serial, server, tuple(layers.values()), torch.zeros(private.clients, dtype=torch.bool))
            return Snapshot(body["round"], state, private, body["meta"]), saved
        except (TDPFedError, MemoryError, torch.OutOfMemoryError):  # not enough memory for the rows
            raise
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError, SafetensorError) as error:
            raise _DamagedError(f"{str(path)!r} does not fit its files ({error})") from None

    def _checked(self, file: _File) -> bytes:
        if not _NAME.fullmatch(file.name):
            raise ValueError(f"{file.name!r} is no file of a checkpoint")
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
                    body = _manifest(self.folder / f"{serial:08}.json")
                    keep[serial] = {entry["name"] for entry in (body["server"], *body["private"])}
        needed = {f"{serial:08}.json" for serial in keep}.union(*keep.values())
        # A manifest is renamed to temporary before its files are removed, and removed last: it never seems deleted.
        for name in self._names():
            if name.endswith(".json") and name not in needed:
                os.replace(self.folder / name, part_of(self.folder / name))
        for name in sorted(self._names().keys() - needed, key=lambda name: name.endswith(".json.part")):
            os.unlink(self.folder / name)

    def _serials(self) -> list[int]:
        """Return the serials of checkpoints, newest first, including those whose manifest is missing."""
        names = self._names()
        complete = {serial for name, serial in names.items() if name.endswith(".json")}
        data = {serial for name, serial in names.items() if name.endswith("-server.safetensors")}
        return sorted(complete | {serial for serial in data if f"{serial:08}.json.part" not in names}, reverse=True)

    def _names(self) -> dict[str, int]:
        """Return the file names of checkpoints, each with its serial number."""
        return {name: int(match[1]) for name in os.listdir(self.folder) if (match := _NAME.fullmatch(name))}


def _spec(state: State) -> dict[str, str]:
    return {name: f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.") for name, value in state.items()}


def _split_by_size(private: Rows, ids: Tensor) -> tuple[Tensor, ...]:
    """Split ids into parts whose rows fit in one file."""
    row = sum(value.nbytes for value in private.start.values())
    pieces: tuple[Tensor, ...] = ids.split(max(1, FILE_BYTES // max(1, row)))
    return pieces


def _names_after(prefix: str, state: State) -> list[str]:
    return [name.removeprefix(prefix) for name in state if name.startswith(prefix)]


def _for_safetensors(state: State) -> State:
    """Return the tensors on the CPU, contiguous, no two in the same storage, as safetensors requires."""
    plain = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    first = {value.untyped_storage().data_ptr(): name for name, value in reversed(plain.items())}
    return {name: v if first[v.untyped_storage().data_ptr()] == name else v.clone() for name, v in plain.items()}


def _sealed(text: bytes) -> bytes:
    """Return a JSON object with its own SHA-256 sum appended as the last item."""
    return text[:-1] + f', "sha256": "{hashlib.sha256(text).hexdigest()}"}}'.encode()


def _manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and verify its checksum."""
    data = _read_bytes(path)
    if data != _sealed(data[: -len(_sealed(b"}"))] + b"}"):
        raise _DamagedError(f"{str(path)!r} is damaged, its SHA-256 sum is wrong")
    body: dict[str, Any] = json.loads(data)
    if body["format"] != FORMAT:
        raise _DamagedError(f"{str(path)!r} has format {body['format']!r}, this version reads {FORMAT}")
    return body


def _read_bytes(path: Path, size: int | None = None) -> bytes:
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise _DamagedError(f"{str(path)!r} is no file")
        if size is not None and found.st_size != size:
            raise _DamagedError(f"{str(path)!r} has {found.st_size} bytes, must have {size}")
        return path.read_bytes()
    except OSError as error:
        raise _DamagedError(f"{str(path)!r} cannot be read ({error.strerror})") from None
