"""The results of a round's clients, as the runners return them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.core.state import State, Turn
from tdpfed.wire.codecs import finite

FINITE = "finite"
"""The metric, added to the algorithm's own, that says whether all results of a client are finite."""


@dataclass(frozen=True)
class Updates:
    """The results of a round's clients: new private state, uploads and metrics, each with a leading client axis."""

    private: State
    upload: State
    metrics: State

    @property
    def parts(self) -> tuple[State, State, State]:
        """The three of them."""
        return self.private, self.upload, self.metrics


def with_finiteness(private: State, upload: State, metrics: State) -> tuple[State, State, State]:
    """Return the clients' results, with a metric that says whether all of them are finite."""
    values = (*metrics.values(), *private.values(), *upload.values())
    distinct = {id(value): value for value in values}.values()  # a tensor may be both kept and sent
    clients = metrics["loss"].shape
    seen = torch.stack([finite(value.reshape(*clients, -1)) for value in distinct]).all(0)
    return private, upload, {**metrics, FINITE: seen}


def joined(parts: list[Updates]) -> Updates:
    """Return the results of several groups of clients as one."""
    if len(parts) == 1:
        return parts[0]

    known: dict[tuple[int, ...], Tensor] = {}  # a tensor that is both kept and sent is joined once

    def join(parts: list[State]) -> State:
        joined = {}
        for name in parts[0]:
            pieces = [part[name] for part in parts]
            same = tuple(map(id, pieces))
            joined[name] = known[same] = known[same] if same in known else torch.cat(pieces)
        return joined

    return Updates(*(join(list(part)) for part in zip(*(updates.parts for updates in parts), strict=True)))


def as_state(turn: Turn) -> State:
    """Return a turn as tensors on its clients' device."""
    scalars = {"seed": turn.seed, "round": turn.round}
    device = turn.clients.device
    numbers = {name: v if isinstance(v, Tensor) else torch.full((), v, device=device) for name, v in scalars.items()}
    return {**numbers, "clients": turn.clients}


def rows_of(state: State, clients: Tensor) -> State:
    """Return the rows of the given clients."""
    return {name: rows[clients] for name, rows in state.items()}
