"""The exact operations on CP factors ``(..., I_n, R)``: compose, unfold, MTTKRP and the gradient of the residual.

The tensor is ``[[A1, ..., AN]] = sum_r a1_r o ... o aN_r``, shape ``(..., I_1, ..., I_N)`` (section III). Unfoldings
and Khatri-Rao products are row-major (the last mode varies fastest), so a reshape is enough to view a tensor as a
matrix "left modes x right modes". All MTTKRPs of a tensor then follow from two matrix products, one per side of the
cut, and a few cheap reductions: for a convolution kernel, no intermediate is larger than positions x channels x R.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from tdpfed.errors import TDPFedError

CONTRACTED_ONE_BY_ONE = 32
"""A reduction over at most this many positions accumulates them; a longer one multiplies and sums, in quarters."""


def compose(factors: Sequence[Tensor]) -> Tensor:
    """Return the tensor ``[[A1, ..., AN]]``, shape ``(..., I_1, ..., I_N)``."""
    check_factors(factors)
    cut = best_cut(mode_sizes(factors))
    left = khatri_rao(factors[:cut])
    dense = left @ khatri_rao(factors[cut:]).mT if cut < len(factors) else left.sum(-1)
    return dense.reshape(*factors[0].shape[:-2], *mode_sizes(factors))


def khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Return the column-wise Kronecker product, shape ``(..., prod I_n, R)``; the last factor's row varies fastest."""
    product = factors[-1]
    for factor in reversed(factors[:-1]):  # in this order small kernel axes are multiplied first
        product = (factor.unsqueeze(-2) * product.unsqueeze(-3)).flatten(-3, -2)
    return product


def unfold(x: Tensor, mode: int, order: int | None = None) -> Tensor:
    """Return the mode-``mode`` unfolding ``(..., I_mode, rest)`` of the last ``order`` dimensions (all by default)."""
    order = _check_mode(x, mode, order)
    return x.movedim(mode - order, -order).flatten(-order + 1) if order > 1 else x.unsqueeze(-1)


def fold(matrix: Tensor, mode: int, shape: Sequence[int]) -> Tensor:
    """Return the inverse of :func:`unfold`: ``(..., I_mode, rest)`` to ``(..., *shape)``."""
    rest = [size for n, size in enumerate(shape) if n != mode]
    return matrix.reshape(*matrix.shape[:-2], shape[mode], *rest).movedim(-len(shape), mode - len(shape))


def mode_dot(x: Tensor, matrix: Tensor, mode: int, order: int | None = None) -> Tensor:
    """Return the mode product: ``matrix`` of shape ``(..., J, I_mode)`` applied along mode ``mode`` of ``x``."""
    order = _check_mode(x, mode, order)
    shape = [*x.shape[-order:]]
    shape[mode] = matrix.shape[-2]
    return fold(matrix @ unfold(x, mode, order), mode, shape)


def mttkrp(theta: Tensor, factors: Sequence[Tensor], mode: int) -> Tensor:
    """Return ``unfold(theta, mode) @ khatri_rao(all factors but mode)``, shape ``(..., I_mode, R)``."""
    check_factors(factors, theta)
    _check_mode(theta, mode, len(factors))
    side = next(side for side in sides(factors) if mode in side)
    return next(product for n, product in walk(partial_product(theta, factors, side), factors, side) if n == mode)


def residual_grad(theta: Tensor, factors: Sequence[Tensor], scale: float = 1.0) -> list[Tensor]:
    """Return the gradient of ``scale/2 ||theta - [[A1..AN]]||^2`` per factor: ``A_n V_n - MTTKRP_n`` (appendix A)."""
    check_factors(factors, theta)
    grams = [factor.mT @ factor for factor in factors]
    return [scale * (factors[n] @ hadamard_of_others(grams, n) - product) for n, product in sweep(theta, factors)]


