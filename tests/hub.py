"""Ranks as threads of one process, of which one computes at a time: a stand-in for torch.distributed in tests."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch import Tensor

from tdpfed.engine.processes import Ranks

T = TypeVar("T")


class Hub:
    """Collectives between threads; a rank that raises closes the line to all others."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._turn, self._place = threading.Condition(), threading.local()
        self._given: dict[tuple[int, int], Tensor] = {}  # by number of the collective and rank
        self._gone: set[int] = set()

    def all_gather(self, parts: list[Tensor], mine: Tensor) -> None:
        for part, given in zip(parts, self._exchange(mine), strict=True):
            part.copy_(given)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._exchange(tensor)[source])

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        number, self._place.done = self._place.done, self._place.done + 1
        self._given[number, self._place.rank] = mine.clone()
        self._turn.notify_all()
        keys = [(number, rank) for rank in range(self.world)]
        if not self._turn.wait_for(lambda: all(key in self._given or key[1] in self._gone for key in keys), 60):
            raise AssertionError("the ranks wait for each other")
        if any(key not in self._given for key in keys):
            raise RuntimeError("Connection closed by peer")
        return [self._given[key] for key in keys]

    def run(self, work: Callable[[Ranks], T]) -> list[T | BaseException]:
        """Do the work on every rank; return what each came to."""
        results: dict[int, Any] = {}

        def one(rank: int) -> None:
            self._place.rank, self._place.done = rank, 0
            with self._turn:
                try:
                    results[rank] = work(Ranks(rank, self.world))
                except BaseException as error:
                    results[rank] = error
                self._gone.add(rank)
                self._turn.notify_all()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return [results[rank] for rank in range(self.world)]


def together(world: int, work: Callable[[Ranks], T]) -> list[T | BaseException]:
    """Do the work on ``world`` ranks; return what each came to."""
    hub = Hub(world)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "broadcast"):
            patch.setattr(dist, name, getattr(hub, name))
        return hub.run(work)
