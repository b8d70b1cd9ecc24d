"""Where the factors of many clients are moved: a flat vector in which every row starts where the machine likes it.

Matrix units of a GPU read rows of a multiple of eight values several times as fast as others; a CPU multiplies by such
ranks up to a fifth faster, and by 16 columns twice as fast as by fewer. So ranks, and on a GPU dense parameters, are
filled up with zeros: a column that is zero in all factors of a tensor has the gradient zero, and stays. On a CPU large
matrices have their factors turned instead, ``(R, I)``: products by any rank are then as fast.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.layout import Layout
from tdpfed.cp import algebra as cp
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.first_layer import Along

ALIGNED = 8

LEAST_RANK = 16
"""Columns below which a CPU's products take other, slower kernels."""

BLOCK = 600_000
"""About how many packed values are moved together: with moments and gradients a few megabytes."""

LEAST_BLOCK = 4
"""Clients that are moved together however large they are.

What is small in a model is slow alone. Below three the bits of a client could depend on its company, see ``runners``.
"""


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


@dataclass(frozen=True)
class Turned(Workspace):
    """A workspace on a CPU for steps in place, ``(K, Q)`` packed to ``(K, Q')``: large matrices' factors are turned.

    Before the second of these is room for the matrix that they are to come near to: one product gives both what the
    second is with that matrix and what it is with itself.
    """

    padded: bool = True
    device: str = "cpu, turned"
    single: bool = False  # one client without an axis of its own, ``(Q,)`` to ``(1, Q')``: the same arithmetic

    def pack(self, a: Tensor) -> Tensor:
        """Take factors in; a copy."""
        a = a[None] if self.single else a
        room = a.new_zeros(len(a), self._inner.size)
        for own, given in zip(self._factors(room), self.outer.factors.split(a), strict=True):
            own[tuple(map(slice, given.shape))].copy_(given)
        return room

    def unpack(self, a: Tensor) -> Tensor:
        """Give factors back; a copy."""
        shapes = self.outer.factors.shapes
        given = self.outer.factors.join(
            [own[(slice(None), *map(slice, shape))] for own, shape in zip(self._factors(a), shapes, strict=True)]
        )
        return given[0] if self.single else given

    def compose(self, a: Tensor) -> Tensor:
        """Return the parameters ``(K, P)`` that packed factors compose to."""
        factors = iter(self._factors(a))
        joined = a.new_empty(len(a), self.plan.dense.size)
        for place, (shape, rank) in zip(self.plan.dense.split(joined), self._parameters, strict=True):
            group = [next(factors) for _ in range(1 if rank is None else len(shape))]
            if len(group) == 2:
                torch.bmm(group[0], group[1].mT, out=place)
            else:
                place.copy_(group[0] if rank is None else cp.compose(group))
        return joined[0] if self.single else joined

    def residual_grad(self, a: Tensor, target: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return the gradient of ``scale/2 ||target - compose(a)||^2`` in packed factors, see :meth:`residual`."""
        compute, pieces = self.residual(a, target[None] if self.single else target, scale)
        compute()
        out = torch.empty_like(a) if out is None else out
        out.zero_()
        for begin, piece in pieces:
            out.narrow(1, begin, piece.shape[1]).copy_(piece)
        return out

    def move(
        self,
        a: Tensor,
        target: Tensor,
        along: Along | None,
        scale: float,
        rule: optim.InPlace,
        state: optim.State,
        counts: range,
    ) -> None:
        """Take optimiser steps on ``scale/2 ||target - compose(a)||^2`` in the memory of ``a`` and of the state.

        All steps of a few clients, then those of the next: what a step touches stays near for the following one.
        ``along`` says where the target is beside ``compose(a)`` before the first step, if that is known.
        """
        target = target[None] if self.single else target
        blocks = max(1, len(a) // max(LEAST_BLOCK, BLOCK // a.shape[1]))
        given = (a, target, *state) if along is None else (a, target, *state, along.slopes, along.inputs)
        for own, near, *others in zip(*(tensor.tensor_split(blocks) for tensor in given), strict=True):
            beside = None if along is None else Along(along.begin, *others[-2:])
            gradient, pieces = self.residual(own, near, scale, beside)
            step = rule(own, pieces, tuple(others[: len(state)]))
            for count in counts:
                gradient()
                step(count)

    def residual(
        self, a: Tensor, target: Tensor, scale: float, along: Along | None = None
    ) -> tuple[Callable[[], None], list[tuple[int, Tensor]]]:
        """Return what computes the gradient of ``scale/2 ||target - compose(a)||^2``, and where ``(K, n)`` it goes.

        The target is put into its room in ``a``, until the next call. It is the gradient at the factors that lie in
        the memory of ``a`` when it is computed. It goes to a tensor for each turned factor, which a product fills
        quickest so, and for what is between, each with where in ``a`` that begins. ``along`` is what is known of where
        the target is beside ``compose(a)`` as it is now.
        """
        pieces, rooms = self._room(a)
        views = iter(self._inner.split(a))
        computed: list[Callable[[], object]] = []
        starts = accumulate(self.plan.dense.sizes[:-1], initial=0)
        for tensor, (shape, rank), begin in zip(self.plan.dense.split(target), self._parameters, starts, strict=True):
            if rank is not None and _is_large_matrix(shape):
                first, room, second = (next(views) for _ in range(3))
                out = [next(rooms).view_as(factor) for factor in (first, second)]
                beside = _stacked(room, first, second, along) if along is not None and along.begin == begin else None
                if beside is None:
                    room.copy_(tensor)
                    computed.append(_turned_residual(room, first, second, scale, *out))
                else:
                    computed.append(_stacked_residual(first, second, *beside, scale, *out))
                continue
            group = [next(views) for _ in range(1 if rank is None else len(shape))]
            where = [next(rooms).view_as(factor) for factor in group]
            if rank is None:
                computed.append(partial(_difference, group[0], tensor, scale, where[0]))
            else:
                gradient = cp.matrix_residual_grad if len(shape) == 2 else cp.residual_grad
                computed.append(partial(gradient, tensor, group, where, scale))

        def compute() -> None:
            for one in computed:
                one()

        return compute, pieces

    def _room(self, a: Tensor) -> tuple[list[tuple[int, Tensor]], Iterator[Tensor]]:
        """Return room for a gradient in pieces, with where they begin, and in them that of each packed factor."""
        pieces: list[tuple[int, Tensor]] = []
        rooms: list[Tensor] = []
        begin = 0
        for kind, entries in groupby(zip(self._kinds, self._inner.sizes, strict=True), itemgetter(0)):
            sizes = [size for _, size in entries]
            for together in [sizes] if kind == "factors" else [[size] for size in sizes]:
                if kind != "target":
                    pieces.append((begin, a.new_empty(len(a), sum(together))))
                    rooms += pieces[-1][1].split(together, 1)
                begin += sum(together)
        return pieces, iter(rooms)

    def _factors(self, a: Tensor) -> list[Tensor]:
        """Return the packed factors ``(K, I, R)``, and dense parameters, as views of where they lie."""
        views = zip(self._inner.split(a), self._kinds, strict=True)
        return [view.mT if kind == "turned" else view for view, kind in views if kind != "target"]

    @property
    def _parameters(self) -> list[tuple[tuple[int, ...], int | None]]:
        return list(zip(self.plan.dense.shapes, self.plan.ranks, strict=True))

    @cached_property
    def _kinds(self) -> list[str]:
        """What lies in each entry of the packed layout."""
        return [kind for kind, _ in self._entries]

    @cached_property
    def _inner(self) -> Layout:
        """The layout of what is packed."""
        names = (f"{kind} {number}" for number, kind in enumerate(self._kinds))
        return Layout(tuple(names), tuple(shape for _, shape in self._entries))

    @cached_property
    def _entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """What is packed: turned factors, targets between them, and factors as they are."""
        entries: list[tuple[str, tuple[int, ...]]] = []
        for shape, rank in self._parameters:
            if rank is None:
                entries.append(("factors", shape))
            elif _is_large_matrix(shape):
                entries += [("turned", (rank, shape[0])), ("target", shape), ("turned", (rank, shape[1]))]
            else:
                entries += [("factors", (size, rank)) for size in shape]
        return entries


def _difference(value: Tensor, target: Tensor, scale: float, out: Tensor) -> None:
    torch.sub(value, target, out=out).mul_(scale)


def _turned_residual(
    target: Tensor, a: Tensor, b: Tensor, scale: float, out_a: Tensor, out_b: Tensor
) -> Callable[[], None]:
    """Return what writes the gradient of ``scale/2 ||target - a^T b||^2``.

    ``a`` is ``(K, R, I)``, ``b`` ``(K, R, J)``, and in memory ``b`` follows the target.
    """
    (clients, rows, columns), rank = target.shape, b.shape[1]
    both = target.as_strided((clients, rows + rank, columns), target.stride()).mT
    products, gram = b.new_empty(clients, rank, rows + rank), a.new_empty(clients, rank, rank)
    (with_target, with_itself), turned = products.split([rows, rank], 2), a.mT

    def compute() -> None:
        torch.bmm(b, both, out=products)
        torch.baddbmm(with_target, with_itself, a, beta=-scale, alpha=scale, out=out_a)
        torch.bmm(a, target, out=out_b)
        torch.bmm(a, turned, out=gram)
        out_b.baddbmm_(gram, b, beta=-scale, alpha=scale)

    return compute


def _stacked(room: Tensor, a: Tensor, b: Tensor, along: Along) -> tuple[Tensor, Tensor] | None:
    """Return ``A'`` and ``B'``, which end in ``a`` and ``b``, such that ``a^T b - target`` is ``A'^T B'`` for good.

    The target is ``a^T b`` as it is now, which stays in them, and ``along``. ``B'`` lies in the memory of the room and
    of what follows it, ``b``; ``a`` is to be put into ``A'`` as it moves. None where they are no smaller than a matrix.
    """
    (clients, rows, columns), rank, samples = room.shape, b.shape[1], along.inputs.shape[1]
    size = _up(samples + 2 * rank)
    if (size - rank) * (rows + columns) >= rows * columns:
        return None
    after = room.storage_offset() + (rows + rank - size) * columns
    right = room.as_strided((clients, size, columns), room.stride(), after)
    left = a.new_zeros(clients, size, rows)
    for stack, beside, factor in ((left, along.slopes, a), (right, along.inputs, b)):
        stack[:, : -2 * rank - samples].zero_()
        stack[:, -2 * rank - samples : -2 * rank] = beside
        stack[:, -2 * rank : -rank] = factor
    left.neg_()
    return left, right


def _stacked_residual(
    a: Tensor, b: Tensor, left: Tensor, right: Tensor, scale: float, out_a: Tensor, out_b: Tensor
) -> Callable[[], None]:
    """Return what writes the gradient of ``scale/2 ||left^T right||^2`` in ``a`` and ``b``, which these end in."""
    clients, rank, _ = a.shape
    with_left, with_right = (a.new_empty(clients, rank, left.shape[1]) for _ in range(2))
    last, left_turned, right_turned = left[:, -rank:], left.mT, right.mT
    left.mul_(scale)

    def compute() -> None:
        torch.mul(a, scale, out=last)
        torch.bmm(b, right_turned, out=with_right)
        torch.bmm(with_right, left, out=out_a)
        torch.bmm(a, left_turned, out=with_left)
        torch.bmm(with_left, right, out=out_b)

    return compute


def _is_large_matrix(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and math.prod(shape) >= cp.SMALL_MATRIX


@lru_cache(8)
def _filled_up(plan: FactorPlan, device: str) -> FactorPlan:
    """Return the plan with ranks, and on a GPU the last dimension of dense parameters, rounded up."""
    if device == "cpu, turned":
        found = zip(plan.dense.shapes, plan.ranks, _filled_up(plan, "cpu").ranks, strict=True)
        return FactorPlan(plan.dense, tuple(own if _is_large_matrix(shape) else up for shape, own, up in found))
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
