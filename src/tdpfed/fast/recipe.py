"""Steps of an optimizer for many clients on a CPU: PyTorch's fused kernels, in the memory of the parameters.

Every client's parameters are a tensor of their own to a kernel, so that its bits do not depend on the others.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from tdpfed.core.layout import Ranges
from tdpfed.core.local import Batch, Gradient, inside
from tdpfed.core.recipe import Optimizer
from tdpfed.fast.optim import BETA1, BETA2, EPS, aligned_copy


def follow_in_place(
    optimizer: Optimizer,
    lr: float,
    gradient: Gradient,
    theta: Tensor,
    batches: Iterable[Batch],
    anchor: Tensor | None,
    lam: float,
    correction: Tensor | None,
    only: Ranges | None,
) -> tuple[Tensor, Tensor]:
    """Return :func:`tdpfed.core.plain.follow` for parameters ``(K, P)``."""
    own = aligned_copy(theta)
    moments = [torch.zeros_like(own) for _ in range(_moments(optimizer))]
    ranges = [(0, own.shape[-1])] if only is None else only
    values, *kept = ([row[begin:end] for row in whole for begin, end in ranges] for whole in (own, *moments))
    for count, batch in enumerate(batches, 1):
        g, loss = gradient(own, batch)
        if anchor is not None:
            g = g + lam * (own - anchor)
        if correction is not None:
            g = g + correction
        g = optimizer.clipped(g if only is None else inside(g, only))
        grads = [row[begin:end] for row in g for begin, end in ranges]
        if optimizer.name == "sgd":
            torch._fused_sgd_(
                values, grads, *(kept or [[]]), weight_decay=optimizer.weight_decay, momentum=optimizer.momentum, lr=lr,
                dampening=0.0, nesterov=optimizer.nesterov, maximize=False, is_first_step=count == 1,
            )  # fmt: skip
        else:
            fused = torch._fused_adam_ if optimizer.name == "adam" else torch._fused_adamw_
            fused(
                values, grads, kept[0], kept[1], [], [torch.tensor(float(count))] * len(values), lr=lr, beta1=BETA1,
                beta2=BETA2, eps=EPS, weight_decay=optimizer.weight_decay, amsgrad=False, maximize=False,
            )  # fmt: skip
    return own, loss


def _moments(optimizer: Optimizer) -> int:
    """Return the number of values that the rule keeps for each parameter."""
    return 2 if optimizer.name != "sgd" else 1 if optimizer.momentum else 0
