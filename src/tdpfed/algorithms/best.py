"""Any method, never worse than training alone: a client uses whichever of its models validates best.

Beside the method the client trains a model alone, by SGD as :class:`~tdpfed.algorithms.local.Local` does. After each of
its rounds it compares, on samples that it holds out of training, the method's personalized model, the one it uploads,
its own, and mixtures on the line between the first and its own. In later rounds it keeps to its last choice and trains
on all of its samples. Nothing more travels.
"""

from collections.abc import Callable
from dataclasses import field, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from tdpfed.algorithms.base import CHOICE, Algorithm, Average, Update, hyper
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError

INNER = "method."
"""Prefix of the entries of private state that belong to the method inside."""

SAME = (
    "name", "title", "communicates", "shared_seed", "same_for_all", "counts_clients", "averages", "averages_all",
    "per_sample", "reports_change", "own_loss", "takes_newcomers",
)  # fmt: skip
"""What a method says of itself that stays true."""


class Best(Algorithm):
    """A method whose clients may use a model trained alone, or a mixture, instead of the method's."""

    inner: Algorithm | None = field(default=None, metadata={"bound": True})
    validation: float = hyper(
        0.25, "share of each client's training samples that is held out for the choice", above=0, below=1
    )
    choose_rounds: int | None = hyper(
        None, "rounds in which the choice is made; then all samples are trained on; default: half of run.rounds",
        least=1, most=10**9,
    )  # fmt: skip
    alone_rate: float = hyper(0.05, "learning rate of the model trained alone", above=0, most=1e38, rate=True)
    mixes: tuple[float, ...] = hyper(
        (0.25, 0.5, 0.75), "candidates between the method's model (0) and the one trained alone (1)", above=0, below=1
    )
    margin: float = hyper(
        0.5,
        "a client leaves the method's model for one that is better by more than this many standard errors",
        least=0, most=100,
    )  # fmt: skip
    choice_batches: int = hyper(
        5, "most minibatches of validation samples per round that the choice is made on", least=1, most=10**6
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SAME:
            object.__setattr__(self, name, getattr(self.method, name))

    @classmethod
    def of(cls, method: Algorithm, **settings: Any) -> Self:
        """Return the method with the choice added."""
        return cls(
            inner=method, tau=cls.tau if method.epochs else method.tau, epochs=method.epochs,
            batch_size=method.batch_size, weights=method.weights,
            bound_layout=method.bound_layout, population=method.population, most_samples=method.most_samples,
            **settings,
        )  # fmt: skip

    @property
    def method(self) -> Algorithm:
        """The method inside."""
        if self.inner is None:
            raise TDPFedError("a method must be given, as in Best.of(FedAvg())", field="inner")
        return self.inner

    def bind(self, layout: Layout, population: int, most_samples: int = 0) -> Self:
        """Bind the method inside too."""
        inner = self.method.bind(layout, population, most_samples)
        return replace(super().bind(layout, population, most_samples), inner=inner)

    def over(self, rounds: int) -> Self:
        """Return it with a choice in the first half of the rounds, unless their number is given."""
        return self if self.choose_rounds is not None else replace(self, choose_rounds=max(1, rounds // 2))

    def of_size(self, samples: int) -> Self:
        """Return it for a client of so many samples, and the method inside too."""
        return replace(super().of_size(samples), inner=self.method.of_size(samples))

    # -- what the method inside says

    def down(self) -> Entries:
        """The method's."""
        return self.method.down()

    def up(self) -> Entries:
        """The method's."""
        return self.method.up()

    def center(self, server: State) -> State:
        """Return the method's."""
        return self.method.center(server)

    def unchanged(self, message: State) -> State:
        """Return the method's."""
        return self.method.unchanged(message)

    @property
    def summable(self) -> bool:
        """The method's."""
        return self.method.summable

    @property
    def averaged(self) -> tuple[str, ...]:
        """The method's."""
        return self.method.averaged

    @property
    def plan(self) -> FactorPlan | None:
        """The method's."""
        return self.method.plan

    def compression_reached(self) -> tuple[float, float, str] | None:
        """Return the method's."""
        return self.method.compression_reached()

    @property
    def rates(self) -> dict[str, float]:
        """The method's learning rates, and that of the model trained alone."""
        return {**self.method.rates, "alone_rate": self.alone_rate}

    @property
    def draws(self) -> int:
        """The method's, at least those of training alone."""
        return max(self.tau, self.method.draws)

    @property
    def held_out(self) -> float:
        """The validation share, or the method's own if it is larger."""
        return max(self.validation, self.method.held_out)

    @property
    def held_out_until(self) -> int | None:
        """The last round of the choice, unless the method holds samples out to the end."""
        return None if self.method.held_out else self.choose_rounds

    @property
    def public_samples(self) -> int:
        """The method's."""
        return self.method.public_samples

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Return the method's state of the server."""
        return self.method.init(theta, generator)

    def broadcast(self, server: State, turn: Turn) -> State:
        """Return the method's messages."""
        return self.method.broadcast(server, turn)

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Return the server's next state, by the method."""
        return self.method.aggregate(server, uploads, average, turn)

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the method's for a client that uses its model; any other choice stays as it is."""
        federated = self.method.received(message, _inside(private), local)
        return torch.where(private[CHOICE] <= 0, federated, private["theta"])

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the model that the method uploads."""
        return self.method.local_model(_inside(private), upload)

    def global_model(self, server: State) -> Tensor | None:
        """Return the method's."""
        return self.method.global_model(server)

    # -- the choice

    @cached_property
    def candidates(self) -> tuple[str, ...]:
        """The models that a client chooses from; the first is the method's personalized model."""
        kind = type(self.method)
        same = kind.local_model is Algorithm.local_model and kind.personalized is Algorithm.personalized
        shared = () if same or not self.communicates else ("uploaded",)
        return ("method", *shared, *(f"{mix:g} alone" for mix in self.mixes), "alone")

    def init_private(self, theta: Tensor) -> State:
        """Keep the model in use, the one trained alone, the number of the choice (-1: none), and the method's state."""
        kept = self.method.init_private(theta)
        first = {"theta": self.method.personalized(kept), "alone": theta, CHOICE: theta.new_full((1,), -1)}
        return {**first, **_outside(kept)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Compute the method's round, train alone, and choose."""
        kept, upload, metrics = self.method.update(message, _inside(private), local)
        alone, _ = local.descend(private["alone"], lr=self.alone_rate)
        federated = self.method.personalized(kept)

        def model(number: int) -> Tensor:
            name = self.candidates[number]
            if name in ("method", "alone"):
                return federated if name == "method" else alone
            if name == "uploaded":
                return self.method.local_model(kept, upload)
            return torch.lerp(federated, alone, self.mixes[number - len(self.candidates) + 1 + len(self.mixes)])

        choice, last = private[CHOICE], self.choose_rounds
        still = True if last is None else local.turn.round <= last  # a tensor in rounds that are recorded for a GPU
        if still is not False:
            chosen = self._choice(model, local)
            choice = chosen if still is True else torch.where(still, chosen, choice)
        theta = federated
        for number in range(1, len(self.candidates)):
            theta = torch.where(choice == number, model(number), theta)
        return {"theta": theta, "alone": alone, CHOICE: choice, **_outside(kept)}, upload, metrics

    def _choice(self, models: Callable[[int], Tensor], local: LocalWork) -> Tensor:
        """Return the number of the model that validates best, ``(..., 1)``; the method's if none is surely better."""
        errors = self._errors(models(0), local)
        choice = errors.new_zeros(*errors.shape[:-1], 1)
        best = torch.zeros_like(choice)
        for number in range(1, len(self.candidates)):
            gain, sure = self._gain(errors, self._errors(models(number), local), local)
            better = sure & (gain > best)
            best, choice = torch.where(better, gain, best), torch.where(better, number, choice)
        return choice

    def _errors(self, theta: Tensor, local: LocalWork) -> Tensor:
        """Return the error on each validation sample, ``(..., N)``: whether it is wrong; for numbers the loss."""
        parts = [local.per_sample(theta, local.validation(t)) for t in range(self.choice_batches)]
        return torch.cat([loss if correct is None else 1 - correct.to(loss) for loss, correct in parts], -1)

    def _gain(self, before: Tensor, after: Tensor, local: LocalWork) -> tuple[Tensor, Tensor]:
        """Return by how much the mean error is lower, ``(..., 1)``, and whether by more than the margin.

        Each sample counts once: a client with few sees them again in further minibatches.
        """
        place = torch.arange(before.shape[-1], device=before.device)
        counts = place < local.held_out[..., None]
        n = counts.sum(-1, keepdim=True)
        gains = torch.where(counts, before - after, 0)
        mean = gains.sum(-1, keepdim=True) / n
        squares = torch.where(counts, gains - mean, 0).square().sum(-1, keepdim=True)
        return mean, (mean > 0) & (mean.square() * n * (n - 1) > self.margin**2 * squares)


def _inside(private: State) -> State:
    return {name.removeprefix(INNER): value for name, value in private.items() if name.startswith(INNER)}


def _outside(kept: State) -> State:
    return {INNER + name: value for name, value in kept.items()}
