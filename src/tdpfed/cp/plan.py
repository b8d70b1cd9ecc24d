"""A factor plan defines which parameters of a model become CP factors, and at what rank.

It depends only on shapes. The factors are a second flat vector ``(..., Q)`` with their own layout; the plan maps
between the two: ``compose`` (factors to dense), ``decompose`` (dense to factors) and ``residual_grad``, the
gradient of ``1/2 ||theta - [[A]]||^2`` that trains the tensorized local model (section V, appendix A). A parameter that
stays dense is its own only factor, and follows the same rules.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tdpfed import cp
from tdpfed.core.layout import Layout
from tdpfed.errors import TDPFedError


@dataclass(frozen=True)
class PlanRow:
    """A parameter under the plan: its rank, and its number of values before and after."""

    name: str
    shape: tuple[int, ...]
    rank: int | None
    dense: int
    factored: int

    @property
    def rate(self) -> float:
        """Compression rate: dense over factored."""
        return self.dense / self.factored


@dataclass(frozen=True)
class FactorPlan:
    """The parameters of a model and the CP rank of each (None: stays dense)."""

    dense: Layout
    ranks: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        source: nn.Module | Layout | Mapping[str, Tensor | Sequence[int]],
        compression: float = 2.0,
        *,
        ranks: Mapping[str, int] | None = None,
        include: str | Sequence[str] = ("*",),
        exclude: str | Sequence[str] = (),
    ) -> "FactorPlan":
        """Plan for a module, a layout or a dict of shapes.

        Every parameter of two or more dimensions that matches ``include`` and not ``exclude`` gets the rank of
        :func:`rank_for`, unless this would not reduce its size. ``ranks`` maps patterns to explicit ranks, which are
        used unchanged. Patterns are shell-style and match parameter names (``"conv*"``, ``"*.weight"``).
        """
        layout = source if isinstance(source, Layout) else Layout.of(source)
        included = selected(layout, compression, include, exclude)
        explicit: dict[str, int] = {}
        for pattern, rank in (ranks or {}).items():
            cp.check_rank(rank, f"rank of {pattern!r}")
            for name in layout.matching(pattern, "ranks"):
                shape = layout.shapes[layout.names.index(name)]
                if rank > math.prod(shape):
                    raise TDPFedError(
                        f"rank of {pattern!r}: {rank} given, must be at most {math.prod(shape)} for {name!r}"
                    )
                if len(shape) < 2:
                    raise TDPFedError(
                        f"ranks: {pattern!r} matches {name!r}, which has fewer than two dimensions and stays dense"
                    )
                explicit[name] = rank

        def rank_of(name: str, shape: tuple[int, ...]) -> int | None:
            if name in explicit:
                return explicit[name]
            if name not in included or len(shape) < 2:
                return None
            rank = rank_for(shape, compression)
            return rank if rank * sum(shape) < math.prod(shape) else None

        return cls(layout, tuple(rank_of(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True)))

    @cached_property
    def factors(self) -> Layout:
        """Layout of the factor vector: ``fc1.A1``, ``fc1.A2`` for ``fc1.weight``; dense parameters under their name."""
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        for name, shape, rank in self._parameters:
            names += [name] if rank is None else [factor_name(name, n) for n in range(1, len(shape) + 1)]
            shapes += [shape] if rank is None else [(size, rank) for size in shape]
        return Layout(tuple(names), tuple(shapes))

    @cached_property
    def modes(self) -> list[int]:
        """The mode, from 0, that each entry of the factor layout belongs to; 0 for a dense parameter."""
        return [n for _, shape, rank in self._parameters for n in range(1 if rank is None else len(shape))]

    @property
    def compression_rate(self) -> float:
        """Number of values of the model divided by that of its factors, over all parameters."""
        return self.dense.size / self.factors.size

    def rate_reached(self) -> tuple[float, str]:
        """Return the compression rate, and why it may differ from the requested one."""
        dense = "at this rate no parameter has fewer values as factors, so all stay dense"
        return self.compression_rate, "a rank is at least 1, and biases stay dense" if any(self.ranks) else dense

    def rows(self) -> list[PlanRow]:
        """Return a row for each parameter (the paper's Table I, including biases)."""
        return [
            PlanRow(name, shape, rank, math.prod(shape), math.prod(shape) if rank is None else rank * sum(shape))
            for name, shape, rank in self._parameters
        ]

    def compose(self, a: Tensor) -> Tensor:
        """Map factors ``(..., Q)`` to dense parameters ``(..., P)``."""
        return self.dense.join([group[0] if rank is None else cp.compose(group) for group, rank in self.groups(a)])

    def decompose(self, theta: Tensor, *, sweeps: int = 100, tol: float = 1e-5, seed: int = 0) -> Tensor:
        """Map dense parameters ``(..., P)`` to factors ``(..., Q)`` by a fit from a cold start."""
        factors: list[Tensor] = []
        for tensor, (_, shape, rank) in zip(self.dense.split(theta), self._parameters, strict=True):
            factors += (
                [tensor] if rank is None else cp.decompose(tensor, rank, len(shape), sweeps=sweeps, tol=tol, seed=seed)
            )
        return self.factors.join(factors)

    def refine(self, a: Tensor, theta: Tensor, *, sweeps: int = 1, tol: float = 0.0, damping: float = 0.0) -> Tensor:
        """Fit factors ``(..., Q)`` to ``theta`` ``(..., P)`` by ALS, starting from ``a``; the residual never grows."""
        factors: list[Tensor] = []
        for tensor, (group, rank) in zip(self.dense.split(theta), self.groups(a), strict=True):
            if rank is None:
                # The result of damped sweeps on a tensor that is its own only factor.
                factors.append(torch.lerp(tensor, group[0], (damping / (1 + damping)) ** sweeps))
            else:
                factors += cp.als(tensor, group, sweeps=sweeps, tol=tol, damping=damping)
        return self.factors.join(factors)

    def residual_grad(self, a: Tensor, theta: Tensor, scale: float = 1.0) -> Tensor:
        """Return the gradient of ``scale/2 ||theta - compose(a)||^2`` in ``a`` ``(..., Q)``."""
        parts: list[Tensor] = []
        for tensor, (group, rank) in zip(self.dense.split(theta), self.groups(a), strict=True):
            parts += [scale * (group[0] - tensor)] if rank is None else cp.residual_grad(tensor, group, scale)
        return self.factors.join(parts)

    def init(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        """Draw factors whose composed entries have the variance of ``theta`` ``(P,)``; dense parameters are copied."""
        factors: list[Tensor] = []
        for tensor, (_, shape, rank) in zip(self.dense.split(theta), self._parameters, strict=True):
            variance = tensor.double().square().mean().item()
            factors += (
                [tensor] if rank is None else [f.to(theta) for f in cp.init_factors(shape, rank, variance, generator)]
            )
        return self.factors.join(factors)

    @cached_property
    def _parameters(self) -> list[tuple[str, tuple[int, ...], int | None]]:
        return list(zip(self.dense.names, self.dense.shapes, self.ranks, strict=True))

    def groups(self, a: Tensor) -> list[tuple[list[Tensor], int | None]]:
        """Return the factors of each parameter of ``dense``, in order, with its rank."""
        tensors = iter(self.factors.split(a))
        counts = [1 if rank is None else len(shape) for _, shape, rank in self._parameters]
        return [([next(tensors) for _ in range(count)], rank) for count, rank in zip(counts, self.ranks, strict=True)]


def selected(
    layout: Layout, compression: float, include: str | Sequence[str], exclude: str | Sequence[str]
) -> set[str]:
    """Return the names that match ``include`` and not ``exclude``, after checking the compression rate."""
    if not (math.isfinite(compression) and compression > 0):
        raise TDPFedError(f"compression: {compression} given, must be a finite rate above 0")
    return set(layout.matching(include, "include")) - set(layout.matching(exclude, "exclude"))


def rank_for(shape: Sequence[int], compression: float) -> int:
    """Return the rank that compresses ``shape`` by about ``compression`` (section VII-B; gives the paper's Table I)."""
    return max(1, round(math.prod(shape) / (compression * sum(shape))))


def factor_name(parameter: str, mode: int) -> str:
    """Name the factor of a parameter's mode (from 1): ``fc1.weight`` gives ``fc1.A1``, as in a tensorized layer."""
    owner = re.sub(r"(^|\.)weight$", "", parameter)
    return f"{owner}.A{mode}" if owner else f"A{mode}"
