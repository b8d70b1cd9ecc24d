"""State and place: what a method computes on, and where in a run it computes.

A state is a dict of tensors, ``(n,)`` for one client or ``(K, n)`` for K at once. An entry of a message is described by
its layout, or by its length alone where its values have no shape of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tdpfed.core.layout import Layout

State = dict[str, Tensor]

Entries = Mapping[str, Layout | int]
"""What a message holds: for each entry its layout, or its length where it has none."""


@dataclass(frozen=True)
class Turn:
    """Which round it is and which clients are computed: together with the seed the place of every random draw."""

    seed: int | Tensor  # (K,) where clients of several runs are computed together
    round: int | Tensor  # a scalar tensor where the computation is recorded for any round
    clients: Tensor  # (K,) ids, or () for one client


def to_each(state: State, turn: Turn) -> State:
    """Return the same message for each of the turn's clients: views with their leading axis."""
    return {name: value.expand(*turn.clients.shape, *value.shape) for name, value in state.items()}


def lengths_of(entries: Entries) -> dict[str, int]:
    """Return the number of values of each entry."""
    return {name: entry if isinstance(entry, int) else entry.size for name, entry in entries.items()}


def layouts_of(entries: Entries) -> dict[str, Layout | None]:
    """Return the layout of each entry; None for plain values."""
    return {name: None if isinstance(entry, int) else entry for name, entry in entries.items()}
