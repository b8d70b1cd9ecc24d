"""Built-in attacks for simulation: uploads of hostile or broken clients, in place of their honest ones.

Every draw is a pure function of seed, round and client, so an attacked run is reproducible. Most attacks change the
update, the difference between upload and broadcast. The gauge attack changes CP factors but not the tensor that they
compose, so no check of that tensor can detect it. A lie about the number of samples changes no upload at all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Literal, get_args

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, choose, key, uniform
from tdpfed.core.permutation import permute
from tdpfed.core.setting import check, setting
from tdpfed.core.state import State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.data.federation import Federation
from tdpfed.errors import TDPFedError, unknown, wrong

Draw = Callable[..., Tensor]
"""Maps counters to the keys of a draw, ``(K, ...)``, for the attackers of a round."""

Kind = Literal["sign-flip", "noise", "scale", "label-flip", "alie", "gauge", "zeros", "shrink", "huge", "samples"]

DEFAULT_STRENGTH: dict[str, float] = {
    "sign-flip": 1.0, "noise": 10.0, "scale": 10.0, "gauge": 100.0, "shrink": 0.9, "huge": 1e25, "samples": 1000.0,
}  # fmt: skip
"""The default strength of each attack, see :func:`attack`."""

MAX_QUANTILE = NormalDist().cdf(3)
"""The largest quantile ALIE uses, three standard deviations: attackers in the majority need not hide."""


@dataclass(frozen=True)
class Attack:
    """Which share of the clients is hostile, and what they do."""

    kind: Kind = setting(doc="what hostile clients do in simulation")
    fraction: float = setting(0.2, "share of the clients that is hostile", least=0, most=1)
    strength: float | None = setting(None, "strength of the attack; a default for each kind", above=0)

    def __post_init__(self) -> None:
        check(self)


def attackers(seed: int, clients: int, fraction: float) -> Tensor:
    """Return a mask ``(clients,)`` of those that are hostile for the whole run, ``fraction`` of all, rounded."""
    if not 0 <= fraction <= 1:
        raise TDPFedError(f"attack.fraction: {fraction} given, must be at least 0 and at most 1")
    chosen = choose(seed, Stream.ATTACK, 0, clients, round(fraction * clients))
    return torch.zeros(clients, dtype=torch.bool).index_fill(0, chosen, True)


def flip_labels(federation: Federation, attackers: Tensor) -> Federation:
    """Return the federation with training labels y of the clients in the mask replaced by ``classes - 1 - y``."""
    if federation.targets != "classes":
        raise wrong("robust.attack", "label-flip", f"another for targets that are {federation.targets}")
    y = federation.y.clone()
    for k in attackers.nonzero().flatten().tolist():
        train = slice(int(federation.train_start[k]), int(federation.train_start[k] + federation.train_size[k]))
        y[train] = federation.classes - 1 - y[train]
    return replace(federation, y=y)


def attack(
    kind: Kind,
    uploads: State,
    broadcast: State,
    attackers: Tensor,
    turn: Turn,
    *,
    plan: FactorPlan | None = None,
    strength: float | None = None,
) -> State:
    """Return uploads ``(K, n)`` with those of the clients in the mask ``(K,)`` replaced by hostile ones.

    ``broadcast`` holds what the turn's clients received under the same names, ``(K, n)`` or ``(n,)``. With update u and
    strength c, ``sign-flip`` sends -c u, ``scale`` c u, ``noise`` u plus normal noise of c times its root mean square,
    ``alie`` the honest mean minus c standard deviations (None: :func:`alie_deviations`), ``gauge`` equivalent factors
    scaled by c and 1/c, ``zeros`` zeros, ``shrink`` c times the broadcast, ``huge`` normal numbers of deviation c.
    ``label-flip`` changes the data before the run (:func:`flip_labels`), ``samples`` the weights (:func:`declared`).
    """
    if kind not in get_args(Kind):
        raise unknown("attack.kind", kind, get_args(Kind))
    if strength is not None and not 0 < strength < math.inf:
        raise TDPFedError(f"attack.strength: {strength} given, must be finite and above 0")
    mask = attackers.to(turn.clients.device)
    rows = mask.nonzero().flatten()
    if kind in ("label-flip", "samples") or not len(rows):
        return uploads
    hostile: State = {}
    for number, (name, values) in enumerate(uploads.items()):
        draw = partial(key, turn.seed, Stream.ATTACK, turn.round, turn.clients[rows, None], number)
        if kind == "gauge" and name != "factors" and len(uploads) > 1:
            bad = values[rows]  # only factors have a gauge
        elif kind == "gauge":
            bad = regauged(values[rows], _factorized(plan, values), draw, strength or DEFAULT_STRENGTH[kind])
        elif kind in ("zeros", "shrink", "huge"):
            bad = _in_place(kind, broadcast[name].expand_as(values)[rows], draw, strength)
        else:
            sent = broadcast[name].expand_as(values)
            bad = sent[rows] + _bad_update(kind, values - sent, mask, draw, strength)
        hostile[name] = values.index_copy(0, rows, bad)
    return hostile


def declared(samples: Tensor, attackers: Tensor, strength: float | None = None) -> Tensor:
    """Return the numbers of samples that clients declare: those in the mask ``strength`` times as many as they have."""
    times = strength or DEFAULT_STRENGTH["samples"]
    return torch.where(attackers.to(samples.device), (samples.double() * times).clamp(1, 2**53), samples)


def alie_deviations(clients: int, attackers: int) -> float:
    """Return how many deviations from the mean still look honest (Baruch et al., 2019), from 0 to 3.

    On average, as many honest clients as the attackers lack for a majority must lie farther out.
    """
    missing, honest = clients // 2 + 1 - attackers, clients - attackers
    share = (honest - missing) / honest if honest else 1.0
    return NormalDist().inv_cdf(min(max(share, 0.5), MAX_QUANTILE))


def regauged(a: Tensor, plan: FactorPlan, draw: Draw, c: float) -> Tensor:
    """Return factors that compose the same tensors as ``a`` ``(K, Q)`` but are far from ``a``.

    For each parameter and client, the columns of two factors are scaled by c and 1/c, with the same random signs, and
    the columns of all factors are permuted in the same random order.
    """
    entries, moved = iter(plan.factors.split(a)), []
    for number, (shape, rank) in enumerate(zip(plan.dense.shapes, plan.ranks, strict=True)):
        if rank is None:
            moved.append(next(entries))
            continue
        column, mode = (torch.arange(size, device=a.device) for size in (rank, len(shape)))
        sign = 1 - 2 * (uniform(draw(number, 0, column)) < 0.5).to(a.dtype)
        order = permute(column, torch.tensor(rank, device=a.device), draw(number, 1))[:, None]
        places = permute(mode, torch.tensor(len(shape), device=a.device), draw(number, 2))
        for place in places.split(1, dim=-1):
            factor = next(entries)
            scale = torch.where(place == 0, sign * c, torch.where(place == 1, sign / c, 1))
            moved.append((factor * scale[:, None]).gather(-1, order.expand_as(factor)))
    return plan.factors.join(moved)


def _in_place(kind: Kind, sent: Tensor, draw: Draw, strength: float | None) -> Tensor:
    """Return what attackers send in place of an update, given what they received ``(K, n)``."""
    if kind == "zeros":
        return torch.zeros_like(sent)
    c = strength or DEFAULT_STRENGTH[kind]
    return c * sent if kind == "shrink" else c * _normal(sent, draw)


def _bad_update(kind: Kind, update: Tensor, mask: Tensor, draw: Draw, strength: float | None) -> Tensor:
    """Return what the clients in the mask send instead of their rows of ``update`` ``(K, n)``."""
    own, c = update[mask], strength or DEFAULT_STRENGTH.get(kind, 0.0)
    if kind == "sign-flip":
        return -c * own
    if kind == "scale":
        return c * own
    if kind == "noise":
        return own + c * own.square().mean(-1, keepdim=True).sqrt() * _normal(own, draw)
    known = own if bool(mask.all()) else update[~mask]  # without honest clients, attackers imitate each other
    std, mean = torch.std_mean(known, 0, correction=0)
    z = strength or alie_deviations(len(update), len(own))
    return (mean - z * std).expand_as(own)


def _normal(like: Tensor, draw: Draw) -> Tensor:
    """Return standard normal numbers ``(K, n)``, by the Box-Muller transform."""
    place = torch.arange(like.shape[-1], device=like.device)
    radius = (-2 * (1 - uniform(draw(place, 0))).log()).sqrt()
    return (radius * (2 * math.pi * uniform(draw(place, 1))).cos()).to(like.dtype)


def _factorized(plan: FactorPlan | None, values: Tensor) -> FactorPlan:
    if plan is None or all(rank is None for rank in plan.ranks) or values.shape[-1] != plan.factors.size:
        raise TDPFedError("attack.kind: 'gauge' given, must be another: the uploads are no CP factors")
    return plan
