"""A simulated federation: the state of the server and of all clients, advanced round by round."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm, held_out_of
from tdpfed.core.draws import Stream, choose
from tdpfed.core.losses import LossFunction
from tdpfed.core.metrics import Function, Metric
from tdpfed.core.objective import Objective
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import State, Turn, own_entries, wire_entries
from tdpfed.core.tasks import Task
from tdpfed.data.federation import Federation
from tdpfed.engine import checks
from tdpfed.engine.attacks import Attack, attackers, flip_labels
from tdpfed.engine.delivery import Delivered, Delivery
from tdpfed.engine.diagnostics import Diagnostics, defined_for, diagnose
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.public import public_sample, sample_bytes
from tdpfed.engine.recorder import Recorder
from tdpfed.engine.runners import Runner, RunnerName
from tdpfed.engine.store import Place, Store
from tdpfed.engine.updates import Updates
from tdpfed.engine.uplink import Down, Uplink
from tdpfed.errors import TDPFedError
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant, Privacy
from tdpfed.server.records import Ledger, Record, due
from tdpfed.server.robust import Rule
from tdpfed.server.round import ServerRound, initial_state
from tdpfed.server.step import AVERAGE, ServerStep
from tdpfed.wire import PLAIN, Rejected, Wire
from tdpfed.wire.channel import Channel
from tdpfed.wire.downlink import Broadcast, Downlink
from tdpfed.wire.forms import dense_bytes

EVERYBODY = Participation()
MEAN = Rule()


class Simulation:
    """A federated run in progress: the state of the server and of all clients, advanced round by round."""

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
        loss: str | LossFunction = "auto",
        metrics: Sequence[str | Metric | Function] = (),
        train_loss: bool = False,
        received: bool = False,
        diagnostics: Diagnostics | None = None,
        wire: Wire = PLAIN,
        rule: Rule = MEAN,
        server_step: ServerStep = AVERAGE,
        optimizer: Optimizer = USUAL,
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
        # A copy on the data's device: the caller's model does not change.
        dtype = federation.x.dtype if federation.x.is_floating_point() else None
        task = Task.of(loss, metrics, federation.targets)
        self.objective = Objective.of(
            copy.deepcopy(model).to(federation.device, dtype), task, short=precision == "bf16", inputs=federation.inputs
        )
        hostile = attackers(seed, federation.clients, 0 if attack is None else attack.fraction)
        self.honest = ~hostile  # only honest clients count in mean accuracies
        if attack is not None and attack.kind == "label-flip":
            federation = flip_labels(federation, hostile)
        most = int(federation.train_size.max()) if algorithm.per_sample else 0
        self.algorithm = algorithm.bind(self.objective.layout, federation.clients, most)
        checks.check_needs(self.algorithm, federation, rule, self.objective, participation)
        self.seed, self.diagnostics, self.ranks = seed, diagnostics, ranks
        self.channel, self.downlink = Channel(self.algorithm, wire, seed), Downlink(self.algorithm, wire, seed)
        self.uplink = Uplink(self.channel, federation.clients, attack, ranks)
        self._down = Down(self.downlink)
        server_step.check(self.algorithm)
        optimizer.check_for(self.algorithm.name, self.algorithm.follows)
        if diagnostics is not None:
            defined_for(self.algorithm)
            if ranks.world > 1:
                raise TDPFedError("run.diagnostics_every: must be 0 in several processes, it needs all clients in one")
        self.objective, self.notes = checks.checked_model(self.objective, federation)
        runner = "loop" if self.objective.alone else runner
        self.accountant: Accountant | None = None
        self._affordable_rounds = 0  # rounds known to be within the privacy budget
        if privacy is not None:
            checks.check_privacy(self.algorithm, participation, rule, attack, federation.clients)
            self.accountant = Accountant(privacy, (participation.clients or federation.clients) / federation.clients)
            self.accountant.check_affordable(1)
        self.server_round = ServerRound(self.algorithm, seed, participation, rule, self.accountant, server_step)
        self.public = public_sample(self.algorithm, federation, seed)  # before other clients' samples are left out
        share = held_out_of(self.algorithm, federation.validation)
        held_out = federation.held_out(seed, share.share) if share.share and share.until is None else None
        if ranks.world > 1:
            own = ranks.own(torch.arange(federation.clients))
            federation, held_out = federation.only(own), None if held_out is None else held_out.only(own)
        self.federation = federation
        self.runner = Runner(
            self.algorithm, self.objective, federation, runner, chunk, precision=precision, public=self.public,
            optimizer=optimizer,
        )  # fmt: skip
        server, start = initial_state(self.algorithm, self.objective.initial(), seed)
        kept = server_step.start(server, self.algorithm) | self.downlink.start(server) | self.server_round.start(server)
        self.server = server | kept
        private = self.algorithm.init_private(start) | self.channel.start(start)
        self.store = Store(private, federation.clients, state, state_folder, ranks)
        evaluated = torch.arange(federation.clients)
        if evaluate_clients is not None:
            evaluated = choose(seed, Stream.EVALUATE, 0, federation.clients, evaluate_clients)
        self.recorder = Recorder(
            self.objective, self.algorithm, federation, self.honest, evaluated, ranks, held_out, train_loss, received
        )
        self.round = 0
        self.ledger = Ledger()
        self.refused: list[Rejected] = []  # uploads refused in the latest round, all its attempts together
        self._trained: tuple[Tensor, Updates] | None = None
        self._broadcast: Broadcast | None = None  # of the next round, if computed

    def run(
        self, rounds: int, evaluate_every: int = 1, on_round: Callable[["Simulation"], None] | None = None
    ) -> Iterator[Record]:
        """Advance by ``rounds`` rounds; yield a record every ``evaluate_every`` rounds and after the last.

        Rounds with diagnostics have a record too. A privacy budget may end the run sooner (:meth:`affordable`).
        ``on_round`` is called after each round, and after its record if it has one.
        """
        for name, value in (("rounds", rounds), ("evaluate_every", evaluate_every)):
            if not isinstance(value, int) or value < 1:
                raise TDPFedError(f"{name}: {value!r} given, must be a whole number of at least 1")
        began, last = time.perf_counter(), self.affordable(self.round + rounds)
        while self.round < last:
            self.step()
            if self.due(evaluate_every, self.round == last):
                yield self.record(time.perf_counter() - began)
            if on_round is not None:
                on_round(self)

    def due(self, evaluate_every: int, last: bool) -> bool:
        """Whether to record this round: every ``evaluate_every`` rounds, the last, and those with diagnostics."""
        return due(self.round, evaluate_every, last) or self._diagnosed

    def step(self, updates: Updates | None = None) -> None:
        """Run one communication round.

        ``updates`` are the results of the clients of :meth:`next_turn`, if they are already computed. With too few
        uploads only the ledger changes, and the round is repeated with other draws or the run stops. A round without
        any participant changes nothing but counts as done, unless a quorum is required.
        """
        if self.accountant is not None and self.round >= self._affordable_rounds:
            self.accountant.check_affordable(self.round + 1)
        self.refused = []
        for attempt in range(self.participation.attempts):
            done, uploads = self._attempt(attempt, None if attempt else updates)
            if done:
                self.round += 1
                return
            repeat = self.participation.below_quorum == "repeat"
            if not repeat or not self.participation.draws(self.federation.clients):
                break
        raise self.server_round.below_quorum(self.round + 1, attempt + 1, uploads, self.refused)

    def next_turn(self, attempt: int = 0) -> tuple[Turn, Tensor]:
        """Return the clients that train in the next round, and a mask of those that upload."""
        if not self.participation.draws(self.federation.clients):
            return self._turn(self.round + 1, self._everybody), torch.ones(len(self._everybody), dtype=torch.bool)
        size, number = self.federation.train_size, self.round + 1
        chosen, trained = self.participation.draw(self.seed, number, self.federation.clients, attempt, size)
        return self._turn(self.round + 1, trained), torch.isin(trained, chosen)

    @property
    def participation(self) -> Participation:
        """Who takes part in a round."""
        return self.server_round.participation

    def _attempt(self, attempt: int, updates: Updates | None) -> tuple[bool, int]:
        """Try a round; return whether it succeeded, and how many uploads were accepted."""
        turn, reported = self.next_turn(attempt)
        with self.runner.around_groups(len(turn.clients)):
            return self._train_and_aggregate(turn, reported, updates)

    def _train_and_aggregate(self, turn: Turn, reported: Tensor, updates: Updates | None) -> tuple[bool, int]:
        """Train the turn's clients, unless ``updates`` are given, and aggregate the uploads of those in the mask."""
        kept: State = {}
        if len(turn.clients):
            updates = self._train(turn) if updates is None else updates
            if names := tuple(wire_entries(self.store.start)):
                kept = self.store.rows(turn.clients, names)
        server, count = self.server, 0
        with checks.finite(updates, turn, self.algorithm, self.uplink.attack):
            found = self._delivered(updates, turn, reported, kept) if self.algorithm.communicates else None
        if found is not None:
            kept, count = found.kept, len(found.senders.clients)
            self._count(turn, reported, found.refused)
            if not self.server_round.enough(count):
                return False, count
            self.server_round.watch(self.ledger, self.round + 1, count, found.refused)
            samples, senders = self.uplink.declared(self.federation.train_size), found.senders.clients
            samples = samples if senders is self._everybody else samples[senders]
            server = self.server_round.aggregate(self.server, found.uploads, samples, found.senders)
            server |= self.downlink.received(self.broadcast.memory, turn.clients, self.round + 1)
        if updates is not None:
            spread = partial(self.runner.spread, participants=len(turn.clients))
            self.store.put(turn.clients, updates.private | kept, spread)
        self.server, self._broadcast = server, None
        self._trained = None if updates is None else (turn.clients, updates)
        return True, count

    @property
    def broadcast(self) -> Broadcast:
        """The server's message of the next round."""
        self._broadcast = self._broadcast or self._down.broadcast(self.server)
        return self._broadcast

    def _train(self, turn: Turn) -> Updates:
        """Run the turn's clients; the private state returned covers only the clients of this process."""
        own = replace(turn, clients=self.ranks.own(turn.clients))
        part = None
        if len(own.clients):
            part = self.runner.run(self.broadcast.known, self.own_rows(own.clients), own, len(turn.clients))
        return self.ranks.shared(part, turn.clients)

    def own_rows(self, clients: Tensor) -> State:
        """Return the clients' rows of the method's private state."""
        return self.store.rows(clients, tuple(own_entries(self.store.start)))

    def _delivered(self, updates: Updates | None, turn: Turn, reported: Tensor, kept: State) -> Delivered:
        """Return the accepted uploads, their senders and the refusals; the mask ``reported`` says who uploads."""
        if updates is None or not bool(reported.any()):
            return Delivered(*self.server_round.no_uploads(self.server, turn), kept, [])
        path = Delivery(self.uplink, self.downlink, self.server_round, self.server, self.broadcast.known)
        return path.deliver(updates.upload, turn, reported, kept)

    def _count(self, turn: Turn, reported: Tensor, refused: list[Rejected]) -> None:
        """Add the exact sizes of the round's messages, headers included, to the ledger; a refused one was sent too."""
        self.refused += refused
        self.ledger.rejected += len(refused)
        if not len(turn.clients):
            return
        if self.public is not None and not self.ledger.client_rounds:  # collected and sent to all before round 1
            size = sample_bytes(self.public)
            self.ledger.uplink += size
            self.ledger.downlink += size * self.federation.clients
        uploads = int(reported.sum())
        self.ledger.downlink += self.downlink.bytes(self.server, turn.clients, self.round + 1)
        self.ledger.uplink += uploads * self.channel.form.bytes
        self.ledger.client_rounds += len(turn.clients)
        self.ledger.uploads += uploads

    def record(self, seconds: float) -> Record:
        """Evaluate the models after the current round."""
        with arithmetic(self.runner.precision):
            extra = None
            if self.diagnostics is not None and self._diagnosed:
                turn = self._turn(self.round, self._everybody)
                weights = self.server_round.weights(self.federation.train_size)
                extra = diagnose(self.runner, own_entries(self.server), self.private, turn, weights, self.diagnostics)
            return self.recorder.record(
                self.round, self.server, self.store, self._trained, self.ledger, seconds,
                epsilon=self.epsilon, diagnostics=extra, receive=self.received,
            )  # fmt: skip

    def received(self, clients: Tensor) -> Tensor:
        """Return the parameters ``(n, P)`` that clients use once they have the message of the next round."""
        return self.runner.receive(self.broadcast.known, self.own_rows(clients), self._turn(self.round + 1, clients))

    def affordable(self, rounds: int) -> int:
        """Return how many of the first ``rounds`` rounds of the run fit in the privacy budget."""
        budget = None if self.accountant is None else self.accountant.privacy.epsilon
        if self.accountant is None or budget is None:
            return rounds
        self._affordable_rounds = self.accountant.rounds_within(budget, rounds)
        return self._affordable_rounds

    @property
    def epsilon(self) -> float | None:
        """The privacy spent so far: every round releases a global model, even one without participants."""
        return None if self.accountant is None else self.accountant.epsilon(self.round)

    @property
    def private(self) -> State:
        """The private state of all clients of this process, ``(K, ...)`` for each entry."""
        return self.store.whole()

    def personalized(self) -> Tensor:
        """Return every client's personalized parameters, ``(K, P)``."""
        return self.algorithm.personalized(self.private)

    def global_model(self) -> Tensor | None:
        """Return the parameters of the global model, ``(P,)``; None if the method has none."""
        return self.algorithm.global_model(self.server)

    @property
    def trained(self) -> Tensor:
        """Ids of the clients that trained in the last round."""
        return torch.arange(0) if self._trained is None else self._trained[0]

    @property
    def compression_rate(self) -> float | None:
        """Size of a message with the dense model over the size of a client's upload; None if nothing was uploaded."""
        return self.ledger.compression_rate(dense_bytes(self.objective.layout))

    @property
    def minibatch_loss(self) -> float | None:
        """The mean over honest clients of the last minibatch's loss; None if none trained."""
        return self.recorder.minibatch_loss(self._trained)

    @property
    def _diagnosed(self) -> bool:
        return self.diagnostics is not None and self.round % self.diagnostics.every == 0

    def _turn(self, number: int, clients: Tensor) -> Turn:
        return Turn(self.seed, number, clients.to(self.federation.device))

    @cached_property
    def _everybody(self) -> Tensor:
        return torch.arange(self.federation.clients, device=self.federation.device)

    def resume_from(self, round_: int, server: State, store: Store, ledger: Ledger) -> None:
        """Continue from the state after a round; the simulation takes ownership of the tensors and the ledger."""
        self.round, self.server, self.store, self.ledger, self._trained = round_, server, store, ledger, None
        self._broadcast = None
