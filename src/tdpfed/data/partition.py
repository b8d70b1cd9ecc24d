"""Partitions of samples into clients: pure functions of labels and a seed that return one index array per client.

``iid``, ``classes`` (at random or in turn), ``class_groups``, ``dirichlet`` and ``natural`` assign each sample to at
most one client; ``bounded`` enforces a minimum and a maximum number of samples per client; ``split``, ``split_in_time``
and ``split_official`` separate training from test samples.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdpfed.errors import TDPFedError

Indices = NDArray[np.int64]
Parts = list[tuple[Indices, Indices]]

_CAP, _SPLIT = 1, 2  # streams separate from the one that assigns samples
_REDRAWS = 100


def generator(seed: int, *stream: int) -> np.random.Generator:
    """Return the random generator of a seed; different streams of one seed are independent."""
    if seed < 0:
        raise TDPFedError(f"{seed!r}; allowed: 0 or more", field="seed")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)))


def iid(
    labels: NDArray[Any], clients: int, seed: int, size_skew: float = 0.0, *, min_samples: int = 1
) -> list[Indices]:
    """Assign all samples at random; sizes are log-normal with sigma ``size_skew`` (0: equal)."""
    _check(labels, clients, size_skew, min_samples)
    rng = generator(seed)
    sizes = _apportion(len(labels), _shares(rng, clients, size_skew), min_samples)
    return _assigned(rng.permutation(len(labels)), sizes)


def classes(
    labels: NDArray[Any],
    clients: int,
    per_client: int,
    seed: int,
    size_skew: float = 0.5,
    *,
    in_turn: bool = False,
    min_samples: int = 1,
) -> list[Indices]:
    """Give each client ``per_client`` classes, and assign all samples of all classes.

    Classes are distributed as evenly as possible and otherwise at random, or ``in_turn``: client k has the k-th class
    and those that follow, cyclically. The clients of a class share its samples in log-normal proportions with sigma
    ``size_skew``.
    """
    _check(labels, clients, size_skew, min_samples)
    names = np.unique(labels)
    _check_per_client(per_client, len(names))
    need = len(names) - per_client + 1 if in_turn else -(-len(names) // per_client)
    if clients < need:
        raise TDPFedError(
            f"{clients!r} with {per_client} classes each{' in turn' if in_turn else ''} leave some of "
            f"{len(names)} classes without a client; allowed: {need} clients or more",
            field="clients",
        )
    rng = generator(seed)
    holders: list[list[int]] = [[] for _ in names]
    for k in range(clients):
        order = np.roll(np.arange(len(names)), -k) if in_turn else _rarest_first(rng, holders)
        for c in order[:per_client]:
            holders[c].append(k)
    least = -(-min_samples // per_client)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    for name, group in zip(names, holders, strict=True):
        members = np.flatnonzero(labels == name)
        if len(members) < least * len(group):
            raise TDPFedError(
                f"{clients!r} put {len(group)} clients on class {name}, which has {len(members)} samples; "
                f"allowed: a number that gives each at least {least}",
                field="clients",
            )
        sizes = _apportion(len(members), _shares(rng, len(group), size_skew), least)
        for k, part in zip(group, _assigned(rng.permutation(members), sizes), strict=True):
            held[k].append(part)
    return [np.sort(np.concatenate(parts)) for parts in held]


def _check_per_client(per_client: int, classes: int) -> None:
    if per_client not in range(1, classes + 1):
        raise TDPFedError(f"{per_client!r}; allowed: 1 to {classes}, the number of classes", field="classes per client")


def _rarest_first(rng: np.random.Generator, holders: list[list[int]]) -> Indices:
    """Return the classes ordered by their number of clients, ties at random."""
    order = rng.permutation(len(holders))
    return order[np.argsort([len(holders[c]) for c in order], kind="stable")]


def class_groups(
    labels: NDArray[Any], clients: int, per_client: int, seed: int, *, min_samples: int = 1
) -> list[Indices]:
    """Deal classes in order, each to the first clients that lack one: groups of clients have the same classes.

    Of each class all its clients but the last get a random part, a tenth of an equal share to a whole one, and the last
    gets the rest. This is the partition that PFLlib calls pathological.
    """
    _check(labels, clients, 0.0, min_samples)
    names = np.unique(labels)
    _check_per_client(per_client, len(names))
    each = -(-clients * per_client // len(names))
    free, rng = np.full(clients, per_client), generator(seed)
    held: list[list[Indices]] = [[] for _ in range(clients)]
    least = -(-min_samples // per_client)
    for name in names:
        holders, members = np.flatnonzero(free)[:each], np.flatnonzero(labels == name)
        if not len(holders):
            raise TDPFedError(
                f"{clients!r} with {per_client} classes each in groups of {each} leave class {name} without a client; "
                f"allowed: a number whose {per_client} classes each are a multiple of {len(names)} classes",
                field="clients",
            )
        share = len(members) / len(holders)
        if share < max(least, 1):
            raise TDPFedError(
                f"{clients!r} put {len(holders)} clients on class {name}, which has {len(members)} samples; "
                f"allowed: a number that gives each at least {least}",
                field="clients",
            )
        low = min(max(int(share / 10), least, 1), int(share))
        sizes = rng.integers(low, max(low + 1, int(share)), len(holders) - 1)
        order = rng.permutation(members)
        for k, part in zip(holders, _assigned(order, np.append(sizes, len(members) - sizes.sum())), strict=True):
            held[k].append(part)
        free[holders] -= 1
    if free.any():
        raise TDPFedError(
            f"{clients!r} in groups of {each} leave client {int(free.argmax())} with fewer than {per_client} classes; "
            f"allowed: whole groups whose {per_client} classes each are a multiple of {len(names)} classes",
            field="clients",
        )
    return [np.sort(np.concatenate(parts)) for parts in held]


def dirichlet(
    labels: NDArray[Any], clients: int, alpha: float, seed: int, min_samples: int = 1, *, capped: bool = False
) -> list[Indices]:
    """Divide each class in proportions drawn from Dirichlet(alpha); a small alpha gives few classes per client.

    Redraws, up to a hundred times, until every client has ``min_samples``. With ``capped`` a client that has as many
    samples as the average gets none of further classes.
    """
    _check(labels, clients, 0.0, min_samples)
    if not 0 < alpha < np.inf:
        raise TDPFedError(f"{alpha!r}; allowed: a number above 0", field="dirichlet alpha")
    rng = generator(seed)
    members = [np.flatnonzero(labels == name) for name in np.unique(labels)]
    for _ in range(_REDRAWS):
        shares = rng.dirichlet(np.full(clients, alpha), len(members))
        counts = np.zeros((len(members), clients), dtype=np.int64)
        for c, (group, drawn) in enumerate(zip(members, shares, strict=True)):
            room = (counts.sum(0) * clients < len(labels)) | (not capped)
            left = drawn * room
            counts[c] = _apportion(len(group), left if left.any() else room.astype(np.float64), 0)
        if counts.sum(0).min() >= min_samples:
            break
    else:
        poorest = int(counts.sum(0).argmin())
        raise TDPFedError(
            f"{min_samples!r} not reached in {_REDRAWS} draws of dirichlet alpha {alpha!r}: client "
            f"{poorest} got {counts.sum(0)[poorest]}; allowed: a smaller min_samples, fewer clients or a larger alpha",
            field="min_samples",
        )
    by_class = [_assigned(rng.permutation(m), c) for m, c in zip(members, counts, strict=True)]
    return [np.sort(np.concatenate(parts)) for parts in zip(*by_class, strict=True)]


def natural(owner: NDArray[Any]) -> list[Indices]:
    """Assign every sample to the client that owns it; clients are in the order of their ids."""
    client = numbered(owner)
    return _assigned(np.argsort(client, kind="stable"), np.bincount(client))


def numbered(ids: NDArray[Any]) -> Indices:
    """Map the ids, whole numbers or strings, to 0 to K - 1 in sorted order."""
    check_ids(ids)
    return np.unique(ids, return_inverse=True)[1].astype(np.int64)


def check_ids(ids: NDArray[Any]) -> None:
    """Refuse client ids that are neither whole numbers nor strings."""
    if ids.dtype.kind not in "iuUSO":
        raise TDPFedError(f"{ids.dtype}; allowed: whole numbers or strings", field="client ids")


def names(ids: NDArray[Any]) -> tuple[str, ...]:
    """Return the different ids as texts, in the order in which :func:`natural` lists their clients."""
    check_ids(ids)
    return tuple(one.decode("utf-8", "replace") if isinstance(one, bytes) else str(one) for one in np.unique(ids))


def bounded(
    parts: Sequence[Indices], seed: int, *, min_samples: int = 1, max_samples: int | None = None
) -> list[Indices]:
    """Reject clients with fewer than ``min_samples``; draw ``max_samples`` from those with more."""
    _positive(min_samples)
    if max_samples is not None and max_samples < min_samples:
        raise TDPFedError(f"{max_samples!r}; allowed: {min_samples} (min_samples) or more", field="max_samples")
    for k, part in enumerate(parts):
        if len(part) < min_samples:
            raise TDPFedError(
                f"client {k} has {len(part)} samples; allowed: {min_samples} or more", field="min_samples"
            )
    if max_samples is None:
        return list(parts)
    return [
        np.sort(generator(seed, _CAP, k).choice(part, max_samples, replace=False)) if len(part) > max_samples else part
        for k, part in enumerate(parts)
    ]


def split(parts: Sequence[Indices], test_fraction: float = 0.25, seed: int = 0) -> Parts:
    """Split each client's samples at random into (training, test).

    A client with at least two samples gets both kinds; with ``test_fraction`` 0 no client has test samples.
    """
    pairs = []
    for k, (part, held_out) in enumerate(zip(parts, _held_out(parts, test_fraction), strict=True)):
        order = generator(seed, _SPLIT, k).permutation(part)
        pairs.append((np.sort(order[held_out:]), np.sort(order[:held_out])))
    return _trainable(pairs)


def split_in_time(parts: Sequence[Indices], test_fraction: float = 0.25) -> Parts:
    """Split each client's samples into the first ones for training and the last ones, as many as :func:`split`."""
    sizes = _held_out(parts, test_fraction)
    return _trainable([(part[: len(part) - n], part[len(part) - n :]) for part, n in zip(parts, sizes, strict=True)])


