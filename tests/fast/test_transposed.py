"""Transposed factors are the factors: what they compose to, their gradient, and steps in their memory."""

from weakref import ref

import pytest
import torch

import small
from tdpfed.core import optim as textbook
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast import optim, transposed
from tdpfed.fast.first_layer import LowRankStep
from tdpfed.fast.transposed import Transposed

SHAPES = {"conv.weight": (6, 3, 3, 3), "conv.bias": (6,), "fc.weight": (10, 13), "fc.bias": (10,), "scale": ()}
PLAN = FactorPlan.of(SHAPES, 1.5)


def drawn(clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(clients, PLAN.factors.size, generator=generator, dtype=torch.float64)
    return a, torch.randn(clients, PLAN.dense.size, generator=generator, dtype=torch.float64)


def flat(pieces: list[tuple[int, torch.Tensor]], packed: torch.Tensor) -> torch.Tensor:
    gradient = torch.full_like(packed, torch.nan)
    for begin, piece in pieces:
        gradient[:, begin : begin + piece.shape[1]] = piece
    return gradient


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize("clients", [0, 1, 3])
def test_transposed_factors_are_the_factors(clients: int) -> None:
    space = Transposed(PLAN)
    ranks = dict(zip(PLAN.dense.names, space.plan.ranks, strict=True))
    assert ranks["fc.weight"] == dict(zip(PLAN.dense.names, PLAN.ranks, strict=True))["fc.weight"]  # any rank will do
    a, theta = drawn(clients)
    packed = space.pack(a)
    assert packed.ndim == 2
    assert torch.equal(space.unpack(packed), a)
    torch.testing.assert_close(space.compose(packed), PLAN.compose(a))
    compute, pieces = space.residual(packed, theta, 3.0)
    compute()
    torch.testing.assert_close(space.unpack(flat(pieces, packed)), PLAN.residual_grad(a, theta, 3.0))
    for factor in space._factors(packed):  # what else is packed stays
        factor.mul_(0.5)
    compute()  # where the factors are by now
    torch.testing.assert_close(space.unpack(flat(pieces, packed)), PLAN.residual_grad(0.5 * a, theta, 3.0))
    torch.testing.assert_close(
        space.unpack(space.residual_grad(packed, theta, 3.0)), PLAN.residual_grad(0.5 * a, theta, 3.0)
    )


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize(("clients", "together"), [(1, 1), (5, 1), (5, 2), (5, 9)])
def test_steps_in_place_are_the_steps(clients: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposed, "CLIENTS_PER_BLOCK", together)
    monkeypatch.setattr(transposed, "VALUES_PER_BLOCK", 1)
    (a, theta), rule, space = drawn(clients), optim.adam(1e-3), Transposed(PLAN)
    plain = textbook.adam(1e-3)
    packed, state, twin = space.pack(a), plain.init(a), a
    space.move(packed, theta, None, 3.0, rule.in_place, rule.init(packed), range(1, 6))
    for count in range(1, 6):
        twin, state = plain.step(twin, PLAN.residual_grad(twin, theta, 3.0), state, count)
    torch.testing.assert_close(space.unpack(packed), twin)
    assert not torch.allclose(twin, a)


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize(("samples", "lower"), [(1, True), (18, True), (19, False), (40, False)])
@pytest.mark.parametrize("clients", [1, 9])
def test_steps_to_a_target_of_low_rank_are_the_steps(
    samples: int, lower: bool, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the target has less numbers so: rank 7, the samples, and what fills up a multiple of eight."""
    found = small.watched(monkeypatch, transposed, "_stacked")
    monkeypatch.setattr(transposed, "CLIENTS_PER_BLOCK", 3)
    monkeypatch.setattr(transposed, "VALUES_PER_BLOCK", 1)
    plan = FactorPlan.of({"bias": (7,), "fc.weight": (40, 90)}, 4.0)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(clients, plan.factors.size, generator=generator, dtype=torch.float64)
    slopes = torch.randn(clients, samples, 40, generator=generator, dtype=torch.float64)
    inputs = torch.randn(clients, samples, 90, generator=generator, dtype=torch.float64)
    target = plan.compose(a)
    target[:, 7:] += (slopes.mT @ inputs).flatten(1)
    target[:, :7] += 1
    ends = []
    for low_rank in (None, LowRankStep(7, slopes, inputs, ref(target), ref(target))):
        space, rule = Transposed(plan), optim.adam(1e-2)
        packed = space.pack(a)
        space.move(packed, target, low_rank, 3.0, rule.in_place, rule.init(packed), range(1, 6))
        ends.append(space.unpack(packed))
    torch.testing.assert_close(*ends)
    assert not torch.allclose(ends[0], a)
    assert [stack is not None for stack in found] == [lower] * (1 if clients == 1 else 3)


@pytest.mark.usefixtures("any_matrix_is_large")
def test_in_single_precision_a_gradient_from_products_of_factors_loses_one_digit_at_most() -> None:
    """Near its target the residual is small against the products that the gradient is the difference of."""
    generator = torch.Generator().manual_seed(0)
    plan = FactorPlan.of({"fc.weight": (100, 784)}, 2.0)
    a = torch.randn(4, plan.factors.size, generator=generator, dtype=torch.float64) / 4
    theta = plan.compose(a) + 1e-2 * torch.randn(4, plan.dense.size, generator=generator, dtype=torch.float64)
    space, single, near = Transposed(plan), a.float(), theta.float()
    exact = plan.residual_grad(single.double(), near.double(), 12.0)
    ours = space.unpack(space.residual_grad(space.pack(single), near, 12.0))
    gap = near - plan.compose(single)
    by_residual = torch.func.vjp(plan.compose, single)[1](-12.0 * gap)[0]
    error, usual = ((found.double() - exact).norm() / exact.norm() for found in (ours, by_residual))
    assert 0 < error < 10 * usual


@pytest.mark.usefixtures("any_matrix_is_large")
def test_in_single_precision_a_target_of_low_rank_loses_one_digit_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    plan = FactorPlan.of({"fc.weight": (100, 784)}, 2.0)
    a = torch.randn(4, plan.factors.size, generator=generator) / 4
    slopes, inputs = torch.randn(4, 20, 100, generator=generator) / 500, torch.randn(4, 20, 784, generator=generator)
    space = Transposed(plan)
    packed = space.pack(a)
    unread = torch.zeros(4, 78400)
    compute, pieces = space.residual(packed, unread, 12.0, LowRankStep(0, slopes, inputs, ref(unread), ref(unread)))
    start = a.double()
    moved = 0.99 * a  # a few steps on
    for factor in space._factors(packed):
        factor.mul_(0.99)
    theta = plan.compose(start) + (slopes.double().mT @ inputs.double()).flatten(1)
    compute()
    exact = plan.residual_grad(moved.double(), theta, 12.0)
    gap = theta.float() - plan.compose(moved)
    by_residual = torch.func.vjp(plan.compose, moved)[1](-12.0 * gap)[0]
    ours = space.unpack(flat(pieces, packed))
    error, usual = ((found.double() - exact).norm() / exact.norm() for found in (ours, by_residual))
    assert 0 < error < 10 * usual
