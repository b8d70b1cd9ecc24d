"""Random augmentation of training images: flipped, and shifted by a few pixels.

Like all draws, it is a pure function of (seed, round, client, step, position in the minibatch).
"""

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, key
from tdpfed.core.permutation import mix

MAX_SHIFT_PIXELS = 4
"""Largest shift of an image, in each direction."""


def augmented(
    x: Tensor, kind: str, seed: int | Tensor, round_: int | Tensor, clients: Tensor, step: int | Tensor
) -> Tensor:
    """Return images ``(..., B, C, H, W)`` of ``clients`` ``(...)``, augmented by ``kind``: none, flip or flip-shift.

    Pixels shifted in from outside are 0, the mean of standardized pixels.
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
    span = 2 * MAX_SHIFT_PIXELS + 1
    source_rows = rows + (mix(bits ^ 0x2545F491).unsqueeze(-1) % span - MAX_SHIFT_PIXELS)
    source_columns = source_columns + (mix(bits ^ 0x6A09E667).unsqueeze(-1) % span - MAX_SHIFT_PIXELS)
    inside = _within(source_rows, height)[..., :, None] & _within(source_columns, width)[..., None, :]
    source = source_rows.clamp(0, height - 1)[..., :, None] * width + source_columns.clamp(0, width - 1)[..., None, :]
    moved = x.flatten(-2).gather(-1, source.flatten(-2).unsqueeze(-2).expand_as(x.flatten(-2)))
    return moved.view_as(x) * inside.unsqueeze(-3)


def _within(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
