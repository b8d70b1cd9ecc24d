"""Checkpoints of a run in several processes: the first process reads and writes them on behalf of all.

Each process holds the rows of its own clients. The first one sends requests for rows, the others answer them until it
is done. A checkpoint is therefore independent of the number of processes, and only the first process needs the disk.
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
from tdpfed.engine.processes import Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Rows, Store
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints, Snapshot


class _Request(IntEnum):
    END = 0  # no more requests
    START = 1  # make a new store for this many clients, all in this state
    GET = 2  # send these clients' rows
    PUT = 3  # store these clients' rows


class GatheredRows:
    """The rows of all clients, for the first process; the others answer requests in :func:`gathered`."""

    def __init__(self, store: Store) -> None:
        self.store, self.start, self.clients, self.touched = store, store.start, store.clients, store.touched

    @property
    def spec(self) -> dict[str, str]:
        """Type and shape of each entry."""
        return self.store.spec

    def rows(self, clients: Tensor) -> State:
        """Return the rows of the clients, in their order."""
        _send(self.store.ranks, _Request.GET, clients)
        return self.store.ranks.gather(self.store.rows(clients), clients)

    def put(self, clients: Tensor, rows: State) -> None:
        """Send every row to the process that holds its client."""
        _send(self.store.ranks, _Request.PUT, clients, rows)
        self.store.put(clients, self.store.ranks.part(rows, clients))


@contextmanager
def gathered(store: Store) -> Iterator[Rows | None]:
    """Yield the rows of all clients in the first process; the others answer its requests and then yield None."""
    if store.ranks.world == 1:
        yield store
    elif store.ranks.leads:
        try:
            yield GatheredRows(store)
        finally:
            _send(store.ranks, _Request.END, torch.arange(0))
    else:
        _answer_requests(store)
        yield None


def load_for_all(checkpoints: Checkpoints, simulation: Simulation) -> tuple[Snapshot, list[str]] | None:
    """Return the newest good checkpoint and warnings; each process gets its own rows. None if nothing was saved."""
    store, device, ranks = simulation.store, simulation.federation.device, simulation.ranks
    if ranks.world == 1:
        return checkpoints.load(device, store.like)
    if not ranks.leads:
        held = _answer_requests(store)
        header, server = json.loads(ranks.broadcast(b"")), from_bytes(ranks.broadcast(b""))
        moved = {name: value.to(device) for name, value in server.items()}
        return (Snapshot(header["round"], moved, held, header["meta"]), []) if header else None

    def make(start: State, clients: int) -> Rows:
        _send(ranks, _Request.START, torch.tensor([clients]), start)
        return GatheredRows(store.like(start, clients))

    found, header, server = None, dict[str, object](), State()
    try:
        found = checkpoints.load(device, make)
        if found is not None:
            header, server = {"round": found[0].round, "meta": found[0].meta}, found[0].server
    finally:
        _send(ranks, _Request.END, torch.arange(0))
        ranks.broadcast(json.dumps(header).encode())
        ranks.broadcast(_packed(server))
    if found is None or not isinstance(found[0].private, GatheredRows):
        return None
    return replace(found[0], private=found[0].private.store), found[1]


def _answer_requests(store: Store) -> Store:
    """Answer the first process's requests until there are no more; return the latest store."""
    ranks = store.ranks
    device = next(iter(store.start.values())).device if store.start else torch.device("cpu")
    failed: TDPFedError | None = None  # raised at the end: the first process expects answers until then
    while True:
        rows = from_bytes(ranks.broadcast(b""))
        request, ids = int(rows.pop("request")), rows.pop("ids")
        try:
            if request == _Request.START:
                store = store.like({name: value.to(device) for name, value in rows.items()}, int(ids))
            elif request == _Request.GET:
                ranks.gather(store.rows(ids), ids)
            elif request == _Request.PUT and failed is None:
                store.put(ids, ranks.part(rows, ids))
        except TDPFedError as error:
            failed = failed or error
        if request == _Request.END:
            if failed is not None:
                raise failed
            return store


def _send(ranks: Ranks, request: _Request, ids: Tensor, rows: State | None = None) -> None:
    ranks.broadcast(_packed({**(rows or {}), "request": torch.tensor([int(request)]), "ids": ids}))


def _packed(state: State) -> bytes:
    return to_bytes(
        {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}
    )
