"""Rounds in which each client passes through all of its samples.

Clients with the same number of samples are computed together, because they take the same number of steps; no method
needs to know about other sizes. A few clients do not fill a GPU, so there the sizes are computed side by side, and the
whole round is one graph. It is replayed as long as clients of the same sizes take part, in the same order.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tdpfed.core.state import State, Turn
from tdpfed.engine.updates import Updates, as_state, joined, rows_of
from tdpfed.fast.cuda_graphs import Graphed, Latest
from tdpfed.fast.gpu import side_by_side

if TYPE_CHECKING:
    from tdpfed.engine.runners import Runner

Round = Callable[..., tuple[State, ...]]

MOST_MINIBATCHES = 20_000
"""A round with more minibatches, those of all sizes together, is not recorded: its graph would take gigabytes."""


class BySize:
    """Runs clients of one federation, whose ``epochs`` are passes through their own samples."""

    def __init__(self, runner: "Runner") -> None:
        self._runner = runner
        self._runners: dict[tuple[int, bool], Runner] = {}
        self._rounds = Latest()

    def of(self, size: int, *, alike: bool = True) -> "Runner":
        """Return the runner of clients with so many training samples; ``alike``: all clients of the federation have.

        If not, this runner records no graph: the graph is that of the whole round.
        """
        if (size, alike) not in self._runners:
            own = self._runner
            made = replace(own, algorithm=own.algorithm.of_size(size), passing=size, graphs=own.graphs and alike)
            vars(made).update(gradient=own.gradient, used=own.used, groups=own.groups, fitting=own.fitting)
            self._runners[size, alike] = made
        return self._runners[size, alike]

    def run(self, server: State, private: State, turn: Turn, participants: int) -> Updates:
        """Run the turn's clients, as :meth:`Runner.run` does."""
        own = self._runner
        every = own.sizes(int(turn.round))
        sizes, alike = every[turn.clients.cpu()].tolist(), bool((every == every[:1]).all())
        fit = len(sizes) <= (own.chunk or own.fitting)  # in memory, all sizes at the same time
        if turn.clients.is_cuda and own.kind == "batched" and own.graphs and fit and not alike:
            compute = self._rounds.of(tuple(sizes), lambda: self._on_streams(sizes))
            return Updates(*compute(server, private, as_state(turn)))
        groups, back = in_groups([sizes], turn.clients.device)
        tasks: list[Callable[[], Updates]] = []
        for size, [(_, rows)] in groups:
            runner, group, kept = self.of(size, alike=alike), part_of(turn, rows), rows_of(private, rows)
            if own.kind == "loop":
                tasks += [partial(runner.run_one, server, kept, group, row) for row in range(len(rows))]
            else:
                tasks += runner.tasks(server, kept, group)
        return in_order([task() for task in tasks] if own.kind == "loop" else own.compute(tasks, participants), back)

    def _on_streams(self, sizes: list[int]) -> Round:
        device = self._runner.federation.device
        groups, back = in_groups([sizes], device)

        def computed(server: State, private: State, place: State) -> tuple[State, ...]:
            turn, found = Turn(**place), list[Updates]()
            with side_by_side(device) as lane:
                for size, [(_, rows)] in groups:
                    with lane():
                        tasks = self.of(size, alike=False).tasks(server, rows_of(private, rows), part_of(turn, rows))
                        found += [task() for task in tasks]
            return in_order(found, back).parts

        return self.recorded(computed, groups)

    def recorded(
        self, function: Callable[..., tuple[State, ...]], groups: "SizeGroups"
    ) -> Callable[..., tuple[State, ...]]:
        """Return the function of a round as one graph, or as it is if that graph would be too large."""
        minibatches = sum(self.of(size, alike=False).algorithm.draws for size, _ in groups)
        return Graphed(function) if self._runner.graphs and minibatches <= MOST_MINIBATCHES else function


SizeGroups = list[tuple[int, list[tuple[int, Tensor]]]]
"""By size: which runs have such clients, and their places among the run's clients."""


def in_groups(sizes: Sequence[Sequence[int]], device: torch.device) -> tuple[SizeGroups, Tensor]:
    """Return the clients of several runs by size, and the index that restores the order of runs and clients."""
    begins = [sum(map(len, sizes[:n])) for n in range(len(sizes))]
    groups: SizeGroups = []
    for size in sorted({size for own in sizes for size in own}):
        places = [(n, torch.tensor([row for row, one in enumerate(own) if one == size])) for n, own in enumerate(sizes)]
        groups.append((size, [(n, rows) for n, rows in places if len(rows)]))
    order = torch.cat([rows + begins[n] for _, places in groups for n, rows in places])
    return [(size, [(n, rows.to(device)) for n, rows in places]) for size, places in groups], order.argsort().to(device)


def part_of(turn: Turn, rows: Tensor) -> Turn:
    """Return a turn with some of its clients."""
    return replace(turn, clients=turn.clients[rows])


def in_order(found: list[Updates], back: Tensor) -> Updates:
    """Return the results of groups in the order of the clients."""
    return found[0] if len(found) == 1 else Updates(*(rows_of(part, back) for part in joined(found).parts))
