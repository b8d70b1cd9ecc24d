"""A recorded gradient is the gradient itself, whatever the model does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

import small
from tdpfed.objective import Objective
from tdpfed.recording import replayed


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


@pytest.mark.parametrize("odd", [cut, scaled, shifted, several, twice, counted, stretched])
def test_recorded_is_computed(odd: Callable[[Odd, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    objective = Objective.of(Odd(odd).double())
    theta = objective.initial() * (1 + 0.3 * torch.rand(5, objective.layout.size, dtype=torch.float64))
    x, y = torch.randn(5, 6, 12, dtype=torch.float64), torch.randint(0, 3, (5, 6))
    gradient = vmap(grad_and_value(objective.value))
    expected, again = gradient(theta, x, y), replayed(gradient)
    first = again(theta, x, y)
    second = again(theta, x, y)
    for one in (first, second):
        for ours, twin in zip(one, expected, strict=True):
            torch.testing.assert_close(ours, twin, rtol=1e-12, atol=1e-12)
    assert first[0].data_ptr() != second[0].data_ptr()  # fresh memory: a caller may write there


def test_parts_are_written_where_they_belong() -> None:
    objective = Objective.of(small.mlp().double())
    theta = objective.initial().expand(4, -1)
    graph = replayed(vmap(grad_and_value(objective.value)))
    x, y = torch.randn(4, 3, *small.SHAPE, dtype=torch.float64), torch.randint(0, small.CLASSES, (4, 3))
    expanded, contiguous = graph(theta, x, y), graph(theta.contiguous(), x, y)
    for ours, twin in zip(expanded, contiguous, strict=True):
        torch.testing.assert_close(ours, twin)