def _held_out(parts: Sequence[Indices], test_fraction: float) -> list[int]:
    """Return the number of test samples of each client."""
    if not 0 <= test_fraction < 1:
        raise TDPFedError(f"{test_fraction!r}; allowed: 0 or more, below 1", field="test_fraction")
    if not test_fraction:
        return [0] * len(parts)
    return [min(max(round(test_fraction * len(part)), 1), len(part) - 1) for part in parts]


def split_official(parts: Sequence[Indices], official_test: NDArray[np.bool_]) -> Parts:
    """Split each client's samples as the data set's authors did: ``official_test`` marks the test samples."""
    return _trainable([(part[~official_test[part]], part[official_test[part]]) for part in parts])


def _trainable(pairs: Parts) -> Parts:
    for k, (train, test) in enumerate(pairs):
        if len(train) == 0:
            raise TDPFedError(
                f"client {k}: 0 training and {len(test)} test samples; allowed: 1 training sample or more"
            )
    return pairs


def _check(labels: NDArray[Any], clients: int, size_skew: float, min_samples: int) -> None:
    _positive(min_samples)
    if not 1 <= clients <= len(labels) // min_samples:
        raise TDPFedError(
            f"{clients!r}; allowed: 1 to {len(labels) // min_samples}, for {len(labels)} samples and at "
            f"least {min_samples} each",
            field="clients",
        )
    if not 0 <= size_skew <= 10:
        raise TDPFedError(f"{size_skew!r}; allowed: 0 (equal) to 10", field="size_skew")


def _positive(min_samples: int) -> None:
    if min_samples < 1:
        raise TDPFedError(f"{min_samples!r}; allowed: 1 or more", field="min_samples")


def _shares(rng: np.random.Generator, count: int, sigma: float) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = rng.lognormal(0.0, abs(sigma), count)  # -0.0 is no sigma for NumPy
    return drawn


def _apportion(total: int, shares: NDArray[np.float64], least: int) -> Indices:
    """Return whole numbers that sum to ``total``: ``least`` each, and the rest in proportion to shares."""
    heights = np.cumsum(shares)
    ends = np.rint(heights / heights[-1] * (total - least * len(shares))).astype(np.int64)
    sizes: Indices = np.diff(ends, prepend=0) + least
    return sizes


def _assigned(order: NDArray[Any], sizes: NDArray[Any]) -> list[Indices]:
    return [np.sort(part).astype(np.int64) for part in np.split(order, np.cumsum(sizes)[:-1])]
