"""The averages that a method's ``aggregate`` receives: of each uploaded entry, plain, robust or private.

An entry is averaged at most once in a round. Privacy depends on this: a second average would reuse the same noise.
With privacy, a client's updates of all entries together are clipped to ``privacy.clip``.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError, unknown
from tdpfed.server.gauge import with_median_norms
from tdpfed.server.privacy import Privacy, private_average
from tdpfed.server.robust import Rule, VectorAverage, average_for


class Averages:
    """The averages of one round, by entry."""

    def __init__(
        self, uploads: State, weights: Tensor, average: Callable[[str], VectorAverage], *, private: bool = False
    ) -> None:
        self._uploads, self._weights, self._average, self._private = uploads, weights, average, private
        self._asked: set[str] = set()

    def __call__(
        self, entry: str, through: Callable[[Tensor], Tensor] | None = None, sent: Tensor | None = None
    ) -> Tensor:
        """Return the average ``(n,)`` of an entry; see :class:`tdpfed.algorithms.base.Average`."""
        if entry not in self._uploads:
            raise unknown("average", entry, self._uploads)
        if entry in self._asked:
            raise TDPFedError(f"average: {entry!r} requested twice, must be requested at most once per round")
        self._asked.add(entry)
        uploads = self._uploads[entry]
        values = uploads if through is None else through(uploads)
        if self._private and sent is not None:
            raise TDPFedError(f"average: {entry!r} requested with sent, which is not covered by privacy")
        if self._private and through is not None and _mixes(through, uploads, values):
            raise TDPFedError(f"average: through of {entry!r} mixes clients, must map each by itself with privacy")
        weights = self._weights if sent is None else self._weights[:, None] * sent
        return self._average(entry)(values, weights)


def _mixes(through: Callable[[Tensor], Tensor], uploads: Tensor, values: Tensor) -> bool:
    """Whether the first client's value depends on the other clients: then no bound on one client's effect holds."""
    return len(uploads) > 1 and not torch.allclose(through(uploads[:1]), values[:1], rtol=1e-3, atol=1e-5)


@dataclass(frozen=True)
class Averaged:
    """What a method averages of an entry: values ``(S, n)``, where they were sent, and the unchanged ``(n,)``."""

    values: Tensor
    sent: Tensor | None
    center: Tensor


class _Complete(Exception):  # noqa: N818 - not an error
    """All entries have been recorded."""


class _Recorded:
    """Records what a method averages, in place of the averages; ends its ``aggregate`` after the last entry."""

    def __init__(self, uploads: State, center: State) -> None:
        self._uploads, self._center = uploads, center
        self.entries: dict[str, Averaged] = {}

    def __call__(
        self, entry: str, through: Callable[[Tensor], Tensor] | None = None, sent: Tensor | None = None
    ) -> Tensor:
        """Return the contribution of a client that changed nothing."""
        if entry not in self._uploads:
            raise unknown("average", entry, self._uploads)
        uploads = self._uploads[entry]
        self.entries[entry] = Averaged(uploads if through is None else through(uploads), sent, self._center[entry])
        if self.entries.keys() == self._uploads.keys():
            raise _Complete
        return self._center[entry]


def averaged_values(algorithm: Algorithm, server: State, uploads: State, turn: Turn) -> dict[str, Averaged]:
    """Return, by entry, what the method would average of the uploads of the turn's clients, after composing."""
    recorded = _Recorded(uploads, algorithm.center(server))
    with suppress(_Complete):
        algorithm.aggregate(server, uploads, recorded, turn)
    return recorded.entries


class HiddenUploads(Mapping[str, Tensor]):
    """Replaces the uploads when privacy allows a method to see only their averages: any use is an error."""

    def __getitem__(self, entry: str) -> NoReturn:
        raise TDPFedError(f"uploads: {entry!r} read, must not be: with privacy a method may only use averages")

    def __iter__(self) -> NoReturn:
        raise TDPFedError("uploads: read, must not be: with privacy a method may only use averages")

    def __len__(self) -> NoReturn:
        raise TDPFedError("uploads: counted, must not be: with privacy a method may only use averages")


def robust_averages(
    uploads: State, weights: Tensor, center: State, rule: Rule, plan: FactorPlan | None = None
) -> Averages:
    """Return averages by a robust rule; ``center`` is, by entry, the contribution of a client that changed nothing.

    ``plan`` is that of the entry ``factors``, if the method sends CP factors.
    """

    def average(entry: str) -> VectorAverage:
        inner = average_for(rule, center[entry])
        if rule.norms == "mean" or plan is None or entry != "factors" or center[entry].numel() != plan.factors.size:
            return inner  # also where composed tensors are averaged, which have no gauge
        return with_median_norms(inner, plan.factors)

    return Averages(uploads, weights, average)


def private_averages(
    uploads: State, weights: Tensor, center: State, privacy: Privacy, cohort: float, seed: int, round_: int
) -> Averages:
    """Return private averages: each entry has its share of the clip and independent noise."""
    entries = list(center)
    clip = privacy.clip / len(entries) ** 0.5

    def average(entry: str) -> VectorAverage:
        place = entries.index(entry)
        return private_average(privacy, center[entry], cohort, seed, round_, place=place, clip=clip)

    return Averages(uploads, weights, average, private=True)
