"""A run from its configuration to its folder on disk: begun or resumed, recorded, saved, ended in any way.

What is finished is always on disk: a line per evaluated round, a checkpoint every so many rounds, a summary at the end,
also after Ctrl-C or an error. A resumed run goes on to exactly the numbers of an uninterrupted one.
"""

import tomllib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tdpfed.config import Config, parse_config, to_toml
from tdpfed.engine.checkpoint import Checkpoints, restore, snapshot_of
from tdpfed.engine.folder import RunFolder, summarize
from tdpfed.engine.records import Record
from tdpfed.engine.simulate import Simulation
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.experiment import prepare, threads

OnRound = Callable[[Simulation], None]
Progress = Callable[[Simulation, int, list[Record]], AbstractContextManager[OnRound]]


class Session:
    """A simulation, the folder it writes to and what it has recorded so far."""

    def __init__(self, config: Config, simulation: Simulation, folder: RunFolder) -> None:
        self.config, self.simulation, self.folder = config, simulation, folder
        self.checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint.keep)
        self.records: list[Record] = []
        self.warnings: list[str] = []
        self._changed: Tensor | None = None  # None: no checkpoint yet, everything is to be saved

    @classmethod
    def begin(cls, config: Config, path: Path, data_root: Path | None) -> "Session":
        """Start a new run in a new or empty folder; nothing is written before everything has been checked."""
        RunFolder.check(path)
        simulation = prepare(config, data_root)
        torch.set_num_threads(threads(config, simulation))
        return cls(config, simulation, RunFolder.create(path, to_toml(config)))

    @classmethod
    def resume(cls, path: Path, data_root: Path | None) -> "Session":
        """Go on with the run in a folder from its newest good checkpoint, or from the start where there is none."""
        folder, text = RunFolder.open(path)
        try:
            config = parse_config(tomllib.loads(text))
        except (tomllib.TOMLDecodeError, TDPFedError) as error:
            raise TDPFedError(f"--resume: {str(path / 'config.toml')!r} is damaged ({error})") from None
        simulation = prepare(config, data_root)
        torch.set_num_threads(threads(config, simulation))
        session = cls(config, simulation, folder)
        found = session.checkpoints.load(simulation.federation.device)
        if found is not None:
            snapshot, session.warnings = found
            restore(simulation, snapshot)
            session._changed = torch.zeros(simulation.federation.clients, dtype=torch.bool)
        session.records = folder.rewind(simulation.round)
        return session

    def run(self, progress: Progress) -> dict[str, Any]:
        """Run to the last round and return the summary; it is written whatever happens."""
        status = "failed"
        try:
            with progress(self.simulation, self.config.run.rounds, self.records) as show:
                for record in self._rounds(show):
                    self.folder.append(record)
                    self.records.append(record)
            status = "finished" if self.simulation.round == self.config.run.rounds else "privacy budget spent"
        except KeyboardInterrupt:
            status = "interrupted"
        except QuorumError:
            self.folder.refuse(self.simulation.round + 1, self.simulation.refused)
            raise
        finally:
            summary = summarize(self.simulation, self.records, model=self.config.model.name, status=status)
            self.folder.finish(summary)
        return summary

    def _rounds(self, show: OnRound) -> Iterator[Record]:
        def on_round(simulation: Simulation) -> None:
            show(simulation)
            self.folder.refuse(simulation.round, simulation.refused)
            self._save(simulation)

        left = self.config.run.rounds - self.simulation.round
        if left > 0:
            spent = self.records[-1].seconds if self.records else 0.0
            yield from self.simulation.run(left, self.config.run.evaluate_every, on_round, spent)

    def _save(self, simulation: Simulation) -> None:
        every, last = self.config.checkpoint.every, simulation.round == simulation.affordable(self.config.run.rounds)
        if self._changed is not None:
            self._changed[simulation.trained.cpu()] = True
        if every and (simulation.round % every == 0 or last):
            changed = None if self._changed is None else self._changed.nonzero().flatten()
            self.checkpoints.save(snapshot_of(simulation), changed)
            self._changed = torch.zeros(simulation.federation.clients, dtype=torch.bool)
