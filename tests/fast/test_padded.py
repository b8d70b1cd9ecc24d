"""A padded workspace gives what the plan itself does."""

import pytest
import torch

from tdpfed.core import optim
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.padded import RANK_MULTIPLE, SMALLEST_CPU_RANK, Workspace, is_large_matrix, padded_plan, rounded_up

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


def test_on_a_cpu_only_ranks_are_padded() -> None:
    space = Workspace(PLAN, padded=True, device="cpu")
    assert all(rank is None or (rank % RANK_MULTIPLE == 0 and rank >= SMALLEST_CPU_RANK) for rank in space.plan.ranks)
    assert space.plan.dense == PLAN.dense
    a, theta = drawn(2)
    assert space.target(theta) is theta
    torch.testing.assert_close(space.compose(space.pack(a)), PLAN.compose(a))
    grad = space.unpack(space.residual_grad(space.pack(a), theta, 3.0))
    torch.testing.assert_close(grad, PLAN.residual_grad(a, theta, 3.0))


def test_ranks_are_multiples() -> None:
    plan = Workspace(PLAN, padded=True).plan
    assert all(rank is None or rank % RANK_MULTIPLE == 0 for rank in plan.ranks)
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


def test_padded_columns_stay_zero() -> None:
    """A column that is zero in all factors has gradient zero, on a GPU the values beside dense parameters too."""
    a, theta = drawn(2)
    for device in ("cpu", "cuda"):
        space = Workspace(PLAN, padded=True, device=device)
        ones = space.pack(torch.ones_like(a))
        gradient = space.residual_grad(space.pack(a), space.target(theta), 3.0)
        assert torch.equal(gradient * (1 - ones), torch.zeros_like(gradient))
        assert gradient.any()


@pytest.mark.parametrize(("size", "up"), [(1, 8), (8, 8), (9, 16), (64, 64)])
def test_sizes_are_rounded_up(size: int, up: int) -> None:
    assert rounded_up(size) == up


def test_large_matrices_keep_their_ranks_where_they_are_transposed() -> None:
    plan = FactorPlan.of({"large": (64, 64), "small": (63, 65), "kernel": (40, 40, 3, 3), "b": (5000,)}, 2.0)
    assert [is_large_matrix(shape) for shape in plan.dense.shapes] == [True, False, False, False]
    ranks = padded_plan(plan, "cpu, transposed").ranks
    assert ranks[0] == plan.ranks[0]
    assert ranks[1:] == padded_plan(plan, "cpu").ranks[1:]
