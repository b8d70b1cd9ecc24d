"""Records of a run: after a round, the accuracies of personalized, local and global models, and the bytes sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from tdpfed.algorithms.base import CHOICE, Algorithm
from tdpfed.core.metrics import ACCURACY
from tdpfed.core.objective import Objective
from tdpfed.core.state import State
from tdpfed.core.tasks import Task
from tdpfed.data.federation import Federation
from tdpfed.engine import evaluate
from tdpfed.engine.processes import Ranks
from tdpfed.engine.store import Store
from tdpfed.engine.updates import Updates
from tdpfed.server.records import HIGHER, LOWER, Ledger, Record

T = TypeVar("T")

PERSONALIZED, LOCAL, GLOBAL, VALIDATION = "personalized", "local", "global", "validation"
RECEIVED = "received"

Known = tuple[evaluate.Score, Callable[[slice], Tensor]]
"""The scores of the evaluated clients' models, and the function that returns these models for a range of clients."""

AT_ONCE = 256
"""Clients whose models are compared at a time."""

FEW = 64
"""Parameters that are compared first."""


@dataclass(frozen=True)
class Recorder:
    """Evaluates the models of one run; hostile clients are listed but left out of mean accuracies."""

    objective: Objective
    algorithm: Algorithm
    federation: Federation
    honest: Tensor  # (K,) bool, which clients count in means
    evaluated: Tensor  # ids of the clients whose models are evaluated
    ranks: Ranks
    held_out: Federation | None = None  # validation samples, as test samples; None: none are held out
    train_loss: bool = False  # whether to evaluate on training samples too
    received: bool = False  # whether to evaluate the models with which clients begin the next round

    def record(
        self,
        round_: int,
        server: State,
        store: Store,
        trained: tuple[Tensor, Updates] | None,
        ledger: Ledger,
        seconds: float,
        *,
        epsilon: float | None,
        diagnostics: dict[str, float] | None,
        receive: Callable[[Tensor], Tensor] | None = None,
    ) -> Record:
        """Return the record after a round; ``trained`` are the clients of that round with their results.

        ``receive`` returns the models with which clients begin the next round.
        """
        mine = self.ranks.own(self.evaluated)
        own = self.algorithm.personalized

        def personalized(some: slice) -> Tensor:
            return own(store.view(mine[some]))

        scores = {PERSONALIZED: self._score(self.evaluated, personalized)}
        if trained is not None:
            scores[LOCAL] = self._local(*trained, store, scores[PERSONALIZED])
        shipped = self.algorithm.global_model(server)
        if shipped is not None:
            scores[GLOBAL] = self._score(self.evaluated, lambda _: shipped)
        if self.received and receive is not None:
            known: list[Known] = [(scores[PERSONALIZED], personalized)]
            known += [] if shipped is None else [(scores[GLOBAL], lambda _: shipped)]
            scores[RECEIVED] = self._but_for(mine, lambda some: receive(mine[some]), known, self.evaluated)
        if self.held_out is not None:
            scores[VALIDATION] = self._score(self.evaluated, personalized, self.held_out)
        honest = {
            name: one.of(self.honest[trained[0].cpu() if name == LOCAL and trained else self.evaluated])
            for name, one in scores.items()
        }
        train: dict[str, float | None] = {}
        if self.train_loss:
            train[PERSONALIZED] = self._train_loss(personalized)
            train[GLOBAL] = None if shipped is None else self._train_loss(lambda _: shipped)
        main = self.task.main
        changes = None
        if shipped is not None and self.algorithm.reports_change:
            pairs = zip(scores[PERSONALIZED].per_client(main), scores[GLOBAL].per_client(main), strict=True)
            changes = self._by_client([None if a is None or b is None else a - b for a, b in pairs])
        rated = {one.name for one in self.task.metrics}
        accuracy = {name: one.accuracy for name, one in honest.items()} if ACCURACY.name in rated else {}
        by_client = scores[PERSONALIZED].per_client() if accuracy else [None] * len(self.evaluated)
        return Record(
            round=round_,
            minibatch_loss=self.minibatch_loss(trained),
            personalized_accuracy=accuracy.get(PERSONALIZED),
            local_accuracy=accuracy.get(LOCAL),
            global_accuracy=accuracy.get(GLOBAL),
            personalized_loss=honest[PERSONALIZED].mean_loss,
            global_loss=honest[GLOBAL].mean_loss if GLOBAL in honest else None,
            client_accuracy=self._by_client(by_client),
            uplink_bytes=ledger.uplink,
            downlink_bytes=ledger.downlink,
            participants=0 if trained is None else len(trained[0]),
            seconds=seconds,
            diagnostics=diagnostics,
            rejected=ledger.rejected,
            epsilon=epsilon,
            client_change=changes,
            validation_accuracy=accuracy.get(VALIDATION),
            client_choice=self._choices(store),
            personalized_train_loss=train.get(PERSONALIZED),
            global_train_loss=train.get(GLOBAL),
            received_accuracy=accuracy.get(RECEIVED),
            metrics=None if self.task.usual else {
                metric.name: {
                    "better": HIGHER if metric.higher else LOWER,
                    **{name: one.result(metric) for name, one in honest.items()},
                    "clients": self._by_client(scores[PERSONALIZED].per_client(metric)),
                }
                for metric in self.task.metrics
            },
        )  # fmt: skip

    @property
    def task(self) -> Task:
        """What the models are judged by."""
        return self.objective.task

    def _choices(self, store: Store) -> list[str | None] | None:
        """Return which model each evaluated client uses, by client id; None if the method offers no choice."""
        names = self.algorithm.candidates
        if not names:
            return None
        rows = store.rows(self.ranks.own(self.evaluated), (CHOICE,))
        numbers = self.ranks.gather(rows, self.evaluated)[CHOICE].flatten()
        return self._by_client([names[int(number)] if number >= 0 else None for number in numbers.tolist()])

    def _by_client(self, values: Sequence[T | None]) -> list[T | None]:
        """Return values of the evaluated clients by client id; None for the others."""
        found: list[T | None] = [None] * self.federation.clients
        for client, value in zip(self.evaluated.tolist(), values, strict=True):
            found[client] = value
        return found

    def minibatch_loss(self, trained: tuple[Tensor, Updates] | None) -> float | None:
        """Return the mean over honest clients of the last minibatch's loss; None if none trained."""
        if trained is None:
            return None
        clients, updates = trained
        losses = updates.metrics["loss"][self.honest[clients.cpu()].to(clients.device)]
        return float(losses.double().mean()) if len(losses) else None

    def _train_loss(self, parameters: Callable[[slice], Tensor]) -> float | None:
        return self._score(self.evaluated, parameters, self._on_training).of(self.honest[self.evaluated]).mean_loss

    @cached_property
    def _on_training(self) -> Federation:
        """The training samples, as test samples."""
        data = self.federation
        return replace(data, test_start=data.train_start, test_size=data.train_size)

    def _but_for(
        self, mine: Tensor, models: Callable[[slice], Tensor], known: Sequence[Known], clients: Tensor
    ) -> evaluate.Score:
        """Evaluate models of ``clients``, of which ``mine`` are on this rank; ``known`` are scores of others.

        A few clients are computed at a time, and those whose model equals one that has a score are not evaluated again.
        """
        place, pieces = self._places[mine], []
        for first in range(0, len(mine), AT_ONCE):
            some = slice(first, first + AT_ONCE)
            theta, ids = models(some), place[some]
            left, found = torch.ones(len(ids), dtype=torch.bool), []
            for score, scored in known:
                there = scored(some)
                same = left & (ids >= 0) & _equal_rows(theta, there)
                found += [(same.nonzero().flatten(), score.of(ids[same]).parts())]
                left &= ~same
            others = left.nonzero().flatten()
            if len(others):
                rows = theta if len(others) == len(left) else theta[others.to(theta.device)]
                found.append((others, self._part(mine[some][others], rows.__getitem__)))
            back = torch.cat([at for at, _ in found]).argsort()
            pieces.append({name: torch.cat([part[name] for _, part in found])[back] for name in found[0][1]})
        parts = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]} if pieces else None
        empty = self._part(mine, lambda _: self.objective.initial()[None]) if parts is None else parts
        return evaluate.Score.joined(self.ranks.gather(empty, clients))

    @cached_property
    def _places(self) -> Tensor:
        """The position of each client among those evaluated, ``(K,)``; -1 for the others."""
        return torch.full((self.federation.clients,), -1).index_copy(
            0, self.evaluated, torch.arange(len(self.evaluated))
        )

    def _local(self, clients: Tensor, updates: Updates, store: Store, personal: evaluate.Score) -> evaluate.Score:
        """Evaluate the models that clients upload; one that is also the client's personalized model is known."""
        clients = clients.cpu()
        private, upload = updates.private, self.ranks.part(updates.upload, clients)
        mine = self.ranks.own(clients)

        def local(some: slice) -> Tensor:
            return self.algorithm.local_model(_rows(private, some), _rows(upload, some))

        first_one = slice(0, 1)
        shared = len(mine) > 0 and _same(local(first_one), self.algorithm.personalized(_rows(private, first_one)))

        def personalized(some: slice) -> Tensor:
            return self.algorithm.personalized(_rows(private, some) if shared else store.view(mine[some]))

        return self._but_for(mine, local, [(personal, personalized)], clients)

    def _score(
        self, clients: Tensor, parameters: Callable[[slice], Tensor], data: Federation | None = None
    ) -> evaluate.Score:
        """Evaluate clients, each on the rank that holds it; ``parameters`` returns those of a range of this rank's."""
        return evaluate.Score.joined(self.ranks.gather(self._part(self.ranks.own(clients), parameters, data), clients))

    def _part(
        self, clients: Tensor, parameters: Callable[[slice], Tensor], data: Federation | None = None
    ) -> dict[str, Tensor]:
        """Return the parts of the scores of clients of this rank."""
        data = self.federation if data is None else data
        own = clients.to(self.federation.device)
        return evaluate.score(self.objective, parameters, data, own, self._samples_at_once).parts()

    @cached_property
    def _samples_at_once(self) -> int:
        return evaluate.samples_at_once(self.objective, self.federation)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both are the same memory, as of a method whose clients upload what they keep."""
    return one.data_ptr() == other.data_ptr() and (one.shape, one.stride()) == (other.shape, other.stride())


def _equal_rows(one: Tensor, other: Tensor) -> Tensor:
    """Return which rows ``(K, P)`` are equal, ``(K,)`` on the CPU; most that are not differ near their start."""
    if _same(one, other):
        return torch.ones(len(one), dtype=torch.bool)
    other = other.expand_as(one)
    equal = (one[:, :FEW] == other[:, :FEW]).all(-1)
    if equal.any():
        equal[equal.clone()] = (one[equal] == other[equal]).all(-1)
    return equal.cpu()


def _rows(state: State, rows: slice | Tensor) -> State:
    return {name: value[rows] for name, value in state.items()}
