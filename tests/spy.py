"""What a grid of runs does, watched: shared by the tests of ``runs/grid.py`` and of ``tdpfed compare``."""

from pathlib import Path
from typing import Any

import pytest

from tdpfed.config import Config
from tdpfed.engine.simulation import Simulation
from tdpfed.runs.session import Session


class Spy:
    """Counts which sessions are begun, which resumed, and how many rounds are run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.resumed: list[str] = []
        self.rounds = 0
        begin, resume, step = Session.begin, Session.resume, Simulation.step

        def spy_begin(config: Config, path: Path, root: Path | None) -> Session:
            self.begun.append(path.name)
            return begin(config, path, root)

        def spy_resume(path: Path, root: Path | None, **more: Any) -> Session:
            self.resumed.append(path.name)
            return resume(path, root, **more)

        def spy_step(simulation: Simulation, *arguments: Any) -> None:
            self.rounds += 1
            step(simulation, *arguments)

        monkeypatch.setattr(Session, "begin", spy_begin)
        monkeypatch.setattr(Session, "resume", spy_resume)
        monkeypatch.setattr(Simulation, "step", spy_step)
