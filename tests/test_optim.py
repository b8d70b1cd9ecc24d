"""The functional optimisers against ``torch.optim``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tdpfed import optim

LR = 0.07
PAIRS: dict[str, tuple[optim.Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "gd": (optim.gd(LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "nesterov": (optim.nesterov(LR, 0.8), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True)),
    "nesterov without momentum": (optim.nesterov(LR, 0.0), lambda p: torch.optim.SGD(p, lr=LR)),
    "adam": (optim.adam(LR), lambda p: torch.optim.Adam(p, lr=LR)),
    "adagrad": (optim.adagrad(LR), lambda p: torch.optim.Adagrad(p, lr=LR)),
    "rmsprop": (optim.rmsprop(LR), lambda p: torch.optim.RMSprop(p, lr=LR)),
}


def gradient(a: Tensor) -> Tensor:
    """Of a function whose curvature differs by coordinate, with a zero gradient in one."""
    scale = torch.arange(a.shape[-1], dtype=a.dtype)
    return scale * a + torch.sin(3 * a) * (scale > 0)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one client", "three clients"])
def test_ten_steps_equal_torch(name: str, lead: tuple[int, ...]) -> None:
    ours, theirs = PAIRS[name]
    start = torch.randn(*lead, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameter = nn.Parameter(start.clone())
    rule = theirs([parameter])
    a, state = start, ours.init(start)
    for step in range(1, 11):
        g = gradient(a)
        before, kept = a, (a.clone(), g.clone())
        a, state = ours.step(a, g, state, step)  # it may reuse the memory of the state, and of nothing else
        assert torch.equal(before, kept[0])
        assert torch.equal(g, kept[1])
        parameter.grad = gradient(parameter.detach())
        rule.step()
        torch.testing.assert_close(a, parameter.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a, start, atol=0.1)


def test_names() -> None:
    assert {name: rule(LR).step.__qualname__ for name, rule in optim.BY_NAME.items()} == {
        "gd": optim.gd(LR).step.__qualname__,
        "adam": optim.adam(LR).step.__qualname__,
        "adagrad": optim.adagrad(LR).step.__qualname__,
        "rmsprop": optim.rmsprop(LR).step.__qualname__,
    }
