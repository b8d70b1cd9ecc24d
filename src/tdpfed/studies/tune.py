"""Tuning: the same number of trials for every method, judged by validation accuracy, on seeds that are not reported.

The first trial of a method has the configuration's own values. The others are the points of a Sobol sequence over the
method's learning rates, the keys that it declares with ``search``, and the server's rate. They do not depend on the
number of trials, so that more trials can be added.
Test samples play no part: a choice depends on samples that are held out of the clients' training samples.
"""

import csv
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tdpfed.config import Config
from tdpfed.config.loading import SERVER, TABLES, flat, raw_config, toml_value
from tdpfed.config.sections import ALGORITHM, SECTIONS
from tdpfed.core.setting import default_of, hints_of, plain, settings_of
from tdpfed.errors import TDPFedError
from tdpfed.report.read import read_run
from tdpfed.runs.folder import RunFolder, file_name
from tdpfed.runs.grid import Cell
from tdpfed.runs.prepare import prepare
from tdpfed.studies.compare import cells_of

SHARE = 0.2
"""Share of each client's training samples that trials hold out if the configuration holds out none."""

AHEAD = 1000
"""Distance of the first tuning seed from run.seed, which is the first that a comparison reports."""

SERVER_RATE = (0.5, 2.0)
"""The range of the server's rate, as multiples of its value."""

EDGE = 0.1
"""Part of a range, at either end, in which a choice suggests that better values lie beyond."""

Values = Mapping[str, Any]
"""Values by full key, such as ``algorithm.eta``."""


@dataclass(frozen=True)
class Trial:
    """A method with some of its values changed, and its runs, one for each tuning seed."""

    number: int
    values: Values
    cells: tuple[Cell, ...]

    def scores(self, folder: Path) -> list[float | None]:
        """Return the validation accuracy of each run in the last round; None for one that failed or is missing."""
        return [_validated(folder / cell.name) for cell in self.cells]

    def score(self, folder: Path) -> float | None:
        """Return the mean over the seeds; None if a run failed or is missing."""
        found = self.scores(folder)
        known = [score for score in found if score is not None]
        return statistics.mean(known) if len(known) == len(found) else None


@dataclass(frozen=True)
class Search:
    """The trials of one method in a configuration, and the range of each key that differs between them."""

    name: str
    config: Config  # of the method with its own values, as it is without tuning
    ranges: Mapping[str, tuple[float, float]]
    trials: tuple[Trial, ...]

    def best(self, folder: Path) -> Trial | None:
        """Return the trial with the best score, of equal ones the first; None if every trial failed."""
        scored = [(score, trial) for trial in self.trials if (score := trial.score(folder)) is not None]
        return max(scored, key=lambda pair: pair[0])[1] if scored else None

    def chosen(self, folder: Path) -> Config | None:
        """Return the configuration with the values of the best trial; None if every trial failed."""
        best = self.best(folder)
        return None if best is None else changed(self.config, best.values)

    def values(self, trial: Trial) -> dict[str, Any]:
        """Return the values of a trial by key: those of the first one are the configuration's own."""
        own = flat(self.config.as_dict())
        return {key: trial.values.get(key, own[key]) for key in self.ranges}

    def rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Yield each trial with its values and its validation accuracy; None where a run failed."""
        best = self.best(folder)
        for trial in self.trials:
            scores = {"validation_accuracy": trial.score(folder), "by_seed": trial.scores(folder)}
            row = {"method": self.name, "trial": trial.number, "values": self.values(trial)}
            yield {**row, **scores, "chosen": trial is best}

    def at_edge(self, trial: Trial) -> Iterator[str]:
        """Yield the values of a trial that lie near an end of their range or beyond it."""
        for key, value in self.values(trial).items():
            limits = self.ranges[key]
            place = _place(value, limits)
            if not EDGE < place < 1 - EDGE:
                end = "lower" if place < 0.5 else "upper"
                yield f"{key} = {value:g} is at the {end} end of {limits[0]:g} to {limits[1]:g}"


def searches(
    source: str,
    algorithms: str,
    trials: int,
    seeds: int,
    overrides: Sequence[str] = (),
    data_root: Path | None = None,
) -> tuple[list[Search], list[str]]:
    """Return the search of each method, and notes; a method that cannot run in this configuration is refused."""
    for option, given in (("--trials", trials), ("--seeds", seeds)):
        if given < 1:
            raise TDPFedError(f"{option}: {given} given, must be at least 1")
    cells, notes = cells_of(source, algorithms, 1, (), overrides)
    found = [search(cell.config, trials, seeds, data_root) for cell in cells]
    if not all(one.config.data.validation for one in found):
        notes.append(f"data.validation is 0: trials hold out {SHARE:g} of each client's training samples")
    return found, notes


def search(config: Config, trials: int, seeds: int, data_root: Path | None = None) -> Search:
    """Return the search of the configuration's method."""
    validation = config.data.validation or SHARE
    held_out = replace(config, data=replace(config.data, validation=validation))
    ranges = {f"algorithm.{name}": limits for name, limits in config.method.search.items()}
    if prepare(_seeded(held_out, AHEAD), data_root).algorithm.averaged:
        rate = config.server.rate
        ranges["server.rate"] = (SERVER_RATE[0] * rate, SERVER_RATE[1] * rate)
    whole = {f"algorithm.{name}" for name, hint in hints_of(type(config.method)).items() if hint is int}
    tried: list[dict[str, Any]] = [{}]
    for point in _points(len(ranges), trials - 1) if ranges else ():
        pairs = zip(ranges.items(), point, strict=True)
        tried.append({key: _value(place, limits, key in whole) for (key, limits), place in pairs})
    made, label = [], file_name(config.method_name)
    for number, values in enumerate(tried):
        configs = [_seeded(changed(held_out, values), ahead) for ahead in range(AHEAD, AHEAD + seeds)]
        cells = (Cell(f"{label}-trial{number}-seed{one.run.seed}", one) for one in configs)
        made.append(Trial(number, values, tuple(cells)))
    return Search(config.method_name, config, ranges, tuple(made))


