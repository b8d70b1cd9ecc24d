"""Local work in plain PyTorch: for the loop runner and Flower nodes, and the reference for tests of the fast one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.inner import Inner, taken, until_accurate
from tdpfed.core.layout import Ranges
from tdpfed.core.local import (
    KEPT,
    NO_EXTRAS,
    Batch,
    Extras,
    FactorRule,
    Factors,
    Gradient,
    HessianProduct,
    LocalWork,
    Near,
    PerSample,
    Plan,
    check_minibatch,
    check_steps,
    inside,
    replaced,
)
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import State, Turn


class PlainLocal(LocalWork):
    """Local work in plain PyTorch, step by step."""

    def __init__(
        self,
        turn: Turn,
        tau: int,
        batch: Callable[[int], Batch],
        gradient: Gradient,
        extras: Extras = NO_EXTRAS,
        hessian_product: HessianProduct | None = None,
        optimizer: Optimizer = USUAL,
        per_sample: PerSample | None = None,
    ) -> None:
        super().__init__(turn, tau, extras, optimizer)
        self._batch, self._gradient, self._hessian_product = batch, gradient, hessian_product
        self._per_sample = per_sample

    def batch(self, t: int) -> Batch:
        """Return minibatch ``t``."""
        check_minibatch(t)
        return self._batch(t)

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient and loss."""
        return self._gradient(theta, batch)

    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss, and whether it is predicted correctly."""
        assert self._per_sample is not None
        return self._per_sample(theta, batch)

    def hessian_product(self, theta: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the Hessian's product with a vector."""
        assert self._hessian_product is not None
        return self._hessian_product(theta, batch, vector)

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
        batches = (self.batch(t) for t in self._steps(first, steps))
        return follow(
            self.optimizer, self.rate(lr), self.gradient, theta, batches,
            anchor=anchor, lam=lam, correction=correction, only=only,
        )  # fmt: skip

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
        """Take Nesterov steps, plain gradient steps at momentum 0."""
        check_steps(steps)
        theta, inner = theta.theta if isinstance(theta, Near) else theta, Inner(anchor, lam, lr, momentum)
        if nu is not None:
            return until_accurate(self.gradient, theta, batch, inner, steps, nu, velocity)
        return taken(self.gradient, theta, batch, inner, steps, velocity)

    def factors(self, plan: Plan, a: Tensor, rule: FactorRule, private: State) -> Factors:
        """Return factors to optimize."""
        return start_factors(plan, a, rule, private)


def follow(
    optimizer: Optimizer,
    lr: float | Tensor,
    gradient: Gradient,
    theta: Tensor,
    batches: Iterable[Batch],
    anchor: Tensor | None,
    lam: float,
    correction: Tensor | None,
    only: Ranges | None,
) -> tuple[Tensor, Tensor]:
    """Take one step of the optimizer per minibatch, as :meth:`LocalWork.descend` does."""
    rule = optimizer.rule(lr)
    moments = rule.init(theta)
    for count, batch in enumerate(batches, 1):
        g, loss = gradient(theta, batch)
        if anchor is not None:
            g = g + lam * (theta - anchor)
        if correction is not None:
            g = g + correction
        g = optimizer.clipped(g if only is None else inside(g, only))
        moved, moments = rule.step(theta, g, moments, count)
        theta = moved if only is None else replaced(theta, moved, only)
    return theta, loss


def start_factors(plan: Plan, a: Tensor, rule: FactorRule, private: State) -> "PlainFactors":
    """Return factors to optimize, with the state of an optimizer that continues."""
    kept = tuple(private[name] for name in KEPT if name in private) if rule.restart == "run" else ()
    return PlainFactors(plan, a, rule, kept or None)


@dataclass(frozen=True)
class PlainFactors(Factors):
    """Factors optimized step by step by a textbook rule."""

    plan: Plan
    a: Tensor
    rule: FactorRule
    moments: optim.Moments | None
    taken: int = 0  # steps since the moments were reset

    @property
    def value(self) -> Tensor:
        """The factors."""
        return self.a

    @property
    def composed(self) -> Tensor:
        """The parameters that the factors compose to."""
        return self.plan.compose(self.a)

    @property
    def state(self) -> State:
        """The optimizer state that a client keeps."""
        return dict(zip(KEPT, self.moments or (), strict=False)) if self.rule.restart == "run" else {}

    def towards(self, near: Near, lam: float, steps: int) -> "PlainFactors":
        """Take optimizer steps on ``lam/2 ||theta - [[A]]||^2``."""
        if self.rule.optimizer == "als":
            return replace(self, a=self.plan.refine(self.a, near.theta, sweeps=1, damping=self.rule.damping))
        optimizer, a = self.rule.make(), self.a
        fresh = self.moments is None or self.rule.restart == "local-round"
        moments = optimizer.init(a) if fresh or self.moments is None else self.moments
        taken = 0 if fresh else self.taken
        for count in range(taken + 1, taken + steps + 1):
            for turn in modes_in_turn(self.plan, a.device) if self.rule.alternating else (None,):
                g = self.plan.residual_grad(a, near.theta, lam)
                moved, new = optimizer.step(a, g, moments, count)
                a, moments = (moved, new) if turn is None else select(turn, (moved, new), (a, moments))
        return replace(self, a=a, moments=moments, taken=taken + steps)


def modes_in_turn(plan: Plan, device: torch.device) -> list[Tensor]:
    """Return which factors move in each turn of an alternating pass, ``(Q,)`` each: mode n of every tensor."""
    sizes = zip(plan.factors.sizes, plan.modes, strict=True)
    mode = torch.cat([torch.full((size,), n) for size, n in sizes]).to(device)
    return [mode == n for n in range(int(mode.max()) + 1)]


def select(
    mask: Tensor, new: tuple[Tensor, optim.Moments], old: tuple[Tensor, optim.Moments]
) -> tuple[Tensor, optim.Moments]:
    """Return the new point and moments where the mask is true, the old ones elsewhere."""
    moments = tuple(torch.where(mask, n, o) for n, o in zip(new[1], old[1], strict=True))
    return torch.where(mask, new[0], old[0]), moments
