"""Laws of the CP algebra: operations against einsum twins, the gradient against autograd, memory against its bound."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cp_cases import KERNELS, MODES, Case, Created, cases, draw_case, gen, relative, twin_compose, twin_grad
from tdpfed import cp
from tdpfed.errors import TDPFedError


def twin_khatri_rao(factors: list[Tensor]) -> Tensor:
    modes = MODES[: len(factors)]
    product = torch.einsum(",".join(f"...{m}z" for m in modes) + f"->...{modes}z", *factors)
    return product.flatten(-len(factors) - 1, -2)


def twin_unfold(x: Tensor, mode: int, order: int) -> Tensor:
    rows = x.unbind(mode - order)
    return torch.stack([row.reshape(*x.shape[: x.ndim - order], -1) for row in rows], -2)


def twin_mttkrp(theta: Tensor, factors: list[Tensor], mode: int) -> Tensor:
    modes = MODES[: len(factors)]
    others = [n for n in range(len(factors)) if n != mode]
    inputs = ",".join([f"...{modes}", *(f"...{modes[n]}z" for n in others)])
    if not others:
        return theta[..., None].expand(*theta.shape, factors[0].shape[-1])
    return torch.einsum(f"{inputs}->...{modes[mode]}z", theta, *(factors[n] for n in others))


@given(cases())
def test_compose_and_khatri_rao_equal_their_twins(case: Case) -> None:
    _, factors = case
    assert relative(cp.compose(factors), twin_compose(factors)) < 1e-13
    assert relative(cp.khatri_rao(factors), twin_khatri_rao(factors)) < 1e-13


@given(cases(), st.data())
def test_unfold_equals_its_twin_and_fold_undoes_it(case: Case, data: st.DataObject) -> None:
    theta, factors = case
    order = len(factors)
    mode = data.draw(st.integers(0, order - 1))
    matrix = cp.unfold(theta, mode, order)
    assert torch.equal(matrix, twin_unfold(theta, mode, order))
    assert torch.equal(cp.fold(matrix, mode, theta.shape[theta.ndim - order :]), theta)


def test_unfold_takes_all_dimensions_by_default() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(cp.unfold(x, 1), cp.unfold(x, 1, 3))
    assert cp.unfold(x, 1)[1].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


@given(cases(), st.data())
def test_unfolded_composition_is_a_matrix_product(case: Case, data: st.DataObject) -> None:
    _, factors = case
    order = len(factors)
    mode = data.draw(st.integers(0, order - 1))
    others = [factor for n, factor in enumerate(factors) if n != mode]
    right = cp.khatri_rao(others) if others else torch.ones_like(factors[0][..., :1, :])
    assert relative(factors[mode] @ right.mT, cp.unfold(cp.compose(factors), mode, order)) < 1e-13


@given(cases(), st.data())
def test_mode_dot_equals_its_twin(case: Case, data: st.DataObject) -> None:
    theta, factors = case
    order = len(factors)
    mode, rows = data.draw(st.integers(0, order - 1)), data.draw(st.integers(1, 4))
    matrix = torch.randn(*factors[0].shape[:-2], rows, factors[mode].shape[-2], dtype=torch.float64, generator=gen(1))
    modes = MODES[:order]
    twin = torch.einsum(f"...{modes},...y{modes[mode]}->...{modes.replace(modes[mode], 'y')}", theta, matrix)
    assert relative(cp.mode_dot(theta, matrix, mode, order), twin) < 1e-13


@given(cases(), st.data())
def test_mode_dot_with_a_shared_matrix_moves_into_the_factor(case: Case, data: st.DataObject) -> None:
    _, factors = case
    order = len(factors)
    mode = data.draw(st.integers(0, order - 1))
    matrix = torch.randn(3, factors[mode].shape[-2], dtype=torch.float64, generator=gen(2))
    moved = [matrix @ factor if n == mode else factor for n, factor in enumerate(factors)]
    assert relative(cp.mode_dot(cp.compose(factors), matrix, mode, order), cp.compose(moved)) < 1e-12


@given(cases(), st.data())
def test_mttkrp_equals_its_twin(case: Case, data: st.DataObject) -> None:
    theta, factors = case
    mode = data.draw(st.integers(0, len(factors) - 1))
    assert relative(cp.mttkrp(theta, factors, mode), twin_mttkrp(theta, factors, mode)) < 1e-13


@pytest.mark.parametrize("sizes", [[40, 2, 3], [2, 40, 3], [3, 2, 40], [40, 41], [5, 6, 40, 3], [36, 2, 35, 2]])
def test_long_and_short_contractions_agree_with_the_twin(sizes: list[int]) -> None:
    theta, factors = draw_case(0, [2], sizes, 3)
    for mode in range(len(sizes)):
        assert relative(cp.mttkrp(theta, factors, mode), twin_mttkrp(theta, factors, mode)) < 1e-13


@given(cases())
def test_residual_grad_equals_autograd(case: Case) -> None:
    theta, factors = case
    for grad, twin in zip(cp.residual_grad(theta, factors), twin_grad(theta, factors), strict=True):
        assert relative(grad, twin) < 1e-10


@given(cases())
def test_residual_grad_vanishes_at_an_exact_solution(case: Case) -> None:
    _, factors = case
    theta = cp.compose(factors)
    for grad, factor in zip(cp.residual_grad(theta, factors), factors, strict=True):
        assert grad.norm() <= 1e-11 * (1 + theta.norm()) * (1 + factor.norm()) * 100


@pytest.mark.parametrize("sizes", [[30, 12, 3, 3], [40, 13, 2, 3, 2], [40, 1, 3, 3]])
def test_residual_grad_of_a_kernel_equals_autograd(sizes: list[int]) -> None:
    theta, factors = draw_case(5, [3], sizes, 4)
    for grad, twin in zip(cp.residual_grad(theta, factors, scale=2.5), twin_grad(theta, factors), strict=True):
        assert relative(grad, 2.5 * twin) < 1e-10


def test_residual_grad_by_hand() -> None:
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [0.0]])
    theta = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # composed: [[3, 0], [6, 0]], residual [[-2, 0], [-6, 1]]
    grad_a, grad_b = cp.residual_grad(theta, [a, b])
    assert grad_a.tolist() == [[6.0], [18.0]]
    assert grad_b.tolist() == [[14.0], [-2.0]]


@given(cases())
def test_residual_grad_takes_views_of_flat_vectors(case: Case) -> None:
    theta, factors = case
    order = len(factors)
    batch = theta.shape[: theta.ndim - order]
    sizes = theta.shape[theta.ndim - order :]
    flat = torch.zeros(*batch, 3 + math.prod(sizes) + 2, dtype=theta.dtype)
    flat[..., 3:-2] = theta.reshape(*batch, -1)
    view = flat[..., 3:-2].view(*batch, *sizes)
    for grad, twin in zip(cp.residual_grad(view, factors), cp.residual_grad(theta, factors), strict=True):
        assert relative(grad, twin) < 1e-13


def test_residual_grad_leaves_its_arguments_alone() -> None:
    theta, factors = draw_case(0, [5], [4, 3, 2], 3)
    before = [t.clone() for t in (theta, *factors)]
    cp.residual_grad(theta, factors, 2.0)
    assert all(torch.equal(a, b) for a, b in zip((theta, *factors), before, strict=True))


def test_no_clients_give_no_gradients() -> None:
    theta, factors = draw_case(0, [0], [4, 3, 2], 3)
    assert [tuple(grad.shape) for grad in cp.residual_grad(theta, factors)] == [(0, 4, 3), (0, 3, 3), (0, 2, 3)]
    assert cp.compose(factors).shape == (0, 4, 3, 2)


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
        grads = cp.residual_grad(theta, factors)
    assert 0 < made.largest(*grads) <= bound
    for mode in range(len(kernel)):
        with Created() as made:
            product = cp.mttkrp(theta, factors, mode)
        assert made.largest(product) <= bound
    with Created() as made:
        dense = cp.compose(factors)
    assert made.largest(dense) <= bound


def bad_factors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ([], ["factors", "none", "at least one"]),
        (bad_factors((4, 2), (3,)), ["A2", "(3,)", "(..., I_2, R)"]),
        (bad_factors((4, 2), (3, 5)), ["A2", "rank 5", "rank 2"]),
        (bad_factors((6, 4, 2), (7, 3, 2)), ["A2", "(7,)", "(6,)"]),
        (bad_factors((4, 2), (1, 3, 2)), ["A2", "(1,)", "()"]),
    ],
)
def test_factors_that_disagree_are_refused(factors: list[Tensor], words: list[str]) -> None:
    for call in (cp.check_factors, cp.compose, lambda f: cp.residual_grad(torch.zeros(4, 3), f)):
        with pytest.raises(TDPFedError) as error:
            call(factors)
        assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("shape", [(4, 4), (3, 4), (1, 4, 3), (4, 3, 1)])
def test_theta_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    factors = bad_factors((4, 2), (3, 2))
    for call in (cp.residual_grad, lambda t, f: cp.mttkrp(t, f, 0), cp.als):
        with pytest.raises(TDPFedError, match=r"theta: shape .* \(4, 3\)") as error:
            call(torch.zeros(shape), factors)
        assert str(shape) in str(error.value)


def test_modes_and_orders_out_of_range_are_refused() -> None:
    x = torch.zeros(2, 3)
    for mode in (-1, 2):
        with pytest.raises(TDPFedError, match=f"mode: {mode} given, must be 0 to 1"):
            cp.unfold(x, mode)
        with pytest.raises(TDPFedError, match=f"mode: {mode} given"):
            cp.mttkrp(x, bad_factors((2, 1), (3, 1)), mode)
    for order in (0, 3):
        with pytest.raises(TDPFedError, match=f"order: {order} given, must be 1 to 2"):
            cp.mode_dot(x, x, 0, order)
        with pytest.raises(TDPFedError, match=f"order: {order} given, must be 1 to 2"):
            cp.decompose(x, 1, order)


@pytest.mark.parametrize("rank", [0, -3, 1.5, True, "2"])
def test_ranks_below_one_are_refused(rank: Any) -> None:
    with pytest.raises(TDPFedError) as error:
        cp.check_rank(rank)
    assert f"rank: {rank!r} given" in str(error.value)
    assert "at least 1" in str(error.value)
