"""Gradients and steps of many clients at once, recorded and replayed; the basis of :mod:`tdpfed.fast.local`.

Clients are computed in one batch, except for convolutions on a CPU, where computing one after another is faster.
Functions whose names end in an underscore may overwrite their parameters.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from tdpfed.core import optim
from tdpfed.core.inner import Inner, taken
from tdpfed.core.layout import Ranges
from tdpfed.core.local import Batch, Near, inside
from tdpfed.core.objective import Objective
from tdpfed.fast.optim import after_gradient, aligned_copy, aligned_empty, is_aligned
from tdpfed.fast.recorded_function import RecordedFunction
from tdpfed.fast.recorded_gradient import Mover, Replayed


class RecordedGradient:
    """The gradient of an objective, with or without a leading client axis."""

    def __init__(self, objective: Objective) -> None:
        self._one_by_one = objective.one_by_one
        self._functions = grad_and_value(objective.value), vmap(grad_and_value(objective.value))
        self._one, self._many = map(Replayed, self._functions)
        self._of_parts: dict[Ranges, tuple[Replayed, Replayed]] = {}
        self._per_sample = objective.per_sample
        product = objective.hessian_product_of_one
        self._losses = RecordedFunction(objective.value), RecordedFunction(vmap(objective.value))
        self._products = RecordedFunction(product), RecordedFunction(vmap(product))

    def __call__(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient ``(..., P)`` and loss ``(...)``."""
        if theta.ndim == 1:
            return self._one(theta, *batch)
        if self._one_by_one(theta):
            gradients, losses = zip(*(self._one(*row) for row in zip(theta, *batch, strict=True)), strict=True)
            return torch.stack(gradients), torch.stack(losses)
        return self._many(theta, *batch)

    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss, and whether it is predicted correctly, ``(..., B)`` each."""
        if theta.ndim == 1 or not self._one_by_one(theta):
            return self._per_sample(theta, batch)
        losses, correct = zip(
            *(self._per_sample(row, (x, y)) for row, x, y in zip(theta, *batch, strict=True)), strict=True
        )
        return torch.stack(losses), None if correct[0] is None else torch.stack(correct)

    def loss(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the loss ``(...)``."""
        return self._each(self._losses, theta, *batch)

    def hessian_product(self, theta: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the product of the Hessian with a vector, ``(..., P)``."""
        return self._each(self._products, theta, *batch, vector)

    def _each(self, functions: tuple[RecordedFunction, RecordedFunction], *given: Tensor) -> Tensor:
        """Call the function of one client or that of many."""
        one, many = functions
        if given[0].ndim == 1:
            return one(*given)
        return (
            torch.stack([one(*row) for row in zip(*given, strict=True)]) if self._one_by_one(given[0]) else many(*given)
        )

    def descend(
        self,
        theta: Tensor,
        batches: Callable[[int], Batch],
        steps: range,
        lr: float,
        anchor: Tensor | None = None,
        lam: float = 0.0,
        correction: Tensor | None = None,
        only: Ranges | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Take steps ``theta + lr lam (anchor - theta) - lr (g + correction)``, each on its own minibatch.

        With ``only``, parameters outside of these ranges are frozen. Return the
        parameters and the loss before the last step. On a CPU no gradient is written to memory.
        """
        pull = optim.within_float32(lr * lam)
        shift = None if correction is None else lr * (correction if only is None else inside(correction, only))
        if theta.ndim == 1 or theta.device.type != "cpu":
            for t in steps:
                g, loss = self(theta, batches(t))
                theta = after_gradient(theta, g, anchor, pull, lr, only)
                theta = theta if shift is None else theta - shift
            return theta, loss
        own = aligned_copy(theta)
        alone = self._one_by_one(own)
        one, many = self._part(only)
        gradient, rows = (one, list(own)) if alone else (many, [own])
        anchors = [None] * len(rows) if anchor is None else list(anchor) if alone else [anchor]

        def minibatches(t: int) -> list[Batch]:
            return list(zip(*batches(t), strict=True)) if alone else [batches(t)]

        def movers(now: list[Batch]) -> list[Mover]:
            kinds = zip(rows, now, anchors, strict=True)
            return [gradient.mover(row, *batch, near, pull, lr) for row, batch, near in kinds]

        now, by_length = minibatches(steps[0]), dict[int, list[Mover]]()
        for t in (*steps[1:], None):
            length = now[0][1].shape[0 if alone else 1]  # the last minibatch of a pass may be shorter
            if length not in by_length:
                by_length[length] = movers(now)
            pairs = zip(by_length[length], now, strict=True)
            if t is None:
                losses = [mover.move_and_report(*batch) for mover, batch in pairs]
                break
            for mover, batch in pairs:
                mover.move(*batch)
            if shift is not None:
                own.sub_(shift)
            now = minibatches(t)
        if shift is not None:
            own.sub_(shift)
        return own, torch.stack(losses) if alone else losses[0]

    def _part(self, only: Ranges | None) -> tuple[Replayed, Replayed]:
        """Return the gradients of one client and of many whose steps move these ranges of the parameters."""
        if only is None:
            return self._one, self._many
        if only not in self._of_parts:
            one, many = (Replayed(function, only) for function in self._functions)
            self._of_parts[only] = one, many
        return self._of_parts[only]

    def proximal(
        self,
        theta: Tensor,
        batch: Batch,
        inner: Inner,
        steps: int,
        velocity: Tensor | None = None,
        *,
        used_up: bool = False,
    ) -> Near:
        """Take Nesterov steps on an inner problem, all on one minibatch; ``used_up``: theta may be overwritten."""
        anchor, lam, lr, momentum = inner
        several = steps > 1 and theta.ndim == 2 and not self._one_by_one(theta)
        if several and theta.device.type == "cpu" and not is_aligned(theta):
            # Aligned rows are fastest; strides are also part of the key of a recording.
            theta, used_up = aligned_copy(theta), True
        known = self._many.first_layer(theta, *batch) if several else None
        if momentum == 0 and velocity is None:
            pull = optim.within_float32(lr * lam)
            if known is not None:
                return known.steps(theta, *batch, anchor, pull, lr, steps, used_up=used_up)
            return Near(*self._plain_steps(theta, batch, anchor, pull, lr, steps, used_up=used_up))
        if known is not None:
            return known.steps_with_momentum(theta, *batch, inner, steps, velocity, used_up=used_up)
        if velocity is not None:
            return taken(self, theta, batch, inner, steps, velocity)
        for _ in range(steps):
            g, loss = self(theta, batch)
            diff = theta - anchor
            g.add_(diff, alpha=lam)
            theta, velocity = optim.nesterov(theta, g, velocity, lr, momentum, out=diff if velocity is None else None)
        return Near(theta, loss)

    def _plain_steps(
        self, theta: Tensor, batch: Batch, anchor: Tensor, pull: float, lr: float, steps: int, *, used_up: bool
    ) -> tuple[Tensor, Tensor]:
        if theta.ndim == 1:
            for _ in range(steps):
                g, loss = self(theta, batch)
                theta = after_gradient(theta, g, anchor, pull, lr)
            return theta, loss
        if not self._one_by_one(theta):
            own = theta if used_up or theta.device.type != "cpu" else aligned_copy(theta)
            return self._many.steps_(own, *batch, anchor, pull, lr, steps)
        own, losses = aligned_empty(theta), []
        for place, row, x, y, near in zip(own, theta, *batch, anchor, strict=True):
            moved, loss = self._one.steps_(place.copy_(row), x, y, near, pull, lr, steps)
            losses.append(loss)
            if moved is not place:
                place.copy_(moved)
        return own, torch.stack(losses)

    def skips_first_layer(self, theta: Tensor, batch: Batch) -> bool:
        """Whether several steps on a minibatch like this one update the first layer's weights only once."""
        return theta.ndim == 2 and not self._one_by_one(theta) and self._many.first_layer(theta, *batch) is not None
