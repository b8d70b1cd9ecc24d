"""A client's inner problem, ``f + lam/2 ||theta - anchor||^2`` on one minibatch (eq. 14), solved with options.

These are the variants of :meth:`tdpfed.core.local.LocalWork.proximal`: steps that begin with a velocity, and steps that
end at an accuracy (eq. 15). Both take clients with or without a leading axis, and change none of their arguments.
"""

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.local import Batch, Gradient, Near


def implicit_rate(lr: float, lam: float) -> float:
    """Return the rate of explicit steps that are the implicit ones of rate ``lr``.

    A step with the proximal term at its end, ``(theta - lr g + lr lam anchor) / (1 + lr lam)``, is
    ``theta - r (g + lam (theta - anchor))`` with ``r = lr / (1 + lr lam)``. For any ``lr``, ``r lam`` is below 1.
    """
    return lr / (1 + lr * lam)


def with_velocity(
    gradient: Gradient,
    theta: Tensor,
    batch: Batch,
    anchor: Tensor,
    lam: float,
    lr: float,
    momentum: float,
    steps: int,
    velocity: Tensor,
) -> Near:
    """Take Nesterov steps from a velocity ``(..., P)``; return the last one with the result."""
    velocity = velocity.clone()
    for _ in range(steps):
        g, loss = gradient(theta, batch)
        theta, velocity = optim.nesterov(theta, g + lam * (theta - anchor), velocity, lr, momentum)
    return Near(theta, loss, velocity=velocity)


def until_accurate(
    gradient: Gradient,
    theta: Tensor,
    batch: Batch,
    anchor: Tensor,
    lam: float,
    lr: float,
    momentum: float,
    most: int,
    nu: float,
    velocity: Tensor | None,
) -> Near:
    """Take Nesterov steps while the squared norm of the inner problem's gradient is above ``nu``, ``most`` at most.

    Each client stops by itself: it keeps parameters, velocity, and the loss at the point where it stopped. On a GPU
    nothing waits for the values, so the others' steps are computed for it and not used.
    """
    going, kept = torch.ones(theta.shape[:-1], dtype=torch.bool, device=theta.device), velocity is not None
    speed = torch.zeros_like(theta) if velocity is None else velocity
    loss = theta.new_zeros(theta.shape[:-1])
    for _ in range(most):
        g, now = gradient(theta, batch)
        loss = torch.where(going, now, loss)
        g = g + lam * (theta - anchor)
        going = going & ~(torch.linalg.vector_norm(g, dim=-1).square() <= nu)  # a gradient that is not finite goes on
        if not theta.is_cuda and not bool(going.any()):
            break
        moved = optim.nesterov(theta, g, speed.clone(), lr, momentum)
        theta, speed = (
            torch.where(going.unsqueeze(-1), new, old) for new, old in zip(moved, (theta, speed), strict=True)
        )
    return Near(theta, loss, velocity=speed if kept else None)
