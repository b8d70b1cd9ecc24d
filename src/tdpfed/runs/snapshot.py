"""The state from which a run resumes, and the checks that it belongs to the run that resumes from it.

It must be of the same method and seed, of the same data in the hands of the same clients, and its rounds must have
spent the privacy that the run's settings say they do.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.core.setting import plain
from tdpfed.core.state import State
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Rows, Store
from tdpfed.errors import TDPFedError, wrong
from tdpfed.server.records import Ledger
from tdpfed.server.step import ServerStep
from tdpfed.wire import Wire

FILE_BYTES = 1 << 27
"""Bytes of rows in one file; as much extra memory is needed while it is written or read."""


@dataclass(frozen=True)
class Snapshot:
    """The state from which a run resumes: the server's state, the clients' rows, and metadata for JSON."""

    round: int
    server: State
    private: Rows
    meta: dict[str, Any]


def snapshot_of(simulation: Simulation, **meta: Any) -> Snapshot:
    """Return the state of a run, with ``meta`` added; the rows are not copied: save before the next round."""
    own = {
        "algorithm": simulation.algorithm.name, "seed": simulation.seed, "ledger": asdict(simulation.ledger),
        "data": simulation.federation.digest, "layout": simulation.objective.layout.hash,
        "privacy": spent_by(simulation, simulation.round),
        **{section: plain(settings) for section, settings in _form(simulation).items()},
    }  # fmt: skip
    return Snapshot(simulation.round, dict(simulation.server), simulation.store, own | meta)


def _form(simulation: Simulation) -> dict[str, Wire | ServerStep]:
    """Return the settings, by section, on which the entries of a checkpoint and their meaning depend."""
    return {"wire": simulation.channel.wire, "server": simulation.server_round.step}


def spent_by(simulation: Simulation, rounds: int) -> dict[str, float] | None:
    """Return the privacy that rounds of this run spend, and what it follows from; None without privacy."""
    accountant = simulation.accountant
    if accountant is None:
        return None
    asked = accountant.privacy
    return {
        "epsilon": accountant.epsilon(rounds), "delta": asked.delta, "noise": asked.noise, "clip": asked.clip,
        "rate": accountant.rate,
    }  # fmt: skip


def _check_privacy(simulation: Simulation, snapshot: Snapshot) -> None:
    """Refuse a run whose settings say that the completed rounds spent another epsilon than they did.

    Epsilon itself may differ a little, by the version of the library that computes it.
    """
    saved, now = snapshot.meta.get("privacy"), spent_by(simulation, snapshot.round)
    if saved is None and now is None:
        return
    if saved is None or now is None:
        raise TDPFedError(f"checkpoint: privacy {saved!r} saved, must be {now!r} as in this run")
    spent = saved.get("epsilon") if isinstance(saved, Mapping) else None
    known = isinstance(spent, float | int) and math.isclose(spent, now["epsilon"], rel_tol=1e-3)
    if not known or {**now, "epsilon": spent} != saved:
        raise TDPFedError(
            f"checkpoint: privacy {saved} was spent in {snapshot.round} rounds, by the settings of this run it would "
            f"be {now}; what was spent is not counted again with other settings"
        )


def check_layout(snapshot: Snapshot, layout: Layout) -> None:
    """Refuse a model with other parameters than those of a checkpoint; one of an older version does not name them."""
    if snapshot.meta.get("layout", layout.hash) != layout.hash:
        raise TDPFedError(
            "parameters of other names or shapes than those in the checkpoint; must be the run's own model",
            field="model.name",
        )


def restore(simulation: Simulation, snapshot: Snapshot, *, take: bool = False) -> None:
    """Resume a run from ``snapshot``; one of another run is refused, and the simulation does not change.

    Rows are copied, so that two runs never share state; with ``take`` the run uses the snapshot's store itself.
    """
    meta = snapshot.meta
    for name, mine in (("algorithm", simulation.algorithm.name), ("seed", simulation.seed)):
        if meta.get(name) != mine:
            raise TDPFedError(f"checkpoint: {name} {meta.get(name)!r} saved, must be {mine!r} as in this run")
    if meta.get("data") != simulation.federation.digest:
        raise TDPFedError(
            f"checkpoint: data with checksum {meta.get('data')!r} saved, must be {simulation.federation.digest!r}: the "
            "samples, their labels or their distribution to clients differ from those of this run"
        )
    check_layout(snapshot, simulation.objective.layout)
    _check_privacy(simulation, snapshot)
    for section, settings in _form(simulation).items():
        saved = meta.get(section, {})
        if not isinstance(saved, Mapping):
            raise TDPFedError(f"checkpoint: {section} {saved!r} saved, which this version cannot read")
        known = plain(type(settings)()) | dict(saved)  # an older version had the defaults
        for name, value in plain(settings).items():
            if known[name] != value:
                raise wrong(f"{section}.{name}", value, f"{known[name]!r} as in the run's checkpoint")
    for place, stored, have in (
        ("server", _spec(snapshot.server), _spec(simulation.server)),
        ("private", snapshot.private.spec, simulation.store.spec),
    ):
        if stored != have:
            raise TDPFedError(f"checkpoint: {place} state {stored} saved, must be {have} as in this run")
    ledger = _ledger(meta.get("ledger"))
    # A copy, since tensors that torch allocates are aligned: the last bit may depend on alignment.
    server = {name: snapshot.server[name].to(v.device, copy=True) for name, v in simulation.server.items()}
    if take and isinstance(snapshot.private, Store):
        store = snapshot.private
    else:
        start = {name: value.to(simulation.store.start[name].device) for name, value in snapshot.private.start.items()}
        store = simulation.store.like(start, snapshot.private.clients)
        for ids in split_by_size(snapshot.private, snapshot.private.touched.nonzero().flatten()):
            store.put(ids, snapshot.private.rows(ids))
    simulation.resume_from(snapshot.round, server, store, ledger)


def _ledger(saved: object) -> Ledger:
    """Return the counts that were saved, all of them whole numbers."""
    names = {item.name for item in fields(Ledger)}
    if not isinstance(saved, Mapping) or not saved.keys() <= names or any(type(v) is not int for v in saved.values()):
        raise TDPFedError(f"checkpoint: ledger {saved!r} saved, which this version cannot read")
    return Ledger(**saved)


def split_by_size(private: Rows, ids: Tensor) -> tuple[Tensor, ...]:
    """Split ids into parts whose rows fit in one file."""
    row = sum(value.nbytes for value in private.start.values())
    pieces: tuple[Tensor, ...] = ids.split(max(1, FILE_BYTES // max(1, row)))
    return pieces


def _spec(state: State) -> dict[str, str]:
    return {name: f"{value.dtype} {tuple(value.shape)}".removeprefix("torch.") for name, value in state.items()}
