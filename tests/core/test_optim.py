"""The textbook rules against ``torch.optim``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tdpfed.core import optim

LR = 0.07


def nesterov(momentum: float) -> optim.Optimizer:
    """The step of a point, a gradient and a velocity as a rule; it may overwrite the latter two."""

    def step(a: Tensor, g: Tensor, state: optim.Moments, _: int) -> tuple[Tensor, optim.Moments]:
        moved, velocity = optim.nesterov(a, g.clone(), state[0].clone() if state else None, LR, momentum)
        return moved, (velocity,)

    return optim.Optimizer(lambda _: (), step)


PAIRS: dict[str, tuple[optim.Optimizer, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]] = {
    "gd": (optim.gd(LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "nesterov": (nesterov(0.8), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.8, nesterov=True)),
    "nesterov without momentum": (nesterov(0.0), lambda p: torch.optim.SGD(p, lr=LR)),
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
        given = (a, g, *state)
        kept = [tensor.clone() for tensor in given]
        a, state = ours.step(a, g, state, step)  # which changes none of its arguments
        assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))
        parameter.grad = gradient(parameter.detach())
        rule.step()
        torch.testing.assert_close(a, parameter.detach(), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a, start, atol=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.8])
def test_a_nesterov_step_goes_where_it_is_told_to(momentum: float) -> None:
    """Into ``out`` where that is given, also the point's own memory, and else never there."""
    generator = torch.Generator().manual_seed(0)
    theta, g, velocity = (torch.randn(3, 7, dtype=torch.float64, generator=generator) for _ in range(3))
    for before in (None, velocity):
        room, own, start = torch.empty_like(theta), theta.clone(), theta.clone()
        ends = [
            optim.nesterov(point, g.clone(), None if before is None else before.clone(), LR, momentum, out)
            for point, out in ((theta, None), (theta, room), (own, own))
        ]
        assert torch.equal(theta, start)
        assert ends[1][0] is room
        assert ends[2][0] is own
        speed = g if before is None else g + momentum * before
        for moved, found in ends:
            torch.testing.assert_close(found, speed, rtol=1e-14, atol=1e-14)
            torch.testing.assert_close(moved, theta - LR * (g + momentum * speed), rtol=1e-14, atol=1e-14)
            assert moved.data_ptr() != found.data_ptr()


def test_clients_that_go_on_after_different_numbers_of_steps_equal_torch() -> None:
    start = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parameters = [nn.Parameter(row.clone()) for row in start]
    theirs = [torch.optim.Adam([parameter], lr=LR) for parameter in parameters]
    rule = optim.adam(LR, counting=True)
    a, state = start, rule.init(start)
    for chosen in ([0], [0, 2], [0, 2], [0, 1, 2], [1]):
        part, moved = rule.step(a[chosen], gradient(a[chosen]), tuple(value[chosen] for value in state), 99)
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


def test_towards() -> None:
    a, b = torch.tensor([0.0, 2.0]), torch.tensor([4.0, 1.0])
    assert optim.towards(a, b, 0.25).tolist() == [1.0, 1.75]
    assert optim.towards(a, b, 1.0).tolist() == b.tolist()
    assert optim.towards(a, b, 1e300).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("value", [0.0, 1.5, -3e38])
def test_numbers_of_float32_stay(value: float) -> None:
    assert optim.within_float32(value) == value


@pytest.mark.parametrize("value", [1e39, -1e300, torch.inf])
def test_numbers_beyond_float32_are_infinite(value: float) -> None:
    assert optim.within_float32(value) == (torch.inf if value > 0 else -torch.inf)


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.float64, 1e-13)])
def test_the_logistic_function_is_that_of_torch(dtype: torch.dtype, near: float) -> None:
    x = torch.linspace(-40, 40, 1001, dtype=dtype)
    torch.testing.assert_close(optim.logistic(x, -0.7), torch.sigmoid(-0.7 * x), rtol=near, atol=0)
    ends = torch.tensor([-torch.inf, -1e30, 0.0, 1e30, torch.inf], dtype=dtype)
    assert optim.logistic(ends, 2.0).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert bool(optim.logistic(torch.tensor([torch.nan]), 1.0).isnan())
    assert optim.logistic(torch.zeros(0, 3), 1.0).shape == (0, 3)


@pytest.mark.parametrize("length", [1, 7, 64, 1003, 79_510])
def test_the_logistic_function_of_a_value_does_not_depend_on_its_place(length: int) -> None:
    x = 5 * torch.randn(7, length, generator=torch.Generator().manual_seed(length))
    whole = optim.logistic(x, 2.0)
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            for rows in (slice(1), slice(1, 3), slice(2, 7)):
                assert torch.equal(optim.logistic(x[rows], 2.0), whole[rows])
            assert torch.equal(optim.logistic(x[4], 2.0), whole[4])
            assert torch.equal(optim.logistic(x[:, length // 2 :], 2.0), whole[:, length // 2 :])
    finally:
        torch.set_num_threads(threads)
