"""Averages of clients' uploads: from uploads ``(K, P)`` and weights to ``(P,)``, plain or robust.

Weights are ``(K,)``, or ``(K, P)`` if clients send only some coordinates: the weight of a client in each of them, 0
where it sent nothing. A coordinate that no client sent is 0. Median, trimmed mean (Yin et al., 2018) and Krum
(Blanchard et al., 2017) select with one vote per client, whatever its weight: a large client is no more trustworthy
than a small one. The mean of the selected values is weighted again. All values must be finite, which the gate ensures.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tdpfed.core.setting import check, setting
from tdpfed.errors import TDPFedError, wrong

VectorAverage = Callable[[Tensor, Tensor], Tensor]
"""Maps uploads ``(S, n)`` and weights to their average ``(n,)``."""

RuleName = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum"]


@dataclass(frozen=True)
class Rule:
    """How the server averages uploads, and how it clips and checks them before."""

    name: RuleName = setting("mean", "how to average")
    fraction: float = setting(0.2, "trimmed-mean: share cut at each end of every coordinate", least=0, below=0.5)
    byzantine: int = setting(1, "krum and multi-krum: how many bad clients to tolerate", least=0)
    keep: int | None = setting(
        None, "multi-krum: how many uploads to average; by default all but the bad ones", least=1
    )
    clip: float | Literal["median"] | None = setting(
        None, "largest norm of an update; median: the median norm of the round's updates", above=0
    )
    gauge: float | None = setting(
        None,
        "largest distance of an uploaded factor from the broadcast one, relative to the norm of such factors so far; "
        "its own norm must be at least 1/(1 + gauge/4) of that",
        above=0,
    )
    norms: Literal["mean", "median"] = setting(
        "mean",
        "norm of an averaged CP factor: that of the average, or the median of the uploads' norms, which a few clients "
        "cannot make smaller",
    )
    bound: float | Literal["off"] = setting(
        10.0,
        "largest norm of what an upload adds to the average, relative to the median of the round's uploads; longer "
        "ones are refused; off: only values that are not finite",
        least=1,
    )
    weight_cap: float | Literal["auto", "off"] = setting(
        "auto",
        "largest weight of a client in an average, relative to the median of the round's; larger ones are reduced to "
        "it; auto: 3 in a deployment, off in a simulation",
        least=1,
    )
    patience: int = setting(
        5,
        "rounds in a row in which more uploads are refused than accepted, after which the run stops; 0: never",
        least=0,
    )

    def __post_init__(self) -> None:
        check(self)

    def enough(self, clients: int) -> bool:
        """Whether this rule can average this many uploads; mean and median accept any number, even none."""
        if self.name == "trimmed-mean":
            return clients > 2 * _cut(self.fraction, clients)
        if self.name in ("krum", "multi-krum"):
            kept = 0 if self.name == "krum" or self.keep is None else self.keep
            return clients >= max(2 * self.byzantine + 3, self.byzantine + kept)
        return True


def average_for(rule: Rule, center: Tensor) -> VectorAverage:
    """Return the average that ``rule`` names; ``center`` ``(P,)`` is what a client that changed nothing would send."""
    rules: dict[str, Callable[[], VectorAverage]] = {
        "mean": lambda: weighted_mean,
        "median": lambda: median,
        "trimmed-mean": lambda: trimmed_mean(rule.fraction),
        "krum": lambda: krum(rule.byzantine),
        "multi-krum": lambda: multi_krum(rule.byzantine, rule.keep),
    }
    inner = rules[rule.name]()
    return inner if rule.clip is None else clipped(center, None if rule.clip == "median" else rule.clip, inner)


def weighted_mean(uploads: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of ``uploads`` over clients, each counted by its share of ``weights``."""
    total = weights.sum(0)
    if weights.ndim == 1:
        mean = (weights / total).to(uploads.dtype) @ uploads
    else:
        mean = (weights / torch.where(total > 0, total, 1)).to(uploads.dtype).mul_(uploads).sum(0)
    if not bool(total if weights.ndim == 1 else total.any()):  # asked last: a GPU computes meanwhile
        raise TDPFedError(f"weights: the sum over {len(weights)} clients is 0, must be above 0")
    return mean


def median(uploads: Tensor, weights: Tensor) -> Tensor:
    """Return the median of each coordinate (the mean of the two middle values if even); clients count the same."""
    sent = _sent(uploads, weights)
    return _inner_mean(uploads, sent.to(uploads.dtype), sent.sum(0))


def trimmed_mean(fraction: float) -> VectorAverage:
    """Return the rule that leaves out the smallest and largest values of each coordinate and averages the rest.

    At each end ``fraction`` of the values is left out, rounded up, so that this share of bad clients does no harm. If
    too few clients sent a coordinate, its middle values are kept.
    """
    _check("fraction", fraction, 0 <= fraction < 0.5, "at least 0 and below 0.5")

    def average(uploads: Tensor, weights: Tensor) -> Tensor:
        sent = _sent(uploads, weights)
        clients = int(sent.any(-1).sum())
        cut = _cut(fraction, clients)
        if 2 * cut >= clients:
            raise TDPFedError(
                f"trimmed-mean: {clients} clients given, must be more than {2 * cut} to cut {fraction:g} at each end"
            )
        cuts = (fraction * sent.sum(0).double() - 1e-9).ceil().long()
        return _inner_mean(uploads, weights.reshape(len(weights), -1).expand_as(uploads), cuts)

    return average


