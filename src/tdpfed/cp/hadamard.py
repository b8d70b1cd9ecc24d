"""Parameters as elementwise products of two low-rank tensors (FedPara; Hyeon-Woo et al., 2022).

A matrix is ``W = (X1 Y1^T) * (X2 Y2^T + c)``: two factors of rank R reach rank R^2. A kernel ``(O, I, ...)`` has a core
in each product, ``sum_rs T_rs x_r y_s`` (Tucker-2), with its further modes taken as one. The constant c is 0, or 1
where the second product is a client's own correction of the first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.errors import TDPFedError

Group = list[Tensor]
"""The factors of a product: X ``(..., O, R)``, Y ``(..., I, R)``, and for a kernel T ``(..., R, R, k)``."""


@dataclass(frozen=True)
class HadamardPlan:
    """Which parameters are products, and at what rank (None: stays dense)."""

    dense: Layout
    ranks: tuple[int | None, ...]
    constant: float = 0.0

    @classmethod
    def of(
        cls,
        layout: Layout,
        share: float,
        *,
        rank: int | None = None,
        exclude: Sequence[str] = (),
        constant: float = 0.0,
    ) -> "HadamardPlan":
        """Plan for a model: each parameter of two or more dimensions has the rank of :func:`rank_for`, or ``rank``."""
        kept = set(layout.matching(exclude, "algorithm.exclude"))

        def rank_of(name: str, shape: tuple[int, ...]) -> int | None:
            if name in kept or len(shape) < 2:
                return None
            return rank_for(shape, share) if rank is None else min(rank, *shape[:2])

        ranks = tuple(rank_of(name, shape) for name, shape in zip(layout.names, layout.shapes, strict=True))
        if not any(ranks):
            raise TDPFedError(
                "no parameter of this model has fewer values as factors; allowed: a larger model, or fewer patterns in "
                "exclude", field="algorithm.name",
            )  # fmt: skip
        return cls(layout, ranks, constant)

    @cached_property
    def first(self) -> Layout:
        """Layout of the first factors and of the parameters that stay dense."""
        return self._layout(1)

    @cached_property
    def second(self) -> Layout:
        """Layout of the second factors."""
        return self._layout(2)

    def at(self, first: Tensor, second: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Return the parameters ``(..., P)``, and the function from their gradient to those of both factor vectors."""
        ones, twos = self._groups(self.first, first), self._groups(self.second, second)
        left = [group[0] if rank is None else product(group) for group, rank in zip(ones, self.ranks, strict=True)]
        right = [None if rank is None else product(group) for group, rank in zip(twos, self.ranks, strict=True)]
        if self.constant:
            right = [None if b is None else b + self.constant for b in right]
        pairs = list(zip(left, right, strict=True))
        lead = first.shape[:-1]
        theta = self.dense.join([
            (a if b is None else a * b).reshape(*lead, *shape)
            for (a, b), shape in zip(pairs, self.dense.shapes, strict=True)
        ])  # fmt: skip

        def pull(gradient: Tensor) -> tuple[Tensor, Tensor]:
            of_first: Group = []
            of_second: Group = []
            for g, (a, b), one, two in zip(self.dense.split(gradient), pairs, ones, twos, strict=True):
                if b is None:
                    of_first.append(g)
                else:
                    whole = g.reshape(a.shape)
                    of_first += pulled(one, whole * b)
                    of_second += pulled(two, whole * a)
            return self.first.join(of_first), self.second.join(of_second)

        return theta, pull

    def compose(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the parameters ``(..., P)`` of both factor vectors."""
        return self.at(first, second)[0]

    def init(self, theta: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw factors of products whose entries have the variance of ``theta`` ``(P,)``; dense parameters are copied.

        With a constant the second product is 0 and one of its factors is not, so that it can move.
        """
        ones: Group = []
        twos: Group = []
        shapes = zip(self._shapes(1), self._shapes(2), strict=True)
        for tensor, rank, (one, two) in zip(self.dense.split(theta), self.ranks, shapes, strict=True):
            if rank is None:
                ones.append(tensor)
                continue
            variance = max(float(tensor.double().square().mean()), 1e-8)
            # An entry of a product sums R (or R^2) terms, each of two (or three) factors.
            terms, factors = rank ** (len(one) - 1), len(one)
            entry = variance if self.constant else variance**0.5
            scale = (entry / terms) ** (0.5 / factors)
            ones += [_normal(shape, scale, generator, theta) for shape in one]
            drawn = [_normal(shape, rank**-0.5 if self.constant else scale, generator, theta) for shape in two]
            if self.constant:
                drawn[1] = torch.zeros_like(drawn[1])
            twos += drawn
        return self.first.join(ones), self.second.join(twos)

    def _shapes(self, number: int) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the first or second factors of each parameter; a dense one is its own first factor."""
        return [
            factor_shapes(shape, rank) if rank is not None else [shape] if number == 1 else []
            for shape, rank in zip(self.dense.shapes, self.ranks, strict=True)
        ]

    def _layout(self, number: int) -> Layout:
        shapes: dict[str, Sequence[int]] = {}
        for name, rank, own in zip(self.dense.names, self.ranks, self._shapes(number), strict=True):
            letters = ("",) if rank is None else (f".X{number}", f".Y{number}", f".T{number}")
            shapes |= {f"{name}{letter}": shape for letter, shape in zip(letters, own, strict=False)}
        return Layout.of(shapes)

    def _groups(self, layout: Layout, flat: Tensor) -> list[Group]:
        parts = iter(layout.split(flat))
        number = 1 if layout is self.first else 2
        return [[next(parts) for _ in shapes] for shapes in self._shapes(number)]


def factor_shapes(shape: Sequence[int], rank: int) -> list[tuple[int, ...]]:
    """Return the shapes of X, Y and, for a kernel, the core T."""
    outputs, inputs, *rest = shape
    return [(outputs, rank), (inputs, rank), *([(rank, rank, math.prod(rest))] if rest else [])]


def rank_for(shape: Sequence[int], share: float) -> int | None:
    """Return the rank between the least that can reach full rank and the most that saves values, at ``share``.

    None if even the least rank has no fewer values than the dense parameter.
    """
    least = math.isqrt(min(shape[:2]) - 1) + 1
    most = least - 1
    while 2 * sum(map(math.prod, factor_shapes(shape, most + 1))) <= math.prod(shape):
        most += 1
    return None if most < least else math.floor((1 - share) * least + share * most + 1e-9)


def product(group: Group) -> Tensor:
    """Return the tensor ``(..., O, I)`` or ``(..., O, I, k)`` of its factors."""
    x, y, *core = group
    return x @ y.mT if not core else torch.einsum("...or,...rsk,...is->...oik", x, *core, y)


def pulled(group: Group, g: Tensor) -> Group:
    """Return the gradients of the factors, given that of their product."""
    x, y, *core = group
    if not core:
        return [(y.mT @ g.mT).mT, (x.mT @ g).mT]  # few rows and many columns are faster than the other way round
    (t,) = core
    by_outputs = torch.einsum("...oik,...or->...rik", g, x)
    return [
        torch.einsum("...oik,...is,...rsk->...or", g, y, t),
        torch.einsum("...rik,...rsk->...is", by_outputs, t),
        torch.einsum("...rik,...is->...rsk", by_outputs, y),
    ]


def _normal(shape: tuple[int, ...], scale: float, generator: torch.Generator, like: Tensor) -> Tensor:
    return scale * torch.randn(shape, generator=generator).to(like)
