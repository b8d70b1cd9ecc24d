"""The round loop: choose clients, run them, aggregate, evaluate; it yields a record per evaluated round."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tdpfed.aggregate import Rule, average_for
from tdpfed.algorithms.base import Algorithm, State, Turn
from tdpfed.data.federation import Federation
from tdpfed.engine import evaluate
from tdpfed.engine.attacks import attackers, flip_labels
from tdpfed.engine.diagnostics import Diagnostics, defined_for, diagnose
from tdpfed.engine.participation import Participation
from tdpfed.engine.records import Ledger, Record
from tdpfed.engine.runners import Outcome, Runner, RunnerName, rows_of
from tdpfed.engine.sampling import Stream, key
from tdpfed.engine.uplink import Attack, Uplink, accepted
from tdpfed.errors import TDPFedError, unknown
from tdpfed.objective import Loss, Objective
from tdpfed.wire import Codec, Kind, Rejected, encoded_size

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
        loss: Loss = nn.functional.cross_entropy,
        diagnostics: Diagnostics | None = None,
        codec: Codec = "float32",
        rule: Rule = MEAN,
        attack: Attack | None = None,
    ) -> None:
        for field, given, kind in (("model", model, nn.Module), ("algorithm", algorithm, Algorithm)):
            if not isinstance(given, kind):
                raise TDPFedError(f"{field}: {given!r} given, must be an instance of {kind.__name__}")
        # A copy, where the data are: the caller's model stays as it is.
        self.objective = Objective.of(copy.deepcopy(model).to(federation.x), loss)
        if attack is not None and attack.kind == "label-flip":
            federation = flip_labels(federation, attackers(seed, federation.clients, attack.fraction))
        self.federation = federation
        self.algorithm = algorithm.bind(self.objective.layout)
        self.seed, self.participation, self.diagnostics = seed, participation, diagnostics
        self.uplink = Uplink(self.algorithm, federation.clients, seed, codec, rule, attack)
        self._check(runner, chunk)
        self._check_model(loss)
        self.runner = Runner(self.algorithm, self.objective, federation, runner, chunk)
        theta = self.objective.initial()
        generator = torch.Generator().manual_seed(int(key(seed, Stream.INIT)))
        self.server: State = self.algorithm.init(theta, generator)
        shipped = self.algorithm.global_model(self.server)
        start = theta if shipped is None else shipped  # the model both sides know before round 1
        self.private: State = {
            name: value.expand(federation.clients, *value.shape).clone()
            for name, value in self.algorithm.init_private(start).items()
        }
        self.round = 0
        self.ledger = Ledger()
        self.refused: list[Rejected] = []  # in the last round
        self._trained: tuple[Tensor, Outcome] | None = None

    def run(
        self,
        rounds: int,
        evaluate_every: int = 1,
        on_round: Callable[["Simulation"], None] | None = None,
        seconds: float = 0.0,
    ) -> Iterator[Record]:
        """Advance by ``rounds`` rounds; yield a record every ``evaluate_every`` rounds and after the last.

        Rounds whose diagnostics were asked for have a record too. ``on_round`` is called after every round, when its
        record, if it has one, is with the caller. ``seconds`` is what went before.
        """
        for name, value in (("rounds", rounds), ("evaluate_every", evaluate_every)):
            if not isinstance(value, int) or value < 1:
                raise TDPFedError(f"{name}: {value!r} given, must be a whole number of at least 1")
        began, last = time.perf_counter() - seconds, self.round + rounds
        while self.round < last:
            self.step()
            if self.round % evaluate_every == 0 or self.round == last or self._diagnosed:
                yield self.record(time.perf_counter() - began)
            if on_round is not None:
                on_round(self)

    def step(self) -> None:
        """Run one communication round; it counts when it is done. If nobody is left to train, nothing changes."""
        number = self.round + 1
        chosen, trained = self.participation.draw(self.seed, number, self.federation.clients)
        if len(trained):
            turn = self._turn(number, trained)
            outcome = self.runner.run(self.server, rows_of(self.private, turn.clients), turn)
            self._check_finite(outcome, turn)
            reported = torch.isin(trained, chosen)
            server, refused = self._aggregated(outcome, turn, reported)
            self._count(turn, outcome, reported)
            for name, rows in outcome.private.items():
                self.private[name][turn.clients] = rows
            self.server, self.refused, self._trained = server, refused, (turn.clients, outcome)
            self.ledger.rejected += len(refused)
        else:
            self._trained = None
        self.round = number

    def record(self, seconds: float) -> Record:
        """Evaluate all models after the current round."""
        everybody = torch.arange(self.federation.clients, device=self.federation.device)
        at_once = self._samples_at_once
        personal = evaluate.score_each(self.objective, self.personalized(), self.federation, everybody, at_once)
        own = None
        if self._trained is not None:
            clients, outcome = self._trained
            local = self.algorithm.local_model(outcome.private, outcome.upload)
            own = evaluate.score_each(self.objective, local, self.federation, clients, at_once)
        shipped = self.global_model()
        common = None if shipped is None else evaluate.score_one(self.objective, shipped, self.federation, at_once)
        extra = None
        if self.diagnostics is not None and self._diagnosed:
            turn = self._turn(self.round, everybody)
            weights = self._weights(everybody)
            extra = diagnose(self.runner, self.server, self.private, turn, weights, self.diagnostics)
        return Record(
            round=self.round,
            loss=self.train_loss,
            personalized_accuracy=personal.accuracy,
            local_accuracy=None if own is None else own.accuracy,
            global_accuracy=None if common is None else common.accuracy,
            personalized_loss=personal.mean_loss,
            global_loss=None if common is None else common.mean_loss,
            client_accuracy=personal.per_client(),
            uplink_bytes=self.ledger.uplink,
            downlink_bytes=self.ledger.downlink,
            participants=0 if own is None else len(own.count),
            seconds=seconds,
            diagnostics=extra,
            rejected=self.ledger.rejected,
        )

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
        values = self.objective.layout.size
        dense = encoded_size(
            {"w": values}, {"w": self.objective.layout}, "float32", kind="up", round_=1, client=0, samples=1
        )
        return dense * self.ledger.uploads / self.ledger.uplink if self.ledger.uplink else None

    @property
    def train_loss(self) -> float | None:
        """The mean over clients of the last minibatch's loss; None if none trained."""
        return None if self._trained is None else float(self._trained[1].metrics["loss"].double().mean())

    @cached_property
    def _samples_at_once(self) -> int:
        return evaluate.samples_at_once(self.objective, self.federation)

    @property
    def _diagnosed(self) -> bool:
        return self.diagnostics is not None and self.round % self.diagnostics.every == 0

    def _turn(self, number: int, clients: Tensor) -> Turn:
        return Turn(self.seed, number, clients.to(self.federation.device))

    def _aggregated(self, outcome: Outcome, turn: Turn, reported: Tensor) -> tuple[State, list[Rejected]]:
        """Return the server's next state from those who ``reported``, a mask over the turn's clients; and refusals."""
        if not self.algorithm.communicates or not bool(reported.any()):
            return self.server, []
        uploads, senders = self._only(outcome.upload, turn, reported)
        uploads = self.uplink.travel(uploads, self.server, senders)
        refused = self.uplink.refusals(uploads, self.server, senders)
        if refused:
            uploads, senders = self._only(uploads, senders, accepted(senders, refused))
        if not len(senders.clients):
            return self.server, refused
        average = average_for(self.uplink.rule, self.algorithm.center(self.server))
        weights = self._weights(senders.clients)
        return self.algorithm.aggregate(self.server, uploads, weights, senders, average), refused

    def _only(self, uploads: State, turn: Turn, mask: Tensor) -> tuple[State, Turn]:
        mask = mask.to(turn.clients.device)
        return {name: value[mask] for name, value in uploads.items()}, self._turn(turn.round, turn.clients[mask])

    def _weights(self, clients: Tensor) -> Tensor:
        sizes = self.federation.train_size[clients].double()
        return sizes if self.algorithm.weights == "samples" else torch.ones_like(sizes)

    def _count(self, turn: Turn, outcome: Outcome, reported: Tensor) -> None:
        """Add to the ledger exactly the bytes of the messages, headers included."""
        if self.algorithm.communicates:
            message = self.algorithm.broadcast(self.server, self._turn(turn.round, turn.clients[:1]))
            clients = turn.clients.tolist()
            senders = [client for client, sent in zip(clients, reported.tolist(), strict=True) if sent]
            self.ledger.downlink += self._bytes(message, "down", "float32", turn.round, clients)
            self.ledger.uplink += self._bytes(outcome.upload, "up", self.uplink.codec, turn.round, senders)
            self.ledger.client_rounds += len(clients)
            self.ledger.uploads += len(senders)

    def _bytes(self, state: State, kind: Kind, codec: Codec, number: int, clients: list[int]) -> int:
        lengths, layouts = {name: value.shape[-1] for name, value in state.items()}, self.algorithm.layouts
        samples = self.federation.train_size.tolist()
        return sum(
            encoded_size(
                lengths, layouts, codec, kind=kind, round_=number, client=k, samples=samples[k] if kind == "up" else 0
            )
            for k in clients
        )

    def _check_finite(self, outcome: Outcome, turn: Turn) -> None:
        values = (*outcome.metrics.values(), *outcome.private.values(), *outcome.upload.values())
        bad = torch.stack([~value.isfinite().reshape(len(value), -1).all(-1) for value in values]).any(0)
        if bool(bad.any()):
            rates = ", ".join(f"{name}={value:g}" for name, value in self.algorithm.learning_rates.items())
            raise TDPFedError(
                f"round {turn.round}: loss or parameters of client {int(turn.clients[bad][0])} are not finite, "
                f"the run diverges; lower the learning rates ({rates})"
            )

    def _check_model(self, loss: Loss) -> None:
        """Try the model on two samples, so that what does not fit is told in words and before any work."""
        data, theta = self.federation, self.objective.initial()
        try:
            outputs = self.objective.outputs(theta, data.x[:2])
        except Exception as error:  # the user's own code may raise anything
            raise TDPFedError(f"model: cannot take inputs of shape {data.input_shape} ({error})") from error
        if not torch.is_tensor(outputs):
            raise TDPFedError(f"model: returns a {type(outputs).__name__}, must return a tensor of outputs")
        if loss is nn.functional.cross_entropy and (outputs.ndim != 2 or outputs.shape[1] < data.classes):
            raise TDPFedError(
                f"model: outputs of shape {tuple(outputs.shape)} for two samples, "
                f"must be (2, classes) with at least the data's {data.classes} classes"
            )
        try:
            torch.func.vmap(self.objective.value)(theta.expand(2, -1), data.x[:2, None], data.y[:2, None])
        except Exception as error:  # a draw in forward, or a path that depends on values
            raise TDPFedError(
                f"model: cannot be computed for several clients at once ({str(error).splitlines()[0]}); "
                "its forward must draw nothing at random and branch on no values"
            ) from error

    def _check(self, runner: str, chunk: int | None) -> None:
        if runner not in ("batched", "loop"):
            raise unknown("runner", runner, ("batched", "loop"))
        if not 0 <= self.seed < 2**63:
            raise TDPFedError(f"seed: {self.seed} given, must be 0 or more")
        if chunk is not None and chunk < 1:
            raise TDPFedError(f"chunk: {chunk} given, must be at least 1")
        if self.diagnostics is not None:
            defined_for(self.algorithm)
        count, total = self.participation.clients or 0, self.federation.clients
        if count > total:
            raise TDPFedError(f"participation.clients: {count} given, must be at most {total}, the number of clients")


