"""The exact operations on CP factors ``(..., I_n, R)``: compose, unfold, MTTKRP and the gradient of the residual.

The tensor is ``[[A1, ..., AN]] = sum_r a1_r o ... o aN_r``, shape ``(..., I_1, ..., I_N)`` (section III). Unfoldings
and Khatri-Rao products are row-major (the last mode varies fastest), so a tensor is cut into "left modes x right modes"
by a reshape alone. Every MTTKRP of a tensor then comes from two matrix products, one per side of the cut, and a few
cheap reductions: for a convolution kernel nothing larger than kernel positions x channels x R is ever formed.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from tdpfed.errors import TDPFedError
from tdpfed.fast.gpu import kernels_for

CPU_CHUNK_BYTES = 3 << 19
"""On a CPU clients are taken together while their largest intermediate stays below this, and so in the caches."""

SMALL_MATRIX = 1 << 12
"""Values of a matrix below which a CPU is quicker with its residual."""

CONTRACTED_ONE_BY_ONE = 32
"""A reduction over at most so many positions accumulates them; a longer one multiplies and sums, in quarters."""


def compose(factors: Sequence[Tensor]) -> Tensor:
    """Return the tensor ``[[A1, ..., AN]]``, shape ``(..., I_1, ..., I_N)``."""
    check_factors(factors)
    cut = _cut(mode_sizes(factors))
    left = khatri_rao(factors[:cut])
    dense = left @ khatri_rao(factors[cut:]).mT if cut < len(factors) else left.sum(-1)
    return dense.reshape(*factors[0].shape[:-2], *mode_sizes(factors))


def khatri_rao(factors: Sequence[Tensor]) -> Tensor:
    """Return the column-wise Kronecker product, shape ``(..., prod I_n, R)``; the last factor's row varies fastest."""
    product, kernels = factors[-1], kernels_for(*factors)
    for factor in reversed(factors[:-1]):  # the small ones are multiplied first, where kernel positions come last
        if kernels is not None and factor.ndim == 3:
            product = kernels.khatri_rao(factor, product)
        else:
            product = (factor.unsqueeze(-2) * product.unsqueeze(-3)).flatten(-3, -2)
    return product


def unfold(x: Tensor, mode: int, order: int | None = None) -> Tensor:
    """Return the mode-``mode`` unfolding ``(..., I_mode, rest)`` of the last ``order`` dimensions (all by default)."""
    order = _check_mode(x, mode, order)
    return x.movedim(mode - order, -order).flatten(-order + 1) if order > 1 else x.unsqueeze(-1)


def fold(matrix: Tensor, mode: int, shape: Sequence[int]) -> Tensor:
    """Undo :func:`unfold`: ``(..., I_mode, rest)`` to ``(..., *shape)``."""
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
    side = next(side for side in _sides(factors) if mode in side)
    return next(product for n, product in _walk(_partial(theta, factors, side), factors, side) if n == mode)


def residual_grad(
    theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor] | None = None, scale: float = 1.0
) -> list[Tensor]:
    """Return the gradient of ``scale/2 ||theta - [[A1..AN]]||^2`` in every factor: ``A_n V_n - MTTKRP_n`` (appendix A).

    It is written into ``out`` where that is given: tensors of the factors' shapes, their leading dimensions mergeable.
    """
    check_factors(factors, theta)
    grads = [torch.empty_like(f, memory_format=torch.contiguous_format) for f in factors] if out is None else list(out)
    clients = math.prod(factors[0].shape[:-2])
    together = _clients_together(theta, factors, clients)
    theta = theta.reshape(clients, *mode_sizes(factors))
    factors = [factor.reshape(clients, *factor.shape[-2:]) for factor in factors]
    rows = [grad.view(clients, *grad.shape[-2:]) for grad in grads]
    few = len(factors) == 2 or (theta.is_cuda and len(factors) > 1)
    if few and not any(tensor.requires_grad for tensor in (theta, *factors)):
        plain = theta.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(theta)
        (matrix_residual_grad if plain else residual_grad_in_few_kernels)(theta, factors, rows, scale)
        return grads
    for start in range(0, clients, together):
        # The last group reaches back to full size: groups of one size take the same kernels.
        begin = min(start, clients - together)
        group = slice(begin, begin + together)
        some = [factor[group] for factor in factors]
        gradients = _kernel_residual_grad if _cut(mode_sizes(some)) == 1 and len(some) > 3 else _plain_residual_grad
        for row, gradient in zip(rows, gradients(theta[group], some), strict=True):
            row[group].copy_(gradient * scale)
    return grads


