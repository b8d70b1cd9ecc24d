"""Checkpoints of a run in several processes: the first writes and reads them for all, it asks and the others answer.

So a checkpoint does not know how many processes made it, and only the first needs to see the disk.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum

import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.engine.ranks import Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Rows, Store
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints, Snapshot


class _Ask(IntEnum):
    END = 0
    START = 1  # begin anew with a store of so many clients, who are at this state
    GET = 2
    PUT = 3


class Everybodys:
    """The rows of all clients, those of other processes too; they must be waiting in :func:`lent`."""

    def __init__(self, store: Store) -> None:
        self.store, self.start, self.clients, self.touched = store, store.start, store.clients, store.touched

    @property
    def spec(self) -> dict[str, str]:
        """Type and shape of each entry."""
        return self.store.spec

    def rows(self, clients: Tensor) -> State:
        """Return the rows of the clients, in their order."""
        _tell(self.store.ranks, _Ask.GET, clients)
        return self.store.ranks.gather(self.store.rows(clients), clients)

    def put(self, clients: Tensor, rows: State) -> None:
        """Send every row to the process that holds it."""
        _tell(self.store.ranks, _Ask.PUT, clients, rows)
        self.store.put(clients, self.store.ranks.part(rows, clients))


@contextmanager
def lent(store: Store) -> Iterator[Rows | None]:
    """Yield the rows of all clients to the first process, None to the others once it is done with them."""
    if store.ranks.world == 1:
        yield store
    elif store.ranks.leads:
        try:
            yield Everybodys(store)
        finally:
            _tell(store.ranks, _Ask.END, torch.arange(0))
    else:
        _answer(store)
        yield None


def load_for_all(checkpoints: Checkpoints, simulation: Simulation) -> tuple[Snapshot, list[str]] | None:
    """Return the newest good checkpoint and warnings, each process with its own rows; None where none was saved."""
    store, device, ranks = simulation.store, simulation.federation.device, simulation.ranks
    if ranks.world == 1:
        return checkpoints.load(device, store.like)
    if not ranks.leads:
        held = _answer(store)
        told, server = json.loads(ranks.broadcast(b"")), from_bytes(ranks.broadcast(b""))
        moved = {name: value.to(device) for name, value in server.items()}
        return (Snapshot(told["round"], moved, held, told["meta"]), []) if told else None

    def make(start: State, clients: int) -> Rows:
        _tell(ranks, _Ask.START, torch.tensor([clients]), start)
        return Everybodys(store.like(start, clients))

    found, told, server = None, dict[str, object](), State()
    try:
        found = checkpoints.load(device, make)
        if found is not None:
            told, server = {"round": found[0].round, "meta": found[0].meta}, found[0].server
    finally:
        _tell(ranks, _Ask.END, torch.arange(0))
        ranks.broadcast(json.dumps(told).encode())
        ranks.broadcast(_packed(server))
    if found is None or not isinstance(found[0].private, Everybodys):
        return None
    return replace(found[0], private=found[0].private.store), found[1]


def _answer(store: Store) -> Store:
    """Do what the first process asks until it ends; return the store that it last began."""
    ranks = store.ranks
    device = next(iter(store.start.values())).device if store.start else torch.device("cpu")
    failed: TDPFedError | None = None  # said when all is done: the first process counts on being answered until then
    while True:
        rows = from_bytes(ranks.broadcast(b""))
        asked, ids = int(rows.pop("ask")), rows.pop("ids")
        try:
            if asked == _Ask.START:
                store = store.like({name: value.to(device) for name, value in rows.items()}, int(ids))
            elif asked == _Ask.GET:
                ranks.gather(store.rows(ids), ids)
            elif asked == _Ask.PUT and failed is None:
                store.put(ids, ranks.part(rows, ids))
        except TDPFedError as error:
            failed = failed or error
        if asked == _Ask.END:
            if failed is not None:
                raise failed
            return store


def _tell(ranks: Ranks, ask: _Ask, ids: Tensor, rows: State | None = None) -> None:
    ranks.broadcast(_packed({**(rows or {}), "ask": torch.tensor([int(ask)]), "ids": ids}))


def _packed(state: State) -> bytes:
    return to_bytes(
        {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    )
