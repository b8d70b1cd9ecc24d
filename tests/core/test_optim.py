"""The functional optimisers against ``torch.optim``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tdpfed.core import optim

LR = 0.07
PAIRS: dict[str, tuple[optim.Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "gd": (optim.gd(LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "nesterov": (optim.nesterov(LR, 0.8), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True)),
    "nesterov without momentum": (optim.nesterov(LR, 0.0), lambda p: torch.optim.SGD(p, lr=LR)),
    "adam": (optim.adam(LR), lambda p: torch.optim.Adam(p, lr=LR)),
    "adam that counts": (optim.adam(LR, counting=True), lambda p: torch.optim.Adam(p, lr=LR)),
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


def kernels_of_a_gpu(a: Tensor, g: Tensor, state: optim.State, _: int) -> tuple[Tensor, optim.State]:
    return optim._counted_adam(a, g, state, LR, 0.9, 0.999, 1e-8)


@pytest.mark.parametrize("step", [optim.adam(LR, counting=True).step, kernels_of_a_gpu], ids=["step", "gpu"])
def test_clients_that_go_on_after_different_numbers_of_steps_equal_torch(step: Any) -> None:
    start = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = [nn.Parameter(row.clone()) for row in start]
    theirs = [torch.optim.Adam([parameter], lr=LR) for parameter in parameters]
    a, state = start, optim.adam(LR, counting=True).init(start)
    for chosen in ([0], [0, 2], [0, 2], [0, 1, 2], [1]):
        part, moved = step(a[chosen], gradient(a[chosen]), tuple(value[chosen] for value in state), 99)
        a, state = a.clone(), tuple(value.clone() for value in state)
        for whole, rows in zip((a, *state), (part, *moved), strict=True):
            whole[chosen] = rows
        for client in chosen:
            parameters[client].grad = gradient(parameters[client].detach())
            theirs[client].step()
    assert state[2].flatten().tolist() == [4, 2, 3]
    torch.testing.assert_close(a, torch.stack([p.detach() for p in parameters]), rtol=1e-12, atol=1e-12)


def test_names() -> None:
    assert {name: rule(LR).step.__qualname__ for name, rule in optim.BY_NAME.items()} == {
        "gd": optim.gd(LR).step.__qualname__,
        "adam": optim.adam(LR).step.__qualname__,
        "adagrad": optim.adagrad(LR).step.__qualname__,
        "rmsprop": optim.rmsprop(LR).step.__qualname__,
    }


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_proximal_steps_are_nesterovs_on_the_whole_objective(momentum: float, steps: int) -> None:
    """Half a squared norm, whose gradient is theta itself; a gradient of one's own goes the long way."""
    generator = torch.Generator().manual_seed(0)
    theta, w = (torch.randn(2, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = torch.zeros(2, 1), torch.zeros(2, 1)
    take, rule = optim.proximal(0.1, 3.0, momentum, steps), optim.nesterov(0.1, momentum)
    twin = theta.clone()
    state: optim.State = ()
    for count in range(1, steps + 1):
        last = twin.square().sum(-1) / 2
        twin, state = rule.step(twin, twin + 3.0 * (twin - w), state, count)
    theta, loss, _ = take(lambda a, _: (a.clone(), a.square().sum(-1) / 2), theta, batch, w)
    torch.testing.assert_close(loss, last)
    torch.testing.assert_close(theta, twin)


@pytest.mark.parametrize("shape", [(7,), (3, 7), (3, 16), (2, 3, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_own_copy_is_one_whose_rows_begin_at_cache_lines(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    theta = torch.randn(shape).to(dtype)
    copy = optim.own_copy(theta)
    assert torch.equal(copy, theta)
    assert all(stride * copy.element_size() % optim.CACHE_LINE == 0 for stride in copy.stride()[:-1])
    assert copy.data_ptr() % optim.CACHE_LINE == 0
    copy += 1
    assert not torch.equal(copy, theta)
