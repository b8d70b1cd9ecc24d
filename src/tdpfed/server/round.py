"""The server's part of a round, for the simulator and for Flower: its initial state, and how it aggregates."""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.draws import Stream, key
from tdpfed.core.state import State, Turn, lengths_of, own_entries
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.server import gauge
from tdpfed.server.averages import HiddenUploads, private_averages, robust_averages
from tdpfed.server.gate import accepted, only, refusals
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant
from tdpfed.server.records import Ledger
from tdpfed.server.robust import Rule
from tdpfed.server.step import AVERAGE, ServerStep
from tdpfed.wire import Rejected


def initial_state(algorithm: Algorithm, theta: Tensor, seed: int) -> tuple[State, Tensor]:
    """Return the server's state before round 1, and the initial model ``(P,)`` that server and clients share."""
    generator = torch.Generator().manual_seed(int(key(seed, Stream.INIT)))
    server = algorithm.init(theta, generator)
    shipped = algorithm.global_model(server)
    return server, theta if shipped is None else shipped


@dataclass(frozen=True)
class ServerRound:
    """How the server of one federation handles uploads: gate, weights, average."""

    algorithm: Algorithm
    seed: int
    participation: Participation
    rule: Rule
    accountant: Accountant | None = None
    step: ServerStep = AVERAGE

    def admitted(
        self, uploads: State, server: State, turn: Turn, *, finite: bool = False
    ) -> tuple[State, Turn, list[Rejected]]:
        """Return the uploads that pass the gate with their clients, and the refusals."""
        private = self.accountant is not None
        refused = refusals(self.algorithm, self.rule, uploads, server, turn, finite=finite, private=private)
        if not refused:
            return uploads, turn, []
        return *only(uploads, turn, accepted(turn, refused)), refused

    def enough(self, count: int) -> bool:
        """Whether this many uploads are enough for a round."""
        return count >= self.participation.quorum and self.rule.enough(count)

    def watch(self, ledger: Ledger, number: int, count: int, refused: list[Rejected]) -> None:
        """Stop a run whose gate refuses more uploads than it accepts, ``count``, for ``robust.patience`` rounds."""
        if not count and not refused:
            return  # a round without uploads says nothing
        ledger.mostly_refused = ledger.mostly_refused + 1 if len(refused) > count else 0
        if 0 < self.rule.patience <= ledger.mostly_refused:
            raise QuorumError(
                f"round {number}: {len(refused)} of {count + len(refused)} uploads refused, and more than accepted in "
                f"{ledger.mostly_refused} rounds in a row (robust.patience); the last refusal: {refused[-1]}"
            )

    def weights(self, samples: Tensor) -> Tensor:
        """Return the weights in the average of clients with these numbers of training samples."""
        sizes, cap = samples.double(), self.rule.weight_cap
        if self.algorithm.weights != "samples":
            return torch.ones_like(sizes)
        return sizes if isinstance(cap, str) or not len(sizes) else sizes.clamp(max=cap * float(sizes.median()))

    def start(self, server: State) -> State:
        """Return what the gate keeps in the server's state, before round 1."""
        plan = self.algorithm.plan
        if plan is None or self.rule.gauge is None:
            return {}
        return {gauge.NORMS: gauge.reference_norms(server["factors"], plan.factors)}

    def aggregate(self, server: State, uploads: State, samples: Tensor, turn: Turn) -> State:
        """Return the server's next state from the accepted uploads of the turn's clients.

        A round without uploads changes nothing. With privacy it still adds noise, since participation is a secret.
        """
        algorithm, weights, own = self.algorithm, self.weights(samples), own_entries(server)
        if self.accountant is None:
            if not len(turn.clients):
                return server
            averages = robust_averages(uploads, weights, algorithm.center(own), self.rule, algorithm.plan)
            return self._after(server, algorithm.aggregate(own, uploads, averages, turn), turn)
        cohort = self.accountant.rate * algorithm.population
        averages = private_averages(
            uploads, weights, algorithm.center(own), self.accountant.privacy, cohort, self.seed, int(turn.round)
        )
        anonymous = Turn(turn.seed, turn.round, turn.clients[:0])  # who took part is a secret, and how many
        averaged = algorithm.aggregate(own, cast(State, HiddenUploads()), averages, anonymous)
        return self._after(server, averaged, turn)

    def _after(self, server: State, averaged: State, turn: Turn) -> State:
        """Return the server's next state; a state that is not finite ends the run and is kept by nobody."""
        state = self.step.after(server, averaged, self.algorithm)
        if not is_finite(state):
            raise diverged(self.algorithm, int(turn.round))
        if gauge.NORMS in server and (plan := self.algorithm.plan) is not None:
            state = state | {gauge.NORMS: gauge.moved_reference(server[gauge.NORMS], state["factors"], plan.factors)}
        return state

    def no_uploads(self, server: State, turn: Turn) -> tuple[State, Turn]:
        """Return the empty uploads of a round without participants, and its turn."""
        like = next(iter(server.values()), torch.zeros(0))
        none = {name: like.new_zeros(0, size) for name, size in lengths_of(self.algorithm.up()).items()}
        return none, Turn(turn.seed, turn.round, turn.clients[:0])

    def below_quorum(self, number: int, attempts: int, count: int, refused: list[Rejected]) -> QuorumError:
        """Return the error for a round with too few uploads."""
        wanted = f"participation.quorum requires {self.participation.quorum}"
        if count >= self.participation.quorum:
            wanted = f"robust.name {self.rule.name!r} needs more"
        tries = "" if attempts == 1 else f" in the last of {attempts} attempts"
        reasons = f"; the last refusal: {refused[-1]}" if refused else ""
        return QuorumError(f"round {number}: {count} uploads accepted{tries}, {wanted}{reasons}")


def is_finite(state: State) -> bool:
    """Whether all numbers of a state are finite."""
    values = [value for value in state.values() if value.is_floating_point() and value.numel()]
    ends = [torch.stack(value.aminmax()) for value in values]  # one pass; both propagate NaN
    return not ends or all(map(math.isfinite, (ends[0] if len(ends) == 1 else torch.cat(ends)).tolist()))


def diverged(algorithm: Algorithm, round_: int, client: int | None = None, hint: str = "") -> TDPFedError:
    """Return the error for a run whose values are no longer finite; it names the learning rates to lower."""
    rates = ", ".join(f"{name}={value:g}" for name, value in algorithm.rates.items())
    whose = "" if client is None else f" of client {client}"
    return TDPFedError(
        f"round {round_}: loss or parameters{whose} are not finite, the run diverges; "
        f"lower the learning rates ({rates}){hint}"
    )
