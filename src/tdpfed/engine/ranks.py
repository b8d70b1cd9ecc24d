"""Several processes as one run: each holds a share of the clients, and all come to the same bits as one process would.

Client k belongs to rank ``k % world``. A round's uploads are gathered on every rank in the order of the clients, and
what follows (the gate, the average, the ledger) is computed by all alike: no sum depends on how many there are. Between
ranks travel bytes of tensors and texts, nothing that could be executed.
"""

import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.engine.runners import Updates
from tdpfed.errors import RankError, TDPFedError


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is; one process alone is rank 0 of 1, and waits for nobody."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def own(self, clients: Tensor) -> Tensor:
        """Return those of the clients that belong to this rank, in their order."""
        return clients if self.world == 1 else clients[clients % self.world == self.rank]

    def part(self, rows: State, clients: Tensor) -> State:
        """Return of rows of all the clients those of this rank's."""
        if self.world == 1:
            return rows
        mask = clients % self.world == self.rank
        return {name: value[mask.to(value.device)] for name, value in rows.items()}

    def gather(self, rows: State, clients: Tensor) -> State:
        """Return the rows of all the clients, in their order; ``rows`` are those of this rank's."""
        if self.world == 1 or not rows:
            return dict(rows)
        rows = dict(sorted(rows.items()))  # a rank may have them in any order: what was in a file has none
        owner = clients.cpu() % self.world
        counts = torch.bincount(owner, minlength=self.world).tolist()
        sizes = [math.prod(value.shape[1:]) * value.itemsize for value in rows.values()]
        device = next(iter(rows.values())).device
        mine = torch.zeros(max(counts), sum(sizes), dtype=torch.uint8, device=device)
        for value, columns in zip(rows.values(), mine.split(sizes, 1), strict=True):
            columns[: len(value)] = as_bytes(value)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        with _together():
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
        """Return everybody's uploads and metrics; ``part`` are this rank's, None where it has no client.

        The private rows stay with the rank that has them.
        """
        if self.world == 1:
            assert part is not None, "somebody trains"
            return part
        rows: State = {}
        if part is not None:
            rows = {f"upload {name}": value for name, value in part.upload.items()}
            rows |= {f"metrics {name}": value for name, value in part.metrics.items()}
        owner = clients.cpu() % self.world
        if len(owner.unique()) < self.world:  # somebody has no client, and so does not know what rows look like
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
        """Return the bytes that rank ``source`` gave."""
        if self.world == 1:
            return data
        size = torch.tensor([len(data)])
        with _together():
            dist.broadcast(size, source)
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == source and data else None
            text = torch.empty(int(size), dtype=torch.uint8) if text is None else text
            if len(text):
                dist.broadcast(text, source)
        return text.numpy().tobytes()

    def alone(self, what: str) -> None:
        """Refuse what works in one process only."""
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
        """Do something on every rank and go on together: what stops one stops all, and rank 0 says why."""
        if self.world == 1:
            yield
            return
        mine = ""
        try:
            yield
        except TDPFedError as error:
            mine = str(error) or "stopped"
        texts = [self.broadcast(mine.encode(), rank).decode() for rank in range(self.world)]
        said = [(rank, text) for rank, text in enumerate(texts) if text]
        if not said:
            return
        if not self.leads:
            raise SystemExit(2)
        rank, text = said[0]
        raise TDPFedError(text if rank == 0 else f"rank {rank}: {text}")


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Yield this process's place among those that ``torchrun`` started; without it, or with one, it is alone."""
    if not under_torchrun():
        yield ALONE
        return
    try:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except (RuntimeError, ValueError, KeyError) as error:
        raise TDPFedError(f"torchrun: the processes cannot reach each other ({_line(error)})") from None
    before = signal.signal(signal.SIGTERM, _ended)
    ranks = Ranks(dist.get_rank(), dist.get_world_size())
    try:
        yield ranks
    except RankError:
        raise
    except TDPFedError:  # it has come up everywhere, and one says it
        if ranks.leads:
            raise
        raise SystemExit(2) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def under_torchrun() -> bool:
    """Whether this process is one of several that ``torchrun`` started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


@contextmanager
def _together() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"torchrun: another process of the run is gone ({_line(error)}); what was saved is good: "
            "go on with --resume, in any number of processes"
        ) from None


def _ended(number: int, frame: Any) -> None:
    del number, frame
    raise RankError("torchrun: this process was told to end; what was saved is good: go on with --resume")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def as_bytes(rows: Tensor) -> Tensor:
    """Return rows ``(K, ...)`` as bytes ``(K, n)``."""
    return rows.contiguous().reshape(len(rows), math.prod(rows.shape[1:])).view(torch.uint8)
