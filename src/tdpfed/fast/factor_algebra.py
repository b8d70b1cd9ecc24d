"""The algebra of :mod:`tdpfed.cp` on factors ``(K, I_n, R)`` of many clients, in fewer passes over memory.

On a CPU, clients are processed in groups that fit the caches, and matrices are handled without forming a large
residual. On a GPU, where small kernels wait for one another, the residual tensor is formed: this takes a third of the
kernels, some of them our own.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tdpfed import cp
from tdpfed.core.layout import Layout
from tdpfed.cp.algebra import best_cut, hadamard_of_others, mode_sizes, sides, sweep, walk
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.gpu import kernels_for, side_by_side

CPU_CHUNK_BYTES = 3 << 19
"""On a CPU, clients are grouped so that the largest intermediate of a group stays below this and fits the caches."""

SMALL_MATRIX_VALUES = 1 << 12
"""Number of values of a matrix below which a CPU is faster if it forms the residual."""


def compose(plan: FactorPlan, a: Tensor) -> Tensor:
    """Return :meth:`FactorPlan.compose`."""
    if not a.is_cuda:
        return plan.compose(a)
    return plan.dense.join([group[0] if rank is None else _composed(group) for group, rank in plan.groups(a)])


def residual_grad(plan: FactorPlan, a: Tensor, theta: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Return :meth:`FactorPlan.residual_grad`, written into ``out`` if given."""
    grad = torch.empty_like(a, memory_format=torch.contiguous_format) if out is None else out
    # Written slice by slice, which avoids a second tensor of this size.
    slices = zip(plan.factors.slices.values(), plan.factors.shapes, strict=True)
    parts = (grad[..., where].view((*grad.shape[:-1], *shape)) for where, shape in slices)
    kernels = kernels_for(a, theta)
    with side_by_side(a.device) as lane:
        for tensor, (group, rank) in zip(plan.dense.split(theta), plan.groups(a), strict=True):
            pieces = [next(parts) for _ in group]
            if rank is None and kernels is not None:
                continue
            with lane():
                if rank is None:
                    pieces[0].copy_((group[0] - tensor) * scale)
                else:
                    tensor_residual_grad(tensor, group, pieces, scale)
        if kernels is not None and None in plan.ranks:  # all dense parameters at once
            with lane():
                kernels.differences(a.contiguous(), theta.contiguous(), grad, *_dense_places(plan, a.device), scale)
    return grad


@lru_cache(8)
def _dense_places(plan: FactorPlan, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the dense parameters' values in the factor vector and in the dense vector."""
    names = [name for name, rank in zip(plan.dense.names, plan.ranks, strict=True) if rank is None]

    def within(layout: Layout) -> Tensor:
        return torch.cat([torch.arange(layout.size)[layout.slices[name]] for name in names]).to(device)

    return within(plan.factors), within(plan.dense)


def tensor_residual_grad(theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor], scale: float) -> None:
    """Write :func:`tdpfed.cp.residual_grad` into ``out``: tensors of the factors' shapes."""
    clients = math.prod(factors[0].shape[:-2])
    together = _clients_together(theta, factors, clients)
    theta = theta.reshape(clients, *mode_sizes(factors))
    factors = [factor.reshape(clients, *factor.shape[-2:]) for factor in factors]
    rows = [grad.view(clients, *grad.shape[-2:]) for grad in out]
    if theta.is_cuda and len(factors) > 1:
        residual_grad_in_few_kernels(theta, factors, rows, scale)
        return
    if len(factors) == 2:
        matrix_residual_grad(theta, factors, rows, scale)
        return
    for start in range(0, clients, together):
        # The last group overlaps the previous one: groups of equal size use the same kernels.
        begin = min(start, clients - together)
        group = slice(begin, begin + together)
        some = [factor[group] for factor in factors]
        gradients = _kernel_residual_grad if best_cut(mode_sizes(some)) == 1 and len(some) > 3 else _plain_residual_grad
        for row, gradient in zip(rows, gradients(theta[group], some), strict=True):
            row[group].copy_(gradient * scale)