def _plain_residual_grad(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the gradient in each factor."""
    grams = [factor.mT @ factor for factor in factors]
    for n, product in sweep(theta, factors):
        yield (factors[n] @ hadamard_of_others(grams, n)).sub_(product)


def _kernel_residual_grad(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the gradient in each factor of a convolution's kernel: outputs, inputs, and the few positions.

    The factors of the positions are one, their Khatri-Rao product, until the end: fewer Gram matrices are multiplied.
    """
    first, second, *positions = factors
    last = khatri_rao(positions)
    grams = [factor.mT @ factor for factor in (first, second, last)]
    together = [first, second, last]
    for n, product in sweep(theta.flatten(3), together):
        gradient = (together[n] @ hadamard_of_others(grams, n)).sub_(product)
        if n < 2:
            yield gradient
        else:
            yield from (along for _, along in _walk(gradient, factors, range(2, len(factors))))


def matrix_residual_grad(theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor], scale: float) -> None:
    """Write the gradient for matrices ``(K, I_1, I_2)`` into ``out``: in a few products, and no large residual."""
    a, b = factors
    if math.prod(theta.shape[1:]) < SMALL_MATRIX:
        residual = torch.bmm(a, b.mT).sub_(theta).mul_(scale)
        out[0].copy_(torch.bmm(residual, b))
        out[1].copy_(torch.bmm(residual.mT, a))
        return
    torch.bmm(theta, b, out=out[0])
    torch.bmm(theta.mT, a, out=out[1])
    out[0].baddbmm_(a, torch.bmm(b.mT, b), beta=-scale, alpha=scale)
    out[1].baddbmm_(b, torch.bmm(a.mT, a), beta=-scale, alpha=scale)


