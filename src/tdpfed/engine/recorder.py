"""Records of a run: after a round, the accuracies of personalized, local and global models, and the bytes sent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from tdpfed.algorithms.base import CHOICE, Algorithm
from tdpfed.core.objective import Objective
from tdpfed.core.state import State
from tdpfed.data.federation import Federation
from tdpfed.engine import evaluate
from tdpfed.engine.ranks import Ranks
from tdpfed.engine.store import Store
from tdpfed.engine.updates import Updates
from tdpfed.server.records import Ledger, Record

T = TypeVar("T")


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
    ) -> Record:
        """Return the record after a round; ``trained`` are the clients of that round with their results."""
        mine = self.ranks.own(self.evaluated)
        own = self.algorithm.personalized
        personal = self._score(self.evaluated, lambda some: own(store.rows(mine[some])))
        validated = None
        if self.held_out is not None:
            validated = self._score(self.evaluated, lambda some: own(store.rows(mine[some])), self.held_out)
        honest = personal.of(self.honest[self.evaluated])
        local = None if trained is None else self._local(*trained)
        shipped = self.algorithm.global_model(server)
        common = changes = None
        accuracies = self._by_client(personal.per_client())
        if shipped is not None:
            everybody = self._score(self.evaluated, lambda _: shipped)
            common = everybody.of(self.honest[self.evaluated])
            if self.algorithm.reports_change:
                pairs = zip(personal.per_client(), everybody.per_client(), strict=True)
                changes = self._by_client([None if a is None or b is None else a - b for a, b in pairs])
        return Record(
            round=round_,
            loss=self.train_loss(trained),
            personalized_accuracy=honest.accuracy,
            local_accuracy=None if local is None else local.accuracy,
            global_accuracy=None if common is None else common.accuracy,
            personalized_loss=honest.mean_loss,
            global_loss=None if common is None else common.mean_loss,
            client_accuracy=accuracies,
            uplink_bytes=ledger.uplink,
            downlink_bytes=ledger.downlink,
            participants=0 if trained is None else len(trained[0]),
            seconds=seconds,
            diagnostics=diagnostics,
            rejected=ledger.rejected,
            epsilon=epsilon,
            client_change=changes,
            validation_accuracy=None if validated is None else validated.of(self.honest[self.evaluated]).accuracy,
            client_choice=self._choices(store),
        )

    def _choices(self, store: Store) -> list[str | None] | None:
        """Return which model each evaluated client uses, by client id; None if the method offers no choice."""
        names = self.algorithm.candidates
        if not names:
            return None
        rows = store.rows(self.ranks.own(self.evaluated), (CHOICE,))
        numbers = self.ranks.gather(rows, self.evaluated)[CHOICE].flatten()
        return self._by_client([names[int(number)] for number in numbers.tolist()])

    def _by_client(self, values: Sequence[T]) -> list[T | None]:
        """Return values of the evaluated clients by client id; None for the others."""
        found: list[T | None] = [None] * self.federation.clients
        for client, value in zip(self.evaluated.tolist(), values, strict=True):
            found[client] = value
        return found

    def train_loss(self, trained: tuple[Tensor, Updates] | None) -> float | None:
        """Return the mean over honest clients of the last minibatch's loss; None if none trained."""
        if trained is None:
            return None
        clients, updates = trained
        losses = updates.metrics["loss"][self.honest[clients.cpu()].to(clients.device)]
        return float(losses.double().mean()) if len(losses) else None

    def _local(self, clients: Tensor, updates: Updates) -> evaluate.Score:
        clients = clients.cpu()
        private, upload = updates.private, self.ranks.part(updates.upload, clients)
        local = self._score(clients, lambda some: self.algorithm.local_model(_rows(private, some), _rows(upload, some)))
        return local.of(self.honest[clients])

    def _score(
        self, clients: Tensor, parameters: Callable[[slice], Tensor], data: Federation | None = None
    ) -> evaluate.Score:
        """Evaluate clients, each on the rank that holds it; ``parameters`` returns those of a range of this rank's."""
        own = self.ranks.own(clients).to(self.federation.device)
        data = self.federation if data is None else data
        part = evaluate.score(self.objective, parameters, data, own, self._samples_at_once)
        return evaluate.Score(**self.ranks.gather(vars(part), clients))

    @cached_property
    def _samples_at_once(self) -> int:
        return evaluate.samples_at_once(self.objective, self.federation)


def _rows(state: State, rows: slice) -> State:
    return {name: value[rows] for name, value in state.items()}
