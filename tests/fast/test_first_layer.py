"""Several steps on one minibatch that skip the first layer's weights: the same steps, wherever they may be skipped."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

import small
from local_work import unchanged
from tdpfed import FedAvg, Federation, PFedMe, TDPFed
from tdpfed.core.inner import Inner
from tdpfed.core.local import FactorRule
from tdpfed.core.objective import Objective
from tdpfed.cp.plan import FactorPlan
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.fast import factors, transposed
from tdpfed.fast.first_layer import LowRankStep
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.fast.padded import Workspace

CLIENTS, BATCH, WIDE = 4, 3, 30


class Model(nn.Module):
    """Two layers, the first on many inputs, and what stands between the data and the result."""

    def __init__(self, way: Callable[["Model", Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDE, 5, bias=bias), nn.Linear(5, 3)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def plain(model: Model, x: Tensor) -> Tensor:
    result: Tensor = model.b(torch.tanh(model.a(x)))
    return result


def scaled_data(model: Model, x: Tensor) -> Tensor:
    return plain(model, 2 * x)


def used_twice(model: Model, x: Tensor) -> Tensor:
    return plain(model, x) + model.a.weight.mean()


def called_twice(model: Model, x: Tensor) -> Tensor:
    result: Tensor = model.b(torch.tanh(model.a(x)) * model.a(x).sigmoid())
    return result


def first_is_last(model: Model, x: Tensor) -> Tensor:
    result: Tensor = model.a(x)
    return result


WAYS = {
    "plain": (plain, True), "scaled data": (scaled_data, False), "weights used twice": (used_twice, False),
    "layer called twice": (called_twice, False), "first is last": (first_is_last, True),
}  # fmt: skip


def problem(model: nn.Module) -> tuple[Objective, Tensor, Tensor, Tensor, Tensor]:
    objective = Objective.of(model.double())
    generator = torch.Generator().manual_seed(1)
    theta, w = (
        objective.initial() + 0.3 * torch.randn(CLIENTS, objective.layout.size, generator=generator).double()
        for _ in range(2)
    )
    x = torch.randn(CLIENTS, BATCH, WIDE, generator=generator).double()
    return objective, theta, w, x, torch.randint(0, 3, (CLIENTS, BATCH), generator=generator)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("pull", [0.0, 0.3, 1.2])
@pytest.mark.parametrize("bias", [True, False])
def test_several_steps_are_the_steps(name: str, pull: float, bias: bool) -> None:
    torch.manual_seed(0)
    way, _ = WAYS[name]
    objective, theta, w, x, y = problem(Model(way, bias))
    gradient = vmap(grad_and_value(objective.value))
    expected = theta.clone()
    for _ in range(4):
        g, last = gradient(expected, x, y)
        expected = expected + pull * (w - expected) - 0.1 * g
    with unchanged(theta, w):
        found, loss, *_ = RecordedGradient(objective).proximal(theta, (x, y), Inner(w, pull / 0.1, 0.1, 0.0), 4)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(loss, last, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("pull", "known"), [(1.0, True), (1.0 + 1e-4, True), (0.999, False), (0.3, False)])
def test_where_nothing_is_left_of_the_start_the_weights_are_the_anchors_and_something_along_the_data(
    pull: float, known: bool
) -> None:
    objective, theta, w, x, y = problem(Model(plain))
    found, _, along, _ = RecordedGradient(objective).proximal(theta, (x, y), Inner(w, pull / 0.1, 0.1, 0.0), 4)
    assert isinstance(along, LowRankStep) == known
    if isinstance(along, LowRankStep):
        assert along.anchor() is w
        rows = slice(along.begin, along.begin + 5 * WIDE)
        moved = (along.slopes.mT @ along.inputs).flatten(1)
        torch.testing.assert_close(found[:, rows], w[:, rows] + moved, rtol=1e-11, atol=1e-12)
        assert moved.abs().max() > 1e-3


def test_with_momentum_a_start_is_forgotten_after_many_steps() -> None:
    objective, theta, w, x, y = problem(Model(plain))
    for count, known in ((3, False), (80, True)):
        found, _, along, _ = RecordedGradient(objective).proximal(theta, (x, y), Inner(w, 8.0, 0.1, 0.5), count)
        assert isinstance(along, LowRankStep) == known
    assert isinstance(along, LowRankStep)
    assert along.anchor() is w
    rows = slice(along.begin, along.begin + 5 * WIDE)
    moved = (along.slopes.mT @ along.inputs).flatten(1)
    torch.testing.assert_close(found[:, rows], w[:, rows] + moved, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("momentum", [0.5, 0.9])
@pytest.mark.parametrize("bias", [True, False])
def test_several_steps_with_momentum_are_the_steps(name: str, momentum: float, bias: bool) -> None:
    torch.manual_seed(0)
    way, skipped = WAYS[name]
    objective, theta, w, x, y = problem(Model(way, bias))
    gradient = vmap(grad_and_value(objective.value))
    expected, velocity = theta, torch.zeros_like(theta)
    for _ in range(5):
        g, last = gradient(expected, x, y)
        g = g + 2.0 * (expected - w)
        velocity = momentum * velocity + g
        expected = expected - 0.1 * (g + momentum * velocity)
    recorded = RecordedGradient(objective)
    assert recorded.skips_first_layer(theta, (x, y)) == skipped
    with unchanged(theta, w):
        found, loss, *_ = recorded.proximal(theta, (x, y), Inner(w, 2.0, 0.1, momentum), 5)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(loss, last, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", WAYS)
def test_the_first_layer_is_skipped_only_where_its_inputs_are_the_data_and_nothing_else_sees_it(name: str) -> None:
    way, skipped = WAYS[name]
    objective, theta, _, x, y = problem(Model(way))
    assert RecordedGradient(objective).skips_first_layer(theta, (x, y)) == skipped


def test_few_inputs_and_convolutions_are_not_skipped() -> None:
    objective, theta, _, x, y = problem(Model(plain))
    many = torch.cat([x, x], 1), torch.cat([y, y], 1)
    assert not RecordedGradient(objective).skips_first_layer(theta, many)
    conv = Objective.of(small.convnet())
    images = torch.randn(3, 2, *small.SHAPE), torch.zeros(3, 2, dtype=torch.int64)
    assert not RecordedGradient(conv).skips_first_layer(conv.initial().repeat(3, 1), images)


def wide_run(algorithm: FedAvg | PFedMe | TDPFed, dtype: torch.dtype = torch.float32, **options: object) -> Simulation:
    generator = torch.Generator().manual_seed(2)
    owner = torch.arange(20).repeat_interleave(12)
    x = torch.randn(240, 800, generator=generator)
    y = (x[:, :3].argmax(1) + owner) % 3
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(800, 40), act=nn.ReLU(), fc2=nn.Linear(40, 3)))
    federation = Federation.from_tensors(x, y, owner, dtype=dtype)
    run = Simulation(model, federation, algorithm, **options)  # type: ignore[arg-type]
    for _ in range(2):
        run.step()
    return run


COMMON: dict[str, Any] = {"tau": 3, "s": 3, "batch_size": 4, "eta": 1e-3, "eta_p": 0.02}


@pytest.mark.parametrize(
    "algorithm",
    [
        FedAvg(tau=3, batch_size=4), PFedMe(**COMMON), PFedMe(**COMMON, momentum=0.5), TDPFed(**COMMON),
        TDPFed(**COMMON, momentum=0.0),
        TDPFed(**COMMON, optimizer_state="local-round"), TDPFed(**COMMON, optimizer_state="run"),
        TDPFed(**COMMON, momentum=0.0, lam=50.0), TDPFed(**COMMON, momentum_state="round", proximal="implicit"),
        TDPFed(**COMMON | {"s": 6}, momentum_state="round", nu=0.5), TDPFed(**COMMON | {"s": 6}, momentum=0.0, nu=0.5),
    ],
    ids=[
        "fedavg", "pfedme", "pfedme momentum", "tdpfed", "tdpfed no momentum", "tdpfed local-round",
        "tdpfed run", "tdpfed start forgotten", "tdpfed velocity kept", "tdpfed nu", "tdpfed nu, no momentum",
    ],
)  # fmt: skip
@pytest.mark.parametrize("every", small.EVERY)
def test_runs_agree_with_the_loop_and_no_chunk_or_thread_changes_a_bit(
    algorithm: FedAvg | PFedMe | TDPFed, every: bool
) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = wide_run(algorithm)
        assert whole.objective.layout.size * 20 > 500_000
        exact = torch.float64  # and yet Adam divides by small gradients
        small.assert_close(wide_run(algorithm, exact), wide_run(algorithm, exact, runner="loop"), 1e-6)
        for chunk in (1, 3, 7, 20) if every else (7,):
            assert small.equal(whole, wide_run(algorithm, chunk=chunk)), chunk
        torch.set_num_threads(1)
        assert small.equal(whole, wide_run(algorithm))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("lam", "used"), [(50.0, True), (49.0, False)])
def test_a_start_that_is_forgotten_makes_factor_steps_cheaper(
    lam: float, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where eta_p lam is 1 theta is the anchor and something along the data."""
    found = small.watched(monkeypatch, transposed, "_stacked")
    wide_run(TDPFed(**COMMON, momentum=0.0, lam=lam))
    assert bool(found) == used
    assert all(stack is not None for stack in found)


