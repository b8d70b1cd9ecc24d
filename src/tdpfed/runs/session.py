"""A simulated run in a folder: started or resumed from a configuration, and recorded however it ends.

A resumed run gives exactly the numbers of an uninterrupted one.
"""

import tomllib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tdpfed.config import Config, parse_config, to_toml
from tdpfed.config.unused import advice
from tdpfed.engine.ensemble import Ensemble, error_of
from tdpfed.engine.ranks import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.runs.checkpoints import restore, snapshot_of
from tdpfed.runs.experiment import prepare, threads
from tdpfed.runs.folder import CONFIG, NoFolder, RunFolder
from tdpfed.runs.gathered import gathered, load_for_all
from tdpfed.runs.journal import Journal
from tdpfed.runs.loggers import Loggers
from tdpfed.runs.summary import facts_of
from tdpfed.server.records import Record

OnRound = Callable[[Simulation], None]
Progress = Callable[[Simulation, int, list[Record]], AbstractContextManager[OnRound]]


class Session:
    """A simulation and the journal that records it in a folder."""

    def __init__(self, config: Config, simulation: Simulation, folder: RunFolder) -> None:
        self.config, self.simulation, self.ranks = config, simulation, simulation.ranks
        self.journal = Journal(config, folder, leads=simulation.ranks.leads)
        self.warnings: list[str] = []
        self._changed: Tensor | None = None  # None: no checkpoint yet, all clients are saved

    @classmethod
    def begin(cls, config: Config, path: Path, data_root: Path | None, ranks: Ranks = ALONE) -> "Session":
        """Start a new run in a new or empty folder; nothing is written before everything has been checked."""
        with ranks.agreement():
            if ranks.leads:
                RunFolder.check(path)
                Loggers.check(config)
            simulation = prepare(config, data_root, path, ranks)
            simulation.store.reserve()
            torch.set_num_threads(threads(config, simulation))
        with ranks.agreement():
            folder = RunFolder.create(path, to_toml(config)) if ranks.leads else NoFolder(path)
        session = cls(config, simulation, folder)
        session.warnings = advice(config, simulation.algorithm)
        return session

    @classmethod
    def resume(cls, path: Path, data_root: Path | None, ranks: Ranks = ALONE) -> "Session":
        """Resume the run in a folder from its newest good checkpoint, or from the start if there is none."""
        with ranks.agreement():
            folder, text = RunFolder.open(path) if ranks.leads else (NoFolder(path), "")
        text = ranks.broadcast(text.encode()).decode()  # the other ranks need no access to the folder
        with ranks.agreement():
            try:
                config = parse_config(tomllib.loads(text))
            except tomllib.TOMLDecodeError as error:
                raise TDPFedError(f"{str(path / CONFIG)!r} is damaged ({error})", field="--resume") from None
            except TDPFedError as error:
                raise error.noting(f"in {str(path / CONFIG)!r}") from None
            simulation = prepare(config, data_root, path, ranks)
            torch.set_num_threads(threads(config, simulation))
            session = cls(config, simulation, folder)
        with ranks.agreement():
            session._load()
            session.journal.rewind(simulation.round)
            session.warnings += folder.warnings
        return session

    def _load(self) -> None:
        """Resume the simulation from the newest good checkpoint; the first rank reads it for all."""
        found = load_for_all(self.journal.checkpoints, self.simulation)
        if found is not None:
            snapshot, self.warnings = found
            restore(self.simulation, snapshot, take=True)
            self._changed = torch.zeros(self.simulation.federation.clients, dtype=torch.bool)
        elif self.folder.done:
            path = str(self.folder.path)
            raise TDPFedError(f"--resume: the run in {path!r} is finished, and has no checkpoint to resume from")

    def run(self, progress: Progress) -> dict[str, Any]:
        """Run to the last round and return the summary, which is written even after an error."""
        self.journal.start_clock()
        try:
            with progress(self.simulation, self.config.run.rounds, self.records) as show:
                while self.left:
                    self.simulation.step()
                    self.after_round()
                    show(self.simulation)
        except BaseException as error:
            failed = error_of(partial(self.end, error))
            if not isinstance(error, KeyboardInterrupt):
                raise
            if failed is not None:
                raise failed from None
        else:
            self.end()
        return self.summary

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return self.journal.folder

    @property
    def records(self) -> list[Record]:
        """A record for each evaluated round so far."""
        return self.journal.records

    @property
    def summary(self) -> dict[str, Any]:
        """The summary, empty until the run has ended."""
        return self.journal.summary

    @property
    def left(self) -> int:
        """The number of remaining rounds."""
        return max(0, self._last - self.simulation.round)

    def after_round(self) -> None:
        """Evaluate the current round, write its results and save a checkpoint, each if it is due."""
        simulation, last = self.simulation, not self.left
        if self._changed is not None:
            self._changed[simulation.trained.cpu()] = True
        evaluated = simulation.due(self.config.run.evaluate_every, last)
        self.journal.after_round(
            simulation.round,
            last=last,
            record=(lambda: simulation.record(self.journal.seconds)) if evaluated else None,
            refused=simulation.refused,
            save=self._save,
        )

    def _save(self) -> None:
        """Save a checkpoint; the first process writes it for all."""
        simulation = self.simulation
        changed = None if self._changed is None else self._changed.nonzero().flatten()
        with self.ranks.agreement(), gathered(simulation.store) as rows:
            if rows is not None:
                self.journal.checkpoints.save(replace(snapshot_of(simulation), private=rows), changed)
        self._changed = torch.zeros(simulation.federation.clients, dtype=torch.bool)

    def end(self, error: BaseException | None = None) -> None:
        """Write the summary of a run that is complete, or stopped by ``error``."""
        simulation = self.simulation
        status = "finished" if simulation.round == self.config.run.rounds else "privacy budget spent"
        if error is not None:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        refused = simulation.refused if isinstance(error, QuorumError) else ()
        self.journal.end(facts_of(simulation, self.config.model.name), status, refused=refused)

    @cached_property
    def _last(self) -> int:
        return self.simulation.affordable(self.config.run.rounds)


def run_together(sessions: Sequence[Session], show: Callable[[Session], None]) -> list[TDPFedError | None]:
    """Run sessions that differ only in their seed together; return for each the error that stopped it, or None.

    If one fails, the others continue. Ctrl-C ends them all and is raised again.
    """
    errors: dict[Session, TDPFedError | None] = dict.fromkeys(sessions)
    alive = [session for session in sessions if session.left]
    for session in alive:
        session.journal.start_clock()
    group: list[Session] = []
    try:
        while alive:
            behind = min(session.simulation.round for session in alive)  # resumed runs may be at different rounds
            now = [session for session in alive if session.simulation.round == behind]
            if now != group:
                group, ensemble = now, Ensemble([session.simulation for session in now])
            for session, stepped in zip(group, ensemble.step(), strict=True):
                error = stepped or error_of(session.after_round)
                if error is not None or not session.left:
                    error = error_of(partial(session.end, error)) or error
                    errors[session] = error
                    alive.remove(session)
                show(session)
    except BaseException as stop:
        for session in alive:
            error_of(partial(session.end, stop))
        raise
    return list(errors.values())
