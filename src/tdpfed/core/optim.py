"""The optimisers of the inner problems, as pure functions on flat vectors with any leading client dimensions.

``init(a)`` makes the state, ``step(a, gradient, state, count)`` returns the next point and state, ``count`` being 1 for
the first step. A step never changes ``a`` or the gradient, but it may reuse the memory of the state it is given. The
rules agree with ``torch.optim`` (SGD with Nesterov momentum, Adam, Adagrad, RMSprop) at its default settings.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tdpfed.core.objective import Batch, Grad, Gradient
from tdpfed.fast.first_layer import Steps, float32
from tdpfed.fast.recorded_gradient import after_gradient

State = tuple[Tensor, ...]
Pieces = Sequence[tuple[int, Tensor]]
InPlace = Callable[[Tensor, Pieces, State], Callable[[int], None]]

CACHE_LINE = 64
"""Bytes; where PyTorch's memory on a CPU begins is a multiple of it."""


class Optimizer(NamedTuple):
    """An update rule: how its state begins, and one step.

    Some take steps in place on a CPU: ``in_place(a, gradient, state)`` returns ``step(count)``, which moves ``a``
    ``(K, n)`` and the state along what then lies in ``gradient``, pieces ``(K, m)`` with where in ``a`` they begin.
    """

    init: Callable[[Tensor], State]
    step: Callable[[Tensor, Tensor, State, int], tuple[Tensor, State]]
    in_place: InPlace | None = None


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


def own_copy(theta: Tensor) -> Tensor:
    """Return a copy to take steps in: on a CPU its rows begin at whole cache lines, where products write fastest."""
    if theta.ndim < 2 or theta.device.type != "cpu":
        return theta.clone()
    size, line = theta.shape[-1], CACHE_LINE // theta.element_size()
    return theta.new_empty(*theta.shape[:-1], -(-size // line) * line)[..., :size].copy_(theta)


def descend(grad: Grad, theta: Tensor, batches: Callable[[int], Batch], steps: int, lr: float) -> tuple[Tensor, Tensor]:
    """Return what ``steps`` steps ``theta - lr grad(theta)`` come to, each on its minibatch, and the last loss.

    All minibatches are of one shape. Theta is given up: the result may lie in its memory.
    """
    if isinstance(grad, Gradient):
        return grad.descend(theta, batches, steps, lr)
    for t in range(steps):
        g, loss = grad(theta, batches(t))
        theta = after_gradient(theta, g, None, 0.0, lr)
    return theta, loss


def proximal(lr: float, lam: float, momentum: float, steps: int) -> Callable[[Grad, Tensor, Batch, Tensor], Steps]:
    """Return ``steps`` steps of :func:`nesterov` on ``f + lam/2 ||theta - w||^2``, with one minibatch.

    ``take(grad, theta, batch, w)`` gives the new theta, the loss before the last step, and where the weights of theta's
    first layer are beside those of ``w``, if that is known to be of low rank. Theta is given up.
    """
    pull = float32(lr * lam)

    def take(grad: Grad, theta: Tensor, batch: Batch, w: Tensor) -> Steps:
        if isinstance(grad, Gradient):
            if momentum == 0:
                return grad.steps(theta, batch, lr, w, pull, steps)
            known = grad.steps_with_momentum(theta, batch, lr, w, lam, momentum, steps)
            if known is not None:
                return known
        velocity: Tensor | None = None
        for _ in range(steps):
            g, loss = grad(theta, batch)
            if momentum == 0:  # theta - lr (g + lam (theta - w))
                theta = after_gradient(theta, g, w, pull, lr)
                continue
            room = theta - w
            g.add_(room, alpha=lam)
            if velocity is None:  # it becomes g
                theta, velocity = torch.add(theta, g, alpha=-lr * (1 + momentum), out=room), g
                continue
            torch.add(g, velocity, alpha=momentum, out=velocity)
            theta = torch.add(theta, g.add_(velocity, alpha=momentum), alpha=-lr, out=g)
        return theta, loss, None

    return take


def adam(
    lr: float, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, *, counting: bool = False
) -> Optimizer:
    """Adam with bias correction; one that is ``counting`` has each client's steps in its state, and so may go on."""

    def step(a: Tensor, g: Tensor, state: State, count: int) -> tuple[Tensor, State]:
        if a.is_cuda and counting:
            return _counted_adam(a, g, state, lr, beta1, beta2, eps)
        if a.is_cuda:
            # Both bias corrections folded into two scalars, one pass over the vector less each.
            root = (1 - beta2**count) ** 0.5
            return _adam_kernel(a, g, state, beta1, beta2, lr * root / (1 - beta1**count), eps * root)
        moved = a.clone(memory_format=torch.contiguous_format)
        flat = [tensor.view(-1, tensor.shape[-1]) for tensor in (moved, g.contiguous(), *state)]
        in_place(flat[0], [(0, flat[1])], tuple(flat[2:]))(count)
        return moved, state

    def in_place(a: Tensor, gradient: Pieces, state: State) -> Callable[[int], None]:
        # One pass instead of six; client by client, so that the bits of one do not depend on its company.
        values, means, squares = (
            [row for begin, piece in gradient for row in tensor.narrow(1, begin, piece.shape[1]).unbind()]
            for tensor in (a, *state[:2])
        )
        grads = [row for _, piece in gradient for row in piece.unbind()]
        taken = [row.view(()) for row in state[2]] * len(gradient) if counting else []

        def step(count: int) -> None:
            if counting:
                state[2].add_(1)
            torch._fused_adam_(
                values, grads, means, squares, [], taken or [torch.tensor(float(count))] * len(values), lr=lr,
                beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
            )  # fmt: skip

        return step

    def init(a: Tensor) -> State:
        moments = tuple(torch.zeros_like(a, memory_format=torch.contiguous_format) for _ in range(2))
        return (*moments, a.new_zeros(*a.shape[:-1], 1)) if counting else moments

    return Optimizer(init, step, in_place)


def _counted_adam(
    a: Tensor, g: Tensor, state: State, lr: float, beta1: float, beta2: float, eps: float
) -> tuple[Tensor, State]:
    """Adam's step where clients may have taken different numbers of steps before."""
    mean, square, taken = torch.lerp(state[0], g, 1 - beta1), beta2 * state[1] + (1 - beta2) * g * g, state[2] + 1
    first, second = (-torch.expm1(taken * math.log(beta)) for beta in (beta1, beta2))
    return a - lr / first * mean / ((square / second).sqrt() + eps), (mean, square, taken)


def _adam_kernel(
    a: Tensor, g: Tensor, state: State, beta1: float, beta2: float, size: float, floor: float
) -> tuple[Tensor, State]:
    """Adam's step as one kernel of a GPU instead of six."""
    a, mean, square = _compiled_adam()(a, g, *state, c1=1 - beta1, b2=beta2, c2=1 - beta2, size=size, least=floor)
    return a, (mean, square)


@cache
def _compiled_adam() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    code = """template <typename T>
    void adam(T a, T g, T m, T v, T c1, T b2, T c2, T size, T least, T& next, T& mean, T& square) {
        mean = m + (g - m) * c1;
        square = v * b2 + g * g * c2;
        next = a - size * mean / (sqrt(square) + least);
    }"""
    scalars = dict.fromkeys(("c1", "b2", "c2", "size", "least"), 0.0)
    return torch.cuda.jiterator._create_multi_output_jit_fn(code, num_outputs=3, **scalars)


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
