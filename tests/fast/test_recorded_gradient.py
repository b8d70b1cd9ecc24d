"""A recorded gradient is the gradient itself, whatever the model does."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

import small
from tdpfed.core.objective import Objective
from tdpfed.fast.graph_rewrites import InPlace, place_in
from tdpfed.fast.recorded_gradient import Replayed


class Odd(nn.Module):
    """A layer, something odd done to what it gives, and another layer."""

    def __init__(self, odd: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 3)
        self.w = nn.Parameter(torch.randn(4, 12, 12))
        self.unused = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.odd = odd

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(torch.tanh(self.odd(self, x)))
        return result


def cut(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.a(x)
    h[:, :8] = 0.0
    return h


def scaled(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.a(x)
    h[:, :8].mul_(3)
    return h


def shifted(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.a(x).clone()
    h[:, ::2] -= 1
    return h


def several(model: Odd, x: Tensor) -> Tensor:
    return torch.bmm(x.expand(4, *x.shape), model.w).sum(0)


def twice(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.a(model.a(x))
    return h


def counted(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.a(x)
    return h + (h > 0) * 1.0 + (h > 0) * 1


def stretched(model: Odd, x: Tensor) -> Tensor:
    h: Tensor = model.scale * model.a(x) + model.a.weight.mean()
    return h


def composed(model: Odd, x: Tensor) -> Tensor:
    """The gradient of one weight is a product with the other itself."""
    return x @ (model.a.weight @ model.b.weight.mT) @ x.new_ones(3, 12)


@pytest.mark.parametrize("odd", [cut, scaled, shifted, several, twice, counted, stretched, composed])
def test_recorded_is_computed(odd: Callable[[Odd, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(5, objective.layout.size, dtype=torch.float64))
    x, y = torch.randn(5, 6, 12, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    gradient = vmap(grad_and_value(objective.value))
    expected, again = gradient(theta, x, y), Replayed(gradient)
    first = again(theta, x, y)
    second = again(theta, x, y)
    for one in (first, second):
        for ours, twin in zip(one, expected, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-12, atol=1e-12)
    assert first[0].data_ptr() != second[0].data_ptr()  # fresh memory: a caller may write there


@pytest.mark.parametrize("odd", [cut, scaled, shifted, several, twice, counted, stretched, composed])
@pytest.mark.parametrize("anchored", [True, False])
def test_a_recorded_step_is_the_gradient_and_the_step(odd: Callable[[Odd, Tensor], Tensor], anchored: bool) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(5, objective.layout.size, dtype=torch.float64))
    w = torch.randn_like(theta) if anchored else None
    x, y = torch.randn(5, 6, 12, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    g, loss = vmap(grad_and_value(objective.value))(theta, x, y)
    expected = (theta if w is None else theta + 0.4 * (w - theta)) - 0.1 * g
    again = Replayed(vmap(grad_and_value(objective.value)))
    for _ in range(2):
        moved, found = again.step(theta.clone(), x, y, w, 0.4, 0.1)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("odd", [cut, scaled, shifted, several, twice, counted, stretched, composed])
@pytest.mark.parametrize("clients", [1, 5])
def test_a_descent_is_its_steps(odd: Callable[[Odd, Tensor], Tensor], clients: int) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(clients, objective.layout.size, dtype=torch.float64))
    batches = [(torch.randn(clients, 6, 12, dtype=torch.float64), torch.randint(0, 3, (clients, 6))) for _ in range(4)]
    expected = theta
    for x, y in batches:
        g, loss = vmap(grad_and_value(objective.value))(expected, x, y)
        expected = expected - 0.1 * g
    for _ in range(2):
        moved, found = objective.gradient.descend(theta.clone(), batches.__getitem__, 4, 0.1)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("odd", [cut, scaled, shifted, several, twice, counted, stretched, composed])
def test_one_clients_steps_in_place_are_the_steps(odd: Callable[[Odd, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    gradient = grad_and_value(objective.value)
    x, y = torch.randn(3, 6, 12, dtype=torch.float64), torch.randint(0, 3, (3, 6))
    own = objective.initial() * (1 + 0.3 * torch.rand(objective.layout.size, dtype=torch.float64))
    expected, mover = own.clone(), Replayed(gradient).mover(own, x[0], y[0], 0.1)
    for t in range(3):
        g, loss = gradient(expected, x[t], y[t])
        expected = expected - 0.1 * g
        if t < 2:
            mover.move(x[t], y[t])
    found = mover.move_and_tell(x[2], y[2])
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("anchored", [True, False])
def test_clients_that_are_computed_singly_take_the_same_steps(anchored: bool) -> None:
    torch.manual_seed(0)
    objective = Objective.of(small.convnet().double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(3, objective.layout.size, dtype=torch.float64))
    assert objective.one_by_one(theta)
    x, y = torch.randn(4, 3, 5, *small.SHAPE, dtype=torch.float64), torch.randint(0, small.CLASSES, (4, 3, 5))
    w, expected = torch.randn_like(theta), theta
    for t in range(4):
        g, loss = vmap(grad_and_value(objective.value))(expected, x[0 if anchored else t], y[0 if anchored else t])
        expected = expected + (0.4 * (w - expected) if anchored else 0) - 0.1 * g
    own = theta.clone()
    if anchored:
        moved, found, _ = objective.gradient.steps(own, (x[0], y[0]), 0.1, w, 0.4, 4)
    else:
        moved, found = objective.gradient.descend(own, lambda t: (x[t], y[t]), 4, 0.1)
    assert moved.data_ptr() == own.data_ptr()
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


def test_in_a_descent_theta_is_looked_at_once_and_the_loss_told_once() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    step = objective.gradient._many.mover(theta, torch.randn(3, 2, *small.SHAPE), y, 0.1).step
    assert isinstance(step, InPlace)
    seen, called = (
        {node.target for node in graph.graph.nodes if node.op == "call_function"}
        for graph in (step.look, step.move_only)
    )
    assert {torch.split_with_sizes, place_in} <= seen
    assert not any("split" in str(target) or "gather" in str(target) for target in called)
    assert called.isdisjoint({torch.neg, place_in})
    assert len(step.move_only.graph.nodes) < len(step.move.graph.nodes)


@pytest.mark.parametrize(("model", "in_place"), [(small.mlp, True), (lambda: Odd(composed), False)])
def test_a_step_is_taken_in_the_memory_of_theta_where_it_may(model: Callable[[], nn.Module], in_place: bool) -> None:
    objective = Objective.of(model())
    shape = small.SHAPE if in_place else (12,)
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    moved, *_ = objective.gradient.steps(theta, (torch.randn(3, 2, *shape), y), 0.1, theta, 0.5, 1)
    assert (moved.data_ptr() == theta.data_ptr()) == in_place


def test_what_does_nothing_is_not_replayed() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    graph = objective.gradient._many._gradients.of(theta, torch.randn(3, 2, *small.SHAPE), y)
    assert isinstance(graph, fx.GraphModule)
    for node in graph.graph.nodes:
        assert node.target is not torch.ops.aten.ones_like.default
        if node.target in (Tensor.view, torch.ops.aten.expand.default):
            assert node.meta["val"].shape != node.args[0].meta["val"].shape


def test_threads_record_one_after_another() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(9, 1), torch.zeros(9, 2, dtype=torch.int64)
    x = torch.randn(9, 2, *small.SHAPE)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: objective.gradient(theta[:k], (x[:k], y[:k]))[0], [3, 4, 5, 6, 7, 8, 9, 3]))
    for one in found:
        assert torch.equal(one, found[-2][: len(one)])


def test_parts_are_written_where_they_belong() -> None:
    objective = Objective.of(small.mlp().double())
    theta = objective.initial().expand(4, -1)
    graph = Replayed(vmap(grad_and_value(objective.value)))
    x, y = torch.randn(4, 3, *small.SHAPE, dtype=torch.float64), torch.randint(0, small.CLASSES, (4, 3))
    expanded, contiguous = graph(theta, x, y), graph(theta.contiguous(), x, y)
    for ours, twin in zip(expanded, contiguous, strict=True):
        torch.testing.assert_close(ours, twin)
