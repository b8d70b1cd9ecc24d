"""Fitting CP factors to a tensor: warm-started ALS, a cold start, initialization and balancing."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tdpfed.cp.algebra import check_factors, check_order, check_rank, compose, hadamard_of_others, sweep, unfold
from tdpfed.errors import TDPFedError


def als(
    theta: Tensor, factors: Sequence[Tensor], *, sweeps: int = 50, tol: float = 1e-6, damping: float = 0.0
) -> list[Tensor]:
    """Fit ``[[A1..AN]]`` to ``theta`` by alternating least squares from a warm start; the residual never increases.

    ``damping`` keeps each factor close to its previous value, as a fraction of the mean eigenvalue of ``V_n``; exact
    solutions remain fixed points. Stops when no client's residual decreases by more than ``tol`` times ``||theta||``.
    """
    check_factors(factors, theta)
    _check_fit(sweeps, tol, damping)
    best, norm = list(factors), _norm(theta, len(factors))
    error = _norm(theta - compose(best), len(factors))
    for _ in range(sweeps):
        new = _als_sweep(theta, best, damping)
        new_error = _norm(theta - compose(new), len(factors))
        better = new_error <= error  # False for NaN too
        best = [torch.where(better[..., None, None], b, a) for a, b in zip(best, new, strict=True)]
        gain = torch.where(better, error - new_error, torch.zeros_like(error))
        error = torch.where(better, new_error, error)
        if not bool((gain > tol * norm).any()):
            break
    return best


def decompose(
    theta: Tensor,
    rank: int,
    order: int | None = None,
    *,
    sweeps: int = 100,
    tol: float = 1e-5,
    restarts: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """Fit ``rank`` columns to the last ``order`` dimensions of ``theta`` from a cold start, with balanced columns.

    Vectors, matrices (truncated SVD) and ranks that can represent any tensor of this shape are solved exactly.
    Otherwise ALS starts from the leading singular vectors of the unfoldings, then ``restarts`` times from random
    factors; the best fit is returned.
    """
    order = check_order(theta, order)
    check_rank(rank)
    _check_fit(sweeps, tol, 0.0)
    if theta.dtype in (torch.float16, torch.bfloat16):  # LAPACK does not support half precision
        fitted = decompose(theta.float(), rank, order, sweeps=sweeps, tol=tol, restarts=restarts, seed=seed)
        return [factor.to(theta.dtype) for factor in fitted]
    shape = theta.shape[theta.ndim - order :]
    batch = theta.shape[: theta.ndim - order]
    if order == 1:
        return [(theta / rank).unsqueeze(-1).expand(*batch, shape[0], rank).contiguous()]
    if order == 2 and rank >= min(shape):
        return balance(_pad(_exact(theta, shape), rank))
    if order == 2:
        u, s, vh = torch.linalg.svd(theta, full_matrices=False)
        return balance([u[..., :rank] * s[..., None, :rank], vh.mT[..., :rank].contiguous()])
    if rank >= math.prod(shape) // max(shape):
        return balance(_pad(_exact(theta, shape), rank))
    generator = torch.Generator().manual_seed(seed)
    best = als(theta, _leading_vectors(theta, rank, order, generator), sweeps=sweeps, tol=tol)
    error = _norm(theta - compose(best), order)
    for _ in range(restarts):
        start = [factor.to(theta) for factor in init_factors(shape, rank, 1.0, generator, batch=batch)]
        other = als(theta, start, sweeps=sweeps, tol=tol)
        other_error = _norm(theta - compose(other), order)
        better = (other_error < error)[..., None, None]
        best = [torch.where(better, b, a) for a, b in zip(best, other, strict=True)]
        error = torch.minimum(error, other_error)
    return balance(best)


def balance(factors: Sequence[Tensor]) -> list[Tensor]:
    """Return factors of the same tensor whose r-th columns have equal norms; all zero if one of them is zero."""
    norms = torch.stack([torch.linalg.vector_norm(factor, dim=-2, keepdim=True) for factor in factors])
    target = norms.clamp_min(torch.finfo(norms.dtype).tiny).log().mean(0).exp() * (norms > 0).all(0)
    return [
        factor * (target / norm.clamp_min(torch.finfo(norm.dtype).tiny))
        for factor, norm in zip(factors, norms, strict=True)
    ]


def init_factors(
    shape: Sequence[int],
    rank: int,
    variance: float,
    generator: torch.Generator,
    *,
    batch: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Draw normal factors ``(*batch, I_n, R)`` whose composed entries have mean 0 and the given variance."""
    check_rank(rank)
    if not variance >= 0:
        raise TDPFedError(f"variance: {variance} given, must be 0 or more")
    std = (variance / rank) ** (0.5 / len(shape))
    return [torch.randn(*batch, size, rank, generator=generator, dtype=dtype) * std for size in shape]


def _als_sweep(theta: Tensor, factors: Sequence[Tensor], damping: float) -> list[Tensor]:
    factors = list(factors)
    grams = [factor.mT @ factor for factor in factors]
    finfo = torch.finfo(theta.dtype)
    for n, product in sweep(theta, factors):
        v = hadamard_of_others(grams, n)
        mean = v.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(finfo.tiny)
        pull = (damping + 8 * finfo.eps) * mean  # slightly positive even without damping: V_n may be singular
        ridge = v + pull * torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
        solved, _ = torch.linalg.solve_ex(ridge, product.mT + pull * factors[n].mT)
        factors[n] = solved.mT.contiguous()
        grams[n] = factors[n].mT @ factors[n]
    return factors


def _leading_vectors(theta: Tensor, rank: int, order: int, generator: torch.Generator) -> list[Tensor]:
    """Return the leading left singular vectors of each unfolding, padded with random columns."""
    factors = []
    for n in range(order):
        matrix = unfold(theta, n, order)
        vectors = torch.linalg.eigh(matrix @ matrix.mT).eigenvectors.flip(-1)[..., :rank]
        extra = torch.randn(*vectors.shape[:-1], rank - vectors.shape[-1], generator=generator, dtype=torch.float64)
        factors.append(torch.cat([vectors, extra.to(theta) / math.sqrt(vectors.shape[-2])], -1))
    return factors


def _exact(theta: Tensor, shape: Sequence[int]) -> list[Tensor]:
    """Return the decomposition of rank ``prod(shape) / max(shape)``: unit vectors, and the longest mode's unfolding."""
    longest = max(range(len(shape)), key=lambda n: shape[n])
    others = [size for n, size in enumerate(shape) if n != longest]
    grid = torch.cartesian_prod(*(torch.arange(size) for size in others)).reshape(-1, len(others))
    units = [
        torch.eye(size, dtype=theta.dtype, device=theta.device)[:, column]
        for size, column in zip(others, grid.unbind(-1), strict=True)
    ]
    batch = theta.shape[: theta.ndim - len(shape)]
    factors = [unit.expand(*batch, *unit.shape) for unit in units]
    factors.insert(longest, unfold(theta, longest, len(shape)))
    return factors


def _pad(factors: Sequence[Tensor], rank: int) -> list[Tensor]:
    return [torch.nn.functional.pad(factor, (0, rank - factor.shape[-1])) for factor in factors]


def _norm(x: Tensor, order: int) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(-order, 0)))
    return norm


def _check_fit(sweeps: int, tol: float, damping: float) -> None:
    for name, value, least in (("sweeps", sweeps, 1), ("tol", tol, 0), ("damping", damping, 0)):
        if not value >= least:
            raise TDPFedError(f"{name}: {value} given, must be {least} or more")
