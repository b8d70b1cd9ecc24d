"""One run in several processes: each holds a share of the clients, and the result has the same bits as in one process.

Client k belongs to rank ``k % world``. A round's uploads are gathered on every rank in the order of the clients. Every
rank then computes the gate, the average and the ledger itself, so no sum depends on the number of ranks. Ranks exchange
only bytes of tensors and text, nothing that is executed.
"""

import json
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.engine.updates import Updates
from tdpfed.errors import RankError, TDPFedError

LATEST = 16
"""So many of the latest broadcast tensors are remembered, see :func:`_wait_until_released`."""

LARGE = 1 << 20
"""Tensors of so many bytes are not: they are never a run's last exchange."""

UNSHARED = 3
"""References to a tensor that only :attr:`Ranks.latest` holds, counted in a loop over it."""

PATIENCE = 5.0
"""Seconds to wait at most for PyTorch's threads at the end of a run."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes; a single process is rank 0 of 1."""

    rank: int = 0
    world: int = 1
    latest: deque[Tensor] = field(default_factory=lambda: deque(maxlen=LATEST), repr=False, compare=False)
    """The latest tensors that were broadcast."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def own(self, clients: Tensor) -> Tensor:
        """Return those of the clients that belong to this rank, in their order."""
        return clients if self.world == 1 else clients[clients % self.world == self.rank]

    def part(self, rows: State, clients: Tensor) -> State:
        """Return, from rows of all the clients, those of this rank's clients."""
        if self.world == 1:
            return rows
        mask = clients % self.world == self.rank
        return {name: value[mask.to(value.device)] for name, value in rows.items()}

    def gather(self, rows: State, clients: Tensor) -> State:
        """Return the rows of all the clients, in their order; ``rows`` are those of this rank's clients."""
        if self.world == 1 or not rows:
            return dict(rows)
        rows = dict(sorted(rows.items()))  # ranks may hold the entries in different orders: a file does not keep one
        owner = clients.cpu() % self.world
        counts = torch.bincount(owner, minlength=self.world).tolist()
        sizes = [math.prod(value.shape[1:]) * value.itemsize for value in rows.values()]
        device = next(iter(rows.values())).device
        mine = torch.zeros(max(counts), sum(sizes), dtype=torch.uint8, device=device)
        for value, columns in zip(rows.values(), mine.split(sizes, 1), strict=True):
            columns[: len(value)] = as_bytes(value)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        with _collective():
            dist.all_gather(parts, mine)
        order = torch.cat([(owner == rank).nonzero().flatten() for rank in range(self.world)]).to(device)
        held = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        everybody = held.index_select(0, order.argsort())
        return {
            name: columns.clone(memory_format=torch.contiguous_format)
            .view(value.dtype)
            .reshape(len(clients), *value.shape[1:])
            for (name, value), columns in zip(rows.items(), everybody.split(sizes, 1), strict=True)
        }

    def shared(self, part: Updates | None, clients: Tensor) -> Updates:
        """Return the uploads and metrics of all clients; ``part`` are those of this rank, None if it has no client.

        Private rows stay on the rank that holds them.
        """
        if self.world == 1:
            assert part is not None, "at least one client trains"
            return part
        rows: State = {}
        if part is not None:
            rows = {f"upload {name}": value for name, value in part.upload.items()}
            rows |= {f"metrics {name}": value for name, value in part.metrics.items()}
        owner = clients.cpu() % self.world
        if len(owner.unique()) < self.world:  # a rank without a client does not know the rows' types and shapes
            kinds = {name: (str(v.dtype).removeprefix("torch."), list(v.shape[1:])) for name, v in rows.items()}
            kinds = json.loads(self.broadcast(json.dumps(kinds).encode(), int(owner[0])))
            device = clients.device
            nothing = {n: torch.empty(0, *k[1], dtype=getattr(torch, k[0]), device=device) for n, k in kinds.items()}
            rows = rows or nothing
        gathered = self.gather(rows, clients)
        upload, metrics = (
            {name.removeprefix(prefix): value for name, value in gathered.items() if name.startswith(prefix)}
            for prefix in ("upload ", "metrics ")
        )
        return Updates({} if part is None else part.private, upload, metrics)

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes that rank ``source`` passes as ``data``."""
        if self.world == 1:
            return data
        size = torch.tensor([len(data)])
        self.latest.append(size)
        with _collective():
            dist.broadcast(size, source)
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == source and data else None
            text = torch.empty(int(size), dtype=torch.uint8) if text is None else text
            if len(text) < LARGE:
                self.latest.append(text)
            if len(text):
                dist.broadcast(text, source)
        return text.numpy().tobytes()

    def alone(self, what: str) -> None:
        """Refuse several processes for what works in only one."""
        if self.world > 1:
            raise TDPFedError(f"torchrun: {self.world} processes given, must be 1 for {what}")

    def check_devices(self) -> None:
        """Refuse more processes on a machine than it has GPUs."""
        processes, devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if self.world > 1 and processes > devices:
            raise TDPFedError(
                f"torchrun: --nproc-per-node {processes} given, must be at most {devices}, the GPUs of this machine; "
                "or set run.device=cpu"
            )

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run the block on every rank; an error on one rank stops all of them, and rank 0 reports it."""
        if self.world == 1:
            yield
            return
        mine = ""
        try:
            yield
        except TDPFedError as error:
            mine = str(error) or "stopped"
        texts = [self.broadcast(mine.encode(), rank).decode() for rank in range(self.world)]
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if not failed:
            return
        if not self.leads:
            raise SystemExit(2)
        rank, text = failed[0]
        raise TDPFedError(text if rank == 0 else f"rank {rank}: {text}")


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Yield the ranks of a run that ``torchrun`` started; without it, or with one process, :data:`ALONE`."""
    if not under_torchrun():
        yield ALONE
        return
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError, KeyError) as error:
        raise TDPFedError(f"torchrun: the processes cannot reach each other ({_first_line(error)})") from None
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    try:
        yield ranks
    except RankError:
        raise
    except TDPFedError:  # every rank raises it, and rank 0 reports it
        if ranks.leads:
            raise
        raise SystemExit(2) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()
        _wait_until_released(ranks.latest)


def _wait_until_released(tensors: Sequence[Tensor]) -> None:
    """Wait until PyTorch's threads have let go of tensors, some time after their broadcast.

    A thread needs Python's lock for that. If the interpreter is ending by then, the thread aborts the process. While a
    thread holds a tensor, so does a reference that Python counts.
    """
    end = time.monotonic() + PATIENCE
    for tensor in tensors:
        while sys.getrefcount(tensor) > UNSHARED and time.monotonic() < end:
            time.sleep(0.001)


def under_torchrun() -> bool:
    """Whether this process is one of several that ``torchrun`` started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


@contextmanager
def _collective() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"torchrun: another process of the run has ended ({_first_line(error)}); saved checkpoints are intact: "
            "resume with --resume, in any number of processes"
        ) from None


def _on_sigterm(number: int, frame: Any) -> None:
    del number, frame
    raise RankError("torchrun: this process was terminated; saved checkpoints are intact: resume with --resume")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def as_bytes(rows: Tensor) -> Tensor:
    """Return rows ``(K, ...)`` as bytes ``(K, n)``."""
    return rows.contiguous().reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
