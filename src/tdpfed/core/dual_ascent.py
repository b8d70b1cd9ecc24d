"""Dual coordinate ascent for support vector machines (Shalev-Shwartz and Zhang, 2013), for any leading dimensions.

A linear model, flat as any other, is one matrix ``(..., C, D)`` whose last column is the bias, if it has one.
"""

import torch
from torch import Tensor

from tdpfed.core.layout import Layout


def hinge_steps(
    variables: Tensor, scores: Tensor, sign: Tensor, x: Tensor, place: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Maximize the dual of hinge losses in one variable after the other, each between 0 and 1.

    A minibatch ``x`` ``(..., B, D)`` consists of samples ``place`` ``(..., B)``, which may repeat, of those whose
    ``variables`` are ``(..., N, C)``. Its ``scores`` (of the current model) and ``sign`` (the labels, 1 or -1) are
    ``(..., B, C)``. A move a of sample i changes the model by ``scale a sign_i x_i``, with ``scale`` ``(..., 1)``.
    Return the moves ``(..., B, C)`` and the variables after them.
    """
    gram = scale[..., None] * (x @ x.mT)
    same = (place[..., :, None] == place[..., None, :]).to(x)
    rows = place[..., None].expand(sign.shape)
    alpha, moves = variables.gather(-2, rows), list[Tensor]()
    curvature = gram.diagonal(dim1=-2, dim2=-1)[..., None].unbind(-2)
    signs, pulls, copies = sign.unbind(-2), gram[..., None].unbind(-2), same[..., None].unbind(-2)
    for i, (label, pull, copy, curve) in enumerate(zip(signs, pulls, copies, curvature, strict=True)):
        own = alpha.select(-2, i)
        move = (own + (1 - label * scores.select(-2, i)) / curve).clamp(0, 1) - own
        moves.append(move)
        alpha = torch.addcmul(alpha, copy, move[..., None, :])
        scores = torch.addcmul(scores, pull, (move * label)[..., None, :])
    return torch.stack(moves, -2), variables.scatter(-2, rows, alpha)


def as_rows(layout: Layout, x: Tensor, y: Tensor) -> Tensor:
    """Return inputs as rows ``(..., B, D)`` for labels ``(..., B)``, with a 1 for the bias."""
    flat = x.reshape(*y.shape, -1)
    return flat if len(layout.names) == 1 else torch.cat([flat, torch.ones_like(flat[..., :1])], -1)


def as_matrix(layout: Layout, flat: Tensor) -> Tensor:
    """Return weight and bias as one matrix."""
    weight, *bias = layout.split(flat)
    return torch.cat([weight, *(one[..., None] for one in bias)], -1)


def as_flat(layout: Layout, matrix: Tensor) -> Tensor:
    """Return a matrix as a flat vector ``(..., P)``."""
    inputs = layout.shapes[0][1]
    return torch.cat([matrix[..., :inputs].flatten(-2), matrix[..., inputs:].flatten(-2)], -1)
