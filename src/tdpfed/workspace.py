"""Where the factors of many clients are moved: a flat vector in which every row starts where the machine likes it.

Matrix units of a GPU read rows of a multiple of eight values several times as fast as others; a CPU multiplies by such
ranks up to a fifth faster, and by 16 columns twice as fast as by fewer. So ranks, and on a GPU dense parameters, are
filled up with zeros: a column that is zero in all factors of a tensor has the gradient zero, and stays.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tdpfed.layout import Layout
from tdpfed.plan import FactorPlan

ALIGNED = 8

LEAST_RANK = 16
"""Columns below which a CPU's products take other, slower kernels."""


@dataclass(frozen=True)
class Workspace:
    """A plan's factors ``(..., Q)`` packed into ``(..., Q')``, and what is done with them there."""

    outer: FactorPlan
    padded: bool
    device: str = "cuda"  # what it is padded for

    def pack(self, a: Tensor) -> Tensor:
        """Take factors in."""
        return self._spread(a, "factors")

    def unpack(self, a: Tensor) -> Tensor:
        """Give factors back."""
        return self._gathered(a, "factors")

    def target(self, theta: Tensor) -> Tensor:
        """Take parameters ``(..., P)`` in, which the factors are to come near to."""
        return self._spread(theta, "dense")

    def compose(self, a: Tensor) -> Tensor:
        """Return the parameters ``(..., P)`` that packed factors compose to."""
        return self._gathered(self.plan.compose(a), "dense")

    def residual_grad(self, a: Tensor, target: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return the gradient of ``scale/2 ||target - compose(a)||^2`` in packed factors."""
        return self.plan.residual_grad(a, target, scale, out)

    @property
    def plan(self) -> FactorPlan:
        """The plan of what is packed."""
        return _filled_up(self.outer, self.device) if self.padded else self.outer

    def _spread(self, flat: Tensor, layout: str) -> Tensor:
        inner: Layout = getattr(self.plan, layout)
        if inner.size == flat.shape[-1]:
            return flat
        room = flat.new_zeros(*flat.shape[:-1], inner.size)
        return room.index_copy(-1, _places(self.outer, self.plan, layout, flat.device), flat)

    def _gathered(self, flat: Tensor, layout: str) -> Tensor:
        outer: Layout = getattr(self.outer, layout)
        if outer.size == flat.shape[-1]:
            return flat
        return flat.index_select(-1, _places(self.outer, self.plan, layout, flat.device))


@lru_cache(8)
def _filled_up(plan: FactorPlan, device: str) -> FactorPlan:
    """Return the plan with ranks, and on a GPU the last dimension of dense parameters, rounded up."""
    if device == "cpu":
        return FactorPlan(plan.dense, tuple(r if r is None else max(LEAST_RANK, _up(r)) for r in plan.ranks))
    shapes = (
        (*shape[:-1], _up(shape[-1])) if rank is None and shape else shape
        for shape, rank in zip(plan.dense.shapes, plan.ranks, strict=True)
    )
    ranks = tuple(None if rank is None else _up(rank) for rank in plan.ranks)
    return FactorPlan(Layout(plan.dense.names, tuple(shapes)), ranks)


@lru_cache(8)
def _places(plan: FactorPlan, filled: FactorPlan, layout: str, device: torch.device) -> Tensor:
    """Return where each value of the plan's vector lies in the filled-up one."""
    outer: Layout = getattr(plan, layout)
    inner: Layout = getattr(filled, layout)
    numbered = inner.split(torch.arange(inner.size))
    within = [
        number[tuple(slice(size) for size in shape)] for number, shape in zip(numbered, outer.shapes, strict=True)
    ]
    return outer.join(within).to(device)


def _up(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
