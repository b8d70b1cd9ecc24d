"""States, the tensors that a method computes with, and turns, the position of a computation in a run.

A state is a dict of tensors, ``(n,)`` for one client or ``(K, n)`` for K at once. An entry of a message is described by
its layout, or by its length if its values have no shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tdpfed.core.layout import Layout

State = dict[str, Tensor]

WIRE, STEP, GATE = "wire.", "step.", "gate."
"""Prefixes of entries that belong to the wire, to the server's optimizer or to its gate, and not to the method."""

Entries = Mapping[str, Layout | int]
"""The entries of a message: the layout of each, or its length if it has none."""


@dataclass(frozen=True)
class Turn:
    """A round and the clients that are computed: with the seed they determine every random draw."""

    seed: int | Tensor  # (K,) if clients of several runs are computed together
    round: int | Tensor  # a scalar tensor if the computation is recorded for any round
    clients: Tensor  # (K,) ids, or () for one client


def to_each(state: State, turn: Turn) -> State:
    """Return the same message for each of the turn's clients: views with their leading axis."""
    return {name: value.expand(*turn.clients.shape, *value.shape) for name, value in state.items()}


def own_entries(state: State) -> State:
    """Return the entries of a state that belong to the method."""
    return {name: value for name, value in state.items() if not name.startswith((WIRE, STEP, GATE))}


def wire_entries(state: State) -> State:
    """Return the entries of a state that belong to the wire."""
    return {name: value for name, value in state.items() if name.startswith(WIRE)}


def lengths_of(entries: Entries) -> dict[str, int]:
    """Return the number of values of each entry."""
    return {name: entry if isinstance(entry, int) else entry.size for name, entry in entries.items()}


def layouts_of(entries: Entries) -> dict[str, Layout | None]:
    """Return the layout of each entry; None for plain values."""
    return {name: None if isinstance(entry, int) else entry for name, entry in entries.items()}
