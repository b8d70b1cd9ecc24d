"""The local work of a client in a round: the only interface through which methods use data and model.

No function of :class:`LocalWork` changes its arguments. There are two implementations, equal up to rounding: plain
PyTorch in :mod:`tdpfed.core.plain`, and a faster one in ``tdpfed.fast.local``, for the simulator. In shapes P is the
number of parameters, Q that of factor values, B that of samples in a minibatch; ``...`` is nothing for one client, or
K, the number of clients that are computed at once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.layout import Layout, Ranges
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import State, Turn
from tdpfed.errors import TDPFedError, wrong

T = TypeVar("T")

Batch = tuple[Tensor, Tensor]
Gradient = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
"""Maps parameters and a minibatch to gradient and loss."""

PerSample = Callable[[Tensor, Batch], tuple[Tensor, Tensor | None]]
"""Maps parameters and a minibatch to each sample's loss and whether it is predicted correctly; None in regression."""

HessianProduct = Callable[[Tensor, Batch, Tensor], Tensor]
"""Maps parameters, a minibatch and a vector to the product of the loss's Hessian with the vector."""

KEPT = ("moment0", "moment1", "steps")
"""Entries in which a client keeps a factor optimizer's state between rounds; one of n tensors uses the first n."""


class Near(NamedTuple):
    """The result of proximal steps: parameters, and the loss before the last step."""

    theta: Tensor
    loss: Tensor
    low_rank: object = None  # set by ``fast`` only: theta - anchor in low-rank form, for the steps on the factors
    velocity: Tensor | None = None  # after the last step, if steps began with one


class Plan(Protocol):
    """The part of a :class:`tdpfed.FactorPlan` that steps on factors need; ``cp`` stands on this package."""

    @property
    def factors(self) -> Layout:
        """Layout of the factor vector."""

    @property
    def modes(self) -> list[int]:
        """The mode, from 0, of each entry of the factor layout."""

    def compose(self, a: Tensor) -> Tensor:
        """Map factors to parameters."""

    def refine(self, a: Tensor, theta: Tensor, *, sweeps: int, damping: float) -> Tensor:
        """Fit factors to parameters by least squares, from a warm start."""

    def residual_grad(self, a: Tensor, theta: Tensor, scale: float) -> Tensor:
        """Return the gradient of ``scale/2 ||theta - compose(a)||^2``."""


@dataclass(frozen=True)
class FactorRule:
    """How factors are optimized: the optimizer, its learning rate, and when its state is reset."""

    optimizer: Literal["adam", "gd", "adagrad", "rmsprop", "als"]
    lr: float
    restart: Literal["round", "local-round", "run"] = "round"
    alternating: bool = False  # factors of one mode at a time instead of all at once
    damping: float = 1.0  # als: how strongly factors are held near their previous value

    def check(self) -> None:
        """Refuse combinations that are not defined; errors name the hyper-parameters of TDPFed."""
        if self.optimizer == "als" and self.alternating:
            raise wrong("factor_steps", "alternating", "'joint' with optimizer 'als', which alternates itself")
        if self.restart == "run" and (self.optimizer == "als" or self.alternating):
            raise wrong(
                "optimizer_state", "run", "'round' or 'local-round' with optimizer 'als', which has no state, and with "
                "factor_steps 'alternating', whose state belongs to one factor at a time",
            )  # fmt: skip

    def make(self) -> optim.Optimizer:
        """Return the optimizer; if it continues in the next round it counts its steps."""
        if self.optimizer == "adam":
            return optim.adam(self.lr, counting=self.restart == "run")
        return optim.BY_NAME[self.optimizer](self.lr)

    def start(self, size: int, like: Tensor) -> State:
        """Return the optimizer state of a client before its first round; empty unless it continues between rounds."""
        if self.restart != "run":
            return {}
        return dict(zip(KEPT, self.make().init(like.new_zeros(size)), strict=False))


class Factors(ABC):
    """The factors of a client during a round. :meth:`towards` returns the next ones; use only the latest."""

    @property
    @abstractmethod
    def value(self) -> Tensor:
        """The factors, ``(..., Q)``."""

    @property
    @abstractmethod
    def composed(self) -> Tensor:
        """The parameters ``(..., P)`` that the factors compose to."""

    @property
    @abstractmethod
    def state(self) -> State:
        """The optimizer state that a client keeps for its next round."""

    @abstractmethod
    def towards(self, near: Near, lam: float, steps: int) -> "Factors":
        """Take ``steps`` optimizer steps on ``lam/2 ||theta - [[A]]||^2`` with theta fixed; ALS takes one sweep."""


@dataclass(frozen=True)
class Extras:
    """What a round has beside minibatches for the methods that ask for it; None where it is not there."""

    validation: Callable[[int], Batch] | None = None
    held_out: Tensor | None = None  # (...) number of each client's validation samples
    public: Callable[[int], Batch] | None = None
    positions: Callable[[int], Tensor] | None = None


NO_EXTRAS = Extras()