def _cut(fraction: float, clients: int) -> int:
    return math.ceil(fraction * clients - 1e-9)


def krum(byzantine: int) -> VectorAverage:
    """Return the rule that takes the one upload nearest to its neighbors, with up to ``byzantine`` bad clients."""
    return multi_krum(byzantine, 1)


def multi_krum(byzantine: int, keep: int | None = None) -> VectorAverage:
    """Return the rule that averages the ``keep`` uploads nearest to their neighbors (None: all but ``byzantine``).

    An upload's score is the sum of its squared distances to the nearest K - byzantine - 2 others, each distance a
    mean over the coordinates that both sent. Ties are broken by the order of the clients.
    """
    _check("byzantine", byzantine, byzantine >= 0, "at least 0")

    def average(uploads: Tensor, weights: Tensor) -> Tensor:
        sent = _sent(uploads, weights)
        clients = int(sent.any(-1).sum())
        if clients < 2 * byzantine + 3:
            raise TDPFedError(
                f"krum: {clients} clients given, must be at least {2 * byzantine + 3} to tolerate {byzantine} bad ones"
            )
        good = clients - byzantine
        count = good if keep is None else keep
        _check("multi-krum: keep", count, 1 <= count <= good, f"1 to {good} of {clients} clients")
        near = _distances(uploads, sent).sort(-1).values[:, 1 : good - 1]  # the nearest is the upload itself
        best = near.sum(-1).argsort(stable=True)[:count]
        return weighted_mean(uploads[best], weights[best])

    return average


def clipped(center: Tensor, bound: float | None, inner: VectorAverage) -> VectorAverage:
    """Return ``inner`` on updates shortened to ``bound``: ``x -> c + min(1, bound / ||x - c||) (x - c)``.

    Without a bound it is the median of the norms, which a minority of bad clients cannot raise above honest norms.
    """
    _check("bound", bound, bound is None or _positive(bound), "finite and above 0")

    def average(uploads: Tensor, weights: Tensor) -> Tensor:
        if uploads.shape[1:] != center.shape:
            raise TDPFedError(f"clip: uploads of {tuple(uploads.shape[1:])} given, must be {tuple(center.shape)}")
        sent = _sent(uploads, weights)
        moved = (uploads - center).where(sent, 0)
        if not bool(moved.isfinite().all()):  # a difference that float32 cannot hold
            moved = (uploads.double() - center.double()).where(sent, 0)
        norms = norm_of(moved)[:, None]
        limit = median(norms, sent.any(-1)) if bound is None else bound
        shortened = (center + (limit / norms).to(moved.dtype) * moved).to(uploads.dtype)
        return inner(torch.where(norms > limit, shortened, uploads), weights)

    return average


def norm_of(rows: Tensor) -> Tensor:
    """Return the norms ``(K,)`` of rows in float64, also of rows whose squares overflow; inf or NaN if a value is."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    if bool(norms.isfinite().all()):
        return norms
    peak = rows.abs().amax(-1).double()
    scaled = rows.double() / peak.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
    return torch.where(norms.isfinite(), norms, peak * torch.linalg.vector_norm(scaled, dim=-1))


def _sent(uploads: Tensor, weights: Tensor) -> Tensor:
    return (weights > 0).reshape(len(weights), -1).expand_as(uploads)


def _inner_mean(uploads: Tensor, weights: Tensor, cuts: Tensor) -> Tensor:
    """Return the mean of each coordinate without its ``cuts`` ``(P,)`` smallest and largest values."""
    sent = weights > 0
    count = sent.sum(0)
    cuts = torch.minimum(cuts, (count - 1).clamp_min(0) // 2)
    values, order = uploads.masked_fill(~sent, torch.inf).sort(stable=True, dim=0)  # missing values sort last
    place = torch.arange(len(uploads), device=uploads.device)[:, None]
    kept = (place >= cuts) & (place < count - cuts)
    return weighted_mean(values.where(kept, 0), weights.gather(0, order).where(kept, 0))


def _distances(uploads: Tensor, sent: Tensor) -> Tensor:
    """Return the mean squared differences of all pairs over the coordinates both sent ``(K, K)``; inf without any."""
    total = common = uploads.new_zeros(len(uploads), len(uploads), dtype=torch.float64)
    for part, own in zip(uploads.split(1 << 16, -1), sent.split(1 << 16, -1), strict=True):  # limits memory
        m, x = own.double(), part.where(own, 0).double()
        squares = x.square() @ m.mT
        total = total + squares + squares.mT - 2 * x @ x.mT
        common = common + m @ m.mT
    return torch.where(common > 0, total.clamp_min(0) / common, torch.inf).fill_diagonal_(0)


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def _check(field: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise wrong(field, value, allowed)