def _plain_residual_grad(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the gradient with respect to each factor."""
    grams = [factor.mT @ factor for factor in factors]
    for n, product in sweep(theta, factors):
        yield (factors[n] @ hadamard_of_others(grams, n)).sub_(product)


def _kernel_residual_grad(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the gradient for each factor of a convolution kernel: output channels, input channels, kernel axes.

    The factors of the kernel axes are replaced by their Khatri-Rao product until the last step, which needs fewer Gram
    matrices.
    """
    first, second, *positions = factors
    last = cp.khatri_rao(positions)
    grams = [factor.mT @ factor for factor in (first, second, last)]
    together = [first, second, last]
    for n, product in sweep(theta.flatten(3), together):
        gradient = (together[n] @ hadamard_of_others(grams, n)).sub_(product)
        if n < 2:
            yield gradient
        else:
            yield from (product for _, product in walk(gradient, factors, range(2, len(factors))))


def matrix_residual_grad(theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor], scale: float) -> None:
    """Write the gradient for matrices ``(K, I_1, I_2)`` into ``out``, for large ones without forming the residual."""
    a, b = factors
    if math.prod(theta.shape[1:]) < SMALL_MATRIX_VALUES:
        residual = torch.bmm(a, b.mT).sub_(theta).mul_(scale)
        out[0].copy_(torch.bmm(residual, b))
        out[1].copy_(torch.bmm(residual.mT, a))
        return
    torch.bmm(theta, b, out=out[0])
    torch.bmm(theta.mT, a, out=out[1])
    out[0].baddbmm_(a, torch.bmm(b.mT, b), beta=-scale, alpha=scale)
    out[1].baddbmm_(b, torch.bmm(a.mT, a), beta=-scale, alpha=scale)


def residual_grad_in_few_kernels(theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor], scale: float) -> None:
    """Write the gradient into ``out``, all ``(K, I_n, R)``, by forming the residual tensor.

    For a matrix this needs the same arithmetic as the other method in half the kernels. From order 3 on it needs 1.5
    times the arithmetic in a third of the kernels.
    """
    sizes = mode_sizes(factors)
    cut = best_cut(sizes)
    left, right = _khatri_rao(factors[:cut]), _khatri_rao(factors[cut:])
    matrix = theta.reshape(len(theta), math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    residual = torch.baddbmm(matrix, left, right.mT, beta=-scale, alpha=scale)
    for side, unfolded, other in ((range(cut), residual, right), (range(cut, len(sizes)), residual.mT, left)):
        if len(side) == 1:
            torch.bmm(unfolded, other, out=out[side.start])
            continue
        for n, product in _walk(unfolded @ other, factors, side, out):
            if product is not out[n]:
                out[n].copy_(product)


def _composed(factors: Sequence[Tensor]) -> Tensor:
    """Return :func:`tdpfed.cp.compose`, computed with our own kernels."""
    sizes = mode_sizes(factors)
    cut = best_cut(sizes)
    left = _khatri_rao(factors[:cut])
    dense = left @ _khatri_rao(factors[cut:]).mT if cut < len(factors) else left.sum(-1)
    return dense.reshape(*factors[0].shape[:-2], *sizes)


def _khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Return :func:`tdpfed.cp.khatri_rao`, computed with our own kernel if it supports these factors."""
    kernels = kernels_for(*factors)
    if kernels is None or factors[0].ndim != 3:
        return cp.khatri_rao(factors)
    product = factors[-1]
    for factor in reversed(factors[:-1]):
        product = kernels.khatri_rao(factor, product)
    return product


def _walk(
    partial: Tensor, factors: Sequence[Tensor], side: range, out: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield :func:`tdpfed.cp.algebra.walk`; a product may be written directly into its place in ``out``."""
    if len(side) == 1:
        yield side.start, partial
        return
    first, rest = side.start, side[1:]
    size = factors[first].shape[-2]
    partial = partial.reshape(*partial.shape[:-2], size, partial.shape[-2] // size, partial.shape[-1])
    yield first, _contract(partial, _khatri_rao(factors[rest.start : rest.stop]).unsqueeze(-3), -2, out[first])
    last = None if len(rest) > 1 else out[rest.start]
    yield from _walk(_contract(partial, factors[first].unsqueeze(-2), -3, last), factors, rest, out)


def _contract(partial: Tensor, other: Tensor, dim: int, out: Tensor | None) -> Tensor:
    kernels = kernels_for(partial, other) if partial.ndim == 4 else None
    if kernels is None:
        return (partial * other).sum(dim)
    product: Tensor = kernels.contract(partial, other, dim, out)
    return product


def _clients_together(theta: Tensor, factors: Sequence[Tensor], clients: int) -> int:
    """Return the group size: as many clients as fit the caches on a CPU, in groups of about equal size."""
    if theta.device.type != "cpu":
        return max(1, clients)
    sizes = mode_sizes(factors)
    larger = max(math.prod(sizes[side.start : side.stop]) for side in sides(factors))
    most = max(1, CPU_CHUNK_BYTES // (larger * factors[0].shape[-1] * theta.element_size()))
    groups = max(1, math.ceil(clients / most))
    return max(1, math.ceil(clients / groups))
