"""Gradients and steps of many clients are those of an objective, whatever the model does; theta stays as it was."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

import small
from local_work import unchanged
from odd_models import ODD, Odd
from tdpfed.core.inner import Inner
from tdpfed.core.objective import Objective
from tdpfed.fast.gradient import RecordedGradient


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("clients", [1, 5])
@pytest.mark.parametrize("anchored", [True, False])
def test_a_descent_is_its_steps(odd: Callable[[Odd, Tensor], Tensor], clients: int, anchored: bool) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(clients, objective.layout.size, dtype=torch.float64))
    batches = [(torch.randn(clients, 6, 12, dtype=torch.float64), torch.randint(0, 3, (clients, 6))) for _ in range(4)]
    w = torch.randn_like(theta) if anchored else None
    expected, gradient = theta, RecordedGradient(objective)
    for x, y in batches:
        g, loss = vmap(grad_and_value(objective.value))(expected, x, y)
        expected = (expected if w is None else expected + 0.4 * (w - expected)) - 0.1 * g
    for _ in range(2):
        with unchanged(theta):
            moved, found = gradient.descend(theta, batches.__getitem__, range(4), 0.1, w, 4.0)
        torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
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
    gradient = RecordedGradient(objective)
    with unchanged(theta, w):
        if anchored:
            moved, found, *_ = gradient.proximal(theta, (x[0], y[0]), Inner(w, 4.0, 0.1, 0.0), 4)
        else:
            moved, found = gradient.descend(theta, lambda t: (x[t], y[t]), range(4), 0.1)
    torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)


def test_threads_record_one_after_another() -> None:
    objective = Objective.of(small.mlp())
    theta, y = objective.initial().repeat(9, 1), torch.zeros(9, 2, dtype=torch.int64)
    gradient, x = RecordedGradient(objective), torch.randn(9, 2, *small.SHAPE)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda k: gradient(theta[:k], (x[:k], y[:k]))[0], [3, 4, 5, 6, 7, 8, 9, 3]))
    for one in found:
        assert torch.equal(one, found[-2][: len(one)])


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("steps", [1, 3])
def test_proximal_steps_are_the_steps(odd: Callable[[Odd, Tensor], Tensor], momentum: float, steps: int) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(5, objective.layout.size, dtype=torch.float64))
    x, y = torch.randn(5, 6, 12, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    w, expected, velocity = torch.randn_like(theta), theta, torch.zeros_like(theta)
    for _ in range(steps):
        g, loss = vmap(grad_and_value(objective.value))(expected, x, y)
        g = g + 4.0 * (expected - w)
        velocity = momentum * velocity + g
        expected = expected - 0.1 * (g + momentum * velocity)
    with unchanged(theta, w):
        moved, found, *_ = RecordedGradient(objective).proximal(theta, (x, y), Inner(w, 4.0, 0.1, momentum), steps)
    torch.testing.assert_close(moved, expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(found, loss, rtol=1e-11, atol=1e-11)
