"""Rates for a study, chosen on seeds that are not reported: every combination of a grid, the same number for all forms.

A study's table ``tune.NAME`` has the ``methods`` that use the choice, the settings ``set`` of the trials, their
``seeds``, a list of values for each of some keys (``rates``) and settings ``with`` which they are used. A value like
``"x2"`` is a multiple of the preset's. A setting may have ``rates`` and ``tuning_seeds`` of its own. The combination
with the best personalized accuracy in the last round, the mean over the seeds, is chosen; of equal ones the first.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common import slug

from tdpfed.config.loading import load_config
from tdpfed.report.read import read_run
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.grid import Cell


@dataclass(frozen=True)
class Trial:
    """A combination of rates, as settings, and its runs."""

    settings: tuple[str, ...]
    cells: tuple[Cell, ...]

    def accuracy(self, folder: Path) -> float | None:
        """Return the mean accuracy of the runs; None if one is missing or diverged."""
        if not all(RunFolder(folder / cell.name).done for cell in self.cells):
            return None
        last = [read_run(folder / cell.name).series["personalized_accuracy"][-1] for cell in self.cells]
        known = [value for value in last if value is not None]
        return statistics.mean(known) if len(known) == len(last) else None


def trials(study: Mapping[str, Any], setting: str, group: str, extra: Sequence[str]) -> Iterator[Trial]:
    """Yield the trials of a group in a setting."""
    given, tuned = study["settings"][setting], study["tune"][group]
    base = ["checkpoint.every=1000000", "checkpoint.keep=1", *extra, *given["set"], *tuned["set"]]
    rates = tuned["rates"] | {key: given["rates"][key] for key in tuned["rates"] if key in given.get("rates", {})}
    for number, values in enumerate(product(*rates.values())):
        pairs = zip(rates, values, strict=True)
        tried = (f"{key}={_value(given['preset'], base, key, value)}" for key, value in pairs)
        settings = (*tuned.get("with", ()), *tried)
        cells = (
            Cell(
                f"{slug(setting)}_{slug(group)}-trial{number}_seed{seed}",
                load_config(given["preset"], [*base, *settings, f"run.seed={seed}"]),
            )
            for seed in given.get("tuning_seeds", tuned["seeds"])
        )
        yield Trial(settings, tuple(cells))


def _value(preset: str, base: Sequence[str], key: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    usual = load_config(preset, list(base)).method
    return float(value.removeprefix("x")) * float(getattr(usual, key.removeprefix("algorithm.")))


def all_trials(study: Mapping[str, Any], settings: Sequence[str], extra: Sequence[str]) -> list[Trial]:
    """Return all trials of some settings."""
    return [
        trial
        for setting in settings
        for group in study.get("tune", {})
        for trial in trials(study, setting, group, extra)
    ]


def chosen(study: Mapping[str, Any], setting: str, folder: Path, extra: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the chosen settings of each method that is tuned; methods whose trials are not finished are left out."""
    found: dict[str, tuple[str, ...]] = {}
    for group, tuned in study.get("tune", {}).items():
        reached = [(trial.accuracy(folder), trial.settings) for trial in trials(study, setting, group, extra)]
        known = [(accuracy, settings) for accuracy, settings in reached if accuracy is not None]
        if known:
            best = max(known, key=lambda pair: pair[0])[1]
            found |= dict.fromkeys(tuned["methods"], best)
    return found


def table(study: Mapping[str, Any], settings: Sequence[str], folder: Path, extra: Sequence[str]) -> list[str]:
    """Return the lines of a table of what was chosen."""
    groups = list(study["tune"])
    lines = [f"| setting | {' | '.join(groups)} |", "| --- |" + " --- |" * len(groups)]
    for setting in settings:
        choice = chosen(study, setting, folder, extra)
        cells = [
            ", ".join(f"`{one}`" for one in choice.get(study["tune"][group]["methods"][0], ())) for group in groups
        ]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines
