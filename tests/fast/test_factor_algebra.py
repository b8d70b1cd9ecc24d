"""The algebra in fewer passes: the gradient of autograd and of :mod:`tdpfed.cp`, in any company, in bounded memory."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_cases import KERNELS, Case, Created, cases, draw_case, gen, relative, twin_compose, twin_grad
from tdpfed import cp
from tdpfed.cp.algebra import best_cut, sides, sweep
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast import factor_algebra
from tdpfed.fast.factor_algebra import residual_grad_in_few_kernels, tensor_residual_grad

SHAPES = {"conv.weight": (6, 3, 3, 3), "conv.bias": (6,), "fc.weight": (10, 13), "fc.bias": (10,), "scale": ()}


def gradients(theta: Tensor, factors: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    """The gradient in memory of its own, which is NaN where nothing is written."""
    out = [torch.full(factor.shape, torch.nan, dtype=factor.dtype) for factor in factors]
    tensor_residual_grad(theta, factors, out, scale)
    return out


@given(cases(), st.sampled_from([1.0, 2.5]))
def test_the_gradient_is_that_of_autograd_and_of_the_plain_algebra(case: Case, scale: float) -> None:
    theta, factors = case
    ours = gradients(theta, factors, scale)
    for grad, twin, plain in zip(ours, twin_grad(theta, factors), cp.residual_grad(theta, factors, scale), strict=True):
        assert relative(grad, scale * twin) < 1e-10
        assert relative(grad, plain) < 1e-10


@given(cases())
def test_the_way_in_few_kernels_equals_autograd(case: Case) -> None:
    """A GPU's way, computed here on the CPU."""
    theta, factors = case
    if len(factors) == 1:
        return
    flat = [factor.reshape(-1, *factor.shape[-2:]) for factor in factors]
    out = [torch.empty_like(factor) for factor in flat]
    residual_grad_in_few_kernels(theta.reshape(len(flat[0]), *(f.shape[-2] for f in flat)), flat, out, 1.0)
    for grad, twin in zip(out, twin_grad(theta, factors), strict=True):
        assert relative(grad.reshape(twin.shape), twin) < 1e-10


@pytest.mark.parametrize("sizes", [[30, 12, 3, 3], [40, 13, 2, 3, 2], [40, 1, 3, 3]])
def test_the_gradient_of_a_kernel_is_that_of_autograd(sizes: list[int]) -> None:
    theta, factors = draw_case(5, [3], sizes, 4)
    assert best_cut(sizes) == 1  # positions are taken together
    for grad, twin in zip(gradients(theta, factors, 2.5), twin_grad(theta, factors), strict=True):
        assert relative(grad, 2.5 * twin) < 1e-10


@given(cases(), st.data())
def test_the_gradient_takes_views_of_flat_vectors(case: Case, data: st.DataObject) -> None:
    theta, factors = case
    order = len(factors)
    batch = theta.shape[: theta.ndim - order]
    sizes = theta.shape[theta.ndim - order :]
    flat = torch.zeros(*batch, 3 + math.prod(sizes) + 2, dtype=theta.dtype)
    flat[..., 3:-2] = theta.reshape(*batch, -1)
    view = flat[..., 3:-2].view(*batch, *sizes)
    expected = gradients(theta, factors)
    clients_together = data.draw(st.sampled_from([1, 1 << 22]))
    with mock.patch.object(factor_algebra, "CPU_CHUNK_BYTES", clients_together):
        for grad, twin in zip(gradients(view, factors), expected, strict=True):
            assert relative(grad, twin) < 1e-13


def test_the_gradient_leaves_its_arguments_alone() -> None:
    for sizes in ([4, 3, 2], [4, 3], [90, 60], [30, 12, 3, 3]):
        theta, factors = draw_case(0, [5], sizes, 3)
        before = [t.clone() for t in (theta, *factors)]
        gradients(theta, factors, 2.0)
        assert all(torch.equal(a, b) for a, b in zip((theta, *factors), before, strict=True))


@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=3),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 6),
)
def test_groups_give_each_client_the_same_bits_in_any_company(
    sizes: list[int], rank: int, together: int, few: int, more: int
) -> None:
    fewer, all_ = together + few, together + few + more
    theta, factors = draw_case(few, [all_], sizes, rank, torch.float32)
    whole = gradients(theta, factors)
    widest = max(math.prod(sizes[side.start : side.stop]) for side in sides(factors))
    with mock.patch.object(factor_algebra, "CPU_CHUNK_BYTES", together * widest * rank * 4):
        assert factor_algebra._clients_together(theta, factors, all_) <= together
        grouped = gradients(theta, factors)
        subset = gradients(theta[more:], [factor[more:] for factor in factors])
    for one, other, all_at_once in zip(grouped, subset, whole, strict=True):
        assert len(other) == fewer
        assert torch.equal(one[more:], other)
        assert relative(one, all_at_once) < 1e-5


