"""Factors of many clients in a flat vector, with ranks padded to sizes that are fast in matrix products.

The matrix units of a GPU read rows of a multiple of eight values several times as fast as other rows. A CPU multiplies
by such ranks up to a fifth faster, and by 16 columns twice as fast as by fewer. So ranks, and on a GPU dense
parameters, are padded with zeros: a column that is zero in all factors of a tensor has gradient zero and stays zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.factor_algebra import SMALL_MATRIX_VALUES, compose, residual_grad

RANK_MULTIPLE = 8

SMALLEST_CPU_RANK = 16
"""Number of columns below which a CPU uses slower kernels for products."""


@dataclass(frozen=True)
class Workspace:
    """A plan's factors ``(..., Q)`` padded to ``(..., Q')``, and the computations on them."""

    outer: FactorPlan
    padded: bool
    device: str = "cuda"  # the device that sizes are padded for

    def pack(self, a: Tensor) -> Tensor:
        """Return packed factors."""
        return self._spread(a, "factors")

    def unpack(self, a: Tensor) -> Tensor:
        """Return the factors from their packed form."""
        return self._gathered(a, "factors")

    def target(self, theta: Tensor) -> Tensor:
        """Return packed parameters ``(..., P)``, the target that the factors are fitted to."""
        return self._spread(theta, "dense")

    def compose(self, a: Tensor) -> Tensor:
        """Return the parameters ``(..., P)`` that packed factors compose to."""
        return self._gathered(compose(self.plan, a), "dense")

    def residual_grad(self, a: Tensor, target: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return the gradient of ``scale/2 ||target - compose(a)||^2`` in packed factors."""
        return residual_grad(self.plan, a, target, scale, out)

    @property
    def plan(self) -> FactorPlan:
        """The plan of the packed factors."""
        return padded_plan(self.outer, self.device) if self.padded else self.outer

    def _spread(self, flat: Tensor, layout: str) -> Tensor:
        inner: Layout = getattr(self.plan, layout)
        if inner.size == flat.shape[-1]:
            return flat
        padded = flat.new_zeros(*flat.shape[:-1], inner.size)
        return padded.index_copy(-1, _places(self.outer, self.plan, layout, flat.device), flat)

    def _gathered(self, flat: Tensor, layout: str) -> Tensor:
        outer: Layout = getattr(self.outer, layout)
        if outer.size == flat.shape[-1]:
            return flat
        return flat.index_select(-1, _places(self.outer, self.plan, layout, flat.device))


def is_large_matrix(shape: Sequence[int]) -> bool:
    """Whether a CPU is faster if it does not form the residual of a matrix of this shape."""
    return len(shape) == 2 and math.prod(shape) >= SMALL_MATRIX_VALUES


@lru_cache(8)
def padded_plan(plan: FactorPlan, device: str) -> FactorPlan:
    """Return the plan with ranks, and on a GPU the last dimension of dense parameters, rounded up."""
    if device == "cpu, transposed":
        found = zip(plan.dense.shapes, plan.ranks, padded_plan(plan, "cpu").ranks, strict=True)
        return FactorPlan(plan.dense, tuple(own if is_large_matrix(shape) else up for shape, own, up in found))
    if device == "cpu":
        return FactorPlan(
            plan.dense, tuple(r if r is None else max(SMALLEST_CPU_RANK, rounded_up(r)) for r in plan.ranks)
        )
    shapes = (
        (*shape[:-1], rounded_up(shape[-1])) if rank is None and shape else shape
        for shape, rank in zip(plan.dense.shapes, plan.ranks, strict=True)
    )
    ranks = tuple(None if rank is None else rounded_up(rank) for rank in plan.ranks)
    return FactorPlan(Layout(plan.dense.names, tuple(shapes)), ranks)


@lru_cache(8)
def _places(plan: FactorPlan, padded: FactorPlan, layout: str, device: torch.device) -> Tensor:
    """Return the index of each value of the plan's vector in the padded vector."""
    outer: Layout = getattr(plan, layout)
    inner: Layout = getattr(padded, layout)
    numbered = inner.split(torch.arange(inner.size))
    within = [
        number[tuple(slice(size) for size in shape)] for number, shape in zip(numbered, outer.shapes, strict=True)
    ]
    return outer.join(within).to(device)


def rounded_up(size: int) -> int:
    """Return the next multiple of ``RANK_MULTIPLE``."""
    return -(-size // RANK_MULTIPLE) * RANK_MULTIPLE
