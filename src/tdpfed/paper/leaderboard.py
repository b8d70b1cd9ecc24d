"""A published benchmark, run by our methods: what was published, the runs that it takes, and which come next.

First the rates of each method are tuned, then all methods run, then the best of them run again with factored updates.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from tdpfed.algorithms import find
from tdpfed.config import Config, load_config
from tdpfed.errors import TDPFedError, unknown
from tdpfed.paper.published import PERSONAL
from tdpfed.report.group import Group
from tdpfed.report.read import read_runs
from tdpfed.runs.folder import RunFolder, file_name
from tdpfed.runs.grid import Cell
from tdpfed.studies.tune import Search, changed, search

NAMES = ("pfllib",)
"""The benchmarks."""

TUNING, RUNS = "tuning", "runs"
"""Folders of the trials and of the runs."""

FACTORS = "-factors"
"""The ending of the names of runs with factored updates."""

BEST = 3
"""How many of the best methods run again with factored updates."""

SHARE_OF_ROUNDS = 10
"""Trials have this part of the rounds unless their number is given."""

Compared = Literal["received", "personalized"]


@dataclass(frozen=True, eq=False)
class Entry:
    """A method: what is published of it by setting, in percent, and which of our accuracies is compared."""

    name: str
    published: Mapping[str, float]
    compared: Compared = "received"
    note: str = ""

    @property
    def title(self) -> str:
        """The method's name as people write it."""
        return find(self.name).title


@dataclass(frozen=True)
class Setting:
    """A way to distribute the data: the preset of its runs."""

    name: str
    title: str
    preset: str


@dataclass(frozen=True)
class Board:
    """A benchmark: its settings, our methods, and what is published of others."""

    name: str
    title: str
    source: str
    rounds: int
    settings: Mapping[str, Setting]
    methods: Mapping[str, Entry]
    others: Mapping[str, Mapping[str, float]]

    def best_published(self, setting: str) -> tuple[str, float]:
        """Return the best method that is published for a setting, and its number."""
        own = {entry.title: entry.published for entry in self.methods.values()}
        found = {title: values[setting] for title, values in {**own, **self.others}.items() if setting in values}
        return max(found.items(), key=lambda pair: pair[1])


