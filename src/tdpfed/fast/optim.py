"""Faster versions of the update rules of :mod:`tdpfed.core.optim`: steps in place, or as a single kernel."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.layout import Ranges
from tdpfed.core.optim import Moments

Pieces = Sequence[tuple[int, Tensor]]
"""A gradient in pieces ``(K, m)``, each with its start in the whole."""

InPlace = Callable[[Tensor, Pieces, Moments], Callable[[int], None]]

CACHE_LINE = 64
"""Bytes; PyTorch aligns memory on a CPU to this."""

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


class FastOptimizer(NamedTuple):
    """An update rule that can also update ``a`` ``(K, n)`` and its state in place, on a CPU.

    ``in_place(a, gradient, state)`` returns ``step(count)``, which uses the current values of the gradient's pieces.
    """

    init: Callable[[Tensor], Moments]
    step: Callable[[Tensor, Tensor, Moments, int], tuple[Tensor, Moments]]
    in_place: InPlace


def aligned_empty(theta: Tensor) -> Tensor:
    """Return an empty tensor like ``theta`` ``(K, P)``; on a CPU rows are aligned to cache lines, for fast writes."""
    if theta.ndim < 2 or theta.device.type != "cpu":
        return torch.empty_like(theta, memory_format=torch.contiguous_format)
    size, line = theta.shape[-1], CACHE_LINE // theta.element_size()
    return theta.new_empty(*theta.shape[:-1], -(-size // line) * line)[..., :size]


def aligned_copy(theta: Tensor) -> Tensor:
    """Return a copy of ``theta`` in which steps can be taken."""
    return aligned_empty(theta).copy_(theta)


def is_aligned(theta: Tensor) -> bool:
    """Whether the rows of ``theta`` ``(K, P)`` share no memory and are aligned to cache lines."""
    line = CACHE_LINE // theta.element_size()
    return theta.stride(-1) == 1 and theta.stride(0) == -(-theta.shape[-1] // line) * line


def after_gradient(
    theta: Tensor, g: Tensor, anchor: Tensor | None, pull: float, lr: float, only: Ranges | None = None
) -> Tensor:
    """Return ``theta + pull (anchor - theta) - lr g``, or ``theta - lr g`` without an anchor; may overwrite ``g``.

    With ``only``, parameters outside of these ranges stay as they are.
    """
    if only is not None:
        moved = theta.clone(memory_format=torch.contiguous_format)
        for begin, end in only:
            one, step = theta[..., begin:end], g[..., begin:end]
            near = None if anchor is None else anchor[..., begin:end]
            moved[..., begin:end] = after_gradient(one, step, near, pull, lr)
        return moved
    if anchor is None:
        return torch.add(theta, g, alpha=-lr, out=g)
    return torch.lerp(theta, anchor, pull).sub_(g, alpha=lr)


def adam(lr: float, *, counting: bool = False) -> FastOptimizer:
    """Return :func:`tdpfed.core.optim.adam` in one pass: PyTorch's fused step on a CPU, a single kernel on a GPU."""
    textbook = optim.adam(lr, counting=counting)

    def step(a: Tensor, g: Tensor, state: Moments, count: int) -> tuple[Tensor, Moments]:
        if a.is_cuda and counting:
            return textbook.step(a, g, state, count)
        if a.is_cuda:
            return _one_kernel(a, g, state, lr, count)
        moved = a.clone(memory_format=torch.contiguous_format)
        new = tuple(moment.clone() for moment in state)
        flat = [tensor.view(-1, tensor.shape[-1]) for tensor in (moved, g.contiguous(), *new)]
        in_place(flat[0], [(0, flat[1])], tuple(flat[2:]))(count)
        return moved, new

    def in_place(a: Tensor, gradient: Pieces, state: Moments) -> Callable[[int], None]:
        # Client by client, so that a client's bits do not depend on which others are computed with it.
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
                beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=0.0, amsgrad=False, maximize=False,
            )  # fmt: skip

        return step

    return FastOptimizer(textbook.init, step, in_place)


def _one_kernel(a: Tensor, g: Tensor, state: Moments, lr: float, count: int) -> tuple[Tensor, Moments]:
    """Take Adam's step on a GPU; both bias corrections are folded into two scalars, which saves a pass each."""
    root = (1 - BETA2**count) ** 0.5
    size, floor = lr * root / (1 - BETA1**count), EPS * root
    a, mean, square = _compiled_adam()(a, g, *state, c1=1 - BETA1, b2=BETA2, c2=1 - BETA2, size=size, least=floor)
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