@dataclass(frozen=True)
class Result:
    """What :func:`simulate` returns: the records, and the final state of server and clients."""

    records: list[Record]
    simulation: Simulation

    @property
    def final(self) -> Record:
        """The record after the last round."""
        return self.records[-1]

    def personalized(self) -> list[dict[str, Tensor]]:
        """Each client's personalised model as a ``state_dict`` of the model."""
        return [self.simulation.objective.state_dict(theta) for theta in self.simulation.personalized()]

    def global_model(self) -> dict[str, Tensor] | None:
        """The server's model as a ``state_dict``; None if the method has none."""
        theta = self.simulation.global_model()
        return None if theta is None else self.simulation.objective.state_dict(theta)


def simulate(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    rounds: int,
    *,
    seed: int = 0,
    evaluate_every: int = 1,
    participation: Participation = EVERYBODY,
    runner: RunnerName = "batched",
    chunk: int | None = None,
    loss: Loss = nn.functional.cross_entropy,
    diagnostics: Diagnostics | None = None,
    codec: Codec = "float32",
    rule: Rule = MEAN,
    attack: Attack | None = None,
) -> Result:
    """Train ``model`` on ``federation`` with ``algorithm`` for ``rounds`` communication rounds.

    The model's own parameters are the common start. All draws follow from ``seed``.
    """
    simulation = Simulation(
        model, federation, algorithm, seed=seed, participation=participation, runner=runner, chunk=chunk, loss=loss,
        diagnostics=diagnostics, codec=codec, rule=rule, attack=attack,
    )  # fmt: skip
    return Result(list(simulation.run(rounds, evaluate_every)), simulation)