@dataclass(frozen=True)
class Plan:
    """What to run: some settings and methods of a benchmark, for some rounds and seeds."""

    board: Board
    settings: tuple[Setting, ...]
    entries: tuple[Entry, ...]
    rounds: int | None
    seeds: int
    trials: int
    tuning_rounds: int | None
    overrides: tuple[str, ...]

    def configs(self) -> Iterator[tuple[Setting, Entry, Config]]:
        """Yield the configuration of each method in each setting, with its own rates."""
        common = ["checkpoint.every=50", "checkpoint.keep=1", *self.overrides]
        common += [] if self.rounds is None else [f"run.rounds={self.rounds}"]
        for setting in self.settings:
            for entry in self.entries:
                yield setting, entry, load_config(setting.preset, [*common, f"algorithm.name={entry.name}"])

    def searches(self, data_root: Path | None = None) -> dict[tuple[str, str], Search]:
        """Return the search of each method's rates in each setting; none with a single trial."""
        if self.trials == 1:
            return {}
        return {
            (setting.name, entry.name): search(self._short(config), self.trials, 1, data_root)
            for setting, entry, config in self.configs()
        }

    def _short(self, config: Config) -> Config:
        """Return a configuration with as many rounds as a trial has, evaluated at the end."""
        rounds = self.rounds_of_trials(config)
        run = replace(config.run, rounds=rounds, evaluate_every=rounds)
        return replace(config, run=run, evaluation=replace(config.evaluation, received=False))

    def rounds_of_trials(self, config: Config) -> int:
        """Return the number of rounds of a trial."""
        return self.tuning_rounds or max(1, config.run.rounds // SHARE_OF_ROUNDS)

    def trials_of(self, found: Mapping[tuple[str, str], Search], setting: Setting) -> list[Cell]:
        """Return the trials of all methods in a setting."""
        mine = [one for (name, _), one in found.items() if name == setting.name]
        return [cell for one in mine for trial in one.trials for cell in trial.cells]

    def dense(self, found: Mapping[tuple[str, str], Search], folder: Path) -> list[Cell]:
        """Return the runs of all methods, at the rates that their trials chose."""
        cells = []
        for setting, entry, config in self.configs():
            one = found.get((setting.name, entry.name))
            best = None if one is None else one.best(folder / TUNING / setting.name)
            chosen = config if best is None else changed(config, best.values)
            cells += self._seeded(label(setting, entry), chosen)
        return cells

    def factored(self, dense: Sequence[Cell], folder: Path) -> list[Cell]:
        """Return the runs of the best methods of each setting with factored updates, at the same rates."""
        first = {cell.name.rpartition("-seed")[0]: cell.config for cell in reversed(dense)}
        cells = []
        for setting in self.settings:
            for entry in self.best(setting, groups(folder)):
                config = first[label(setting, entry)]
                if config.wire.update != "factors":
                    wire = replace(config.wire, update="factors")
                    cells += self._seeded(f"{label(setting, entry)}{FACTORS}", replace(config, wire=wire))
        return cells

    def best(self, setting: Setting, found: Mapping[str, Group]) -> list[Entry]:
        """Return the best methods that send something, by the number that is compared."""
        results = {}
        for entry in self.entries:
            group = found.get(label(setting, entry))
            number = None if group is None else group.stat(f"best_{accuracy(entry)}").mean
            if number is not None and find(entry.name).communicates:
                results[entry] = number
        return sorted(results, key=lambda entry: -results[entry])[:BEST]

    def _seeded(self, name: str, config: Config) -> list[Cell]:
        runs = (replace(config.run, seed=config.run.seed + seed, seeds=1) for seed in range(self.seeds))
        return [Cell(f"{name}-seed{run.seed}", replace(config, run=run)) for run in runs]


def label(setting: Setting, entry: Entry) -> str:
    """Return the name of a method's runs in a setting, without the seed."""
    return f"{setting.name}-{file_name(entry.name)}"


def accuracy(entry: Entry) -> str:
    """Return the accuracy of ours that is compared with the published one."""
    return "received_accuracy" if entry.compared == "received" else PERSONAL


def groups(folder: Path) -> dict[str, Group]:
    """Return the finished runs in the folder, by name without the seed."""
    inside = folder / RUNS
    found: dict[str, list[Path]] = {}
    for path in sorted(inside.iterdir()) if inside.is_dir() else ():
        if RunFolder(path).done:
            found.setdefault(path.name.rpartition("-seed")[0], []).append(path)
    return {name: Group(name, tuple(read_runs(paths)[0])) for name, paths in found.items()}


def load_board(name: str) -> Board:
    """Return a benchmark by name."""
    if name not in NAMES:
        raise unknown("benchmark", name, NAMES)
    text = (resources.files("tdpfed.paper") / f"{name}.toml").read_text(encoding="utf-8")
    values: dict[str, Any] = tomllib.loads(text)
    return Board(
        name, values["title"], values["source"], values["rounds"],
        {key: Setting(key, **one) for key, one in values["settings"].items()},
        {key: Entry(key, **one) for key, one in values["methods"].items()},
        values["others"],
    )  # fmt: skip


def plan(
    board: Board,
    *,
    settings: Sequence[str] = (),
    methods: str | None = None,
    rounds: int | None = None,
    seeds: int = 3,
    trials: int = 4,
    tuning_rounds: int | None = None,
    overrides: Sequence[str] = (),
) -> Plan:
    """Return what to run; whatever is wrong raises an error that names the option."""
    numbers = {"--rounds": rounds, "--seeds": seeds, "--trials": trials, "--tuning-rounds": tuning_rounds}
    for option, number in numbers.items():
        if number is not None and number < 1:
            raise TDPFedError(f"{option}: {number} given, must be at least 1")
    for key in (one.partition("=")[0].strip() for one in overrides):
        for own, option in (("run.seeds", "--seeds"), ("run.rounds", "--rounds"), ("algorithm.name", "--methods")):
            if key == own:
                raise TDPFedError(f"--set: {key} given, must be given as {option}")
    for one in settings:
        if one not in board.settings:
            raise unknown("--setting", one, board.settings)
    names = list(board.methods) if methods is None else [name.strip() for name in methods.split(",")]
    entries = []
    for name in dict.fromkeys(names):
        try:
            find(name)
        except TDPFedError as error:
            raise error.at("--methods") from None
        entries.append(board.methods.get(name) or Entry(name, {}))
    wanted = tuple(board.settings[name] for name in dict.fromkeys(settings or board.settings))
    return Plan(board, wanted, tuple(entries), rounds, seeds, trials, tuning_rounds, tuple(overrides))
