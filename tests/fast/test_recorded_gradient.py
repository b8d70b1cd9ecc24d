"""A recorded gradient is the gradient itself, whatever the model does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import grad_and_value, vmap

import small
from odd_models import ODD, Odd, composed
from tdpfed.core.objective import Objective
from tdpfed.fast.graph_rewrites import InPlace, place_in
from tdpfed.fast.recorded_gradient import Replayed


def many(objective: Objective) -> Replayed:
    """The gradient of many clients."""
    return Replayed(vmap(grad_and_value(objective.value)))


@pytest.mark.parametrize("odd", ODD)
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


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("anchored", [True, False])
def test_a_recorded_step_is_the_gradient_and_the_step(odd: Callable[[Odd, Tensor], Tensor], anchored: bool) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(5, objective.layout.size, dtype=torch.float64))
    w = torch.randn_like(theta) if anchored else None
    x, y = torch.randn(5, 6, 12, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    g, loss = vmap(grad_and_value(objective.value))(theta, x, y)
    expected = (theta if w is None else theta + 0.4 * (w - theta)) - 0.1 * g
    again = many(objective)
    for _ in range(2):
        moved, found = again.step_(theta.clone(), x, y, w, 0.4, 0.1)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("anchored", [True, False])
def test_one_clients_steps_in_place_are_the_steps(odd: Callable[[Odd, Tensor], Tensor], anchored: bool) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    gradient = grad_and_value(objective.value)
    x, y = torch.randn(3, 6, 12, dtype=torch.float64), torch.randint(0, 3, (3, 6))
    own = objective.initial() * (1 + 0.3 * torch.rand(objective.layout.size, dtype=torch.float64))
    w = torch.randn_like(own) if anchored else None
    expected, mover = own.clone(), Replayed(gradient).mover(own, x[0], y[0], w, 0.4, 0.1)
    for t in range(3):
        g, loss = gradient(expected, x[t], y[t])
        expected = (expected if w is None else expected + 0.4 * (w - expected)) - 0.1 * g
        if t < 2:
            mover.move(x[t], y[t])
    found = mover.move_and_report(x[2], y[2])
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


def test_in_a_descent_theta_is_looked_at_once_and_the_loss_told_once() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    step = many(objective).mover(theta, torch.randn(3, 2, *small.SHAPE), y, None, 0.0, 0.1).step
    assert isinstance(step, InPlace)
    seen, called = (
        {node.target for node in graph.graph.nodes if node.op == "call_function"}
        for graph in (step.make_views, step.move_only)
    )
    assert {torch.split_with_sizes, place_in} <= seen
    assert not any("split" in str(target) or "gather" in str(target) for target in called)
    assert called.isdisjoint({torch.neg, place_in})
    assert len(step.move_only.graph.nodes) < len(step.move.graph.nodes)


def test_what_does_nothing_is_not_replayed() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    graph = many(objective)._gradients.of(theta, torch.randn(3, 2, *small.SHAPE), y)
    assert isinstance(graph, fx.GraphModule)
    for node in graph.graph.nodes:
        assert node.target is not torch.ops.aten.ones_like.default
        if node.target in (Tensor.view, torch.ops.aten.expand.default):
            assert node.meta["val"].shape != node.args[0].meta["val"].shape


def test_parts_are_written_where_they_belong() -> None:
    objective = Objective.of(small.mlp().double())
    theta = objective.initial().expand(4, -1)
    graph = many(objective)
    x, y = torch.randn(4, 3, *small.SHAPE, dtype=torch.float64), torch.randint(0, small.CLASSES, (4, 3))
    expanded, contiguous = graph(theta, x, y), graph(theta.contiguous(), x, y)
    for ours, twin in zip(expanded, contiguous, strict=True):
        torch.testing.assert_close(ours, twin)


@pytest.mark.parametrize(("model", "in_place"), [(small.mlp, True), (lambda: Odd(composed), False)])
def test_a_step_is_taken_in_the_memory_of_theta_where_it_may(model: Callable[[], nn.Module], in_place: bool) -> None:
    objective = Objective.of(model())
    shape = small.SHAPE if in_place else (12,)
    theta, y = objective.initial().repeat(3, 1), torch.zeros(3, 2, dtype=torch.int64)
    anchor, x = theta.clone(), torch.randn(3, 2, *shape)
    moved, _ = many(objective).steps_(theta, x, y, anchor, 0.5, 0.1, 1)
    assert (moved.data_ptr() == theta.data_ptr()) == in_place
    assert torch.equal(theta, anchor) != in_place
