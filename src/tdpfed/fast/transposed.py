"""Factors of many clients on a CPU, updated in place; the factors of large matrices are stored transposed, ``(R, I)``.

Products are then as fast for any rank as for a padded one.
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
"""Approximate number of packed values per block: a few megabytes with moments and gradients."""

CLIENTS_PER_BLOCK = 4
"""Minimum number of clients per block, whatever their size: small tensors are slow one at a time.

With fewer than three, a client's bits could depend on which others are computed with it.
"""


@dataclass(frozen=True)
class Transposed(Workspace):
    """A workspace on a CPU for steps in place, ``(K, Q)`` packed to ``(K, Q')``: factors of large matrices transposed.

    Space for the target matrix is reserved between its two factors: one product then computes both the second
    factor's product with the target and its Gram matrix.
    """

    padded: bool = True
    device: str = "cpu, transposed"

    def pack(self, a: Tensor) -> Tensor:
        """Return a packed copy of the factors."""
        packed = a.new_zeros(len(a), self._inner.size)
        for own, given in zip(self._factors(packed), self.outer.factors.split(a), strict=True):
            own[tuple(map(slice, given.shape))].copy_(given)
        return packed

    def unpack(self, a: Tensor) -> Tensor:
        """Return a copy of the factors from their packed form."""
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

        All steps of a block of clients are taken before those of the next block, so that data stay in the caches
        between steps. ``low_rank`` is ``target - compose(a)`` before the first step, if known.
        """
        blocks = max(1, len(a) // max(CLIENTS_PER_BLOCK, VALUES_PER_BLOCK // a.shape[1]))
        given = (a, target, *state) if low_rank is None else (a, target, *state, low_rank.slopes, low_rank.inputs)
        for own, near, *others in zip(*(tensor.tensor_split(blocks) for tensor in given), strict=True):
            block = None if low_rank is None else low_rank._replace(slopes=others[-2], inputs=others[-1])
            gradient, pieces = self.residual(own, near, scale, block)
            step = rule(own, pieces, tuple(others[: len(state)]))
            for count in counts:
                gradient()
                step(count)

    def residual(
        self, a: Tensor, target: Tensor, scale: float, low_rank: LowRankStep | None = None
    ) -> tuple[Callable[[], None], list[tuple[int, Tensor]]]:
        """Return a function that computes the gradient of ``scale/2 ||target - compose(a)||^2``, and its pieces.

        The function uses the values of ``a`` at the time of each call; the target is copied into its reserved space in
        ``a``. The gradient is written to one tensor ``(K, n)`` per transposed factor, the fastest output of a product,
        and to one for the entries between them; each comes with its start in ``a``. ``low_rank`` is the current
        ``target - compose(a)``, if known.
        """
        pieces, buffers = self._buffers(a)
        views = iter(self._inner.split(a))
        computed: list[Callable[[], object]] = []
        starts = accumulate(self.plan.dense.sizes[:-1], initial=0)
        for tensor, (shape, rank), begin in zip(self.plan.dense.split(target), self._parameters, starts, strict=True):
            if rank is not None and is_large_matrix(shape):
                first, space, second = (next(views) for _ in range(3))
                out = [next(buffers).view_as(factor) for factor in (first, second)]
                stacked = None
                if low_rank is not None and low_rank.begin == begin:
                    stacked = _stacked(space, first, second, low_rank)
                if stacked is None:
                    space.copy_(tensor)
                    computed.append(_transposed_residual(space, first, second, scale, *out))
                else:
                    computed.append(_stacked_residual(first, second, *stacked, scale, *out))
                continue
            group = [next(views) for _ in range(1 if rank is None else len(shape))]
            where = [next(buffers).view_as(factor) for factor in group]
            if rank is None:
                computed.append(partial(_difference, group[0], tensor, scale, where[0]))
            else:
                gradient = matrix_residual_grad if len(shape) == 2 else tensor_residual_grad
                computed.append(partial(gradient, tensor, group, where, scale))

        def compute() -> None:
            for one in computed:
                one()

        return compute, pieces

    def _buffers(self, a: Tensor) -> tuple[list[tuple[int, Tensor]], Iterator[Tensor]]:
        """Return empty pieces of a gradient with their starts, and in them a view for each packed factor."""
        pieces: list[tuple[int, Tensor]] = []
        buffers: list[Tensor] = []
        begin = 0
        for kind, entries in groupby(zip(self._kinds, self._inner.sizes, strict=True), itemgetter(0)):
            sizes = [size for _, size in entries]
            for together in [sizes] if kind == "factors" else [[size] for size in sizes]:
                if kind != "target":
                    pieces.append((begin, a.new_empty(len(a), sum(together))))
                    buffers += pieces[-1][1].split(together, 1)
                begin += sum(together)
        return pieces, iter(buffers)

    def _factors(self, a: Tensor) -> list[Tensor]:
        """Return the packed factors ``(K, I, R)``, and dense parameters, as views."""
        views = zip(self._inner.split(a), self._kinds, strict=True)
        return [view.mT if kind == "transposed" else view for view, kind in views if kind != "target"]

    @property
    def _parameters(self) -> list[tuple[tuple[int, ...], int | None]]:
        return list(zip(self.plan.dense.shapes, self.plan.ranks, strict=True))

    @cached_property
    def _kinds(self) -> list[str]:
        """The kind of each entry of the packed layout."""
        return [kind for kind, _ in self._entries]

    @cached_property
    def _inner(self) -> Layout:
        """The packed layout."""
        names = (f"{kind} {number}" for number, kind in enumerate(self._kinds))
        return Layout(tuple(names), tuple(shape for _, shape in self._entries))

    @cached_property
    def _entries(self) -> list[tuple[str, tuple[int, ...]]]:
        """Kind and shape of each packed entry: transposed factors, targets between them, and other factors."""
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
    """Return a function that writes the gradient of ``scale/2 ||target - a^T b||^2``.

    ``a`` is ``(K, R, I)``, ``b`` ``(K, R, J)``, and in memory ``b`` follows the target.
    """
    (clients, rows, columns), rank = target.shape, b.shape[1]
    both = target.as_strided((clients, rows + rank, columns), target.stride()).mT
    products, gram = b.new_empty(clients, rank, rows + rank), a.new_empty(clients, rank, rank)
    (with_target, with_itself), a_transposed = products.split([rows, rank], 2), a.mT

    def compute() -> None:
        torch.bmm(b, both, out=products)
        torch.baddbmm(with_target, with_itself, a, beta=-scale, alpha=scale, out=out_a)
        torch.bmm(a, target, out=out_b)
        torch.bmm(a, a_transposed, out=gram)
        out_b.baddbmm_(gram, b, beta=-scale, alpha=scale)

    return compute


def _stacked(space: Tensor, a: Tensor, b: Tensor, low_rank: LowRankStep) -> tuple[Tensor, Tensor] | None:
    """Return ``A'`` and ``B'``, which end in ``a`` and ``b``, such that ``a^T b - target`` stays ``A'^T B'``.

    The target is the current ``a^T b``, whose factors they keep, plus ``low_rank``. ``B'`` is stored in ``space``, the
    reserved memory of the target, and in ``b`` behind it; the caller copies ``a`` into ``A'`` at each step. None if
    they are not smaller than the matrix.
    """
    (clients, rows, columns), rank, samples = space.shape, b.shape[1], low_rank.inputs.shape[1]
    size = rounded_up(samples + 2 * rank)
    if (size - rank) * (rows + columns) >= rows * columns:
        return None
    after = space.storage_offset() + (rows + rank - size) * columns
    right = space.as_strided((clients, size, columns), space.stride(), after)
    left = a.new_zeros(clients, size, rows)
    for stack, update, factor in ((left, low_rank.slopes, a), (right, low_rank.inputs, b)):
        stack[:, : -2 * rank - samples].zero_()
        stack[:, -2 * rank - samples : -2 * rank] = update
        stack[:, -2 * rank : -rank] = factor
    left.neg_()
    return left, right


def _stacked_residual(
    a: Tensor, b: Tensor, left: Tensor, right: Tensor, scale: float, out_a: Tensor, out_b: Tensor
) -> Callable[[], None]:
    """Return a function that writes the gradient of ``scale/2 ||left^T right||^2`` in ``a`` and ``b``.

    These are the last rows of ``left`` and ``right``.
    """
    clients, rank, _ = a.shape
    with_left, with_right = (a.new_empty(clients, rank, left.shape[1]) for _ in range(2))
    last, left_transposed, right_transposed = left[:, -rank:], left.mT, right.mT
    left.mul_(scale)

    def compute() -> None:
        torch.mul(a, scale, out=last)
        torch.bmm(b, right_transposed, out=with_right)
        torch.bmm(with_right, left, out=out_a)
        torch.bmm(a, left_transposed, out=with_left)
        torch.bmm(with_left, right, out=out_b)

    return compute
