"""Laws of the fits: ALS never makes things worse, finds what is exactly low-rank, and treats clients independently."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tdpfed import cp
from tdpfed.cp import fit
from tdpfed.errors import TDPFedError


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def random_factors(batch: list[int], sizes: list[int], rank: int, seed: int = 0) -> list[Tensor]:
    return [randn(*batch, size, rank, seed=1000 * seed + n) for n, size in enumerate(sizes)]


def residual(theta: Tensor, factors: list[Tensor]) -> Tensor:
    """The residual's norm per client, in float64 whatever the fit ran in."""
    difference = theta.double() - cp.compose([factor.double() for factor in factors])
    norm: Tensor = torch.linalg.vector_norm(difference, dim=tuple(range(-len(factors), 0)))
    return norm


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rank=st.integers(1, 6),
    clients=st.integers(1, 3),
    seed=st.integers(0, 50),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    damping=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
    start=st.sampled_from(["random", "near", "null factor", "double columns", "null column", "huge", "tiny"]),
    target=st.sampled_from(["random", "low rank", "zero"]),
)
def test_als_never_increases_the_residual(
    sizes: list[int],
    rank: int,
    clients: int,
    seed: int,
    dtype: torch.dtype,
    damping: float,
    start: str,
    target: str,
) -> None:
    factors = random_factors([clients], sizes, rank, seed)
    theta = {
        "random": randn(clients, *sizes, seed=seed + 77),
        "low rank": cp.compose(random_factors([clients], sizes, 1, seed + 1)),
        "zero": torch.zeros(clients, *sizes, dtype=torch.float64),
    }[target]
    if start == "near":
        theta = cp.compose(factors) + 1e-3 * theta
    elif start == "null factor":
        factors[0] = torch.zeros_like(factors[0])
    elif start == "double columns":
        factors = [factor[..., :1].expand_as(factor).contiguous() for factor in factors]
    elif start == "null column":
        factors = [torch.cat([torch.zeros_like(f[..., :1]), f[..., 1:]], -1) for f in factors]
    elif start in ("huge", "tiny"):
        factors = [factor * (1e4 if start == "huge" else 1e-6) for factor in factors]
    theta, factors = theta.to(dtype), [factor.to(dtype) for factor in factors]
    before = residual(theta, factors)
    scale = theta.double().norm() + cp.compose([factor.abs().double() for factor in factors]).norm()
    for sweeps in (1, 4):
        fitted = cp.als(theta, factors, sweeps=sweeps, tol=0.0, damping=damping)
        after = residual(theta, fitted)
        assert all(bool(factor.isfinite().all()) for factor in fitted)
        assert bool((after <= before * (1 + 1e-6) + 20 * torch.finfo(dtype).eps * scale).all())


@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_als_makes_progress_from_a_random_start(damping: float) -> None:
    theta = cp.compose(random_factors([4], [6, 5, 4], 2, seed=3))
    start = random_factors([4], [6, 5, 4], 3, seed=4)
    fitted = cp.als(theta, start, sweeps=60, tol=0.0, damping=damping)
    assert bool((residual(theta, fitted) < 0.05 * residual(theta, start)).all())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 20))
