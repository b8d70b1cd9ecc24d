"""The private state of clients between rounds: a row for each client, in memory or in a memory-mapped file.

Space is reserved for all clients but only used by those that have trained: the others still have the common initial
state. The cost of memory, of a round and of a checkpoint therefore depends on the participants, not on the number of
clients. With several processes (:mod:`tdpfed.engine.processes`) each holds the rows of its own clients.
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile, gettempdir
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.engine.processes import ALONE, Ranks, as_bytes
from tdpfed.errors import TDPFedError, unknown
from tdpfed.files import ctrl_c_waits

Place = Literal["auto", "ram", "mmap"]
Spread = Callable[[int, Callable[[slice], None]], None]
"""Calls a task with slices that together cover a number of rows."""

ASSIGNABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool}


class Rows(Protocol):
    """Rows of all clients by id, wherever they are stored."""

    start: State  # the state of a client before its first round
    clients: int
    touched: Tensor  # (K,) bool, which clients have trained

    @property
    def spec(self) -> dict[str, str]:
        """Type and shape of each entry, of all clients."""

    def rows(self, clients: Tensor) -> State:
        """Return the rows of the clients, in their order."""

    def put(self, clients: Tensor, rows: State) -> None:
        """Replace the rows of the clients."""


class Store:
    """The private state of all clients, ``(K, ...)`` for each of its entries."""

    def __init__(
        self, start: State, clients: int, place: Place = "auto", folder: Path | None = None, ranks: Ranks = ALONE
    ) -> None:
        if place not in get_args(Place):
            raise unknown("engine.state", place, get_args(Place))
        self.start, self.clients, self.folder, self.ranks = start, clients, folder, ranks
        self._held_clients = len(range(ranks.rank, clients, ranks.world))
        size = self._held_clients * sum(value.nbytes for value in start.values())
        device = next(iter(start.values())).device if start else torch.device("cpu")
        self.place: Place = ("ram" if size <= free_memory(device) // 2 else "mmap") if place == "auto" else place
        self.touched = torch.zeros(clients, dtype=torch.bool)  # which of all clients have trained
        self._untouched = clients  # number of clients that have not trained
        self._sparse = True  # rows of untouched clients are not written

    @cached_property
    def _values(self) -> State:
        """Tensors for all rows, allocated on first use: a store that is replaced before takes no memory."""
        return {name: self._allocated(name, value) for name, value in self.start.items()}

    def reserve(self) -> None:
        """Allocate all rows now, so that a lack of memory is reported now."""
        _ = self._values

    def like(self, start: State, clients: int) -> "Store":
        """Return a store in the same place for this many clients, all with the state ``start``."""
        return Store(start, clients, self.place, self.folder, self.ranks)

    def rows(self, clients: Tensor, names: Sequence[str] | None = None) -> State:
        """Return copies of the clients' rows, in their order; only of clients that this process holds.

        ``names`` are the entries, all by default.
        """
        own, names = self.ranks.own(clients), tuple(self.start) if names is None else names
        if not self._sparse or not self._untouched:
            return self._copied(own, names)
        ids = own.cpu()
        known = self.touched[ids]
        if bool(known.all()):
            return self._copied(ids, names)
        rows = {name: self.start[name].expand(len(ids), *self.start[name].shape).clone() for name in names}
        for name, value in self._copied(ids[known], names).items():
            if value.numel():
                assign(rows[name], known.to(value.device), value)
        return rows

    def view(self, clients: Tensor) -> State:
        """Return the clients' rows to read them before the next :meth:`put`: without a copy if they are consecutive."""
        slots = self._slots(self.ranks.own(clients))
        if len(slots) and slots.device.type == "cpu" and not (self._sparse and self._untouched):
            first, last = int(slots[0]), int(slots[0]) + len(slots)
            if torch.equal(slots, torch.arange(first, last)):
                return {name: value[first:last].to(self.start[name].device) for name, value in self._values.items()}
        return self.rows(clients)

    def put(self, clients: Tensor, rows: State, spread: Spread = lambda count, task: task(slice(count))) -> None:
        """Replace rows; ``rows`` are those of the clients that this process holds. All clients count as trained.

        ``spread`` may split the work over threads: fresh pages of memory cost more than the writes to them.
        """
        ids = self.ranks.own(clients)
        values = {name: value for name, value in self._values.items() if value.numel()}

        def write(part: slice) -> None:
            for name, value in values.items():
                assign(value, self._slots(ids[part]).to(value.device), rows[name][part].to(value.device))

        with ctrl_c_waits():  # rows of two rounds must not mix
            if len(ids):
                spread(len(ids), write)
            if self._untouched:
                trained = clients.cpu()
                self._untouched -= int((~self.touched[trained]).sum())
                self.touched[trained] = True

    def whole(self) -> State:
        """Return the rows of all clients that this process holds: the store's own tensors, not copies."""
        if self._sparse:
            new = self.ranks.own((~self.touched).nonzero().flatten())
            for name, value in self._values.items():
                first = self.start[name].to(value.device)
                if len(new) and value.numel():
                    assign(value, self._slots(new).to(value.device), first.expand(len(new), *first.shape))
            self._sparse = False
        return dict(self._values)

    @property
    def spec(self) -> dict[str, str]:
        """Type and shape of each entry, of all clients."""
        return {
            name: f"{value.dtype} {(self.clients, *value.shape)}".removeprefix("torch.")
            for name, value in self.start.items()
        }

    def _copied(self, ids: Tensor, names: Sequence[str]) -> State:
        slots, found = self._slots(ids), {}
        for name in names:
            value = self._values[name]
            found[name] = value.index_select(0, slots.to(value.device)).to(self.start[name].device)
        return found

    def _slots(self, ids: Tensor) -> Tensor:
        return ids if self.ranks.world == 1 else ids // self.ranks.world  # a process holds every world-th client

    def _allocated(self, name: str, start: Tensor) -> Tensor:
        shape = (self._held_clients, *start.shape)
        if self.place == "ram" or not start.numel():
            return torch.empty(shape, dtype=start.dtype, device=start.device)  # a CPU allocates pages on first write
        size, folder = math.prod(shape) * start.itemsize, existing(self.folder or Path(gettempdir()))
        try:
            with TemporaryFile(dir=folder) as file:
                file.truncate(size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)  # a disk that is full later would kill the process
                raw = np.memmap(file, np.uint8, "r+", shape=(size,))
        except OSError as error:
            raise TDPFedError(
                f"engine.state: 'mmap' needs {size:,} bytes for {name} in {str(folder)!r} ({error.strerror}); "
                "allowed: ram, or a run folder with enough free space"
            ) from None
        return torch.from_numpy(raw).view(start.dtype).reshape(shape)


def existing(path: Path) -> Path:
    """Return the folder, or the nearest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def free_memory(device: torch.device) -> int:
    """Return the free memory in bytes: of the GPU, or of the machine or container."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = 1024 * int(lines["MemAvailable"].split()[0])
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free = free if limit == "max" else min(free, int(limit) - int(used))
    except (OSError, ValueError, KeyError):  # another system, or another kind of container
        pass
    return free


def assign(value: Tensor, index: Tensor, rows: Tensor) -> None:
    """Replace rows of ``value`` by index or mask; types that PyTorch cannot assign are assigned as bytes."""
    if index.dtype == torch.int64 and value.dtype in ASSIGNABLE:
        value.index_copy_(0, index, rows)
    elif value.dtype in ASSIGNABLE:
        value[index] = rows
    else:
        as_bytes(value)[index] = as_bytes(rows)
