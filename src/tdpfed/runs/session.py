"""A simulated run in a folder: started or resumed from a configuration, and recorded however it ends.

A resumed run gives exactly the numbers of an uninterrupted one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tdpfed.config import Config, parse_config, to_toml
from tdpfed.config.loading import overridden, parse_toml
from tdpfed.config.resume import check_same_run, settings_by_key
from tdpfed.config.unused import advice
from tdpfed.engine.ensemble import Ensemble, error_of
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import QuorumError, TDPFedError, wrong
from tdpfed.files import ctrl_c_asks, lock_folder
from tdpfed.runs import data_card, frozen
from tdpfed.runs.folder import CONFIG, CONFIGURATION, FILES, NoFolder, RunFolder
from tdpfed.runs.gathered import gathered, load_for_all
from tdpfed.runs.journal import Journal
from tdpfed.runs.loggers import Loggers
from tdpfed.runs.prepare import prepare, threads
from tdpfed.runs.snapshot import restore, snapshot_of
from tdpfed.runs.summary import facts_of
from tdpfed.server.records import Record

Callback = Callable[[Record, Simulation], object]
"""Called with each new record; if it returns True, the run ends after that round."""

OnRound = Callable[[Simulation], None]
Progress = Callable[[Simulation, int, list[Record]], AbstractContextManager[OnRound]]


class Session:
    """A simulation and the journal that records it in a folder."""

    def __init__(self, config: Config, simulation: Simulation, folder: RunFolder) -> None:
        self.config, self.simulation, self.ranks = config, simulation, simulation.ranks
        self.journal = Journal(config, folder, leads=simulation.ranks.leads)
        self.warnings: list[str] = []
        self._saved = 0  # the round of the newest checkpoint
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
            folder = _created(path, config, simulation) if ranks.leads else NoFolder(path)
        session = cls(config, simulation, folder)
        session.warnings = [*advice(config, simulation.algorithm), *simulation.notes]
        return session

    @classmethod
    def around(cls, config: Config, simulation: Simulation, path: Path, *, resume: bool) -> "Session":
        """Start a run of a simulation that was made in Python and that ``config`` describes.

        With ``resume`` the run in the folder is continued, if there is one and it is of the same configuration.
        """
        if not (resume and (path / CONFIG).exists()):
            RunFolder.check(path)
            Loggers.check(config)
            simulation.store.reserve()
            session = cls(config, simulation, _created(path, config, simulation))
            session.warnings = advice(config, simulation.algorithm)
            return session
        folder, text = _opened(path)
        try:
            check_same_run(settings_by_key(_parsed(path, text)), config, f"the run in {str(path)!r}")
            session = cls(config, simulation, folder)
            session._load(changed=to_toml(config) != text)
            session.warnings += folder.warnings
        except BaseException:
            folder.release()
            raise
        return session

    @classmethod
    def resume(
        cls, path: Path, data_root: Path | None, ranks: Ranks = ALONE, overrides: Sequence[str] = ()
    ) -> "Session":
        """Resume the run in a folder from its newest good checkpoint, or from the start if there is none.

        ``overrides``, as ``section.key=value``, change keys that may differ between a run and its resumption.
        """
        with ranks.agreement():
            folder, text = _opened(path) if ranks.leads else (NoFolder(path), "")
        try:
            text = ranks.broadcast(text.encode()).decode()  # the other ranks need no access to the folder
            with ranks.agreement():
                config = _configuration(path, text, overrides)
                simulation = prepare(config, data_root, path, ranks)
                torch.set_num_threads(threads(config, simulation))
                session = cls(config, simulation, folder)
            with ranks.agreement():
                session._load(changed=bool(overrides))
                session.warnings += [*folder.warnings, *simulation.notes]
        except BaseException:
            folder.release()
            raise
        return session

    def _load(self, changed: bool) -> None:
        """Resume the simulation from the newest good checkpoint; the first rank reads it for all.

        ``changed`` tells that the folder holds another configuration than this one.
        """
        found, saved, done, round_ = load_for_all(self.journal.checkpoints, self.simulation), None, self.folder.done, 0
        if found is not None:
            snapshot, self.warnings = found
            check_same_run(snapshot.meta.get(CONFIGURATION), self.config, "the checkpoint")
            round_, saved = snapshot.round, snapshot.meta.get(FILES)
            if self.config.run.rounds < round_:
                allowed = f"at least {round_}, the rounds already completed"
                raise wrong("run.rounds", self.config.run.rounds, allowed)
            restore(self.simulation, snapshot, take=True)
            self._changed, self._saved = torch.zeros(self.simulation.federation.clients, dtype=torch.bool), round_
        elif done:
            path = str(self.folder.path)
            raise TDPFedError(f"--resume: the run in {path!r} is finished, and has no checkpoint to resume from")
        if self.ranks.leads:
            self.warnings += data_card.keep(self.folder, self.simulation.federation)
            frozen.keep(self.folder, self.simulation.objective.model, self.simulation.objective.layout)
        if changed or (done and self.left):
            self.folder.change(to_toml(self.config))
        elif self.left:
            self.folder.reopen()
        self.journal.rewind(round_, saved=saved)

    def run(
        self, progress: Progress, on_stop: Callable[[], None] | None = None, callbacks: Sequence[Callback] = ()
    ) -> dict[str, Any]:
        """Run to the last round and return the summary, which is written even after an error.

        With ``on_stop``, which is called at once, the first Ctrl-C ends the run after the current round, with a
        checkpoint; a second one, or any without ``on_stop``, ends it immediately. So does a callback that returns True.
        """
        self.journal.start_clock()
        stopped = False
        try:
            with (
                progress(self.simulation, self.config.run.rounds, self.records) as show,
                _stop_asked(on_stop, self.ranks) as asked,
            ):
                while self.left and not stopped:
                    known = len(self.records)
                    self.simulation.step()
                    self.after_round()
                    show(self.simulation)
                    if self.left and asked():
                        self.save()
                        raise KeyboardInterrupt
                    stopped = any(told(callbacks, record, self.simulation) for record in self.records[known:])
                if self.left:
                    self.save()
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

    def save(self) -> None:
        """Save a checkpoint unless there is one of this round, or checkpoints are off."""
        if self.config.checkpoint.every and self._saved != self.simulation.round:
            self._save()

    def _save(self) -> None:
        """Save a checkpoint; the first process writes it for all."""
        simulation = self.simulation
        more = {CONFIGURATION: settings_by_key(self.config), FILES: self.folder.sums}
        changed = None if self._changed is None else self._changed.nonzero().flatten()
        with self.ranks.agreement(), gathered(simulation.store) as rows:
            if rows is not None:
                self.journal.checkpoints.save(replace(snapshot_of(simulation, **more), private=rows), changed)
        self._saved = simulation.round
        self._changed = torch.zeros(simulation.federation.clients, dtype=torch.bool)

    def end(self, error: BaseException | None = None) -> None:
        """Write the summary of a run that is complete, or stopped by ``error``."""
        simulation = self.simulation
        status = "finished" if simulation.round == self.config.run.rounds else "privacy budget spent"
        if self.left:
            status = "stopped"
        if error is not None:
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        refused = simulation.refused if isinstance(error, QuorumError) else ()
        try:
            self.journal.end(facts_of(simulation, self.config.model.name), status, refused=refused)
        finally:
            self.folder.release()

    @cached_property
    def _last(self) -> int:
        return self.simulation.affordable(self.config.run.rounds)


def told(callbacks: Sequence[Callback], record: Record, simulation: Simulation) -> bool:
    """Call all callbacks with a record; return whether one of them ends the run."""
    answers = [callback(record, simulation) for callback in callbacks]
    return any(answer is True for answer in answers)


def run_together(
    sessions: Sequence[Session], show: Callable[[Session], None], on_stop: Callable[[], None] | None = None
) -> list[TDPFedError | None]:
    """Run sessions that differ only in their seed together; return for each the error that stopped it, or None.

    If one fails, the others continue. Ctrl-C ends them all, as in :meth:`Session.run`, and is raised again.
    """
    errors: dict[Session, TDPFedError | None] = dict.fromkeys(sessions)
    alive = [session for session in sessions if session.left]
    for session in alive:
        session.journal.start_clock()
    group: list[Session] = []
    try:
        with _stop_asked(on_stop) as asked:
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
                if alive and asked():
                    for session in alive:
                        session.save()
                    raise KeyboardInterrupt
    except BaseException as stop:
        for session in alive:
            error_of(partial(session.end, stop))
        raise
    return list(errors.values())


def _stop_asked(on_stop: Callable[[], None] | None, ranks: Ranks = ALONE) -> AbstractContextManager[Callable[[], bool]]:
    """Yield whether a stop was asked for; never in several processes, which would not agree on the round."""
    if on_stop is None or ranks.world > 1:
        return nullcontext(lambda: False)
    return ctrl_c_asks(on_stop)


def _created(path: Path, config: Config, simulation: Simulation) -> RunFolder:
    """Return a new run folder, locked."""
    lock = lock_folder(path, field="--out")
    try:
        folder = RunFolder.create(path, to_toml(config))
        data_card.keep(folder, simulation.federation)
        frozen.keep(folder, simulation.objective.model, simulation.objective.layout)
    except BaseException:
        lock.release()
        raise
    folder.lock = lock
    return folder


def _opened(path: Path) -> tuple[RunFolder, str]:
    """Return the folder of an existing run, locked, and its configuration."""
    RunFolder.open(path)  # a folder that is no run is not touched
    lock = lock_folder(path, field="--resume")
    try:
        folder, text = RunFolder.open(path)
    except BaseException:
        lock.release()
        raise
    folder.lock = lock
    return folder, text


def _configuration(path: Path, text: str, overrides: Sequence[str]) -> Config:
    """Return the configuration in a run folder; ``overrides`` may change only what may differ when it is resumed."""
    config = _parsed(path, text)
    if not overrides:
        return config
    changed = parse_config(overridden(parse_toml(text), overrides))
    check_same_run(settings_by_key(config), changed, f"the run in {str(path)!r}")
    return changed


def _parsed(path: Path, text: str) -> Config:
    """Return the configuration in a run folder."""
    file = str(path / CONFIG)
    try:
        values = parse_toml(text)
    except TDPFedError as error:
        raise TDPFedError(f"{file!r} is damaged ({error.reason})", field="--resume") from None
    try:
        return parse_config(values)
    except TDPFedError as error:
        raise error.noting(f"in {file!r}") from None
