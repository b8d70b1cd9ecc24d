"""Client-level differential privacy of the global model: clipped updates, a trusted server's noise, its accounting.

The guarantee covers the global models of all rounds, against adding or removing one client, if clients take part by
Poisson sampling. It does not cover personal models, metrics and records, nor anyone who knows the seed of the noise.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, key
from tdpfed.core.setting import check, setting
from tdpfed.errors import TDPFedError, wrong
from tdpfed.server.robust import VectorAverage, norm_of


@dataclass(frozen=True)
class Privacy:
    """The influence of one client on a round's sum, the noise that hides it, and the privacy budget."""

    clip: float = setting(doc="largest Euclidean norm of a client's update", above=0)
    noise: float = setting(
        doc="noise multiplier: standard deviation of the noise on the sum over the clip", least=1e-3, most=1e6
    )
    # Smaller values are in the range of the accountant's rounding.
    delta: float = setting(1e-5, "probability that epsilon does not hold", least=1e-10, below=1)
    epsilon: float | None = setting(None, "budget: the run ends before it is exceeded", above=0)

    def __post_init__(self) -> None:
        check(self)


def private_average(
    privacy: Privacy,
    center: Tensor,
    cohort: float,
    seed: int,
    round_: int,
    *,
    place: int = 0,
    clip: float | None = None,
) -> VectorAverage:
    """Return the average ``center + (clipped sum + noise) / cohort``; call it once per round, even without uploads.

    ``place`` is the number of the entry in the upload: entries have independent noise. ``clip`` is this entry's share
    of ``privacy.clip``, all of it by default. The deviation is the same for all entries, ``noise * privacy.clip``.

    ``cohort`` is the expected number of clients that send a coordinate: sampling rate times clients, times the share of
    coordinates each sends. It does not depend on the actual number, which is itself a secret. The noise is drawn on the
    CPU and is the same for every device.
    """
    _check("cohort", cohort, _positive(cohort), "finite and above 0")

    def average(uploads: Tensor, weights: Tensor) -> Tensor:
        counters = (round_, place) if place else (round_,)
        generator = torch.Generator().manual_seed(int(key(seed, Stream.NOISE, *counters)))
        noise = torch.randn(center.shape, generator=generator, dtype=torch.float64).to(center.device)
        bound = privacy.clip if clip is None else clip
        total = clipped_sum(uploads, weights, center, bound) + privacy.noise * privacy.clip * noise
        return (center.double() + total / cohort).to(uploads.dtype)

    return average


def clipped_sum(uploads: Tensor, weights: Tensor, center: Tensor, clip: float) -> Tensor:
    """Return the sum ``(P,)`` of the clients' updates ``uploads - center`` ``(K, P)``, each shortened to ``clip``.

    No client changes the sum by more than ``clip``, so all count the same: weights ``(K,)`` or ``(K, P)`` above 0 only
    mark what was sent. Computed in float64, where no square of a float32 overflows. An update that is not finite, as
    finite factors may compose one, has no direction and counts as not sent.
    """
    if uploads.shape[1:] != center.shape:
        raise TDPFedError(f"clip: uploads of {tuple(uploads.shape[1:])} given, must be {tuple(center.shape)}")
    sent = weights > 0 if weights.ndim == uploads.ndim else (weights > 0)[:, None]
    total, start = torch.zeros_like(center, dtype=torch.float64), center.double()
    for rows, own in zip(uploads.split(4), sent.split(4), strict=True):  # a few at a time: less memory, and faster
        moved = (rows.double() - start).where(own, 0)
        norms = norm_of(moved)
        known = norms.isfinite()
        total = total + (clip / norms.where(known, clip).clamp_min(clip)) @ moved.where(known[:, None], 0)
    return total


@dataclass(frozen=True)
class Accountant:
    """The epsilon of rounds in which each client takes part with probability ``rate``: by privacy loss distributions.

    Losses are rounded to a grid so that epsilon is never too small. It is too large by about 0.01 %, and by more only
    if ``rate / noise`` is below 1e-4.
    """

    privacy: Privacy
    rate: float

    def __post_init__(self) -> None:
        _check("sampling rate", self.rate, _positive(self.rate) and self.rate <= 1, "above 0 and at most 1")
        _library()  # a missing package is reported before any work

    def epsilon(self, rounds: int) -> float:
        """Return the epsilon of this many rounds at ``privacy.delta``; cached."""
        if rounds not in self._known:
            _check("rounds", rounds, isinstance(rounds, int) and rounds > 0, "a whole number of at least 0")
            composed = self._one_round.self_compose(rounds)
            self._known[rounds] = float(composed.get_epsilon_for_delta(self.privacy.delta))
        return self._known[rounds]

    def rounds_within(self, budget: float, most: int = 10_000) -> int:
        """Return the greatest number of rounds, up to ``most``, whose epsilon does not exceed ``budget``."""
        _check("budget", budget, _positive(budget), "finite and above 0")
        return bisect_right(range(1, most + 1), budget, key=self.epsilon)

    def check_affordable(self, rounds: int) -> None:
        """Raise an error if ``rounds`` rounds exceed the budget."""
        budget = self.privacy.epsilon
        if budget is not None and self.epsilon(rounds) > budget:
            number = f"{rounds} {'round' if rounds == 1 else 'rounds'}"
            least = f"at least {self.epsilon(rounds):.6g} for {number} at this noise and participation"
            raise wrong("privacy.epsilon", budget, least)

    @property
    def interval(self) -> float:
        """The spacing of the grid of losses: 1/40 of their spread, at most 50,000 points, above rounding errors."""
        q, z = self.rate, self.privacy.noise
        unsampled = 1 / (2 * z * z) + 10 / z  # the loss without sampling, at ten standard deviations
        largest = unsampled + math.log(q + (1 - q) * math.exp(-unsampled))
        return max(q / (40 * z), largest / 50_000, 1e-5)

    @cached_property
    def _one_round(self) -> Any:
        return _library().from_gaussian_mechanism(
            self.privacy.noise, sampling_prob=self.rate, value_discretization_interval=self.interval
        )

    @cached_property
    def _known(self) -> dict[int, float]:
        return {0: 0.0}


def _library() -> Any:
    try:
        return import_module("dp_accounting.pld.privacy_loss_distribution")
    except ImportError as error:
        raise TDPFedError(
            "privacy: needs dp-accounting, which is not installed; pip install 'tdpfed[privacy]'"
        ) from error


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _check(field: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise wrong(field, value, allowed)
