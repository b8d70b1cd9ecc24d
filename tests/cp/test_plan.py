"""Laws of factor plans: the paper's ranks, exactness at sufficient rank, the gradient, and sums that add up."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tdpfed import cp
from tdpfed.core.layout import Layout
from tdpfed.cp.plan import FactorPlan, factor_name, rank_for
from tdpfed.cp.tensorize import tensorize
from tdpfed.errors import TDPFedError
from tdpfed.models import build

TABLE_I: dict[str, dict[str, tuple[int, int]]] = {
    "dnn": {"fc1": (59, 44), "fc2": (6, 5)},
    "vgg8": {
        "conv1": (14, 11),
        "conv2": (120, 90),
        "conv3": (248, 186),
        "conv4": (504, 378),
        "conv5": (759, 569),
        "fc1": (85, 64),
        "fc2": (85, 64),
        "fc3": (6, 5),
    },
}


class Many(nn.Module):
    """One of each kind of weight that is no plain Linear or Conv2d."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.up = nn.ConvTranspose2d(4, 6, 3)
        self.line = nn.Conv1d(5, 4, 3)
        self.cube = nn.Conv3d(3, 4, (2, 3, 2))
        self.attention = nn.MultiheadAttention(8, 2)


class Odd(nn.Module):
    """Tied weights, a scalar, a vector and a bare matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.randn(7))
        self.mix = nn.Parameter(torch.randn(9, 8))
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embedding.weight


OWN: dict[str, type[nn.Module]] = {"many": Many, "odd": Odd}
BUILT = ["dnn", "lenet", "vgg8", "resnet8", "resnet18", "transformer"]


def make(name: str) -> nn.Module:
    return OWN[name]() if name in OWN else build(name, seed=0)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def enough(shape: tuple[int, ...]) -> int:
    return math.prod(shape) // max(shape)


def exact_plan(source: nn.Module) -> FactorPlan:
    layout = Layout.of(source)
    shapes = zip(layout.names, layout.shapes, strict=True)
    return FactorPlan.of(source, ranks={name: enough(shape) for name, shape in shapes if len(shape) > 1})


@pytest.mark.parametrize("model", TABLE_I)
@pytest.mark.parametrize(("column", "compression"), [(0, 1.5), (1, 2.0)])
def test_table_1(model: str, column: int, compression: float) -> None:
    rows = FactorPlan.of(build(model), compression).rows()
    ranks = {row.name.removesuffix(".weight"): row.rank for row in rows if row.rank is not None}
    assert ranks == {layer: both[column] for layer, both in TABLE_I[model].items()}


def test_the_rank_rule() -> None:
    assert rank_for((784, 100), 2) == 44
    assert rank_for((3, 3), 100) == 1
    assert rank_for((256, 256, 3, 3), 1) == round(256 * 256 * 9 / 518)


@pytest.mark.parametrize("name", [*BUILT, *OWN])
def test_at_sufficient_rank_compose_undoes_decompose(name: str) -> None:
    model = make(name)
    plan = exact_plan(model)
    theta = plan.dense.flatten({n: p.detach() for n, p in model.named_parameters()})
    again = plan.compose(plan.decompose(theta))
    assert again.shape == theta.shape
    assert (again - theta).norm() < 1e-5 * theta.norm()


@pytest.mark.parametrize("name", ["many", "odd", "transformer"])
def test_sufficient_rank_with_leading_dimensions(name: str) -> None:
    plan = exact_plan(make(name))
    theta = randn(2, 1, plan.dense.size)
    torch.testing.assert_close(plan.compose(plan.decompose(theta)), theta, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*BUILT, *OWN])
def test_residual_grad_equals_autograd_through_compose(name: str) -> None:
    plan = FactorPlan.of(make(name), 3.0 if name == "resnet18" else 1.5)
    batch = () if name in ("vgg8", "resnet18") else (2, 3)
    a = 0.3 * randn(*batch, plan.factors.size)
    theta = randn(*batch, plan.dense.size, seed=1)
    before = a.clone(), theta.clone()
    leaf = a.clone().requires_grad_()
    loss = 0.5 * (theta - plan.compose(leaf)).square().sum()
    (expected,) = torch.autograd.grad(loss, leaf)
    grad = plan.residual_grad(a, theta)
    assert grad.shape == a.shape
    assert (grad - expected).norm() < 1e-10 * expected.norm()
    assert torch.equal(a, before[0])
    assert torch.equal(theta, before[1])


def test_residual_grad_can_itself_be_differentiated_and_vmapped() -> None:
    plan = FactorPlan.of({"w": (6, 5, 3), "b": (4,), "v": (9, 9)}, 1.2)
    a, theta = randn(3, plan.factors.size), randn(3, plan.dense.size, seed=1)
    grad = plan.residual_grad(a, theta)
    assert torch.equal(torch.func.vmap(plan.residual_grad)(a, theta), grad)
    leaf, direction = a.clone().requires_grad_(), randn(3, plan.factors.size, seed=2)
    (hvp,) = torch.autograd.grad(plan.residual_grad(leaf, theta), leaf, direction)
    step = 1e-6
    difference = plan.residual_grad(a + step * direction, theta) - plan.residual_grad(a - step * direction, theta)
    torch.testing.assert_close(hvp, difference / (2 * step), rtol=1e-6, atol=1e-6)


def test_residual_grad_takes_one_state_for_all_clients() -> None:
    plan = FactorPlan.of({"w": (6, 5, 3), "b": (4,)}, 1.2)
    a, theta = randn(plan.factors.size), randn(3, plan.dense.size, seed=1)
    shared = plan.residual_grad(a.expand(3, -1), theta)
    torch.testing.assert_close(shared, plan.residual_grad(a.repeat(3, 1), theta))
    with pytest.raises(TDPFedError, match="theta: shape"):
        plan.residual_grad(a, theta)


def test_no_clients() -> None:
    plan = FactorPlan.of(Odd())
    nobody = torch.zeros(0, plan.factors.size)
    assert plan.compose(nobody).shape == (0, plan.dense.size)
    assert plan.residual_grad(nobody, torch.zeros(0, plan.dense.size)).shape == nobody.shape


@pytest.mark.parametrize("name", ["dnn", "many", "odd", "transformer"])
def test_compose_is_each_parameters_own_composition(name: str) -> None:
    plan = FactorPlan.of(make(name), 2.0)
    a = randn(3, plan.factors.size)
    factors, dense = plan.factors.unflatten(a), plan.dense.unflatten(plan.compose(a))
    for row in plan.rows():
        if row.rank is None:
            assert torch.equal(dense[row.name], factors[row.name])
        else:
            mine = [factors[factor_name(row.name, n)] for n in range(1, len(row.shape) + 1)]
            torch.testing.assert_close(dense[row.name], cp.compose(mine), rtol=0, atol=0)


@pytest.mark.parametrize("name", [*BUILT, *OWN])
@pytest.mark.parametrize("compression", [1.0, 1.5, 2.0, 20.0])
def test_rows_and_totals_add_up(name: str, compression: float) -> None:
    plan = FactorPlan.of(make(name), compression)
    rows = plan.rows()
    assert [row.name for row in rows] == list(plan.dense.names)
    assert sum(row.dense for row in rows) == plan.dense.size
    assert sum(row.factored for row in rows) == plan.factors.size
    assert plan.compression_rate == plan.dense.size / plan.factors.size
    for row in rows:
        assert row.dense == math.prod(row.shape)
        assert row.rate == row.dense / row.factored
        if row.rank is None:
            assert row.factored == row.dense
            assert len(row.shape) < 2 or rank_for(row.shape, compression) * sum(row.shape) >= row.dense
        else:
            assert row.factored == row.rank * sum(row.shape) < row.dense
            assert len(row.shape) > 1


def test_what_is_factorized() -> None:
    ranks = {row.name: row.rank for row in FactorPlan.of(Many(), 1.5).rows()}
    matrices = {"embedding.weight", "up.weight", "line.weight", "cube.weight", "attention.in_proj_weight"}
    matrices |= {"attention.out_proj.weight"}
    assert {name for name, rank in ranks.items() if rank is not None} == matrices
    odd = {row.name: row.rank for row in FactorPlan.of(Odd(), 1.5).rows()}
    assert {name for name, rank in odd.items() if rank is not None} == {"embedding.weight", "mix"}
    assert {"temperature", "shift", "head.bias"} == {name for name, rank in odd.items() if rank is None}


def test_a_parameter_that_would_not_shrink_stays_dense() -> None:
    shapes = {"small": (2, 2), "thin": (1, 9), "big": (20, 20)}
    assert FactorPlan.of(shapes, 2.0).ranks == (None, None, 5)
    assert FactorPlan.of(shapes, 0.5).ranks == (None, None, None)  # the rate asks for more values, not fewer
    assert FactorPlan.of(shapes, ranks={"small": 1, "thin": 3}).ranks == (1, 3, 5)  # explicit ranks are kept


def test_patterns() -> None:
    shapes = {
        "conv1.weight": (16, 16, 3, 3),
        "conv1.bias": (16,),
        "conv2.weight": (16, 16, 3, 3),
        "fc.weight": (30, 30),
    }
    auto = FactorPlan.of(shapes).ranks
    assert auto[1] is None
    assert None not in (auto[0], auto[2], auto[3])
    assert FactorPlan.of(shapes, include=["conv*"]).ranks == (auto[0], None, auto[2], None)
    assert FactorPlan.of(shapes, exclude=["*2.*", "fc*"]).ranks == (auto[0], None, None, None)
    assert FactorPlan.of(shapes, include=["conv*"], exclude=["conv1*"]).ranks == (None, None, auto[2], None)
    assert FactorPlan.of(shapes, include=[]).ranks == (None,) * 4
    assert FactorPlan.of(shapes, ranks={"conv?.weight": 4}).ranks == (4, None, 4, auto[3])
    assert FactorPlan.of(shapes, ranks={"*.weight": 4, "fc*": 7}).ranks == (4, None, 4, 7)
    assert FactorPlan.of(shapes, ranks={"fc.weight": 2}, exclude=["fc*"]).ranks == (auto[0], None, auto[2], 2)


@pytest.mark.parametrize("name", ["dnn", "lenet", "vgg8", "resnet8"])
@pytest.mark.parametrize("compression", [1.5, 8.0])
def test_factors_are_named_as_in_the_tensorized_module(name: str, compression: float) -> None:
    model = make(name)
    plan = FactorPlan.of(model, compression)
    assert Layout.of(tensorize(model, compression, fit=False)) == plan.factors


def test_factor_names() -> None:
    assert factor_name("fc1.weight", 2) == "fc1.A2"
    assert factor_name("weight", 1) == "A1"
    assert factor_name("attention.in_proj_weight", 1) == "attention.in_proj_weight.A1"
    assert factor_name("mix", 3) == "mix.A3"


@pytest.mark.parametrize("shape", [(300, 200), (40, 30, 3, 3)])
def test_init_varies_as_theta_does(shape: tuple[int, ...]) -> None:
    plan = FactorPlan.of({"w": shape, "b": (5,)})
    theta = 0.1 * randn(plan.dense.size)
    state = torch.random.get_rng_state()
    a, again, other = (plan.init(theta, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(a, again)
    assert not torch.equal(a, other)
    assert a.dtype == theta.dtype
    dense = plan.compose(a)
    weight = dense[:-5]
    assert weight.std().item() == pytest.approx(theta[:-5].std().item(), rel=0.15)
    assert torch.equal(dense[-5:], theta[-5:])


@settings(max_examples=15)
@given(st.integers(0, 100), st.sampled_from([0.0, 0.1]), st.sampled_from([torch.float32, torch.float64]))
def test_refine_never_increases_the_residual(seed: int, damping: float, dtype: torch.dtype) -> None:
    plan = FactorPlan.of(Odd(), 2.0)
    a, theta = (
        randn(2, plan.factors.size, seed=seed, dtype=dtype),
        randn(2, plan.dense.size, seed=seed + 1, dtype=dtype),
    )
    errors = [(plan.compose(a) - theta).norm(dim=-1)]
    for _ in range(3):
        a = plan.refine(a, theta, damping=damping)
        errors.append((plan.compose(a) - theta).norm(dim=-1))
    assert all(bool((after <= before * (1 + 1e-6)).all()) for before, after in pairwise(errors))
    assert bool((errors[-1] < errors[0]).all())


def test_refine_moves_a_dense_parameter_as_a_damped_sweep_would() -> None:
    plan = FactorPlan.of({"w": (9, 9), "b": (4,)}, 2.0)
    a, theta = randn(2, plan.factors.size), randn(2, plan.dense.size, seed=1)
    old, target = a[:, -4:], theta[:, -4:]
    assert torch.equal(plan.refine(a, theta)[:, -4:], target)
    for sweeps in (1, 3):
        for _ in range(sweeps):  # argmin of 1/2 |x - target|^2 + damping/2 |x - old|^2, sweeps times
            old = (target + 0.5 * old) / 1.5
        torch.testing.assert_close(plan.refine(a, theta, sweeps=sweeps, damping=0.5)[:, -4:], old)
        old = a[:, -4:]


def test_modes_of_the_factor_layout() -> None:
    assert FactorPlan.of({"w": (9, 9, 2), "b": (4,), "v": (9, 9)}).modes == [0, 1, 2, 0, 0, 1]


def test_decompose_is_the_fit_of_each_parameter() -> None:
    plan = FactorPlan.of({"w": (8, 7, 3), "b": (4,)}, 2.0)
    theta = randn(plan.dense.size)
    a = plan.decompose(theta, sweeps=4, tol=0.0, seed=3)
    rank = plan.ranks[0]
    assert rank is not None
    expected = cp.decompose(theta[:168].reshape(8, 7, 3), rank, sweeps=4, tol=0.0, seed=3)
    assert torch.equal(a[:-4], torch.cat([factor.flatten() for factor in expected]))
    assert torch.equal(a[-4:], theta[-4:])


@pytest.mark.parametrize("compression", [0, -1.0, math.nan, math.inf, -math.inf])
def test_bad_rates_are_refused(compression: float) -> None:
    with pytest.raises(TDPFedError, match=f"^compression: {compression} given"):
        FactorPlan.of({"w": (4, 4)}, compression)


@pytest.mark.parametrize("rank", [0, -1, 2.0, True])
def test_bad_ranks_are_refused(rank: Any) -> None:
    with pytest.raises(TDPFedError, match=rf"^rank of 'w\*': {rank} given, .* at least 1$"):
        FactorPlan.of({"w": (4, 4)}, ranks={"w*": rank})


@pytest.mark.parametrize("field", ["include", "exclude", "ranks"])
def test_patterns_that_match_nothing_are_refused(field: str) -> None:
    patterns: Any = {"conv*": 2} if field == "ranks" else ["conv*"]
    with pytest.raises(TDPFedError, match=rf"^{field}: the pattern 'conv\*' matches no parameter, .*fc.weight, b"):
        FactorPlan.of({"fc.weight": (4, 4), "b": (3,)}, **{field: patterns})


def test_a_rank_for_a_vector_is_refused() -> None:
    with pytest.raises(TDPFedError, match=r"ranks: '\*' matches 'b', which has fewer than two dimensions"):
        FactorPlan.of({"fc.weight": (4, 4), "b": (3,)}, ranks={"*": 2})


def test_vectors_of_another_length_are_refused() -> None:
    plan = FactorPlan.of({"w": (9, 9)})
    for call in (
        plan.compose,
        lambda a: plan.residual_grad(a, torch.zeros(81)),
        lambda a: plan.refine(a, torch.zeros(81)),
    ):
        with pytest.raises(TDPFedError, match=f"the last dimension must be {plan.factors.size}"):
            call(torch.zeros(3))
    with pytest.raises(TDPFedError, match="the last dimension must be 81"):
        plan.decompose(torch.zeros(80))
