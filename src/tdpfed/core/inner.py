"""A client's inner problem, ``f + lam/2 ||theta - anchor||^2`` on one minibatch (eq. 14).

A number of steps (:func:`taken`), from rest or from a velocity, or steps until an accuracy (eq. 15). Both take clients
with or without a leading axis, and change none of their arguments.
"""

from typing import NamedTuple

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


class Inner(NamedTuple):
    """An inner problem and how its steps are taken: the anchor and lambda, the rate and the momentum."""

    anchor: Tensor
    lam: float
    lr: float
    momentum: float


def taken(
    gradient: Gradient, theta: Tensor, batch: Batch, inner: Inner, steps: int, velocity: Tensor | None = None
) -> Near:
    """Take Nesterov steps, plain gradient steps at momentum 0; given a velocity ``(..., P)``, return the last one."""
    anchor, lam, lr, momentum = inner
    speed = None if velocity is None else velocity.clone()
    for _ in range(steps):
        g, loss = gradient(theta, batch)
        g = g + lam * (theta - anchor)
        if momentum == 0 and velocity is None:
            theta = theta - lr * g
        else:
            theta, speed = optim.nesterov(theta, g, speed, lr, momentum)
    return Near(theta, loss, velocity=None if velocity is None else speed)


def until_accurate(
    gradient: Gradient,
    theta: Tensor,
    batch: Batch,
    inner: Inner,
    most: int,
    nu: float,
    velocity: Tensor | None = None,
) -> Near:
    """Take Nesterov steps while the squared norm of the inner problem's gradient is above ``nu``, ``most`` at most.

    Each client stops by itself: it keeps parameters, velocity, and the loss at the point where it stopped. On a GPU
    nothing waits for the values, so the others' steps are computed for it and not used.
    """
    anchor, lam, lr, momentum = inner
    start = theta
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
    return Near(theta.clone() if theta is start else theta, loss, velocity=speed if kept else None)
