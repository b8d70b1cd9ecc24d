"""A padded workspace gives what the plan itself does."""

from collections.abc import Iterator

import pytest
import torch

import small
from tdpfed.core import optim
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast import factors as workspace
from tdpfed.fast.factors import ALIGNED, LEAST_RANK, Turned, Workspace
from tdpfed.fast.first_layer import Along

SHAPES = {"conv.weight": (6, 3, 3, 3), "conv.bias": (6,), "fc.weight": (10, 13), "fc.bias": (10,), "scale": ()}
PLAN = FactorPlan.of(SHAPES, 1.5)


def drawn(*lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(*lead, PLAN.factors.size, generator=generator, dtype=torch.float64)
    return a, torch.randn(*lead, PLAN.dense.size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("lead", [(), (4,)])
def test_packed_and_unpacked_is_the_same(lead: tuple[int, ...]) -> None:
    a, _ = drawn(*lead)
    space = Workspace(PLAN, padded=True)
    packed = space.pack(a)
    assert packed.shape[-1] > a.shape[-1]
    assert torch.equal(space.unpack(packed), a)
    torch.testing.assert_close(packed.square().sum(-1), a.square().sum(-1))


def test_what_is_not_padded_stays_as_it_is() -> None:
    a, theta = drawn(2)
    space = Workspace(PLAN, padded=False)
    assert space.pack(a) is a
    assert space.unpack(a) is a
    assert space.target(theta) is theta
    assert torch.equal(space.compose(a), PLAN.compose(a))


def test_on_a_cpu_only_ranks_are_filled_up() -> None:
    space = Workspace(PLAN, padded=True, device="cpu")
    assert all(rank is None or (rank % ALIGNED == 0 and rank >= LEAST_RANK) for rank in space.plan.ranks)
    assert space.plan.dense == PLAN.dense
    a, theta = drawn(2)
    assert space.target(theta) is theta
    torch.testing.assert_close(space.compose(space.pack(a)), PLAN.compose(a))
    grad = space.unpack(space.residual_grad(space.pack(a), theta, 3.0))
    torch.testing.assert_close(grad, PLAN.residual_grad(a, theta, 3.0))


@pytest.fixture
def any_matrix_is_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tdpfed.cp.algebra.SMALL_MATRIX", 1)
    workspace._filled_up.cache_clear()
    yield
    workspace._filled_up.cache_clear()


def flat(pieces: list[tuple[int, torch.Tensor]], packed: torch.Tensor) -> torch.Tensor:
    gradient = torch.full_like(packed, torch.nan)
    for begin, piece in pieces:
        gradient[:, begin : begin + piece.shape[1]] = piece
    return gradient


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize("lead", [(), (3,)])
def test_turned_factors_are_the_factors(lead: tuple[int, ...]) -> None:
    space = Turned(PLAN, single=not lead)
    ranks = dict(zip(PLAN.dense.names, space.plan.ranks, strict=True))
    assert ranks["fc.weight"] == dict(zip(PLAN.dense.names, PLAN.ranks, strict=True))["fc.weight"]  # any rank will do
    a, theta = drawn(*lead)
    packed = space.pack(a)
    assert packed.ndim == 2
    assert torch.equal(space.unpack(packed), a)
    torch.testing.assert_close(space.compose(packed), PLAN.compose(a))
    compute, pieces = space.residual(packed, theta if lead else theta[None], 3.0)
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
@pytest.mark.parametrize(("lead", "together"), [((), 1), ((5,), 1), ((5,), 2), ((5,), 9)])
def test_steps_in_place_are_the_steps(lead: tuple[int, ...], together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "LEAST_BLOCK", together)
    monkeypatch.setattr(workspace, "BLOCK", 1)
    (a, theta), rule, space = drawn(*lead), optim.adam(1e-3), Turned(PLAN, single=not lead)
    packed, state, twin = space.pack(a), rule.init(a), a
    assert rule.in_place is not None
    space.move(packed, theta, None, 3.0, rule.in_place, rule.init(packed), range(1, 6))
    for count in range(1, 6):
        twin, state = rule.step(twin, PLAN.residual_grad(twin, theta, 3.0), state, count)
    torch.testing.assert_close(space.unpack(packed), twin)
    assert not torch.allclose(twin, a)


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize(("samples", "lower"), [(1, True), (18, True), (19, False), (40, False)])
@pytest.mark.parametrize("clients", [1, 9])
def test_steps_to_a_target_of_low_rank_are_the_steps(
    samples: int, lower: bool, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the target has less numbers so: rank 7, the samples, and what fills up a multiple of eight."""
    found = small.watched(monkeypatch, workspace, "_stacked")
    monkeypatch.setattr(workspace, "LEAST_BLOCK", 3)
    monkeypatch.setattr(workspace, "BLOCK", 1)
    plan = FactorPlan.of({"bias": (7,), "fc.weight": (40, 90)}, 4.0)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(clients, plan.factors.size, generator=generator, dtype=torch.float64)
    slopes = torch.randn(clients, samples, 40, generator=generator, dtype=torch.float64)
    inputs = torch.randn(clients, samples, 90, generator=generator, dtype=torch.float64)
    target = plan.compose(a)
    target[:, 7:] += (slopes.mT @ inputs).flatten(1)
    target[:, :7] += 1
    ends = []
    for along in (None, Along(7, slopes, inputs)):
        space, rule = Turned(plan), optim.adam(1e-2)
        packed = space.pack(a)
        assert rule.in_place is not None
        space.move(packed, target, along, 3.0, rule.in_place, rule.init(packed), range(1, 6))
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
    space, single, near = Turned(plan), a.float(), theta.float()
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
    space = Turned(plan)
    packed = space.pack(a)
    compute, pieces = space.residual(packed, torch.zeros(4, 78400), 12.0, Along(0, slopes, inputs))
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


def test_ranks_are_multiples() -> None:
    plan = Workspace(PLAN, padded=True).plan
    assert all(rank is None or rank % ALIGNED == 0 for rank in plan.ranks)
    assert [rank is None for rank in plan.ranks] == [rank is None for rank in PLAN.ranks]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rule", ["adam", "gd", "adagrad", "rmsprop"])
def test_steps_in_the_workspace_are_the_plans(rule: str, device: str) -> None:
    a, theta = drawn(3)
    ends = []
    for space in (Workspace(PLAN, padded=False), Workspace(PLAN, padded=True, device=device)):
        packed, target, step = space.pack(a), space.target(theta), optim.BY_NAME[rule](1e-3)
        state = step.init(packed)
        for count in range(1, 6):
            packed, state = step.step(packed, space.residual_grad(packed, target, 3.0), state, count)
        ends.append((space.unpack(packed), space.compose(packed)))
    for ours, twin in zip(*ends, strict=True):
        torch.testing.assert_close(ours, twin)
    assert not torch.allclose(ends[0][0], a)
