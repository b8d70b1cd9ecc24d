"""Textbook optimizers as pure functions on flat vectors with any leading client dimensions.

``init(a)`` returns the initial state, ``step(a, gradient, state, count)`` the next point and state; ``count`` is 1 for
the first step. The rules agree with ``torch.optim`` (SGD with Nesterov momentum, Adam, Adagrad, RMSprop) at its
default settings.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Moments = tuple[Tensor, ...]
T = TypeVar("T", float, Tensor)

VECTOR_VALUES = 64
"""A multiple of the number of values that any processor computes at a time."""

VALUES_ON_ONE_THREAD = 1 << 15
"""PyTorch computes at most this many values on one thread."""


class Optimizer(NamedTuple):
    """An optimizer: its initial state, and one step."""

    init: Callable[[Tensor], Moments]
    step: Callable[[Tensor, Tensor, Moments, int], tuple[Tensor, Moments]]


def towards(a: Tensor, b: Tensor, share: float) -> Tensor:
    """Return ``a + share (b - a)``; a share beyond the range of float32 counts as infinite."""
    return torch.lerp(a, b, within_float32(share))


def within_float32(value: float) -> float:
    """Return a number that float32 tensors accept: one beyond their range becomes infinite."""
    return value if abs(value) < torch.finfo(torch.float32).max else math.copysign(math.inf, value)


def logistic(x: Tensor, scale: float) -> Tensor:
    """Return ``1 / (1 + exp(-scale x))``. Unlike torch.sigmoid's, a value's bits do not depend on its place.

    Processors compute several values at a time, by another algorithm than the few that are left at a tensor's end. So
    rows are filled up, and computed in pieces that no threads share.
    """
    length, factor = x.shape[-1], within_float32(-scale * math.log2(math.e))
    filled = x.new_empty(*x.shape[:-1], -(-length // VECTOR_VALUES) * VECTOR_VALUES)
    filled[..., length:] = 0
    torch.mul(x, factor, out=filled[..., :length])
    for piece in filled.view(-1).split(max(1, filled.numel()) if x.is_cuda else VALUES_ON_ONE_THREAD):
        piece.exp2_()  # a third of the time of exp
    return filled.add_(1).reciprocal_()[..., :length]


def gd(lr: float) -> Optimizer:
    """Plain gradient descent."""
    return Optimizer(lambda _: (), lambda a, g, state, _: (torch.add(a, g, alpha=-lr), state))


def nesterov(theta: T, g: T, velocity: T | None, lr: float, momentum: float, out: Tensor | None = None) -> tuple[T, T]:
    """Return the point and the velocity after one step of gradient descent with Nesterov momentum.

    The velocity is None before the first step, and the gradient after it. The tensors ``g`` and ``velocity`` may be
    overwritten; the point is written to ``out`` if given. Numbers of type float follow the same rule.
    """
    if isinstance(theta, float):
        velocity = g + momentum * (velocity or 0.0)
        return theta - lr * (g + momentum * velocity), velocity
    if velocity is None:
        return torch.add(theta, g, alpha=-lr * (1 + momentum), out=out), g
    torch.add(g, velocity, alpha=momentum, out=velocity)
    return torch.add(theta, g.add_(velocity, alpha=momentum), alpha=-lr, out=g if out is None else out), velocity


def adam(
    lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, *, counting: bool = False
) -> Optimizer:
    """Adam with bias correction.

    With ``counting`` the state has each client's number of steps, so that clients can continue after different numbers
    of rounds.
    """

    def init(a: Tensor) -> Moments:
        moments = tuple(torch.zeros_like(a, memory_format=torch.contiguous_format) for _ in range(2))
        return (*moments, a.new_zeros(*a.shape[:-1], 1)) if counting else moments

    def step(a: Tensor, g: Tensor, state: Moments, count: int) -> tuple[Tensor, Moments]:
        mean, square = torch.lerp(state[0], g, 1 - beta1), beta2 * state[1] + (1 - beta2) * g * g
        if not counting:
            first, second = 1 - beta1**count, 1 - beta2**count
            return a - lr / first * mean / ((square / second).sqrt() + eps), (mean, square)
        taken = state[2] + 1
        firsts, seconds = (-torch.expm1(taken * math.log(beta)) for beta in (beta1, beta2))
        return a - lr / firsts * mean / ((square / seconds).sqrt() + eps), (mean, square, taken)

    return Optimizer(init, step)


def adagrad(lr: float, eps: float = 1e-10) -> Optimizer:
    """AdaGrad: the step shrinks with the sum of squared gradients."""

    def step(a: Tensor, g: Tensor, state: Moments, _: int) -> tuple[Tensor, Moments]:
        total = torch.addcmul(state[0], g, g)
        return torch.addcdiv(a, g, total.sqrt() + eps, value=-lr), (total,)

    return Optimizer(lambda a: (torch.zeros_like(a),), step)


def rmsprop(lr: float, decay: float = 0.99, eps: float = 1e-8) -> Optimizer:
    """RMSProp: the step is scaled by a running mean of squared gradients."""

    def step(a: Tensor, g: Tensor, state: Moments, _: int) -> tuple[Tensor, Moments]:
        square = torch.addcmul(decay * state[0], g, g, value=1 - decay)
        return torch.addcdiv(a, g, square.sqrt() + eps, value=-lr), (square,)

    return Optimizer(lambda a: (torch.zeros_like(a),), step)


BY_NAME: dict[str, Callable[..., Optimizer]] = {"gd": gd, "adam": adam, "adagrad": adagrad, "rmsprop": rmsprop}
"""The optimizers of factors by their name in a configuration; the argument is the learning rate."""
