"""Two ways to run the clients of a round: one after another (the reference), or all at once as one computation.

Both execute the same functions of the algorithm on the same minibatches, and agree up to rounding. The batched runner
takes clients in chunks; a client's bits do not depend on its company, so any chunking gives the same result on a CPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Batches, State, Turn
from tdpfed.data.federation import Federation
from tdpfed.engine.augment import augmented
from tdpfed.engine.graphs import Graphed
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.sampling import batch_indices
from tdpfed.objective import Objective

RunnerName = Literal["batched", "loop"]

CPU_BYTES = 2 << 30
"""How much the intermediates of one chunk may take on a CPU by estimate; on a GPU it is half of what is free."""

VECTORS_PER_CLIENT = 16
"""Parameter-sized vectors alive per client in the widest step (parameters, gradients, anchors, optimiser state)."""

LEAST_TOGETHER = 3
"""Fewer clients than this take other kernels, whose last bits differ: such a chunk is filled up with copies."""


@dataclass(frozen=True)
class Outcome:
    """What the clients of a round gave: new private state, uploads and metrics, each with a leading client axis."""

    private: State
    upload: State
    metrics: State


@dataclass(frozen=True)
class Runner:
    """Runs clients of one federation with one algorithm and objective."""

    algorithm: Algorithm
    objective: Objective
    federation: Federation
    kind: RunnerName = "batched"
    chunk: int | None = None  # clients computed together; None: as many as fit
    graphs: bool = True  # on a GPU: record a round and replay it
    precision: Precision = "float32"

    def run(self, server: State, private: State, turn: Turn) -> Outcome:
        """Run the turn's clients; ``private`` holds their rows, in the same order."""
        with arithmetic(self.precision):
            if self.kind == "loop":
                return _joined([self._one(server, private, turn, row) for row in range(len(turn.clients))])
            size = self.chunk or self.fitting
            return _joined([self._together(server, private, turn, rows) for rows in _chunks(len(turn.clients), size)])

    def batches(self, turn: Turn) -> Batches:
        """Return the function from step to minibatch, ``(..., B, *input_shape)`` and ``(..., B)``."""
        data, clients = self.federation, turn.clients
        index = batch_indices(
            turn.seed, turn.round, clients.reshape(-1), data.train_start[clients.reshape(-1)],
            data.train_size[clients.reshape(-1)], self.algorithm.draws, self.algorithm.batch_size,
        ).reshape(*clients.shape, self.algorithm.draws, self.algorithm.batch_size)  # fmt: skip

        def batch(step: int) -> tuple[Tensor, Tensor]:
            drawn = index[..., step, :]
            return augmented(data.x[drawn], data.augment, turn.seed, turn.round, clients, step), data.y[drawn]

        return batch

    def _one(self, server: State, private: State, turn: Turn, row: int) -> Outcome:
        alone = replace(turn, clients=turn.clients[row])
        outcome = self._update(server, {name: rows[row] for name, rows in private.items()}, alone)
        return Outcome(*({name: value[None] for name, value in part.items()} for part in outcome))

    def _together(self, server: State, private: State, turn: Turn, rows: slice) -> Outcome:
        group = replace(turn, clients=turn.clients[rows])
        kept = {name: values[rows] for name, values in private.items()}
        count, missing = len(group.clients), LEAST_TOGETHER - len(group.clients)
        if missing <= 0:
            return Outcome(*self._update(server, kept, group))
        filled = torch.arange(LEAST_TOGETHER, device=group.clients.device).clamp_max(count - 1)
        outcome = self._update(server, rows_of(kept, filled), replace(group, clients=group.clients[filled]))
        return Outcome(*({name: value[:count] for name, value in part.items()} for part in outcome))

    def _update(self, server: State, private: State, turn: Turn) -> tuple[State, ...]:
        if turn.clients.device.type == "cuda" and self.graphs:
            return self._graphed(server, private, as_state(turn))
        return self._computed(server, private, turn)

    def _computed(self, server: State, private: State, turn: Turn) -> tuple[State, State, State]:
        message = self.algorithm.broadcast(server, turn)
        return self.algorithm.update(message, private, self.batches(turn), self.objective.gradient, turn)

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(lambda server, private, place: self._computed(server, private, Turn(**place)))

    @cached_property
    def fitting(self) -> int:
        """Return how many clients fit into the memory of a chunk."""
        data = self.federation
        # Forward and backward keep about two values per activation; grouped convolutions copy them once more.
        activations = 4 * self.algorithm.batch_size * self.objective.activation_size(data.x[:2])
        per_client = data.x.element_size() * (VECTORS_PER_CLIENT * self.objective.layout.size + activations)
        bytes_ = torch.cuda.mem_get_info(data.device)[0] // 2 if data.device.type == "cuda" else CPU_BYTES
        return max(LEAST_TOGETHER, bytes_ // per_client)


def _chunks(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _joined(outcomes: list[Outcome]) -> Outcome:
    if len(outcomes) == 1:
        return outcomes[0]

    def join(parts: list[State]) -> State:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return Outcome(
        join([outcome.private for outcome in outcomes]),
        join([outcome.upload for outcome in outcomes]),
        join([outcome.metrics for outcome in outcomes]),
    )


def as_state(turn: Turn) -> State:
    """Return a turn as tensors on its clients' device."""
    scalars = {"seed": turn.seed, "round": turn.round}
    device = turn.clients.device
    numbers = {name: v if isinstance(v, Tensor) else torch.full((), v, device=device) for name, v in scalars.items()}
    return {**numbers, "clients": turn.clients}


def rows_of(state: State, clients: Tensor) -> State:
    """Return the rows of the given clients."""
    return {name: rows[clients] for name, rows in state.items()}
