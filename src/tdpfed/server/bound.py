"""The norm bound: one upload that is far longer than the others must not move the average.

It is applied to what a method averages, after composing: finite factors may compose values that are not. Each client's
contribution is measured from that of a client that changed nothing, and compared with the median of the round's norms,
which a minority cannot move. With fewer than three uploads nobody can tell which one is wrong; they must only stay
below a limit that no training reaches.
"""

from typing import Literal

import torch
from torch import Tensor

from tdpfed.server.robust import norm_of
from tdpfed.wire.forms import LARGEST_CHANGE

SMALL = 0.1
"""A contribution up to this share of the norm of an unchanged one is never refused, whatever the others send."""

FEW = 3
"""The least number of uploads whose median says something about the others."""

VALUES_AT_ONCE = 1 << 22


def contributions(values: Tensor, center: Tensor, sent: Tensor | None) -> Tensor:
    """Return the norms ``(S,)`` of the clients' contributions ``values - center``, of ``(S, n)`` where they were sent.

    It is not finite if a value is not, or if the difference is too large for the type of the values.
    """
    rows = max(1, VALUES_AT_ONCE // max(1, center.numel()))
    parts = [values.new_zeros(0, dtype=torch.float64)]
    for start in range(0, len(values), rows):
        moved = values[start : start + rows] - center
        parts.append(norm_of(moved if sent is None else moved.where(sent[start : start + rows] > 0, 0)))
    return torch.cat(parts)


def longest_allowed(norms: Tensor, center: Tensor, bound: float | Literal["off"]) -> float:
    """Return the largest norm that is accepted, given those of all clients ``(S,)`` and the unchanged contribution."""
    if bound == "off":
        return float("inf")
    unchanged = float(norm_of(center[None]))
    known = norms[norms.isfinite()].sort().values
    most = LARGEST_CHANGE * max(1.0, unchanged)
    median = float(known[(len(known) - 1) // 2]) if len(known) >= FEW else 0.0
    return min(most, max(bound * median, SMALL * unchanged)) if median > 0 else most
