"""The round loop: choose clients, run them, aggregate, evaluate; it yields a record per evaluated round."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm, State, Turn
from tdpfed.core.draws import Stream, choose, key
from tdpfed.core.objective import Loss, Objective, cross_entropy
from tdpfed.data.federation import Federation
from tdpfed.engine import checks, evaluate
from tdpfed.engine.attacks import attackers, flip_labels
from tdpfed.engine.diagnostics import Diagnostics, defined_for, diagnose
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.ranks import ALONE, Ranks
from tdpfed.engine.runners import Outcome, Runner, RunnerName
from tdpfed.engine.store import Place, Store
from tdpfed.errors import TDPFedError
from tdpfed.server.gate import Attack, Uplink, accepted
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant, Privacy, private_average
from tdpfed.server.records import Ledger, Record, due
from tdpfed.server.robust import Rule, average_for
from tdpfed.wire import Codec, Rejected
from tdpfed.wire.meter import Meter, dense_bytes

EVERYBODY = Participation()
MEAN = Rule()


class Simulation:
    """A federated run in progress: the server's and all clients' state, and what advances it by a round."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: Algorithm,
        *,
        seed: int = 0,
        participation: Participation = EVERYBODY,
        runner: RunnerName = "batched",
        chunk: int | None = None,
        loss: Loss = cross_entropy,
        diagnostics: Diagnostics | None = None,
        codec: Codec = "float32",
        rule: Rule = MEAN,
        attack: Attack | None = None,
        privacy: Privacy | None = None,
        precision: Precision = "float32",
        evaluate_clients: int | None = None,
        state: Place = "auto",
        state_folder: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        checks.check_kinds(model, federation, algorithm, participation, loss)
        checks.check_settings(
            seed, runner, chunk, precision, participation, rule, federation.clients, evaluate_clients, ranks
        )
        # A copy, where the data are: the caller's model stays as it is.
        self.objective = Objective.of(copy.deepcopy(model).to(federation.x), loss, short=precision == "bf16")
        hostile = attackers(seed, federation.clients, 0 if attack is None else attack.fraction)
        self.honest = ~hostile  # whose accuracy counts
        if attack is not None and attack.kind == "label-flip":
            federation = flip_labels(federation, hostile)
        self.algorithm = algorithm.bind(self.objective.layout)
        self.seed, self.participation, self.diagnostics = seed, participation, diagnostics
        self.uplink = Uplink(self.algorithm, federation.clients, seed, codec, rule, attack)
        if diagnostics is not None:
            defined_for(self.algorithm)
            if ranks.world > 1:
                raise TDPFedError("run.diagnostics_every: must be 0 in several processes: it needs all clients in one")
        checks.check_model(self.objective, federation)
        self.accountant: Accountant | None = None
        self._within_budget = 0  # rounds that are known to be
        if privacy is not None:
            checks.check_privacy(self.algorithm, participation, self.uplink, federation.clients)
            self.accountant = Accountant(privacy, (participation.clients or federation.clients) / federation.clients)
            self.accountant.check_affordable(1)
        self.ranks = ranks
        if ranks.world > 1:
            federation = federation.only(ranks.own(torch.arange(federation.clients)))
        self.federation = federation
        self.runner = Runner(self.algorithm, self.objective, federation, runner, chunk, precision=precision)
        theta = self.objective.initial()
        generator = torch.Generator().manual_seed(int(key(seed, Stream.INIT)))
        self.server: State = self.algorithm.init(theta, generator)
        shipped = self.algorithm.global_model(self.server)
        start = theta if shipped is None else shipped  # the model both sides know before round 1
        own = self.algorithm.init_private(start)
        self.store = Store(own, federation.clients, state, state_folder, ranks)
        self.judged = torch.arange(federation.clients)  # whose models are evaluated
        if evaluate_clients is not None:
            self.judged = choose(seed, Stream.EVALUATE, 0, federation.clients, evaluate_clients)
        self.round = 0
        self.ledger, self.meter = Ledger(), Meter(self.algorithm, codec, federation.train_size)
        self.refused: list[Rejected] = []  # in the last round that was tried
        self._trained: tuple[Tensor, Outcome] | None = None

    def run(self, rounds: int, evaluate_every: int = 1) -> Iterator[Record]:
        """Advance by ``rounds`` rounds; yield a record every ``evaluate_every`` rounds and after the last.

        Rounds whose diagnostics were asked for have a record too. A privacy budget may end it sooner
        (:meth:`affordable`).
        """
        for name, value in (("rounds", rounds), ("evaluate_every", evaluate_every)):
            if not isinstance(value, int) or value < 1:
                raise TDPFedError(f"{name}: {value!r} given, must be a whole number of at least 1")
        began, last = time.perf_counter(), self.affordable(self.round + rounds)
        while self.round < last:
            self.step()
            if self.due(evaluate_every, self.round == last):
                yield self.record(time.perf_counter() - began)

    def due(self, evaluate_every: int, last: bool) -> bool:
        """Whether the round that was just run is to be recorded: every so many, the last, and those diagnosed."""
        return due(self.round, evaluate_every, last) or self._diagnosed

    def step(self, outcome: Outcome | None = None) -> None:
        """Run one communication round; it counts when it is done.

        ``outcome`` is what the clients of :meth:`next_turn` came to, if that is known already. With too few uploads
        nothing changes but the ledger: the round is repeated with other draws, or the run stops. A round in which
        nobody is left and no quorum is asked for changes nothing either, and counts.
        """
        if self.accountant is not None and self.round >= self._within_budget:
            self.accountant.check_affordable(self.round + 1)
        self.refused = []
        for attempt in range(self.participation.attempts):
            done, uploads = self._attempt(attempt, None if attempt else outcome)
            if done:
                self.round += 1
                return
            repeat = self.participation.below_quorum == "repeat"
            if not repeat or not self.participation.draws(self.federation.clients):
                break
        raise checks.below_quorum(
            self.round + 1, attempt + 1, uploads, self.participation, self.uplink.rule, self.refused
        )

    def next_turn(self, attempt: int = 0) -> tuple[Turn, Tensor]:
        """Return the clients that train in the next round, and which of them report, a mask."""
        if not self.participation.draws(self.federation.clients):
            return self._turn(self.round + 1, self._everybody), torch.ones(len(self._everybody), dtype=torch.bool)
        chosen, trained = self.participation.draw(self.seed, self.round + 1, self.federation.clients, attempt)
        return self._turn(self.round + 1, trained), torch.isin(trained, chosen)

    def _attempt(self, attempt: int, outcome: Outcome | None) -> tuple[bool, int]:
        """Try a round; return whether it is done, and how many uploads were accepted."""
        turn, reported = self.next_turn(attempt)
        with self.runner.around_groups(len(turn.clients)):
            return self._exchanged(turn, reported, outcome)

    def _exchanged(self, turn: Turn, reported: Tensor, outcome: Outcome | None) -> tuple[bool, int]:
        """Train the turn's clients, unless that is done, and take in what those who ``reported`` send."""
        if len(turn.clients):
            outcome = self._train(turn) if outcome is None else outcome
            checks.check_finite(outcome, turn, self.algorithm, self.uplink.attack)
        server, count = self.server, 0
        if self.algorithm.communicates:
            arrived = self._arrived(outcome, turn, reported)
            count = 0 if arrived is None else len(arrived[1].clients)
            if count < self.participation.quorum or not self.uplink.rule.enough(count):
                return False, count
            server = self._aggregated(arrived, turn)
        if outcome is not None:
            self.store.put(turn.clients, outcome.private, partial(self.runner.spread, participants=len(turn.clients)))
        self.server, self._trained = server, None if outcome is None else (turn.clients, outcome)
        return True, count

    def _train(self, turn: Turn) -> Outcome:
        """Run the turn's clients; of their private state only the rows of this process's own are returned."""
        own = replace(turn, clients=self.ranks.own(turn.clients))
        part = None
        if len(own.clients):
            part = self.runner.run(self.server, self.store.rows(own.clients), own, len(turn.clients))
        return self.ranks.shared(part, turn.clients)

    def record(self, seconds: float) -> Record:
        """Evaluate the models after the current round; hostile clients' accuracy is listed but does not count."""
        with arithmetic(self.runner.precision):
            return self._record(seconds)

    def _record(self, seconds: float) -> Record:
        mine = self.ranks.own(self.judged)
        personal = self._score(self.judged, lambda some: self.algorithm.personalized(self.store.rows(mine[some])))
        honest, own = personal.of(self.honest[self.judged]), None
        if self._trained is not None:
            clients, outcome = self._trained[0].cpu(), self._trained[1]
            private, upload = outcome.private, self.ranks.part(outcome.upload, clients)
            local = self._score(
                clients, lambda some: self.algorithm.local_model(_cut(private, some), _cut(upload, some))
            )
            own = local.of(self.honest[clients])
        shipped = self.global_model()
        common = None
        if shipped is not None:
            common = self._score(self.judged, lambda _: shipped).of(self.honest[self.judged])
        extra = None
        if self.diagnostics is not None and self._diagnosed:
            turn = self._turn(self.round, self._everybody)
            weights = self._weights(self._everybody)
            extra = diagnose(self.runner, self.server, self.private, turn, weights, self.diagnostics)
        accuracies: list[float | None] = [None] * self.federation.clients
        for client, accuracy in zip(self.judged.tolist(), personal.per_client(), strict=True):
            accuracies[client] = accuracy
        return Record(
            round=self.round,
            loss=self.train_loss,
            personalized_accuracy=honest.accuracy,
            local_accuracy=None if own is None else own.accuracy,
            global_accuracy=None if common is None else common.accuracy,
            personalized_loss=honest.mean_loss,
            global_loss=None if common is None else common.mean_loss,
            client_accuracy=accuracies,
            uplink_bytes=self.ledger.uplink,
            downlink_bytes=self.ledger.downlink,
            participants=len(self.trained),
            seconds=seconds,
            diagnostics=extra,
            rejected=self.ledger.rejected,
            epsilon=self.epsilon,
        )

    def _score(self, clients: Tensor, parameters: Callable[[slice], Tensor]) -> evaluate.Score:
        """Score clients, each where it is held; ``parameters`` gives those of a range of this process's own."""
        own = self.ranks.own(clients).to(self.federation.device)
        part = evaluate.score(self.objective, parameters, self.federation, own, self._samples_at_once)
        return evaluate.Score(**self.ranks.gather(vars(part), clients))

    def affordable(self, rounds: int) -> int:
        """Return how many rounds, of ``rounds`` from the start, the privacy budget allows."""
        budget = None if self.accountant is None else self.accountant.privacy.epsilon
        if self.accountant is None or budget is None:
            return rounds
        self._within_budget = self.accountant.rounds_within(budget, rounds)
        return self._within_budget

    @property
    def epsilon(self) -> float | None:
        """The privacy spent so far: every round released a global model, also one in which nobody took part."""
        return None if self.accountant is None else self.accountant.epsilon(self.round)

    @property
    def private(self) -> State:
        """What every client keeps, ``(K, ...)`` for each entry; of several processes each has its own clients' rows."""
        return self.store.whole()

    def personalized(self) -> Tensor:
        """Return every client's personalised parameters, ``(K, P)``."""
        return self.algorithm.personalized(self.private)

    def global_model(self) -> Tensor | None:
        """Return the parameters the server would ship, ``(P,)``; None if the method has none."""
        return self.algorithm.global_model(self.server)

    @property
    def trained(self) -> Tensor:
        """Ids of the clients that trained in the last round."""
        return torch.arange(0) if self._trained is None else self._trained[0]

    @property
    def compression_rate(self) -> float | None:
        """Bytes of a message with the dense model over those of a client's upload; None if nothing was uploaded."""
        return self.ledger.compression_rate(dense_bytes(self.objective.layout))

    @property
    def train_loss(self) -> float | None:
        """The mean over honest clients of the last minibatch's loss; None if none trained."""
        if self._trained is None:
            return None
        clients, outcome = self._trained
        losses = outcome.metrics["loss"][self.honest[clients.cpu()].to(clients.device)]
        return float(losses.double().mean()) if len(losses) else None

    @cached_property
    def _samples_at_once(self) -> int:
        return evaluate.samples_at_once(self.objective, self.federation)

    @property
    def _diagnosed(self) -> bool:
        return self.diagnostics is not None and self.round % self.diagnostics.every == 0

    def _turn(self, number: int, clients: Tensor) -> Turn:
        return Turn(self.seed, number, clients.to(self.federation.device))

    def _arrived(self, outcome: Outcome | None, turn: Turn, reported: Tensor) -> tuple[State, Turn] | None:
        """Return the uploads the gate accepted of those who ``reported``, a mask over the turn's clients."""
        if outcome is None:
            return None
        self._count(turn, outcome, reported)
        if not bool(reported.any()):
            return None
        sent, senders = self._only(outcome.upload, turn, reported)
        uploads = self.uplink.travel(sent, self.server, senders)
        refused = self.uplink.refusals(uploads, self.server, senders, finite=uploads is sent)
        self.refused += refused
        self.ledger.rejected += len(refused)
        return self._only(uploads, senders, accepted(senders, refused)) if refused else (uploads, senders)

    def _aggregated(self, arrived: tuple[State, Turn] | None, turn: Turn) -> State:
        center = self.algorithm.center(self.server)
        if self.accountant is not None:  # also where nobody came, which is nobody's business
            cohort = self.accountant.rate * self.federation.clients
            average = private_average(self.accountant.privacy, center, cohort, self.seed, int(turn.round))
            nobody = replace(turn, clients=turn.clients[:0])
            uploads, senders = arrived or (self.algorithm.broadcast(self.server, nobody), nobody)
        elif arrived is None or not len(arrived[1].clients):
            return self.server
        else:
            average, (uploads, senders) = average_for(self.uplink.rule, center), arrived
        return self.algorithm.aggregate(self.server, uploads, self._weights(senders.clients), senders, average)

    def _only(self, uploads: State, turn: Turn, mask: Tensor) -> tuple[State, Turn]:
        if bool(mask.all()):
            return uploads, turn
        mask = mask.to(turn.clients.device)
        return {name: value[mask] for name, value in uploads.items()}, replace(turn, clients=turn.clients[mask])

    def _weights(self, clients: Tensor) -> Tensor:
        sizes = self.federation.train_size[clients].double()
        return sizes if self.algorithm.weights == "samples" else torch.ones_like(sizes)

    @cached_property
    def _everybody(self) -> Tensor:
        return torch.arange(self.federation.clients, device=self.federation.device)

    def _count(self, turn: Turn, outcome: Outcome, reported: Tensor) -> None:
        """Add to the ledger exactly the bytes of the messages, headers included."""
        message = self.algorithm.broadcast(self.server, replace(turn, clients=turn.clients[:1]))
        everybody = turn.clients is self._everybody
        down, up = self.meter.sizes(message, outcome.upload, turn, reported, everybody=everybody)
        self.ledger.downlink += down
        self.ledger.uplink += up
        self.ledger.client_rounds += len(turn.clients)
        self.ledger.uploads += int(reported.sum())

    def resume_from(self, round_: int, server: State, store: Store, ledger: Ledger) -> None:
        """Continue from the state after a round; the tensors and the ledger become the simulation's own."""
        self.round, self.server, self.store, self.ledger, self._trained = round_, server, store, ledger, None


def _cut(state: State, rows: slice) -> State:
    return {name: value[rows] for name, value in state.items()}