class LocalWork(ABC):
    """A client's minibatches, gradients and steps in one round."""

    def __init__(self, turn: Turn, tau: int, extras: Extras = NO_EXTRAS, optimizer: Optimizer = USUAL) -> None:
        self.turn, self.tau, self.optimizer, self._extras = turn, tau, optimizer, extras
        self.descended = False
        """Whether steps were taken by :meth:`descend`; nothing else uses the configured optimizer."""

    @abstractmethod
    def batch(self, t: int) -> Batch:
        """Return minibatch ``t`` of this round, from 0: inputs ``(..., B, *input_shape)``, targets ``(..., B, ...)``.

        With dropout each sample is flattened, and the key of its random draws is appended to its values.
        """

    @abstractmethod
    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient ``(..., P)`` and the mean loss ``(...)`` of parameters on a minibatch."""

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the mean loss ``(...)`` of parameters on a minibatch."""
        return self.gradient(theta, batch)[1]

    @abstractmethod
    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss, and whether it is predicted correctly, ``(..., B)`` each.

        With several targets per sample it is the share predicted correctly; None in regression.
        """

    @abstractmethod
    def hessian_product(self, theta: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the product ``(..., P)`` of the loss's Hessian on a minibatch with a vector ``(..., P)``."""

    @abstractmethod
    def descend(
        self,
        theta: Tensor,
        *,
        lr: float,
        steps: int | None = None,
        first: int = 0,
        anchor: Tensor | None = None,
        lam: float = 0.0,
        correction: Tensor | None = None,
        only: Ranges | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take steps of the optimizer, each on a new minibatch; return the parameters and the last loss.

        By default these are gradient steps of size ``lr``, which the optimizer's schedule scales.
        ``tau`` steps unless ``steps`` is given, from minibatch ``first`` on. With an ``anchor`` the steps are on
        ``f + lam/2 ||theta - anchor||^2``; the loss is that of ``f``. A ``correction`` ``(..., P)`` is added to every
        gradient. With ``only``, as :meth:`Layout.ranges` returns it, the other parameters are frozen.
        """

    @abstractmethod
    def proximal(
        self,
        theta: "Tensor | Near",
        batch: Batch,
        *,
        anchor: Tensor,
        lam: float,
        lr: float,
        momentum: float = 0.0,
        steps: int = 1,
        nu: float | None = None,
        velocity: Tensor | None = None,
    ) -> Near:
        """Take ``steps`` Nesterov steps on ``f + lam/2 ||theta - anchor||^2``, all on the same minibatch.

        They begin at parameters ``theta``, or where another call ended: its result is used up, as its memory may hold
        the new one.
        With ``nu`` a client takes no further step once the squared norm of that function's gradient is at most ``nu``.
        The velocity is 0 at first. If ``velocity`` ``(..., P)`` is given it starts there, and the last one is returned.
        """

    @abstractmethod
    def factors(self, plan: Plan, a: Tensor, rule: FactorRule, private: State) -> Factors:
        """Return factors ``(..., Q)`` to optimize; an optimizer that continues takes its state from ``private``."""

    def rate(self, lr: float) -> float | Tensor:
        """Return the learning rate of this round, by the optimizer's schedule."""
        return self.optimizer.rate(lr, self.turn.round)

    def batches(self, count: int | None = None) -> Iterator[Batch]:
        """Yield the first ``count`` minibatches of this round, ``tau`` by default."""
        return (self.batch(t) for t in range(self.tau if count is None else count))

    def validation(self, t: int) -> Batch:
        """Return minibatch ``t`` of the samples that are held out of training."""
        return _there("validation samples", self._extras.validation)(t)

    @property
    def held_out(self) -> Tensor:
        """The number of validation samples, ``(...)``; minibatches repeat none before all have been seen."""
        return _there("validation samples", self._extras.held_out)

    def public(self, t: int) -> Batch:
        """Return minibatch ``t`` of the sample that all clients have in common (the method's ``public_samples``)."""
        return _there("a public sample", self._extras.public)(t)

    def positions(self, t: int) -> Tensor:
        """Return which of a client's training samples, numbered from 0, minibatch ``t`` consists of, ``(..., B)``."""
        return _there("samples that are numbered", self._extras.positions)(t)

    def _steps(self, first: int, steps: int | None) -> range:
        """Return the minibatches that ``descend`` uses."""
        self.descended = True
        count = self.tau if steps is None else steps
        check_steps(count)
        check_minibatch(first)
        return range(first, first + count)


def inside(values: Tensor, ranges: Ranges) -> Tensor:
    """Return ``values`` ``(..., P)`` inside of the ranges, and 0 elsewhere."""
    found = torch.zeros_like(values)
    for begin, end in ranges:
        found[..., begin:end] = values[..., begin:end]
    return found


def replaced(values: Tensor, others: Tensor, ranges: Ranges) -> Tensor:
    """Return ``others`` ``(..., P)`` inside of the ranges, and ``values`` elsewhere."""
    found = values.clone()
    for begin, end in ranges:
        found[..., begin:end] = others[..., begin:end]
    return found


def _there(what: str, found: T | None) -> T:
    if found is None:
        raise TDPFedError(f"the method needs {what}, but this run has none", field="algorithm.name")
    return found


def joined(batches: Iterable[Batch], turn: Turn) -> Batch:
    """Return a turn's minibatches of one size as one minibatch: its mean loss is the mean of theirs."""
    xs, ys = zip(*batches, strict=True)
    samples = turn.clients.ndim
    return torch.cat(xs, samples), torch.cat(ys, samples)


def check_steps(steps: int) -> None:
    """Refuse to take no step: there would be no loss to report."""
    if steps < 1:
        raise wrong("steps", steps, "at least 1")


def check_minibatch(t: int) -> None:
    """Refuse a minibatch before the first."""
    if t < 0:
        raise wrong("batch", t, "at least 0")