@pytest.mark.parametrize("algorithm", [TDPFed(**COMMON), TDPFed(**COMMON, momentum=0.0, lam=50.0)])
def test_blocks_of_clients_change_no_bit(algorithm: TDPFed, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wide_run(algorithm)
    monkeypatch.setattr(transposed, "VALUES_PER_BLOCK", 1)  # blocks of four clients or a few more
    for chunk in (None, 9, 14):
        assert small.equal(whole, wide_run(algorithm, chunk=chunk)), chunk


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_transposed_factors_move_as_plain_ones(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = TDPFed(**COMMON, momentum=momentum)
    packed = wide_run(algorithm, torch.float64)
    made: list[Workspace] = []

    def plainly(plan: FactorPlan, _: Tensor, rule: FactorRule) -> Workspace:
        assert rule.optimizer == "adam"
        made.append(Workspace(plan, padded=False))
        return made[-1]

    monkeypatch.setattr(factors, "_workspace", plainly)
    for runner in ("batched", "loop"):
        small.assert_close(packed, wide_run(algorithm, torch.float64, runner=runner), 1e-6)
    assert made


@pytest.mark.parametrize("options", [{"momentum_state": "round"}, {"nu": 0.1}, {"nu": 0.1, "momentum_state": "round"}])
def test_steps_with_options_beyond_all_numbers_are_a_run_that_diverges(options: dict[str, Any]) -> None:
    for runner in ("batched", "loop"):
        with pytest.raises(TDPFedError, match="the run diverges; lower the learning rates"):
            wide_run(TDPFed(tau=2, s=60, batch_size=4, eta=1e38, eta_p=10.0, **options), runner=runner)


@pytest.mark.parametrize("kind", [PFedMe, TDPFed])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("eta_p", [10.0, 1e38])
def test_steps_beyond_all_numbers_are_a_run_that_diverges(
    kind: type[PFedMe] | type[TDPFed], momentum: float, eta_p: float
) -> None:
    algorithm = kind(tau=2, s=60, batch_size=4, eta=1e38, eta_p=eta_p, momentum=momentum)
    for runner in ("batched", "loop"):
        with pytest.raises(TDPFedError, match="the run diverges; lower the learning rates"):
            wide_run(algorithm, runner=runner)
