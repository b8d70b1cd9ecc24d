"""Local work of many clients at once: the results of :mod:`tdpfed.core.plain` up to rounding, in less time."""

from collections.abc import Callable
from weakref import ref

from torch import Tensor

from tdpfed.core.inner import Inner, until_accurate
from tdpfed.core.layout import Ranges
from tdpfed.core.local import (
    NO_EXTRAS,
    Batch,
    Extras,
    FactorRule,
    Factors,
    LocalWork,
    Near,
    Plan,
    check_minibatch,
    check_steps,
)
from tdpfed.core.plain import follow, start_factors
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.factors import FastFactors
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.fast.recipe import follow_in_place


class FastLocal(LocalWork):
    """Local work on recorded gradients; ``used`` collects the kinds of work that a method uses."""

    def __init__(
        self,
        turn: Turn,
        tau: int,
        batch: Callable[[int], Batch],
        gradient: RecordedGradient,
        used: set[str],
        extras: Extras = NO_EXTRAS,
        optimizer: Optimizer = USUAL,
    ) -> None:
        super().__init__(turn, tau, extras, optimizer)
        self._batch, self._gradient, self._used = batch, gradient, used
        self._latest: ref[Tensor] | None = None  # the parameters of the latest proximal result

    def batch(self, t: int) -> Batch:
        """Return minibatch ``t``."""
        check_minibatch(t)
        return self._batch(t)

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient and loss."""
        self._used.add("gradient")
        return self._gradient(theta, batch)

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the loss, without its gradient."""
        self._used.add("gradient")
        return self._gradient.loss(theta, batch)

    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss, and whether it is predicted correctly."""
        self._used.add("gradient")
        return self._gradient.per_sample(theta, batch)

    def hessian_product(self, theta: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the Hessian's product with a vector."""
        self._used.add("gradient")
        return self._gradient.hessian_product(theta, batch, vector)

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
        """Take one step per minibatch."""
        self._used.add("descend")
        rate, places = self.rate(lr), self._steps(first, steps)
        if self.optimizer.plain and not isinstance(rate, Tensor):
            return self._gradient.descend(theta, self._batch, places, rate, anchor, lam, correction, only)
        batches = map(self._batch, places)
        if theta.ndim == 1 or isinstance(rate, Tensor) or theta.is_cuda:
            return follow(self.optimizer, rate, self._gradient, theta, batches, anchor, lam, correction, only)
        return follow_in_place(self.optimizer, rate, self._gradient, theta, batches, anchor, lam, correction, only)

    def proximal(
        self,
        theta: Tensor | Near,
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
        """Take Nesterov steps; at momentum 0 these are plain gradient steps."""
        check_steps(steps)
        plain = steps > 1 and momentum == 0 and nu is None and velocity is None
        self._used.add("plain steps" if plain else "proximal")
        used_up, inner = self._may_use_up(theta, anchor), Inner(anchor, lam, lr, momentum)
        start = theta.theta if isinstance(theta, Near) else theta
        if nu is None:
            found = self._gradient.proximal(start, batch, inner, steps, velocity, used_up=used_up)
        else:
            found = until_accurate(self._gradient, start, batch, inner, steps, nu, velocity)
        self._latest = ref(found.theta)
        return found

    def _may_use_up(self, theta: Tensor | Near, anchor: Tensor) -> bool:
        """Whether these are the latest result's parameters, and not the anchor's, which is read in between."""
        latest = None if self._latest is None else self._latest()
        if not isinstance(theta, Near) or theta.theta is not latest:
            return False  # anybody else may hold them: the server, or the rows of private state
        return latest.untyped_storage().data_ptr() != anchor.untyped_storage().data_ptr()

    def factors(self, plan: Plan, a: Tensor, rule: FactorRule, private: State) -> Factors:
        """Return the factors, ready to be updated."""
        self._used.add("factors")
        if not isinstance(plan, FactorPlan):  # a plan of the user's own
            return start_factors(plan, a, rule, private)
        return FastFactors.start(plan, a, rule, private)
