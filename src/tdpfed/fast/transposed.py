"""Factors of many clients on a CPU, moved where they lie: large matrices have their factors transposed, ``(R, I)``.

Products by any rank are then as fast as by a padded one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from torch import Tensor

from tdpfed import cp
from tdpfed.core.layout import Layout
from tdpfed.core.optim import Moments
from tdpfed.fast.factor_algebra import matrix_residual_grad, tensor_residual_grad
from tdpfed.fast.first_layer import LowRankStep
from tdpfed.fast.optim import InPlace
from tdpfed.fast.padded import Workspace, is_large_matrix, rounded_up

VALUES_PER_BLOCK = 600_000
"""About how many packed values are moved together: with moments and gradients a few megabytes."""

CLIENTS_PER_BLOCK = 4
"""Clients that are moved together however large they are: small tensors are slow alone.

Below three the bits of a client could depend on which others are computed with it.
"""


@dataclass(frozen=True)
class Transposed(Workspace):
    """A workspace on a CPU for steps in place, ``(K, Q)`` packed to ``(K, Q')``: factors of large matrices transposed.

    Between the two factors of a matrix is room for the matrix that they are fitted to: one product gives both the
    second factor's product with that matrix and its Gram matrix.
    """

    padded: bool = True
    device: str = "cpu, transposed"

    def pack(self, a: Tensor) -> Tensor:
        """Take factors in; a copy."""
        room = a.new_zeros(len(a), self._inner.size)
        for own, given in zip(self._factors(room), self.outer.factors.split(a), strict=True):
            own[tuple(map(slice, given.shape))].copy_(given)
        return room

    def unpack(self, a: Tensor) -> Tensor:
        """Give factors back; a copy."""
        shapes = self.outer.factors.shapes
        return self.outer.factors.join(
            [own[(slice(None), *map(slice, shape))] for own, shape in zip(self._factors(a), shapes, strict=True)]
        )

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
        return joined

    def residual_grad(self, a: Tensor, target: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Return the gradient of ``scale/2 ||target - compose(a)||^2`` in packed factors, see :meth:`residual`."""
        compute, pieces = self.residual(a, target, scale)
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
        low_rank: LowRankStep | None,
        scale: float,
        rule: InPlace,
        state: Moments,
        counts: range,
    ) -> None:
        """Take optimizer steps on ``scale/2 ||target - compose(a)||^2`` in the memory of ``a`` and of the state.

        All steps of a few clients, then those of the next: what a step touches stays in the caches for the following
        one. ``low_rank`` is ``target - compose(a)`` before the first step, where that is known.
        """
        blocks = max(1, len(a) // max(CLIENTS_PER_BLOCK, VALUES_PER_BLOCK // a.shape[1]))
        given = (a, target, *state) if low_rank is None else (a, target, *state, low_rank.slopes, low_rank.inputs)
        for own, near, *others in zip(*(tensor.tensor_split(blocks) for tensor in given), strict=True):
            beside = None if low_rank is None else low_rank._replace(slopes=others[-2], inputs=others[-1])
            gradient, pieces = self.residual(own, near, scale, beside)
            step = rule(own, pieces, tuple(others[: len(state)]))
            for count in counts:
                gradient()
                step(count)

    def residual(
        self, a: Tensor, target: Tensor, scale: float, low_rank: LowRankStep | None = None
    ) -> tuple[Callable[[], None], list[tuple[int, Tensor]]]:
        """Return a function that computes the gradient of ``scale/2 ||target - compose(a)||^2``, and its pieces.

        The function takes the factors that lie in the memory of ``a`` when it is called; the target is copied into its
        room there until the next call. The gradient is written to one tensor ``(K, n)`` per transposed factor, which a
        product fills fastest, and to one for the entries between them; each comes with where in ``a`` it begins.
        ``low_rank`` is ``target - compose(a)`` as it is now, where that is known.
        """
        pieces, rooms = self._room(a)
        views = iter(self._inner.split(a))
        computed: list[Callable[[], object]] = []
        starts = accumulate(self.plan.dense.sizes[:-1], initial=0)
        for tensor, (shape, rank), begin in zip(self.plan.dense.split(target), self._parameters, starts, strict=True):
            if rank is not None and is_large_matrix(shape):
                first, room, second = (next(views) for _ in range(3))
                out = [next(rooms).view_as(factor) for factor in (first, second)]
                beside = None
                if low_rank is not None and low_rank.begin == begin:
                    beside = _stacked(room, first, second, low_rank)
                if beside is None:
                    room.copy_(tensor)
                    computed.append(_transposed_residual(room, first, second, scale, *out))
                else:
                    computed.append(_stacked_residual(first, second, *beside, scale, *out))
                continue
            group = [next(views) for _ in range(1 if rank is None else len(shape))]
            where = [next(rooms).view_as(factor) for factor in group]
            if rank is None:
                computed.append(partial(_difference, group[0], tensor, scale, where[0]))
            else:
                gradient = matrix_residual_grad if len(shape) == 2 else tensor_residual_grad
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
        return [view.mT if kind == "transposed" else view for view, kind in views if kind != "target"]

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
        """What is packed: transposed factors, targets between them, and factors as they are."""
        entries: list[tuple[str, tuple[int, ...]]] = []
        for shape, rank in self._parameters:
            if rank is None:
                entries.append(("factors", shape))
            elif is_large_matrix(shape):
                entries += [("transposed", (rank, shape[0])), ("target", shape), ("transposed", (rank, shape[1]))]
            else:
                entries += [("factors", (size, rank)) for size in shape]
        return entries


def _difference(value: Tensor, target: Tensor, scale: float, out: Tensor) -> None:
    torch.sub(value, target, out=out).mul_(scale)


def _transposed_residual(
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


def _stacked(room: Tensor, a: Tensor, b: Tensor, low_rank: LowRankStep) -> tuple[Tensor, Tensor] | None:
    """Return ``A'`` and ``B'``, which end in ``a`` and ``b``, such that ``a^T b - target`` stays ``A'^T B'``.

    The target is ``a^T b`` as it is now, which stays in them, plus ``low_rank``. ``B'`` lies in the memory of the room
    and of ``b`` behind it; ``a`` is to be put into ``A'`` as it moves. None where they are no smaller than a matrix.
    """
    (clients, rows, columns), rank, samples = room.shape, b.shape[1], low_rank.inputs.shape[1]
    size = rounded_up(samples + 2 * rank)
    if (size - rank) * (rows + columns) >= rows * columns:
        return None
    after = room.storage_offset() + (rows + rank - size) * columns
    right = room.as_strided((clients, size, columns), room.stride(), after)
    left = a.new_zeros(clients, size, rows)
    for stack, beside, factor in ((left, low_rank.slopes, a), (right, low_rank.inputs, b)):
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