def residual_grad_in_few_kernels(
    theta: Tensor, factors: Sequence[Tensor], out: Sequence[Tensor], scale: float = 1.0
) -> None:
    """Write the gradient into ``out``, all ``(K, I_n, R)``, by way of the residual tensor itself.

    For a matrix it is as much arithmetic as the other way, in half the kernels. From order 3 on it is half as much
    again, in a third of the kernels: a GPU, on which small kernels wait for one another, is faster so.
    """
    sizes = mode_sizes(factors)
    cut = _cut(sizes)
    left, right = khatri_rao(factors[:cut]), khatri_rao(factors[cut:])
    matrix = theta.reshape(len(theta), math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    residual = torch.baddbmm(matrix, left, right.mT, beta=-scale, alpha=scale)
    sides = ((range(cut), residual, right), (range(cut, len(sizes)), residual.mT, left))
    for side, unfolded, other in sides:
        if len(side) == 1 and not torch._C._functorch.is_functorch_wrapped_tensor(residual):
            torch.bmm(unfolded, other, out=out[side.start])  # a pass less, but vmap does not know it
            continue
        for n, product in _walk(unfolded @ other, factors, side, out):
            if product is not out[n]:
                out[n].copy_(product)


def sweep(theta: Tensor, factors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield ``(n, MTTKRP_n)`` for every mode in order, sharing contractions between modes.

    ``factors`` is read anew at each step: a caller that replaces a factor in between gets alternating updates (ALS),
    one that does not gets all products at the same point (the gradient).
    """
    for side in _sides(factors):
        yield from _walk(_partial(theta, factors, side), factors, side)


def hadamard_of_others(grams: Sequence[Tensor], n: int) -> Tensor:
    """Return the paper's ``V_n``: the elementwise product of all Gram matrices but the n-th."""
    others = [gram for m, gram in enumerate(grams) if m != n]
    return reduce(torch.mul, others) if others else torch.ones_like(grams[n])


def mode_sizes(factors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return ``(I_1, ..., I_N)``."""
    return tuple(factor.shape[-2] for factor in factors)


def check_rank(rank: int, name: str = "rank") -> None:
    """Refuse a rank that is no whole number of at least 1."""
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise TDPFedError(f"{name}: {rank!r} given, a rank must be a whole number of at least 1")


def check_order(x: Tensor, order: int | None) -> int:
    """Return ``order``, all dimensions of ``x`` where None; refuse one that ``x`` does not have."""
    order = x.ndim if order is None else order
    if not 1 <= order <= x.ndim:
        raise TDPFedError(f"order: {order} given, must be 1 to {x.ndim} for a tensor of shape {tuple(x.shape)}")
    return order


def check_factors(factors: Sequence[Tensor], theta: Tensor | None = None) -> None:
    """Refuse factors whose ranks or batch dimensions disagree, among themselves or with ``theta``."""
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


def _cut(sizes: Sequence[int]) -> int:
    """Return how many modes stand left of the cut that makes its two sides smallest; neither is empty from order 2."""
    cuts = range(1, len(sizes)) if len(sizes) > 1 else [1]
    return min(cuts, key=lambda cut: math.prod(sizes[:cut]) + math.prod(sizes[cut:]))


def _sides(factors: Sequence[Tensor]) -> list[range]:
    cut = _cut(mode_sizes(factors))
    return [side for side in (range(cut), range(cut, len(factors))) if side]


def _partial(theta: Tensor, factors: Sequence[Tensor], side: range) -> Tensor:
    """Contract all modes outside ``side`` by one matrix product, to ``(..., product of the side's sizes, R)``."""
    sizes = mode_sizes(factors)
    if len(side) == len(sizes):
        return theta.unsqueeze(-1).expand(*theta.shape, factors[0].shape[-1])
    left = side.start == 0
    cut = side.stop if left else side.start
    matrix = theta.reshape(*theta.shape[: -len(sizes)], math.prod(sizes[:cut]), math.prod(sizes[cut:]))
    return matrix @ khatri_rao(factors[cut:]) if left else matrix.mT @ khatri_rao(factors[:cut])


def _walk(
    partial: Tensor, factors: Sequence[Tensor], side: range, out: Sequence[Tensor] | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield the products of ``side``'s modes, given ``partial`` with all other modes contracted.

    A product may be written into its place in ``out`` at once; it is then that tensor itself.
    """
    if len(side) == 1:
        yield side.start, partial
        return
    first, rest = side.start, side[1:]
    partial = partial.reshape(*partial.shape[:-2], factors[first].shape[-2], -1, partial.shape[-1])
    others = khatri_rao(factors[rest.start : rest.stop]).unsqueeze(-3)
    yield first, _contract(partial, others, -2, None if out is None else out[first])
    last = None if out is None or len(rest) > 1 else out[rest.start]
    yield from _walk(_contract(partial, factors[first].unsqueeze(-2), -3, last), factors, rest, out)


def _contract(partial: Tensor, other: Tensor, dim: int, out: Tensor | None = None) -> Tensor:
    """Return ``(partial * other).sum(dim)``; on a CPU with a quarter of the product's memory, or without it."""
    if partial.is_cuda:
        kernels = kernels_for(partial, other) if partial.ndim == 4 else None
        return (partial * other).sum(dim) if kernels is None else kernels.contract(partial, other, dim, out)
    if partial.shape[dim] > CONTRACTED_ONE_BY_ONE:
        quarters = zip(partial.chunk(4, dim), other.chunk(4, dim), strict=True)
        return reduce(torch.add, ((part * factor).sum(dim) for part, factor in quarters))
    steps = zip(partial.unbind(dim), other.unbind(dim), strict=True)
    first, factor = next(steps)
    total = first * factor
    for position, factor in steps:
        total = torch.addcmul(total, position, factor)
    return total


def _clients_together(theta: Tensor, factors: Sequence[Tensor], clients: int) -> int:
    """Return into groups of how many clients to cut them: as many as fit the caches on a CPU, evenly."""
    if theta.device.type != "cpu":
        return max(1, clients)
    sizes = mode_sizes(factors)
    larger = max(math.prod(sizes[side.start : side.stop]) for side in _sides(factors))
    most = max(1, CPU_CHUNK_BYTES // (larger * factors[0].shape[-1] * theta.element_size()))
    groups = max(1, math.ceil(clients / most))
    return max(1, math.ceil(clients / groups))


def _check_mode(x: Tensor, mode: int, order: int | None) -> int:
    order = check_order(x, order)
    if not 0 <= mode < order:
        raise TDPFedError(f"mode: {mode} given, must be 0 to {order - 1}")
    return order
