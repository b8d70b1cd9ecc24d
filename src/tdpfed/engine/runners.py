"""Two ways to run the clients of a round: one after another (the reference), or all at once as one computation.

Both execute the same functions of the method on the same minibatches and agree up to rounding: the loop uses plain
local work, the batched runner the fast one. The batched runner computes clients in chunks, on a CPU several chunks at a
time. On a CPU a client's result does not depend on its chunk, so any chunking gives the same bits.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, held_out_of
from tdpfed.core.draws import HeldOut, length_in_pass, own_indices
from tdpfed.core.extras import extras_of
from tdpfed.core.local import NO_EXTRAS, Batch, Extras, LocalWork
from tdpfed.core.objective import Objective
from tdpfed.core.plain import PlainLocal
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import State, Turn
from tdpfed.core.threads import ONE_THREAD_PARAMETERS
from tdpfed.data.federation import Federation
from tdpfed.engine.augment import augmented
from tdpfed.engine.by_size import BySize
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.updates import Updates, as_state, joined, rows_of, with_finiteness
from tdpfed.fast.ahead import Ahead
from tdpfed.fast.client_groups import QUIET_PARAMETERS, Groups
from tdpfed.fast.cuda_graphs import Graphed
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.fast.local import FastLocal

RunnerName = Literal["batched", "loop"]

CPU_CHUNK_BYTES = 2 << 30
"""Estimated memory the intermediates of one chunk may take on a CPU; on a GPU it is half of the free memory."""

VECTORS_PER_CLIENT = 16
"""Parameter-sized vectors alive per client in the largest step (parameters, gradients, anchors, optimizer state)."""

SAMPLES_DRAWN_TOGETHER = 1 << 22
"""Up to this many samples a CPU draws a whole round's at once: chunks that draw their own wait for each other."""

