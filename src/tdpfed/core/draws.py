"""Counter-based random draws: every draw is a pure function of its position, so the order of draws does not matter.

A minibatch is a function of (seed, round, client, step), the selection of a client one of (seed, round, client), and so
on. The runner, the order or chunking of clients, the device and a resumed run do not change the draws. Keys are whole
numbers modulo 2^32 in int64 tensors (a product may wrap, its low bits are right), the same on CPU and GPU.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from tdpfed.core.permutation import MASK, mix, permute
from tdpfed.core.state import Turn


class Stream(IntEnum):
    """The purpose of a draw; draws of different purposes are independent."""

    BATCH = 1
    SELECT = 2
    DROP = 3
    SUBSET = 4
    INIT = 5
    CODEC = 6
    ATTACK = 7
    NOISE = 8
    EVALUATE = 9
    AUGMENT = 10
    HOLD_OUT = 11
    VALIDATION = 12
    PUBLIC = 13
    CLUSTER = 14
    DROPOUT = 15
    START = 16


def key(seed: int | Tensor, stream: Stream, *counters: Tensor | int) -> Tensor:
    """Return the 32-bit key of a draw; tensors broadcast against each other."""
    any_: Any = seed
    state: Any = mix((any_ & MASK) ^ mix(((any_ >> 32) & MASK) + 0x9E3779B9))
    for counter in (int(stream), *counters):  # Python integers until the first tensor, whose device the key has
        state = mix(((state * 0x9E3779B1 & MASK) + counter + 0x7F4A7C15) & MASK)
    return torch.as_tensor(state)


def uniform(bits: Tensor) -> Tensor:
    """Return 32-bit keys as float64 numbers in [0, 1)."""
    return mix(bits ^ 0x5851F42D).double() / 2**32


def batch_indices(
    seed: int | Tensor,
    round_: int | Tensor,
    clients: Tensor,
    start: Tensor,
    size: Tensor,
    draws: int,
    batch_size: int,
    stream: Stream = Stream.BATCH,
    *,
    by_pass: bool = False,
) -> Tensor:
    """Return which samples each client sees in a round, ``(K, draws, batch_size)``.

    A client passes through its ``size`` samples (stored from ``start`` on) in its own random order, a new one for each
    pass: no sample repeats before all have been seen. ``by_pass``: no minibatch is of two passes, so the last one of a
    pass may be shorter (:func:`length_in_pass`); the rest of its row repeats a sample.
    """
    if by_pass:
        return _by_pass(seed, round_, clients, start, size, draws, batch_size, stream)
    position = torch.arange(draws * batch_size, device=start.device)[None, :]
    start, size = start[:, None], size[:, None]
    seed = seed.unsqueeze(-1) if isinstance(seed, Tensor) else seed
    one_pass = not size.is_cuda and bool((size >= position.shape[-1]).all())
    passes = torch.zeros_like(position[:, :1]) if one_pass else position // size
    bits = key(seed, stream, round_, clients[:, None], passes)
    return (start + permute(position % size, size, bits)).reshape(len(clients), draws, batch_size)


def _by_pass(
    seed: int | Tensor,
    round_: int | Tensor,
    clients: Tensor,
    start: Tensor,
    size: Tensor,
    draws: int,
    batch_size: int,
    stream: Stream,
) -> Tensor:
    clients, start, size = clients[:, None, None], start[:, None, None], size[:, None, None]
    step, sample = torch.arange(draws, device=size.device)[:, None], torch.arange(batch_size, device=size.device)
    in_pass = (size + batch_size - 1) // batch_size
    place = torch.minimum(step % in_pass * batch_size + sample, size - 1)
    seed = seed[:, None, None] if isinstance(seed, Tensor) and seed.ndim else seed
    return start + permute(place, size, key(seed, stream, round_, clients, step // in_pass))


def length_in_pass(step: int, size: int, batch_size: int) -> int:
    """Return the number of samples in a minibatch of a client with ``size`` samples that passes through them whole."""
    return min(batch_size, size - step % math.ceil(size / batch_size) * batch_size)


def held_out_sizes(size: Tensor, share: float) -> Tensor:
    """Return how many of each client's ``size`` training samples are held out for validation; at least one."""
    return (share * size.double() + 1e-9).floor().long().clamp_min(1) if share else torch.zeros_like(size)


@dataclass(frozen=True)
class HeldOut:
    """The share of each client's training samples that is held out for validation, and until which round."""

    share: float = 0.0
    until: int | None = None  # the last round in which it is; then all samples are trained on. None: to the end

    def sizes(self, size: Tensor) -> Tensor:
        """Return the number of each client's validation samples."""
        return held_out_sizes(size, self.share)

    def sizes_in(self, size: Tensor, round_: int | Tensor) -> Tensor:
        """Return how many of them are not trained on in a round."""
        return self.sizes(size) if self.until is None else self.sizes(size) * (round_ <= self.until)


