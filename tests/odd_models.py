"""Models that do something odd, which a recorded gradient must get right."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


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


ODD: list[Callable[[Odd, Tensor], Tensor]] = [cut, scaled, shifted, several, twice, counted, stretched, composed]
