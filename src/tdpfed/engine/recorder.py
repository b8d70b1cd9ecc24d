"""Records of a run: after a round, the accuracies of personalized, local and global models, and the bytes sent."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.objective import Objective
from tdpfed.core.state import State
from tdpfed.data.federation import Federation
from tdpfed.engine import evaluate
from tdpfed.engine.ranks import Ranks
from tdpfed.engine.runners import Updates
from tdpfed.engine.store import Store
from tdpfed.server.records import Ledger, Record


@dataclass(frozen=True)
class Recorder:
    """Evaluates the models of one run; hostile clients are listed but left out of mean accuracies."""

    objective: Objective
    algorithm: Algorithm
    federation: Federation
    honest: Tensor  # (K,) bool, which clients count in means
    evaluated: Tensor  # ids of the clients whose models are evaluated
    ranks: Ranks

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
        personal = self._score(self.evaluated, lambda some: self.algorithm.personalized(store.rows(mine[some])))
        honest = personal.of(self.honest[self.evaluated])
        local = None if trained is None else self._local(*trained)
        shipped = self.algorithm.global_model(server)
        common = None
        if shipped is not None:
            common = self._score(self.evaluated, lambda _: shipped).of(self.honest[self.evaluated])
        accuracies: list[float | None] = [None] * self.federation.clients
        for client, accuracy in zip(self.evaluated.tolist(), personal.per_client(), strict=True):
            accuracies[client] = accuracy
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
        )

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

    def _score(self, clients: Tensor, parameters: Callable[[slice], Tensor]) -> evaluate.Score:
        """Evaluate clients, each on the rank that holds it; ``parameters`` returns those of a range of this rank's."""
        own = self.ranks.own(clients).to(self.federation.device)
        part = evaluate.score(self.objective, parameters, self.federation, own, self._samples_at_once)
        return evaluate.Score(**self.ranks.gather(vars(part), clients))

    @cached_property
    def _samples_at_once(self) -> int:
        return evaluate.samples_at_once(self.objective, self.federation)


def _rows(state: State, rows: slice) -> State:
    return {name: value[rows] for name, value in state.items()}
