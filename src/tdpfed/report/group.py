"""Groups of runs that differ only in their seeds, summarized by mean and spread.

The spread is the sample standard deviation over seeds. Groups are ordered by data set, because results on different
data sets are not comparable.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tdpfed.config import flat
from tdpfed.report.look import PLAIN, Look, looks
from tdpfed.report.parse import ACCURACIES, FIELDS, LOSSES, Number
from tdpfed.report.read import IN_PROGRESS, Run, Series
from tdpfed.runs.folder import DONE

SEEDS = ("run.seed", "data.seed")
NOT_IN_LABELS = (
    *SEEDS, "run.seeds", "run.evaluate_every", "run.diagnostics_every", "run.device", "run.runner", "run.threads",
    "run.chunk", "run.loggers", "checkpoint.every", "checkpoint.keep",
)  # fmt: skip
"""Settings that do not change what is learned, and so are not part of a group's label."""


@dataclass(frozen=True)
class Stat:
    """Mean and spread of a number; no spread for a single run, no mean if a run does not have the number."""

    mean: Number
    spread: Number = None

    @classmethod
    def of(cls, values: Sequence[Number]) -> "Stat":
        """Return mean and sample standard deviation."""
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return cls(None)
        mean = sum(known) / len(known)
        if len(known) == 1:
            return cls(mean)
        return cls(mean, math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1)))

    def separated(self, other: "Stat") -> bool:
        """Whether two means differ by more than the sum of their spreads; a missing spread counts as 0."""
        if self.mean is None or other.mean is None:
            return True
        return abs(self.mean - other.mean) > (self.spread or 0.0) + (other.spread or 0.0)


@dataclass(frozen=True)
class Group:
    """The runs of one configuration, their label, and how figures show them."""

    label: str
    runs: tuple[Run, ...]
    look: Look = PLAIN

    @property
    def dataset(self) -> str:
        """The data set of its runs."""
        return self.runs[0].dataset

    @property
    def algorithm(self) -> str:
        """The name of its method in a configuration."""
        return self.runs[0].algorithm

    @property
    def method(self) -> str:
        """The method's name as people write it."""
        return self.runs[0].method

    @property
    def task(self) -> Any:
        """The learning task: the data set, and how its samples were distributed to clients."""
        settings = _without_seeds(self.runs[0].config)
        return self.dataset, _frozen({key: value for key, value in settings.items() if key.startswith("data.")})

    @cached_property
    def counted(self) -> tuple[Run, ...]:
        """The runs that results are computed over: the finished ones or, if there are none, all with records."""
        finished = tuple(run for run in self.runs if run.status in DONE)
        return finished or tuple(run for run in self.runs if run.rounds)

    @property
    def status(self) -> str:
        """The status of its runs, such as ``2 finished, 1 in progress``."""
        states = [run.status for run in self.runs]
        kinds = dict.fromkeys(states)
        return states[0] if len(kinds) == 1 else ", ".join(f"{states.count(kind)} {kind}" for kind in kinds)

    def stat(self, figure: str) -> Stat:
        """Return mean and spread of a number over the runs."""
        return Stat.of([run.figures[figure] for run in self.counted])

    @cached_property
    def mean(self) -> Series:
        """The mean of each quantity at the rounds that all runs have evaluated."""
        return {field: [stat.mean for stat in self._stats[field]] for field in FIELDS}

    @cached_property
    def spread(self) -> Series:
        """The spread of accuracies and losses at these rounds."""
        return {field: [stat.spread for stat in self._stats[field]] for field in (*ACCURACIES, *LOSSES)}

    @cached_property
    def _stats(self) -> dict[str, list[Stat]]:
        at = [{round_: i for i, round_ in enumerate(run.series["round"])} for run in self.counted]
        common = [round_ for round_ in (at[0] if at else ()) if all(round_ in places for places in at)]
        return {
            field: [
                Stat.of([run.series[field][i[round_]] for run, i in zip(self.counted, at, strict=True)])
                for round_ in common
            ]
            for field in FIELDS
        }


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Group runs whose configurations differ only in seeds; return groups ordered by data set, and notes."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        key: Any = _frozen(_without_seeds(run.config)) if run.config else run.path
        groups.setdefault(key, []).append(run)
    datasets = list(dict.fromkeys(run.dataset for run in runs))
    found = [Group(members[0].method, tuple(members)) for members in groups.values()]
    found.sort(key=lambda group: datasets.index(group.dataset))
    tasks = {name: len({group.task for group in found if group.dataset == name}) for name in datasets}
    notes = [
        f"{name}: data distributed to clients in {ways} different ways; the best result is marked within each"
        for name, ways in tasks.items()
        if ways > 1
    ]
    if len(datasets) > 1:
        notes.append(f"{len(datasets)} data sets ({', '.join(datasets)}): results are comparable only within each")
    for group in found:
        seeds = [tuple(run.setting(key) for key in SEEDS) for run in group.runs]
        if run_twice := [run.name for run, seed in zip(group.runs, seeds, strict=True) if seeds.count(seed) > 1]:
            notes.append(f"{', '.join(run_twice)}: same configuration and same seed, counted as separate runs")
    styles = looks([(group.dataset, str(group.runs[0].setting("algorithm.name"))) for group in found])
    return [replace(group, look=look) for group, look in zip(_labeled(found), styles, strict=True)], notes


def rivals_of(group: Group, groups: Sequence[Group]) -> list[Group]:
    """Return the groups of the same task, whose results are comparable; the group itself is included."""
    return [other for other in groups if other.task == group.task]


def in_progress(groups: Sequence[Group]) -> list[Run]:
    """Return the runs that have not ended."""
    return [run for group in groups for run in group.runs if run.status == IN_PROGRESS]


def _without_seeds(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat(config).items() if key not in SEEDS}


def _frozen(value: Any) -> Any:
    """Return plain values in a hashable form; 1, 1.0 and True stay different."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(item)) for key, item in value.items()))
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return type(value).__name__, str(value)


def _labeled(groups: Sequence[Group]) -> list[Group]:
    """Label each group with its method and, if a method has several groups, the settings in which they differ."""
    labeled: list[Group] = []
    for group in groups:
        rivals = [one for one in groups if (one.dataset, one.method) == (group.dataset, group.method)]
        words = _words(flat(group.runs[0].config), [flat(one.runs[0].config) for one in rivals])
        label = ", ".join([group.method, *words])
        labeled.append(replace(group, label=label if len(label) <= 60 else group.runs[0].name))
    names = [(group.dataset, group.label) for group in labeled]
    return [
        replace(group, label=f"{group.label} ({group.runs[0].name})") if names.count(name) > 1 else group
        for group, name in zip(labeled, names, strict=True)
    ]


def _words(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which a configuration differs from most of its rivals, such as ``compression 4``."""
    words = []
    names = [key.partition(".")[2] for key in own]
    for key in own:
        values = [_frozen(rival.get(key)) for rival in rivals]
        if key not in NOT_IN_LABELS and 2 * values.count(_frozen(own[key])) <= len(values):
            section, _, name = key.partition(".")
            if section != "algorithm":  # other sections' keys are shortened only if unambiguous
                name = section if name == "name" else name if names.count(name) == 1 else key
            words.append(f"{name} {_short(own[key])}")
    return words


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