def test_als_batched_equals_one_by_one(sizes: list[int], rank: int, seed: int) -> None:
    theta = randn(3, *sizes, seed=seed)
    start = random_factors([3], sizes, rank, seed)
    together = cp.als(theta, start, sweeps=3, tol=0.0, damping=0.1)
    for k in range(3):
        alone = cp.als(theta[k], [factor[k] for factor in start], sweeps=3, tol=0.0, damping=0.1)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a, b[k], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("damping", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("sizes", [[5], [5, 4], [5, 4, 3], [4, 3, 3, 2]])
def test_an_exact_solution_is_a_fixed_point(sizes: list[int], damping: float) -> None:
    factors = random_factors([2], sizes, 2)
    fitted = cp.als(cp.compose(factors), factors, sweeps=5, tol=0.0, damping=damping)
    torch.testing.assert_close(cp.compose(fitted), cp.compose(factors), rtol=1e-8, atol=1e-8)
    if len(sizes) > 1 or damping > 0:  # the columns of a single factor are exchangeable: V_1 is singular
        for factor, again in zip(factors, fitted, strict=True):
            torch.testing.assert_close(again, factor, rtol=1e-8, atol=1e-8)


def test_damping_holds_the_factors_near_the_start() -> None:
    theta, start = randn(4, 4, 4), random_factors([], [4, 4, 4], 2, seed=1)
    moved = [
        sum((a - b).norm().item() for a, b in zip(start, cp.als(theta, start, sweeps=1, damping=damping), strict=True))
        for damping in (0.0, 1.0, 100.0)
    ]
    assert moved[0] > moved[1] > 10 * moved[2] > 0


def test_als_leaves_its_arguments_alone() -> None:
    theta, start = randn(4, 3, 2), random_factors([], [4, 3, 2], 2)
    before = [t.clone() for t in (theta, *start)]
    cp.als(theta, start, sweeps=3)
    assert all(torch.equal(a, b) for a, b in zip((theta, *start), before, strict=True))


def test_als_stops_early_and_only_when_every_client_is_done() -> None:
    solved = random_factors([], [5, 4, 3], 2, seed=1)
    other = random_factors([], [5, 4, 3], 2, seed=2)
    theta = cp.compose(solved)
    both = [torch.stack([a, b]) for a, b in zip(solved, other, strict=True)]
    counts = []
    for target, start in ((theta, solved), (torch.stack([theta, theta]), both)):
        with mock.patch.object(fit, "_als_sweep", wraps=fit._als_sweep) as sweep:
            cp.als(target, start, sweeps=40, tol=1e-7)
        counts.append(sweep.call_count)
    assert counts[0] == 1
    assert 2 < counts[1] <= 40


def test_als_honours_the_sweeps_limit_and_the_tolerance() -> None:
    theta, start = randn(6, 6, 6), random_factors([], [6, 6, 6], 3)
    counts = []
    for sweeps, tol in ((7, 0.0), (500, 1e-2), (500, 1e-4)):
        with mock.patch.object(fit, "_als_sweep", wraps=fit._als_sweep) as sweep:
            cp.als(theta, start, sweeps=sweeps, tol=tol)
        counts.append(sweep.call_count)
    assert counts[0] == 7
    assert counts[1] < counts[2] < 500


def test_a_client_that_cannot_be_fitted_keeps_its_factors_and_spares_the_others() -> None:
    theta, start = randn(2, 4, 3, 2), random_factors([2], [4, 3, 2], 2)
    theta[0, 0, 0, 0] = torch.nan
    fitted = cp.als(theta, start, sweeps=3)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(fitted, start, strict=True))
    assert residual(theta[1], [f[1] for f in fitted]) < residual(theta[1], [f[1] for f in start])


def test_a_sweep_that_went_wrong_is_not_taken() -> None:
    theta, start = randn(2, 4, 3, 2), random_factors([2], [4, 3, 2], 2)
    worse = [factor * torch.tensor([10.0, 1.0])[:, None, None] for factor in start]  # for the first client only
    with mock.patch.object(fit, "_als_sweep", return_value=worse):
        fitted = cp.als(theta, start, sweeps=3)
    assert all(torch.equal(a, b) for a, b in zip(fitted, start, strict=True))


def test_low_rank_tensors_are_recovered() -> None:
    found = 0
    for case in range(100):
        draw = random.Random(case)
        sizes = [draw.randint(4, 7) for _ in range(3 + case % 3)]
        rank = draw.randint(1, 3)
        theta = cp.compose(random_factors([], sizes, rank, seed=case))
        fitted = cp.decompose(theta, rank, sweeps=300, tol=1e-9)
        found += bool(residual(theta, fitted) < 1e-6 * theta.norm())
    assert found >= 95


@pytest.mark.parametrize("batch", [[], [3], [2, 2]])
@pytest.mark.parametrize("shape", [[7, 4], [4, 7], [5, 5], [1, 6]])
def test_matrices_are_fitted_as_well_as_the_singular_values_allow(batch: list[int], shape: list[int]) -> None:
    theta = randn(*batch, *shape)
    values = torch.linalg.svdvals(theta)
    for rank in range(1, 9):
        fitted = cp.decompose(theta, rank, 2)
        assert [tuple(f.shape) for f in fitted] == [(*batch, size, rank) for size in shape]
        best = values[..., rank:].norm(dim=-1)
        torch.testing.assert_close(residual(theta, fitted), best, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("batch", [[], [2]])
@pytest.mark.parametrize("shape", [[5], [4, 3, 2], [2, 3, 4], [3, 5, 2, 2], [2, 2, 3, 2, 2], [6, 1, 1]])
def test_sufficient_ranks_are_exact(batch: list[int], shape: list[int]) -> None:
    theta = randn(*batch, *shape)
    enough = max(1, theta[(0,) * len(batch)].numel() // max(shape))
    for rank in (enough, enough + 2):
        fitted = cp.decompose(theta, rank, len(shape))
        assert [tuple(f.shape) for f in fitted] == [(*batch, size, rank) for size in shape]
        torch.testing.assert_close(cp.compose(fitted), theta, rtol=1e-12, atol=1e-12)


def test_decompose_batched_equals_one_by_one() -> None:
    theta = cp.compose(random_factors([3], [5, 4, 6], 2))
    together = cp.compose(cp.decompose(theta, 2, 3, tol=1e-9))
    for k in range(3):
        torch.testing.assert_close(cp.compose(cp.decompose(theta[k], 2, tol=1e-9)), together[k], rtol=1e-5, atol=1e-5)


def test_decompose_is_a_function_of_its_seed_and_draws_from_no_other_generator() -> None:
    theta = randn(5, 5, 3, 3)
    state = torch.random.get_rng_state()
    first, again, other = (cp.decompose(theta, 7, seed=seed, sweeps=3) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], other[2])


def test_restarts_never_hurt_and_sometimes_help() -> None:
    theta = randn(6, 4, 4, 4)
    once = residual(theta, cp.decompose(theta, 3, 3, sweeps=10))
    more = residual(theta, cp.decompose(theta, 3, 3, sweeps=10, restarts=4))
    assert bool((more <= once + 1e-9).all())
    assert bool((more < once - 1e-3).any())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_decompose_keeps_the_dtype(dtype: torch.dtype) -> None:
    for shape, rank in (((4,), 2), ((5, 4), 2), ((5, 4), 4), ((5, 4, 3), 2), ((5, 4, 3), 12)):
        theta = randn(*shape).to(dtype)
        fitted = cp.decompose(theta, rank)
        assert all(factor.dtype == dtype for factor in fitted)
        assert residual(theta, fitted) < theta.double().norm()


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
def test_decompose_comes_out_balanced(order: int) -> None:
    fitted = cp.decompose(randn(*[4, 3, 3, 2, 2][:order]), 2, sweeps=5)
    norms = torch.stack([factor.norm(dim=-2) for factor in fitted])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 50))
