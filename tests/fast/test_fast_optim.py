"""Steps in existing memory: the textbook's steps, and rows that begin at cache lines."""

import pytest
import torch
from torch import Tensor

from tdpfed.core import optim as textbook
from tdpfed.core.optim import Moments
from tdpfed.fast import optim

LR = 0.07


def gradient(a: Tensor) -> Tensor:
    """Of a function whose curvature differs by coordinate, with a zero gradient in one."""
    scale = torch.arange(a.shape[-1], dtype=a.dtype)
    return scale * a + torch.sin(3 * a) * (scale > 0)


def start(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one client", "three clients"])
def test_adam_is_the_textbooks_and_changes_none_of_its_arguments(counting: bool, lead: tuple[int, ...]) -> None:
    rule, plain = optim.adam(LR, counting=counting), textbook.adam(LR, counting=counting)
    a, twin = start(*lead, 7), start(*lead, 7)
    state, expected = rule.init(a), plain.init(twin)
    for count in range(1, 11):
        g = gradient(a)
        given = (a, g, *state)
        kept = [tensor.clone() for tensor in given]
        a, state = rule.step(a, g, state, count)
        assert all(torch.equal(one, other) for one, other in zip(given, kept, strict=True))
        twin, expected = plain.step(twin, gradient(twin), expected, count)
        for ours, other in zip((a, *state), (twin, *expected), strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a, start(*lead, 7), atol=0.1)


@pytest.mark.parametrize("counting", [False, True])
def test_steps_in_place_are_the_steps(counting: bool) -> None:
    """The gradient in pieces, which need not cover everything: what lies between them stays."""
    rule = optim.adam(LR, counting=counting)
    a, twin = start(3, 9), start(3, 9)
    state, expected = rule.init(a), rule.init(twin)
    pieces = [(0, torch.empty(3, 4, dtype=a.dtype)), (6, torch.empty(3, 3, dtype=a.dtype))]
    step = rule.in_place(a, pieces, state)
    for count in range(1, 6):
        for begin, piece in pieces:
            piece.copy_(gradient(a)[:, begin : begin + piece.shape[1]])
        step(count)
        g = gradient(twin)
        g[:, 4:6] = 0
        twin, expected = rule.step(twin, g, expected, count)
    for ours, other in zip((a, *state), (twin, *expected), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    assert torch.equal(a[:, 4:6], start(3, 9)[:, 4:6])
    assert not torch.allclose(a, start(3, 9), atol=0.1)


def test_clients_that_go_on_after_different_numbers_of_steps_take_the_textbooks_steps() -> None:
    rule, plain = optim.adam(LR, counting=True), textbook.adam(LR, counting=True)
    a = start(3, 7)
    state: Moments = (0.1 * start(3, 7), start(3, 7).square(), torch.tensor([[4.0], [0.0], [9.0]]).double())
    moved, new = rule.step(a, gradient(a), state, 99)
    twin, expected = plain.step(a, gradient(a), state, 99)
    for ours, other in zip((moved, *new), (twin, *expected), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-12)
    assert new[2].flatten().tolist() == [5, 1, 10]


@pytest.mark.parametrize("pull", [0.0, 0.4, 1.0])
def test_a_step_after_the_gradient(pull: float) -> None:
    theta, g, anchor = start(3, 7), start(4, 7)[1:], start(5, 7)[2:]
    kept = theta.clone(), anchor.clone()
    expected = theta + pull * (anchor - theta) - LR * g
    without = theta - LR * g
    torch.testing.assert_close(optim.after_gradient(theta, g.clone(), anchor, pull, LR), expected)
    torch.testing.assert_close(optim.after_gradient(theta, g.clone(), None, pull, LR), without)
    assert torch.equal(theta, kept[0])
    assert torch.equal(anchor, kept[1])


@pytest.mark.parametrize("shape", [(7,), (3, 7), (3, 16), (2, 3, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_aligned_copy_is_one_whose_rows_begin_at_cache_lines(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    theta = torch.randn(shape).to(dtype)
    copy = optim.aligned_copy(theta)
    assert torch.equal(copy, theta)
    assert all(stride * copy.element_size() % optim.CACHE_LINE == 0 for stride in copy.stride()[:-1])
    assert copy.data_ptr() % optim.CACHE_LINE == 0
    room = optim.aligned_empty(theta)
    assert room.shape == theta.shape
    assert room.stride() == copy.stride()
    copy += 1
    assert not torch.equal(copy, theta)


def test_rows_are_aligned_where_they_are_their_own_and_begin_at_cache_lines() -> None:
    theta = torch.randn(3, 7)
    assert optim.is_aligned(optim.aligned_copy(theta))
    assert optim.is_aligned(torch.randn(3, 16))
    assert not optim.is_aligned(theta)
    assert not optim.is_aligned(torch.randn(16).expand(3, -1))  # all the same memory
    assert not optim.is_aligned(torch.randn(16, 3).mT)
