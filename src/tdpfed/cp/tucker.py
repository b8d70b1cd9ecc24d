"""Tucker and block-term tensors: a small core and a matrix per dimension, and sums of such blocks.

A block-term tensor of B blocks is stored as a core ``(B, R1, ..., RN)`` and a matrix ``(I_n, B, R_n)`` per dimension;
with one block it is a Tucker tensor. Turning a block's basis and turning its core back gives the same tensor, so
factors of different clients must not be averaged: average composed tensors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tdpfed.cp.algebra import mode_dot, unfold
from tdpfed.errors import TDPFedError


def compose_blocks(core: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Return the tensor ``(I1, ..., IN)`` of a core ``(B, R1, ..., RN)`` and factors ``(I_n, B, R_n)``."""
    parts = core
    for mode, factor in enumerate(factors):
        parts = mode_dot(parts, factor.transpose(0, 1), mode, len(factors))
    return parts.sum(0)


def decompose_blocks(
    theta: Tensor, ranks: Sequence[int], blocks: int = 1, *, sweeps: int = 20, tol: float = 1e-5
) -> tuple[Tensor, list[Tensor]]:
    """Fit ``blocks`` Tucker blocks of the given ranks to ``theta``; each has orthonormal columns.

    Blocks are fitted one after another to what the others leave, and a new fit is kept only where it is better, so the
    residual never grows. One block is fitted by higher-order orthogonal iteration.
    """
    check_ranks(ranks, theta.shape, blocks)
    if theta.dtype in (torch.float16, torch.bfloat16):  # LAPACK does not support half precision
        core, factors = decompose_blocks(theta.float(), ranks, blocks, sweeps=sweeps, tol=tol)
        return core.to(theta.dtype), [factor.to(theta.dtype) for factor in factors]
    cores = [theta.new_zeros(*ranks) for _ in range(blocks)]
    bases = [
        [
            torch.eye(size, rank, dtype=theta.dtype, device=theta.device)
            for size, rank in zip(theta.shape, ranks, strict=True)
        ]
        for _ in range(blocks)
    ]
    left, norm = theta, theta.norm()
    for turn in range(sweeps if blocks > 1 else 1):
        before = left.norm()
        for n in range(blocks):
            target = left + _multiply(cores[n], bases[n])
            core, basis = _tucker(target, ranks, sweeps, tol)
            rest = target - _multiply(core, basis)
            if turn == 0 or rest.norm() < left.norm():
                cores[n], bases[n], left = core, basis, rest
        if turn and not before - left.norm() > tol * norm:
            break
    return torch.stack(cores), [torch.stack(mode, 1) for mode in zip(*bases, strict=True)]


def ranks_for(shape: Sequence[int], compression: float, blocks: int = 1) -> tuple[int, ...]:
    """Return the largest ranks ``min(r, I_n)`` whose values are at most ``prod(shape) / compression``, at least 1."""
    budget = math.prod(shape) / compression
    most = max(1, *(min(size, math.prod(shape) // size) for size in shape))  # a larger rank would not be used
    best = (1,) * len(shape)
    for rank in range(1, most + 1):
        ranks = tuple(min(rank, size) for size in shape)
        if values(shape, ranks, blocks) > budget:
            break
        best = ranks
    return best


def values(shape: Sequence[int], ranks: Sequence[int], blocks: int = 1) -> int:
    """Return how many values the core and the factors have."""
    return blocks * (math.prod(ranks) + sum(size * rank for size, rank in zip(shape, ranks, strict=True)))


def check_ranks(ranks: Sequence[int], shape: Sequence[int], blocks: int) -> None:
    """Refuse ranks that a tensor of this shape cannot have."""
    if blocks < 1:
        raise TDPFedError(f"blocks: {blocks} given, must be at least 1")
    if len(ranks) != len(shape):
        raise TDPFedError(
            f"ranks: {tuple(ranks)} given for shape {tuple(shape)}, must have one rank for each dimension"
        )
    for rank, size in zip(ranks, shape, strict=True):
        if not 1 <= rank <= size:
            raise TDPFedError(f"ranks: {tuple(ranks)} given, must be from 1 to the sizes {tuple(shape)}")


def _tucker(theta: Tensor, ranks: Sequence[int], sweeps: int, tol: float) -> tuple[Tensor, list[Tensor]]:
    """Fit one block: leading vectors of each unfolding, then of each unfolding seen from the other bases."""
    order = theta.ndim
    basis = [_leading(unfold(theta, n, order), rank) for n, rank in enumerate(ranks)]
    size = _project(theta, basis).norm()
    for _ in range(sweeps if order > 2 else 0):  # for a matrix the first fit is the truncated SVD
        new = list(basis)
        for n, rank in enumerate(ranks):
            new[n] = _leading(unfold(_project(theta, new, skip=n), n, order), rank)
        found = _project(theta, new).norm()
        if not found > size * (1 + tol):
            break
        basis, size = new, found
    return _project(theta, basis), basis


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Return the leading left singular vectors; completed by other orthonormal columns if there are too few."""
    vectors: Tensor = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors.flip(-1)[..., :rank]
    return vectors.contiguous()


def _project(theta: Tensor, basis: Sequence[Tensor], skip: int | None = None) -> Tensor:
    for n, vectors in enumerate(basis):
        if n != skip:
            theta = mode_dot(theta, vectors.mT, n, len(basis))
    return theta


def _multiply(core: Tensor, basis: Sequence[Tensor]) -> Tensor:
    for n, vectors in enumerate(basis):
        core = mode_dot(core, vectors, n, len(basis))
    return core
