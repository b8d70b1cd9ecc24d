"""The optimisers of the inner problems, as pure functions on flat vectors with any leading client dimensions.

``init(a)`` makes the state, ``step(a, gradient, state, count)`` returns the next point and state, ``count`` being 1 for
the first step. A step never changes ``a`` or the gradient, but it may reuse the memory of the state it is given. The
rules agree with ``torch.optim`` (SGD with Nesterov momentum, Adam, Adagrad, RMSprop) at its default settings.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, ...]


class Optimizer(NamedTuple):
    """An update rule: how its state begins, and one step."""

    init: Callable[[Tensor], State]
    step: Callable[[Tensor, Tensor, State, int], tuple[Tensor, State]]


def gd(lr: float) -> Optimizer:
    """Plain gradient descent."""
    return Optimizer(lambda _: (), lambda a, g, state, _: (torch.add(a, g, alpha=-lr), state))


def nesterov(lr: float, momentum: float) -> Optimizer:
    """Gradient descent with Nesterov momentum; plain gradient descent at momentum 0."""
    if momentum == 0:
        return gd(lr)

    def step(a: Tensor, g: Tensor, state: State, _: int) -> tuple[Tensor, State]:
        if not state:  # no velocity yet: it becomes g
            return torch.add(a, g, alpha=-lr * (1 + momentum)), (g,)
        velocity = torch.add(g, state[0], alpha=momentum)
        return torch.add(a, torch.add(g, velocity, alpha=momentum), alpha=-lr), (velocity,)

    return Optimizer(lambda _: (), step)


def adam(lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam with bias correction."""

    def step(a: Tensor, g: Tensor, state: State, count: int) -> tuple[Tensor, State]:
        mean, square = state[0].lerp_(g, 1 - beta1), state[1].mul_(beta2).addcmul_(g, g, value=1 - beta2)
        # Both bias corrections folded into two scalars, one pass over the vector less each.
        root = (1 - beta2**count) ** 0.5
        step_size = lr * root / (1 - beta1**count)
        return torch.addcdiv(a, mean, square.sqrt().add_(eps * root), value=-step_size), (mean, square)

    return Optimizer(lambda a: (torch.zeros_like(a), torch.zeros_like(a)), step)


def adagrad(lr: float, eps: float = 1e-10) -> Optimizer:
    """AdaGrad: the step shrinks with the sum of squared gradients."""

    def step(a: Tensor, g: Tensor, state: State, _: int) -> tuple[Tensor, State]:
        total = state[0].addcmul_(g, g)
        return torch.addcdiv(a, g, total.sqrt() + eps, value=-lr), (total,)

    return Optimizer(lambda a: (torch.zeros_like(a),), step)


def rmsprop(lr: float, decay: float = 0.99, eps: float = 1e-8) -> Optimizer:
    """RMSProp: the step is scaled by a running mean of squared gradients."""

    def step(a: Tensor, g: Tensor, state: State, _: int) -> tuple[Tensor, State]:
        square = state[0].mul_(decay).addcmul_(g, g, value=1 - decay)
        return torch.addcdiv(a, g, square.sqrt() + eps, value=-lr), (square,)

    return Optimizer(lambda a: (torch.zeros_like(a),), step)


BY_NAME: dict[str, Callable[[float], Optimizer]] = {"gd": gd, "adam": adam, "adagrad": adagrad, "rmsprop": rmsprop}