@pytest.mark.parametrize("shape", [(5, 7), (90, 60)])
@pytest.mark.parametrize("clients", [0, 1, 4])
def test_a_cpus_way_for_matrices_is_that_of_the_residual(shape: tuple[int, int], clients: int) -> None:
    """Small and large matrices on a CPU against the way of a GPU."""
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(clients, *shape, generator=generator, dtype=torch.float64)
    factors = [torch.randn(clients, size, 6, generator=generator, dtype=torch.float64) for size in shape]
    twin = [torch.empty_like(factor) for factor in factors]
    residual_grad_in_few_kernels(theta, factors, twin, 3.0)
    for ours, other in zip(gradients(theta, factors, 3.0), twin, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-11, atol=1e-11)


def test_a_group_never_holds_more_clients_than_fit_the_chunk() -> None:
    theta, factors = draw_case(0, [11], [8, 6, 3, 3], 5, torch.float32)
    seen: list[int] = []

    def watched(theta: Tensor, factors: Any) -> Any:
        seen.append(len(theta))
        return sweep(theta, factors)

    one = 6 * 9 * 5 * 4
    with (
        mock.patch.object(factor_algebra, "sweep", watched),
        mock.patch.object(factor_algebra, "CPU_CHUNK_BYTES", 5 * one + 1),
    ):
        gradients(theta, factors)
    assert seen == [4, 4, 4]  # even groups of at most five; the last one reaches back


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("rank", [1, 3, 50])
def test_memory_of_a_convolution_kernel(kernel: tuple[int, ...], rank: int) -> None:
    clients = 3
    rank = min(rank, math.prod(kernel[2:]) * max(kernel[:2]))  # beyond it the Gram matrices (R, R) are larger
    _, factors = draw_case(0, [clients], list(kernel), rank, torch.float32)
    flat = torch.randn(clients, 7 + math.prod(kernel), generator=gen(1))
    theta = flat[:, 7:].view(clients, *kernel)  # a copy of theta would be seen: it has no memory of its own
    bound = clients * math.prod(kernel[2:]) * max(kernel[:2]) * rank * theta.element_size()
    with Created() as made:
        grads = gradients(theta, factors)
    assert 0 < made.largest(*grads) <= bound


def test_no_clients_give_no_gradients() -> None:
    for sizes in ([4, 3, 2], [4, 3], [90, 60], [5]):
        theta, factors = draw_case(0, [0], sizes, 3)
        assert [tuple(grad.shape) for grad in gradients(theta, factors)] == [(0, size, 3) for size in sizes]
        if len(sizes) > 1:
            residual_grad_in_few_kernels(theta, factors, [torch.empty_like(factor) for factor in factors], 1.0)


@given(cases())
def test_a_gpus_way_to_compose_equals_the_twin(case: Case) -> None:
    """Computed here on the CPU."""
    _, factors = case
    assert relative(factor_algebra._composed(factors), twin_compose(factors)) < 1e-13


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (0,)])
@pytest.mark.parametrize("shapes", [SHAPES, {"w": (90, 60)}, {"b": (7,)}], ids=["many", "matrix", "dense"])
def test_a_plans_parameters_and_gradient_are_its_own(lead: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> None:
    plan, generator = FactorPlan.of(shapes, 1.5), gen(3)
    a = torch.randn(*lead, plan.factors.size, generator=generator, dtype=torch.float64)
    theta = torch.randn(*lead, plan.dense.size, generator=generator, dtype=torch.float64)
    expected, before = plan.residual_grad(a, theta, 3.0), (a.clone(), theta.clone())
    torch.testing.assert_close(factor_algebra.compose(plan, a), plan.compose(a))
    torch.testing.assert_close(factor_algebra.residual_grad(plan, a, theta, 3.0), expected)
    out = torch.full_like(a, torch.nan)
    assert factor_algebra.residual_grad(plan, a, theta, 3.0, out) is out
    torch.testing.assert_close(out, expected)
    assert torch.equal(a, before[0])
    assert torch.equal(theta, before[1])


def test_clients_may_share_their_factors() -> None:
    plan = FactorPlan.of(SHAPES, 1.5)
    a, theta = torch.randn(plan.factors.size, generator=gen(0)), torch.randn(3, plan.dense.size, generator=gen(1))
    shared = factor_algebra.residual_grad(plan, a.expand(3, -1), theta, 1.0)
    assert torch.equal(shared, factor_algebra.residual_grad(plan, a.repeat(3, 1), theta, 1.0))


def test_places_of_dense_parameters() -> None:
    plan = FactorPlan.of(SHAPES, 1.5)
    within_factors, within_dense = factor_algebra._dense_places(plan, torch.device("cpu"))
    a = torch.randn(plan.factors.size, generator=gen(0))
    assert torch.equal(a[within_factors], plan.compose(a)[within_dense])
    assert len(within_dense) == 6 + 10 + 1
