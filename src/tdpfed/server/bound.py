"""The norm bound: one upload that is far longer than the others must not move the average.

It is applied to what a method averages, after composing: finite factors may compose values that are not. Each client's
contribution is measured from that of a client that changed nothing, and compared with the median of the round's norms,
which a minority cannot move. With fewer than three uploads nobody can tell which one is wrong; they must only stay
below a limit that no training reaches.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tdpfed.server.robust import norm_of
from tdpfed.wire.forms import LARGEST_CHANGE

SMALL = 0.1
"""A contribution up to this share of the norm of an unchanged one is never refused, whatever the others send."""

FEW = 3
"""The least number of uploads whose median says something about the others."""

VALUES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Differences of so many values are computed at a time; on a CPU they stay in its cache."""

TINY = 1e-15
"""Norms below it are computed in float64: the squares of such values vanish in float32."""


def contributions(values: Tensor, center: Tensor, sent: Tensor | None) -> list[float]:
    """Return the norm of each client's contribution ``values - center``, of ``(S, n)`` where they were sent.

    It is not finite if a value is not, or if the difference is too large for the type of the values.
    """
    rows = max(1, VALUES_AT_ONCE.get(values.device.type, 1 << 22) // max(1, center.numel()))
    norms: list[float] = []
    for start in range(0, len(values), rows):
        some, moved = slice(start, start + rows), values[start : start + rows] - center
        quick = _quick_norms(moved if sent is None else moved.mul_(sent[some] > 0))
        if quick is None:  # what was not sent may be any number
            moved = values[some] - center
            quick = norm_of(moved if sent is None else moved.where(sent[some] > 0, 0)).tolist()
        norms += quick
    return norms


def _quick_norms(rows: Tensor) -> list[float] | None:
    """Return norms, computed in the rows' own precision; None if squares leave its range."""
    norms: list[float] = torch.linalg.vector_norm(rows, dim=-1).tolist()
    return norms if all(TINY < norm < math.inf for norm in norms) else None


def all_allowed(norms: Sequence[float], bound: float | Literal["off"]) -> bool:
    """Whether all norms are accepted for any norm of the unchanged contribution, so that it need not be computed."""
    return all(map(math.isfinite, norms)) and max(norms, default=0.0) <= _longest(norms, 0.0, bound)


def longest_allowed(norms: Sequence[float], center: Tensor, bound: float | Literal["off"]) -> float:
    """Return the largest norm that is accepted, given those of all clients and the unchanged contribution."""
    return _longest(norms, float(norm_of(center[None])), bound)


def _longest(norms: Sequence[float], unchanged: float, bound: float | Literal["off"]) -> float:
    if bound == "off":
        return math.inf
    known = sorted(norm for norm in norms if math.isfinite(norm))
    most = LARGEST_CHANGE * max(1.0, unchanged)
    median = known[(len(known) - 1) // 2] if len(known) >= FEW else 0.0
    return min(most, max(bound * median, SMALL * unchanged)) if median > 0 else most