def own_indices(
    seed: int | Tensor,
    round_: int | Tensor,
    clients: Tensor,
    start: Tensor,
    size: Tensor,
    draws: int,
    batch_size: int,
    held_out: HeldOut,
    validation: bool = False,
    by_pass: bool = False,
) -> Tensor:
    """Return :func:`batch_indices` where a share of each client's samples is held out, or with ``validation`` of those.

    Which samples are held out is drawn once for a client and run.
    """
    if not held_out.share:
        return batch_indices(seed, round_, clients, start, size, draws, batch_size, by_pass=by_pass)
    if validation:
        held = held_out.sizes(size)
        place = batch_indices(seed, round_, clients, size - held, held, draws, batch_size, Stream.VALIDATION)
    else:
        kept, first = size - held_out.sizes_in(size, round_), torch.zeros_like(size)
        place = batch_indices(seed, round_, clients, first, kept, draws, batch_size, by_pass=by_pass)
    seed = seed[:, None, None] if isinstance(seed, Tensor) and seed.ndim else seed
    bits = key(seed, Stream.HOLD_OUT, clients[:, None, None])
    return start[:, None, None] + permute(place, size[:, None, None], bits)


def dealt(turn: Turn, population: int, groups: int) -> Tensor:
    """Return a group for each of the turn's clients, ``(...)``: drawn once for a run, and groups of even sizes."""
    size = torch.full((), population, device=turn.clients.device)
    return permute(turn.clients, size, key(turn.seed, Stream.CLUSTER).to(size.device)) % groups


def choose(seed: int, stream: Stream, round_: int, population: int, count: int, attempt: int = 0) -> Tensor:
    """Return ``count`` of ``population`` client ids, ascending, drawn anew for each round and attempt."""
    positions = torch.arange(count)
    drawn = permute(positions, torch.tensor(population), key(seed, stream, round_, *((attempt,) if attempt else ())))
    return drawn.sort().values


def choose_by_size(seed: int, round_: int, sizes: Tensor, count: int, attempt: int = 0) -> Tensor:
    """Return ``count`` client ids, ascending, drawn with probability ``count * size / total size``; sizes ``(K,)``.

    Systematic sampling: the clients stand in a random order, each as long as its size, and points at equal distances
    from a random start choose those in which they lie. All in integers, so the probabilities are exact; none may be
    above 1.
    """
    again, total = (attempt,) if attempt else (), int(sizes.sum())
    everybody, population = torch.arange(len(sizes)), torch.tensor(len(sizes))
    order = permute(everybody, population, key(seed, Stream.SELECT, round_, *again))
    start = (uniform(key(seed, Stream.START, round_, *again)) * total).long()
    points = start + total * torch.arange(count)
    return order[torch.searchsorted(count * sizes[order].cumsum(0), points, right=True)].sort().values


class Subsets:
    """Random subsets of ``count`` of ``size`` coordinates, one for each client and round; the latest are cached."""

    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        # Broadcast, update and average of a round use the same subset, with groups of clients in between.
        self._latest: deque[tuple[Turn, Tensor]] = deque(maxlen=4)
        self._mask: tuple[Tensor, Tensor] | None = None  # of a subset

    def of(self, turn: Turn) -> Tensor:
        """Return the coordinates of each client's subset, ``(..., count)``."""
        latest = tuple(self._latest)
        known = next((drawn for seen, drawn in latest if _same(seen, turn)), None)
        known = self._joined(turn, latest) if known is None else known
        if known is None:
            device = turn.clients.device
            bits = key(turn.seed, Stream.SUBSET, turn.round, turn.clients).unsqueeze(-1)
            known = permute(torch.arange(self.count, device=device), torch.full((), self.size, device=device), bits)
        if all(known is not drawn for _, drawn in latest):
            self._latest.append((turn, known))
        return known

    def mask(self, turn: Turn, like: Tensor) -> Tensor:
        """Return 1 at the coordinates of each client's subset and 0 elsewhere, ``(..., size)``."""
        chosen, latest = self.of(turn), self._mask
        if latest is None or latest[0] is not chosen or latest[1].dtype != like.dtype:
            nothing = torch.zeros((*chosen.shape[:-1], self.size), dtype=like.dtype, device=like.device)
            latest = self._mask = chosen, nothing.scatter_(-1, chosen, 1.0)
        return latest[1]

    def _joined(self, turn: Turn, latest: Sequence[tuple[Turn, Tensor]]) -> Tensor | None:
        """Return the subsets of clients that were drawn in several groups; None if some were not."""
        if turn.clients.ndim != 1 or isinstance(turn.round, Tensor):
            return None
        parts = [
            (seen.clients, drawn)
            for seen, drawn in latest
            if seen.clients.ndim == 1
            and not isinstance(seen.round, Tensor)
            and (seen.seed, seen.round) == (turn.seed, turn.round)
        ]
        if not parts or not len(turn.clients):
            return None
        clients, order = torch.cat([clients for clients, _ in parts]).sort()
        place = torch.searchsorted(clients, turn.clients).clamp_max(max(0, len(clients) - 1))
        if not len(clients) or not torch.equal(clients[place], turn.clients):
            return None
        return torch.cat([drawn for _, drawn in parts])[order[place]]


def _same(one: Turn, other: Turn) -> bool:
    if one is other or isinstance(one.round, Tensor) or isinstance(other.round, Tensor):
        return one is other  # recorded computations have no values to compare
    return (one.seed, one.round) == (other.seed, other.round) and torch.equal(one.clients, other.clients)
