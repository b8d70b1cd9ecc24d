"""The server's part of a round, for the simulator and for Flower: its initial state, and how it aggregates."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.draws import Stream, key
from tdpfed.core.state import State, Turn, lengths_of, own_entries
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.server.averages import HiddenUploads, private_averages, robust_averages
from tdpfed.server.gate import accepted, refusals
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant
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
        refused = refusals(self.algorithm, self.rule, uploads, server, turn, finite=finite)
        if not refused:
            return uploads, turn, []
        return *only(uploads, turn, accepted(turn, refused)), refused

    def enough(self, count: int) -> bool:
        """Whether this many uploads are enough for a round."""
        return count >= self.participation.quorum and self.rule.enough(count)

    def weights(self, samples: Tensor) -> Tensor:
        """Return the weights in the average of clients with these numbers of training samples."""
        sizes = samples.double()
        return sizes if self.algorithm.weights == "samples" else torch.ones_like(sizes)

    def aggregate(self, server: State, uploads: State, samples: Tensor, turn: Turn) -> State:
        """Return the server's next state from the accepted uploads of the turn's clients.

        A round without uploads changes nothing. With privacy it still adds noise, since participation is a secret.
        """
        algorithm, weights, own = self.algorithm, self.weights(samples), own_entries(server)
        if self.accountant is None:
            if not len(turn.clients):
                return server
            averages = robust_averages(uploads, weights, algorithm.center(own), self.rule)
            return self.step.after(server, algorithm.aggregate(own, uploads, averages, turn), algorithm)
        cohort = self.accountant.rate * algorithm.population
        averages = private_averages(
            uploads, weights, algorithm.center(own), self.accountant.privacy, cohort, self.seed, int(turn.round)
        )
        anonymous = Turn(turn.seed, turn.round, turn.clients[:0])  # who took part is a secret, and how many
        averaged = algorithm.aggregate(own, cast(State, HiddenUploads()), averages, anonymous)
        return self.step.after(server, averaged, algorithm)

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


def only(uploads: State, turn: Turn, mask: Tensor) -> tuple[State, Turn]:
    """Return the uploads and the clients of a turn that a mask selects."""
    if bool(mask.all()):
        return uploads, turn
    mask = mask.to(turn.clients.device)
    some = {name: value[mask] for name, value in uploads.items()}
    return some, Turn(turn.seed, turn.round, turn.clients[mask])


def diverged(algorithm: Algorithm, round_: int, client: int | None = None, hint: str = "") -> TDPFedError:
    """Return the error for a run whose values are no longer finite; it names the learning rates to lower."""
    rates = ", ".join(f"{name}={value:g}" for name, value in algorithm.rates.items())
    whose = "" if client is None else f" of client {client}"
    return TDPFedError(
        f"round {round_}: loss or parameters{whose} are not finite, the run diverges; "
        f"lower the learning rates ({rates}){hint}"
    )