def sweep(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(n, MTTKRP_n)`` for every mode in order, sharing contractions between modes.

    ``factors`` is read again at each step: if the caller replaces factors during the iteration, the updates alternate
    (ALS); otherwise all products are computed at the same point (the gradient).
    """
    for side in sides(factors):
        yield from walk(partial_product(theta, factors, side), factors, side)


def hadamard_of_others(grams: Sequence[Tensor], n: int) -> Tensor:
    """Return the paper's ``V_n``: the elementwise product of all Gram matrices but the n-th."""
    others = [gram for m, gram in enumerate(grams) if m != n]
    return reduce(torch.mul, others) if others else torch.ones_like(grams[n])


def mode_sizes(factors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return ``(I_1, ..., I_N)``."""
    return tuple(factor.shape[-2] for factor in factors)


def check_rank(rank: int, name: str = "rank") -> None:
    """Reject a rank that is not a whole number of at least 1."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TDPFedError(f"{name}: {rank!r} given, a rank must be a whole number of at least 1")


def check_order(x: Tensor, order: int | None) -> int:
    """Return ``order``, by default the number of dimensions of ``x``; reject values outside 1 to that number."""
    order = x.ndim if order is None else order
    if not 1 <= order <= x.ndim:
        raise TDPFedError(f"order: {order} given, must be 1 to {x.ndim} for a tensor of shape {tuple(x.shape)}")
    return order


def check_factors(factors: Sequence[Tensor], theta: Tensor | None = None) -> None:
    """Reject factors whose ranks or batch dimensions do not match each other or ``theta``."""
    if not factors:
        raise TDPFedError("factors: none given, at least one is needed")
    for n, factor in enumerate(factors, 1):
        if factor.ndim < 2:
            raise TDPFedError(f"factor A{n}: shape {tuple(factor.shape)} given, must be (..., I_{n}, R)")
        if factor.shape[-1] != factors[0].shape[-1]:
            raise TDPFedError(
                f"factor A{n}: rank {factor.shape[-1]} given, must equal A1's rank {factors[0].shape[-1]}"
            )
        if factor.shape[:-2] != factors[0].shape[:-2]:
            given, first = tuple(factor.shape[:-2]), tuple(factors[0].shape[:-2])
            raise TDPFedError(f"factor A{n}: leading dimensions {given} given, must equal A1's {first}")
    if theta is not None:
        expected = (*factors[0].shape[:-2], *mode_sizes(factors))
        if tuple(theta.shape) != expected:
            raise TDPFedError(f"theta: shape {tuple(theta.shape)} given, the factors compose to {expected}")


def best_cut(sizes: Sequence[int]) -> int:
    """Return the number of modes left of the cut with the smallest sides; from order 2 on neither side is empty."""
    cuts = range(1, len(sizes)) if len(sizes) > 1 else [1]
    return min(cuts, key=lambda cut: math.prod(sizes[:cut]) + math.prod(sizes[cut:]))


def sides(factors: Sequence[Tensor]) -> list[range]:
    """Return the modes on each side of the cut."""
    cut = best_cut(mode_sizes(factors))
    return [side for side in (range(cut), range(cut, len(factors))) if side]


def partial_product(theta: Tensor, factors: Sequence[Tensor], side: range) -> Tensor:
    """Contract all modes outside ``side`` by one matrix product, to ``(..., product of the side's sizes, R)``."""
    sizes = mode_sizes(factors)
    if len(side) == len(sizes):
        return theta.unsqueeze(-1).expand(*theta.shape, factors[0].shape[-1])
    left = side.start == 0
    cut = side.stop if left else side.start
    matrix = theta.reshape(*theta.shape[: -len(sizes)], math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    return matrix @ khatri_rao(factors[cut:]) if left else matrix.mT @ khatri_rao(factors[:cut])


def walk(partial: Tensor, factors: Sequence[Tensor], side: range) -> Iterator[tuple[int, Tensor]]:
    """Yield the products of ``side``'s modes, given ``partial`` with all other modes contracted."""
    if len(side) == 1:
        yield side.start, partial
        return
    first, rest = side.start, side[1:]
    size = factors[first].shape[-2]
    partial = partial.reshape(*partial.shape[:-2], size, partial.shape[-2] // size, partial.shape[-1])
    yield first, contract(partial, khatri_rao(factors[rest.start : rest.stop]).unsqueeze(-3), -2)
    yield from walk(contract(partial, factors[first].unsqueeze(-2), -3), factors, rest)


def contract(partial: Tensor, other: Tensor, dim: int) -> Tensor:
    """Return ``(partial * other).sum(dim)`` with at most a quarter of the product in memory."""
    if partial.is_cuda:
        return (partial * other).sum(dim)
    if partial.shape[dim] > CONTRACTED_ONE_BY_ONE:
        quarters = zip(partial.chunk(4, dim), other.chunk(4, dim), strict=True)
        return reduce(torch.add, ((part * factor).sum(dim) for part, factor in quarters))
    steps = zip(partial.unbind(dim), other.unbind(dim), strict=True)
    first, factor = next(steps)
    total = first * factor
    for position, factor in steps:
        total = torch.addcmul(total, position, factor)
    return total


def _check_mode(x: Tensor, mode: int, order: int | None) -> int:
    order = check_order(x, order)
    if not 0 <= mode < order:
        raise TDPFedError(f"mode: {mode} given, must be 0 to {order - 1}")
    return order
