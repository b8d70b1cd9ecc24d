"""Training images changed at random as they are drawn: mirrored, and moved by a few pixels.

As all draws, a change is a pure function of (seed, round, client, step, place in the minibatch).
"""

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, key, mix

REACH = 4
"""Pixels by which an image moves at most, in each direction."""


def augmented(
    x: Tensor, kind: str, seed: int | Tensor, round_: int | Tensor, clients: Tensor, step: int | Tensor
) -> Tensor:
    """Return images ``(..., B, C, H, W)`` of ``clients`` ``(...)``, changed as ``kind`` says: none, flip or flip-shift.

    What moves in from outside is 0, the mean of standardised pixels.
    """
    if kind == "none":
        return x
    *_, height, width = x.shape
    place = torch.arange(x.shape[-4], device=x.device)
    seed = seed.unsqueeze(-1) if isinstance(seed, Tensor) else seed
    bits = key(seed, Stream.AUGMENT, round_, clients.unsqueeze(-1), step, place)  # (..., B)
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    mirrored = (bits & 1).bool().unsqueeze(-1)
    source_columns = torch.where(mirrored, width - 1 - columns, columns)  # (..., B, W)
    if kind == "flip":
        return x.gather(-1, source_columns[..., None, None, :].expand_as(x))
    span = 2 * REACH + 1
    source_rows = rows + (mix(bits ^ 0x2545F491).unsqueeze(-1) % span - REACH)
    source_columns = source_columns + (mix(bits ^ 0x6A09E667).unsqueeze(-1) % span - REACH)
    inside = _within(source_rows, height)[..., :, None] & _within(source_columns, width)[..., None, :]
    source = source_rows.clamp(0, height - 1)[..., :, None] * width + source_columns.clamp(0, width - 1)[..., None, :]
    moved = x.flatten(-2).gather(-1, source.flatten(-2).unsqueeze(-2).expand_as(x.flatten(-2)))
    return moved.view_as(x) * inside.unsqueeze(-3)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