MIN_CLIENTS = 3
"""Fewer clients than this use other kernels, whose last bits differ: smaller chunks are padded with copies."""


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
    public: Batch | None = None  # the sample that all clients have in common, if the method asks for one
    optimizer: Optimizer = USUAL
    passing: int | None = None  # the samples through which each client passes whole, if all have as many
    receives: bool = False  # instead of a round: the model of each client after the message, as upload

    @property
    def held_out(self) -> HeldOut:
        """Which of each client's training samples are held out: as the data says, or as the method asks."""
        return held_out_of(self.algorithm, self.federation.validation)

    def run(self, server: State, private: State, turn: Turn, participants: int | None = None) -> Updates:
        """Run the turn's clients; ``private`` holds their rows, in the same order.

        If several processes share a round, ``participants`` is the number of its clients over all processes.
        """
        count = len(turn.clients)
        with arithmetic(self.precision):
            if self.algorithm.epochs is not None:
                return self.by_size.run(server, private, turn, participants or count)
            if self.kind == "loop":
                return joined([self.run_one(server, private, turn, row) for row in range(count)])
            return joined(self.compute(self.tasks(server, private, turn), participants or count))

    def tasks(self, server: State, private: State, turn: Turn) -> list[Callable[[], Updates]]:
        """Return the work of the turn's clients, chunk by chunk."""
        count, on_cpu = len(turn.clients), turn.clients.device.type == "cpu"
        draw_once = count * self.algorithm.draws * self.algorithm.batch_size <= SAMPLES_DRAWN_TOGETHER
        index = self._drawn_once(turn) if on_cpu and draw_once else None
        return [partial(self._run_chunk, server, private, turn, rows, index) for rows in self._chunks(count)]

    def compute(self, tasks: list[Callable[[], Updates]], participants: int) -> list[Updates]:
        """Do the work of chunks: on a CPU several at a time."""
        if self.federation.device.type != "cpu":
            return [task() for task in tasks]
        return self.groups.compute(tasks, *self.lanes(participants))

    @cached_property
    def by_size(self) -> BySize:
        """Runs the clients if each passes through all its samples."""
        return BySize(self)

    def receive(self, server: State, private: State, turn: Turn) -> Tensor:
        """Return the parameters ``(n, P)`` that the turn's clients use once they have the message."""
        return self._receiver.run(server, private, turn).upload["theta"]

    @cached_property
    def _receiver(self) -> "Runner":
        made = replace(self, receives=True)
        vars(made).update(gradient=self.gradient, groups=self.groups, fitting=self.fitting)
        return made

    def sizes(self, round_: int) -> Tensor:
        """Return the number of samples that each client trains on in a round, ``(K,)``: without those held out."""
        size = self.federation.train_size.cpu()
        return size - self.held_out.sizes_in(size, round_)

    def spread(self, count: int, task: Callable[[slice], None], participants: int | None = None) -> None:
        """Call a task with slices that cover ``count`` clients; on a CPU in parallel, chunked as in :meth:`run`."""
        if self.kind == "loop" or self.federation.device.type != "cpu":
            task(slice(count))
        else:
            tasks = [partial(task, rows) for rows in self._chunks(count)]
            self.groups.compute(tasks, *self.lanes(participants or count))

    def batches(self, turn: Turn, index: Tensor | None = None) -> Callable[[int], Batch]:
        """Return the function from step to minibatch, ``(..., B, *input_shape)`` and ``(..., B)``.

        ``index`` holds the samples of the first ``draws`` minibatches, if they are already drawn.
        """
        data, clients, expected = self.federation, turn.clients, self.algorithm.draws
        by_step = (self._drawn(turn) if index is None else index).movedim(-2, 0).contiguous()
        labels = _rows(data.y, by_step)

        def batch(step: int) -> Batch:
            self.groups.check()
            here, targets = (by_step, labels) if step < expected else beyond_expected(step)
            index, y = here[step], targets[step]
            if self.passing is not None:
                length = length_in_pass(step, self.passing, self.algorithm.batch_size)
                index, y = index[..., :length], y.narrow(clients.ndim, 0, length)
            return augmented(_rows(data.x, index), data.augment, turn.seed, turn.round, clients, step), y

        @cache
        def drawn_again(draws: int) -> tuple[Tensor, Tensor]:
            found = self._drawn(turn, draws).movedim(-2, 0).contiguous()
            return found, _rows(data.y, found)

        def beyond_expected(step: int) -> tuple[Tensor, Tensor]:
            return drawn_again(expected * (step // expected + 1))

        return self.objective.keyed(batch, turn)

    def extras(self, turn: Turn) -> Extras:
        """Return what the turn's clients have beside minibatches."""
        data, algorithm, clients = self.federation, self.algorithm, turn.clients
        return extras_of(
            turn, (data.x, data.y), data.train_start[clients], data.train_size[clients], expected=algorithm.draws,
            batch_size=algorithm.batch_size, held_out=self.held_out, public=self.public, passing=self.passing,
        )  # fmt: skip

    def _drawn(self, turn: Turn, draws: int | None = None) -> Tensor:
        """Return the samples the turn's clients see, ``(..., draws, B)``; by default as many as the method expects."""
        data, clients = self.federation, turn.clients.reshape(-1)
        draws, size = self.algorithm.draws if draws is None else draws, self.algorithm.batch_size
        start, held = data.train_start[clients], data.train_size[clients]
        by_pass = self.passing is not None
        index = own_indices(turn.seed, turn.round, clients, start, held, draws, size, self.held_out, by_pass=by_pass)
        return index.reshape(*turn.clients.shape, draws, size)

    def _drawn_once(self, turn: Turn) -> Tensor:
        alike = self.passing is None and not self.held_out.share  # then the rounds can be drawn together
        return self._ahead.of(turn) if alike else self._drawn(turn)

    @cached_property
    def _ahead(self) -> Ahead:
        return Ahead(self._drawn)

    def run_one(self, server: State, private: State, turn: Turn, row: int) -> Updates:
        """Run a single client with the plain local work."""
        alone = replace(turn, clients=turn.clients[row])
        objective = self.objective
        local = PlainLocal(
            alone, self.algorithm.tau, self.batches(alone), objective.gradient, self.extras(alone),
            objective.hessian_product, self.optimizer, objective.per_sample,
        )  # fmt: skip
        own = {name: rows[row] for name, rows in private.items()}
        updates = self.updated(self.algorithm.broadcast(server, alone), own, local)
        return Updates(*({name: value[None] for name, value in part.items()} for part in updates))

    def _run_chunk(self, server: State, private: State, turn: Turn, rows: slice, index: Tensor | None) -> Updates:
        """Run some of the turn's clients as one computation."""
        group = replace(turn, clients=turn.clients[rows])
        kept, drawn = {name: values[rows] for name, values in private.items()}, None if index is None else index[rows]
        count, missing = len(group.clients), MIN_CLIENTS - len(group.clients)
        if missing <= 0:
            return Updates(*self._update(server, kept, group, drawn))
        filled = torch.arange(MIN_CLIENTS, device=group.clients.device).clamp_max(count - 1)
        group = replace(group, clients=group.clients[filled])
        updates = self._update(server, rows_of(kept, filled), group, None if drawn is None else drawn[filled])
        return Updates(*({name: value[:count] for name, value in part.items()} for part in updates))

    def _update(self, server: State, private: State, turn: Turn, index: Tensor | None = None) -> tuple[State, ...]:
        if turn.clients.is_cuda and self.graphs:
            return self._graphed(server, private, as_state(turn))
        return self._computed(server, private, turn, index)

    def _computed(
        self, server: State, private: State, turn: Turn, index: Tensor | None = None
    ) -> tuple[State, State, State]:
        local = self.local(turn, self.batches(turn, index), self.extras(turn))
        return self.updated(self.algorithm.broadcast(server, turn), private, local)

    def local(self, turn: Turn, batches: Callable[[int], Batch], extras: Extras = NO_EXTRAS) -> FastLocal:
        """Return the local work of the turn's clients, all at once."""
        return FastLocal(turn, self.algorithm.tau, batches, self.gradient, self.used, extras, self.optimizer)

    def updated(self, message: State, private: State, local: LocalWork) -> tuple[State, State, State]:
        """Return the clients' results, checked against what the method declares, and whether all are finite."""
        if self.receives:
            return {}, {"theta": self.algorithm.received(message, private, local)}, {}
        return with_finiteness(*self.algorithm.checked_update(message, private, local))

    @cached_property
    def gradient(self) -> RecordedGradient:
        """The gradient of the objective, recorded and replayed."""
        return RecordedGradient(self.objective)

    @cached_property
    def used(self) -> set[str]:
        """The kinds of local work the method has used so far."""
        return set()

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(lambda server, private, place: self._computed(server, private, Turn(**place)))

    def _chunks(self, count: int) -> list[slice]:
        """Split ``count`` clients into chunks: on a CPU of even sizes, at least one for each thread."""
        if self.federation.device.type != "cpu":
            size = self.chunk or self.fitting
            return [slice(start, min(start + size, count)) for start in range(0, count, size)]
        lanes, _ = self.lanes(count)
        cuts = max(lanes, math.ceil(count / (self.chunk or count)), math.ceil(count * lanes / self.fitting))
        return [slice(n * count // cuts, (n + 1) * count // cuts) for n in range(cuts)]

    def lanes(self, count: int) -> tuple[int, int]:
        """Return how many chunks of ``count`` clients a CPU computes at a time, and with how many threads each."""
        if count * self.objective.layout.size <= ONE_THREAD_PARAMETERS:
            return 1, 1
        threads = self.groups.threads
        if self.used == {"plain steps"} and self._skips_first_layer:
            return 1, threads  # few large products, many small operators: parallel chunks would wait for each other
        lanes = max(1, min(threads, self.fitting // MIN_CLIENTS, math.ceil(count / MIN_CLIENTS)))
        return lanes, threads // lanes

    def around_groups(self, count: int) -> AbstractContextManager[None]:
        """Return the context for the work of a round of ``count`` clients outside their own computation."""
        alone = self.kind == "loop" or self.federation.device.type != "cpu" or self.lanes(count)[0] == 1
        if alone or count * self.objective.layout.size > QUIET_PARAMETERS:
            return nullcontext()
        return self.groups.using(1)

    @cached_property
    def _skips_first_layer(self) -> bool:
        """Whether several steps on one minibatch read the first layer's weights only once."""
        data, size = self.federation, self.algorithm.batch_size
        index = torch.arange(MIN_CLIENTS * size).reshape(MIN_CLIENTS, size) % len(data.x)
        theta = self.objective.initial().repeat(MIN_CLIENTS, 1).to(data.x)
        return self.gradient.skips_first_layer(theta, (_rows(data.x, index), _rows(data.y, index)))

    @cached_property
    def groups(self) -> Groups:
        """The thread groups that compute chunks in parallel on a CPU."""
        return Groups()

    @cached_property
    def fitting(self) -> int:
        """How many clients fit in memory at a time: in one chunk on a GPU, in all parallel chunks on a CPU."""
        data = self.federation
        # Forward and backward keep about two values per activation; grouped convolutions copy them once more.
        activations = 4 * self.algorithm.batch_size * self.objective.activation_size(data.x[:2].clone())
        per_client = data.x.element_size() * (VECTORS_PER_CLIENT * self.objective.layout.size + activations)
        bytes_ = torch.cuda.mem_get_info(data.device)[0] // 2 if data.device.type == "cuda" else CPU_CHUNK_BYTES
        return max(MIN_CLIENTS, bytes_ // per_client)


def _rows(values: Tensor, index: Tensor) -> Tensor:
    """Return ``values[index]``; on a CPU by ``index_select``, which takes half the time."""
    if values.device.type != "cpu":
        return values[index]
    return values.index_select(0, index.reshape(-1)).reshape(*index.shape, *values.shape[1:])
