"""What a reader tells the groups of a figure apart by, and how far its axes go; the page and the figures share it.

A method has one color everywhere, whatever its settings, seeds and data set. Its groups differ by marker and dash, so
that no two groups of a data set differ by color alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#b8578c", "#b97f00", "#3d9bd1", "#4a4f57", "#7a3fb5", "#8b5a2b", "#a3142e",
    "#6b8e00", "#00838f",
)  # fmt: skip
"""Those of Okabe and Ito, darkened for print, and five more; ``page.css`` has the same."""
MARKERS, DASHES = 7, 5
"""How many markers and dashes there are."""

SQUASHED = 5
"""An outlier reaches more than this many times as far as most of the others."""
LEAST_POINTS = 5.0
"""Accuracies in percent that differ by less are treated as this far apart."""


@dataclass(frozen=True)
class Look:
    """Numbers of a color, a marker and a dash."""

    color: int = 0
    marker: int = 0
    dash: int = 0


PLAIN = Look()


def looks(groups: Sequence[tuple[str, str]]) -> list[Look]:
    """Return the looks of groups, given the data set and the method of each."""
    methods = list(dict.fromkeys(method for _, method in groups))
    taken: set[tuple[str, int, int]] = set()
    found = []
    for i, (dataset, method) in enumerate(groups):
        color, before = methods.index(method), list(groups[:i]).count((dataset, method))
        wanted = [((color + before + k) % MARKERS, (before + k // MARKERS) % DASHES) for k in range(MARKERS * DASHES)]
        marker, dash = next((one for one in wanted if (dataset, *one) not in taken), wanted[0])
        taken.add((dataset, marker, dash))
        found.append(Look(color % len(COLORS), marker, dash))
    return found


def ceiling(curves: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the lowest value and the highest one worth showing if a few far higher ones would squash the rest.

    Outliers are at most a third of the curves (of two, one), and of any curve the highest twentieth of the values.
    """
    curves = [curve for curve in curves if curve]
    if not curves:
        return None
    lowest, highest = min(map(min, curves)), max(map(max, curves))
    tops = [max(curve[0], sorted(curve)[-(19 * (1 - len(curve)) // 20)]) for curve in curves]
    end = _end([top - lowest for top in tops], highest - lowest, 0.0)
    return (lowest, max(top for top in tops if top - lowest <= end)) if end else None


def floor(finals: Sequence[float]) -> float | None:
    """Return the lowest of some accuracies in percent worth showing if a few far lower ones would squash the rest."""
    if not finals:
        return None
    highest = max(finals)
    end = _end([highest - one for one in finals], highest - min(finals), LEAST_POINTS)
    return None if end is None else min(one for one in finals if highest - one <= end)


def _end(tops: Sequence[float], highest: float, least: float) -> float | None:
    """Return the highest of the tops that is no outlier; None if nothing is one."""
    ranked = sorted(tops, reverse=True)
    bulk = max(ranked[0 if len(ranked) < 2 else max(1, len(ranked) // 3)], least)
    return max(top for top in ranked if top <= SQUASHED * bulk) if highest > SQUASHED * bulk else None