def test_balance_keeps_the_tensor_and_evens_the_columns(sizes: list[int], rank: int, seed: int) -> None:
    factors = [factor * 10.0 ** (n - 1) for n, factor in enumerate(random_factors([2], sizes, rank, seed))]
    balanced = cp.balance(factors)
    torch.testing.assert_close(cp.compose(balanced), cp.compose(factors), rtol=1e-10, atol=1e-10)
    norms = torch.stack([factor.norm(dim=-2) for factor in balanced])
    torch.testing.assert_close(norms, norms[:1].expand_as(norms))


def test_balance_clears_a_null_column_everywhere() -> None:
    a, b = randn(4, 2), randn(3, 2, seed=1)
    a[:, 1] = 0
    balanced = cp.balance([a, b])
    assert [factor[:, 1].abs().sum().item() for factor in balanced] == [0, 0]
    torch.testing.assert_close(cp.compose(balanced), cp.compose([a, b]))


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("rank", [1, 8])
def test_init_factors_give_the_variance_asked_for(order: int, rank: int) -> None:
    shape = [3, 2, 2, 2, 2][:order]
    factors = cp.init_factors(shape, rank, 0.04, torch.Generator().manual_seed(0), batch=[60000], dtype=torch.float64)
    dense = cp.compose(factors)
    assert dense.shape == (60000, *shape)
    assert dense.square().mean().item() == pytest.approx(0.04, rel=0.2 if order > 3 else 0.05)
    assert abs(dense.mean().item()) < 0.005


def test_init_factors_are_a_function_of_the_generator() -> None:
    state = torch.random.get_rng_state()
    one, two = (cp.init_factors([4, 3], 2, 1.0, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(one, two, strict=True))
    assert cp.compose(cp.init_factors([4, 3], 2, 0.0, torch.Generator())).abs().sum() == 0


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("sweeps", 0, "1 or more"),
        ("sweeps", -1, "1 or more"),
        ("tol", -1e-3, "0 or more"),
        ("tol", float("nan"), "0 or more"),
        ("damping", -0.1, "0 or more"),
        ("damping", float("nan"), "0 or more"),
    ],
)
def test_bad_settings_are_refused(field: str, value: float, allowed: str) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(TDPFedError, match=f"^{field}: {value} given, must be {allowed}$"):
        cp.als(randn(3, 2), random_factors([], [3, 2], 1), **settings)
    if field != "damping":
        with pytest.raises(TDPFedError, match=f"^{field}: {value} given, must be {allowed}$"):
            cp.decompose(randn(3, 2), 1, **settings)


def test_bad_ranks_and_variances_are_refused() -> None:
    for rank in (0, -1):
        with pytest.raises(TDPFedError, match=f"rank: {rank} given, .* at least 1"):
            cp.decompose(randn(3, 2), rank)
        with pytest.raises(TDPFedError, match=f"rank: {rank} given, .* at least 1"):
            cp.init_factors([3, 2], rank, 1.0, torch.Generator())
    for variance in (-1.0, float("nan")):
        with pytest.raises(TDPFedError, match=f"variance: {variance} given, must be 0 or more"):
            cp.init_factors([3, 2], 1, variance, torch.Generator())