def changed(config: Config, values: Values) -> Config:
    """Return a configuration with some of its method's values, and the server's rate, changed."""
    own = {key.removeprefix("algorithm."): value for key, value in values.items() if key != "server.rate"}
    server = config.server
    if "server.rate" in values:
        optimizer = "sgd" if server.optimizer == "average" else server.optimizer
        server = replace(server, optimizer=optimizer, rate=values["server.rate"])
    return replace(config, method=replace(config.method, **own), server=server)


def as_csv(found: Sequence[Search], folder: Path) -> str:
    """Return all trials with their values and scores."""
    keys = list(dict.fromkeys(key for one in found for key in one.ranges))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "trial", *keys, "validation_accuracy", "by_seed", "chosen"])
    for row in (row for one in found for row in one.rows(folder)):
        values = [row["values"].get(key, "") for key in keys]
        by_seed = " ".join("failed" if score is None else f"{score:.6g}" for score in row["by_seed"])
        writer.writerow([row["method"], row["trial"], *values, row["validation_accuracy"], by_seed, row["chosen"]])
    return text.getvalue()


def as_toml(found: Sequence[Search], folder: Path, source: str, overrides: Sequence[str] = ()) -> str:
    """Return a configuration file with the chosen values of each method, for ``compare`` and ``run``."""
    first, raw = found[0], raw_config(source, overrides)
    seeds = ", ".join(str(cell.config.run.seed) for cell in first.trials[0].cells)
    count = max(len(one.trials) for one in found)
    parts = [
        f"# Made by tdpfed tune: of {count} trials of each method the one with the best validation accuracy,\n"
        f"# mean of the seeds {seeds}.\n"
    ]
    for name in SECTIONS:
        values = _given(getattr(first.config, name)) if name != ALGORITHM else {}
        if name == SERVER:  # the rest depends on the method
            values = {key: value for key, value in values.items() if key not in ("optimizer", "rate")}
        if name == ALGORITHM:
            values = {"name": raw.get(ALGORITHM, {}).get("name", first.name)}
        if values:
            parts.append(_table(name, values))
    for one in found:
        best, chosen = one.best(folder), one.chosen(folder)
        if best is not None and chosen is not None:
            reached, own = (_percent(trial.score(folder)) for trial in (best, one.trials[0]))
            values = {**_given(chosen.method), **_server(chosen)}
            table = _table(f"{TABLES}.{_key(one.name)}", values)
            parts.append(f"# validation accuracy {reached}, own values {own}\n{table}")
    tuned = {one.name for one in found if one.best(folder) is not None}
    for name, table in raw.get(TABLES, {}).items():
        if name not in tuned:
            parts.append(_table(f"{TABLES}.{_key(name)}", {**_server(first.config), **table}))
    return "\n".join(parts)


def _given(settings: Any) -> dict[str, Any]:
    """Return the values that are not the defaults."""
    defaults = {item.name: default_of(item) for item in settings_of(type(settings))}
    return {name: value for name, value in plain(settings).items() if value is not None and value != defaults[name]}


def _server(config: Config) -> dict[str, Any]:
    """Return the server's rule and rate as part of a method's table."""
    values = {key: value for key, value in _given(config.server).items() if key in ("optimizer", "rate")}
    return {SERVER: values} if values else {}


def _table(name: str, values: Values) -> str:
    lines = [f"{_key(key)} = {toml_value(value)}" for key, value in values.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else toml_value(name)


def _percent(score: float | None) -> str:
    return "-" if score is None else f"{100 * score:.2f} %"


def _validated(path: Path) -> float | None:
    """Return the validation accuracy of a finished run in its last round; None if its records do not reach there."""
    if not RunFolder(path).done:
        return None
    run = read_run(path)
    return run.series["validation_accuracy"][-1] if run.rounds and run.rounds == run.figures["rounds"] else None


def _seeded(config: Config, ahead: int) -> Config:
    try:
        return replace(config, run=replace(config.run, seed=config.run.seed + ahead, seeds=1))
    except TDPFedError as error:
        raise error.within("run") from None


def _points(dimensions: int, count: int) -> list[list[float]]:
    """Return points of the Sobol sequence in the unit cube, without the first two: its corner and its center."""
    sequence = torch.quasirandom.SobolEngine(dimensions)
    sequence.fast_forward(2)
    found: list[list[float]] = sequence.draw(count, dtype=torch.float64).tolist()
    return found


def _is_log(limits: tuple[float, float]) -> bool:
    """Whether a range is searched by factors: it spans at least one power of ten."""
    return 0 < 10 * limits[0] <= limits[1]


def _value(place: float, limits: tuple[float, float], whole: bool) -> float:
    """Return the value at a place from 0 to 1 in a range: a whole number, or to three digits."""
    low, high = limits
    if _is_log(limits):
        value = low * (high / low) ** place
    else:
        value = low + place * (high - low) if not whole else low - 0.5 + place * (high - low + 1)
    return round(value) if whole else float(f"{value:.3g}")


def _place(value: float, limits: tuple[float, float]) -> float:
    """Return where in a range a value is, from 0 to 1; beyond them outside of it."""
    low, high = limits
    if _is_log(limits):
        return math.log(value / low) / math.log(high / low) if value > 0 else 0.0
    return (value - low) / (high - low) if high > low else 0.5
