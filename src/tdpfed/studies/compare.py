"""Comparison of methods: a grid of algorithms, swept settings and seeds, and its results as a table and a page.

Repeating a call keeps the finished runs and resumes the others. A setting that an algorithm does not have is ignored
for it, with a note: FedAvg runs once, whatever the values in a sweep over ``algorithm.compression``.
"""

import importlib.util
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.algorithms import find
from tdpfed.config import load_config, to_toml
from tdpfed.config.keys import describe
from tdpfed.errors import TDPFedError, UnknownError, each, unknown
from tdpfed.files import write_file
from tdpfed.report import Group, group_runs, read_runs, write_page
from tdpfed.report import table as tables
from tdpfed.report.group import Stat, rivals_of
from tdpfed.report.parse import Number
from tdpfed.runs.folder import file_name
from tdpfed.runs.grid import Cell, CellResult

CAPTION = (
    "Mean ± standard deviation over seeds. Bold: the best of its column (highest accuracy, lowest cost). ≈: not "
    "separated from the best; the means differ by no more than the sum of their standard deviations. Personalized: "
    "each client's own model after its last training (for methods without one, the global model after further training "
    "by the client). Global: the server's model. Worst decile: mean over the worst tenth of the clients. MB: all "
    "clients together. To target: rounds and uploaded MB until the personalized accuracy first reaches the target; - "
    "if a run never reaches it."
)
OPTIONS = {"algorithm.name": "--algorithms", "run.seed": "--seeds", "run.seeds": "--seeds"}
"""Keys that have their own option."""

Setting = tuple[str, str]
"""A key and its value, as they are written on the command line."""


@dataclass(frozen=True)
class Comparison:
    """The results of a grid: finished runs as groups and as a table, the files written, failed runs, and notes."""

    groups: Sequence[Group]
    target: Number  # None: for each data set, the accuracy that all its runs reached
    table: tables.Table
    files: Mapping[str, Path]
    failed: Mapping[str, Sequence[str]]  # names of runs by error
    notes: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        """Return plain values; figures have the keys and units of ``summary.json``."""
        failed = [{"run": name, "error": error} for error, names in self.failed.items() for name in names]
        files = {name: str(path) for name, path in self.files.items()}
        rows = [_row(group, self.groups, self.target) for group in self.groups]
        return {"rows": rows, "files": files, "failed": failed, "notes": list(self.notes)}


def cells_of(
    source: str, algorithms: str, seeds: int, sweeps: Sequence[str] = (), overrides: Sequence[str] = ()
) -> tuple[list[Cell], list[str]]:
    """Return the runs of a grid, seeds innermost, and notes on settings that some methods do not have."""
    names = _names(algorithms)
    if seeds < 1:
        raise TDPFedError(f"--seeds: {seeds} given, must be at least 1")
    load_config(source)  # reports errors of the file itself before those of the grid
    keys = {name: {key.name for key in describe(name)} for name in names}
    given = [_setting("--set", text) for text in overrides]
    swept = [_sweep(text) for text in sweeps]
    _check_keys("--set", [key for key, _ in given if key.startswith("algorithm.")], keys)
    _check_keys("--sweep", [key for key, _ in swept], keys)

    def lacks(name: str, key: str) -> bool:
        return key.startswith("algorithm.") and not _has(keys[name], key)

    found: dict[str, Cell] = {}
    for name in names:
        common = [f"{key}={value}" for key, value in given if not lacks(name, key)]
        axes = [[(key, value) for value in values] for key, values in swept if not lacks(name, key)]
        for settings in itertools.product(*axes):
            for cell in _seeded(source, name, seeds, settings, common):
                twin = found.setdefault(to_toml(cell.config), cell)
                if twin is not cell:
                    raise TDPFedError(f"--sweep: {twin.name} and {cell.name} are the same run; give each value once")
    notes = [f"{name} has no {key}: runs without it" for key, _ in given for name in names if lacks(name, key)]
    notes += [f"{name} has no {key}: not swept over it" for key, _ in swept for name in names if lacks(name, key)]
    return list(found.values()), notes


def check_target(target: float | None) -> None:
    """Reject a target accuracy that is not a fraction."""
    if target is not None and not 0 < target <= 1:
        raise TDPFedError(f"--target: {target:g} given, must be above 0 and at most 1, as in 0.95")


def conclude(outcomes: Sequence[CellResult], folder: Path, target: Number = None) -> Comparison:
    """Read the finished runs of a grid; write ``table.md``, ``table.csv`` and, with plotly, ``report.html``."""
    failed: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            failed.setdefault(outcome.error, []).append(outcome.cell.name)
    finished = [outcome.path for outcome in outcomes if outcome.error is None]
    runs, damage = read_runs(finished)
    groups, notes = group_runs(runs)
    notes, files = [*damage, *notes], {}
    made = tables.results(groups, target)
    if len(groups) > 1 and all(len(group.counted) == 1 for group in groups):
        notes.append("one seed: no standard deviation, so differences may be due to chance; use --seeds 3")
    if groups:
        texts = {"table.md": f"{tables.to_markdown(made)}\n{CAPTION}\n", "table.csv": tables.to_csv(made)}
        files = {name: folder / name for name in texts}
        for name, text in texts.items():
            write_file(files[name], text, field="--out")
        if importlib.util.find_spec("plotly") is None:
            notes.append("no report.html: it needs plotly, which is not installed; pip install 'tdpfed[report]'")
        else:
            files["report.html"] = write_page(finished, folder / "report.html").page
    return Comparison(groups, target, made, files, failed, notes)


def _row(group: Group, groups: Sequence[Group], target: Number) -> dict[str, Any]:
    rivals, goal = rivals_of(group, groups), tables.goal_of(group, groups, target)
    marked = zip(tables.COLUMNS, tables.cells(group, rivals), strict=True)
    costs = zip(tables.REACH, tables.reach(group, goal), tables.reach_cells(group, rivals, goal), strict=True)
    return {
        "method": group.label,
        "algorithm": group.algorithm,
        "dataset": group.dataset,
        "runs": [str(run.path) for run in group.counted],
        **{column.key: _plain(group.stat(column.key), cell.mark) for column, cell in marked},
        "target": goal,
        **{column.key: _plain(stat, cell.mark) for column, stat, cell in costs},
    }


def _plain(stat: Stat, mark: str) -> dict[str, Any]:
    return {"mean": stat.mean, "spread": stat.spread, "mark": mark or None}


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        try:
            find(name)
        except TDPFedError as error:
            raise error.at("--algorithms") from error.__cause__
        if names.count(name) > 1:
            raise TDPFedError(f"--algorithms: {text!r} given, must name {name!r} only once")
    return names


def _setting(option: str, text: str) -> Setting:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")) or "." not in key:
        like = "run.rounds=60" if option == "--set" else "algorithm.compression=2,4,8"
        raise TDPFedError(f"{option}: {text!r} given, must be section.key=value, as in {like}")
    return key, value


def _sweep(text: str) -> tuple[str, list[str]]:
    key, raw = _setting("--sweep", text)
    values = [value.strip() for value in re.split(r",(?![^\[]*\])(?![^{]*\})", raw)]  # not within [] or {}
    if not all(values):
        raise TDPFedError(f"--sweep: {text!r} given, must have no empty value between its commas")
    return key, values


def _check_keys(option: str, given: Sequence[str], keys: Mapping[str, set[str]]) -> None:
    """Reject keys that no method has, that another option sets, or that are swept twice."""
    known = set().union(*keys.values()) - set(OPTIONS)
    for key in given:
        if key in OPTIONS:
            raise TDPFedError(f"{option}: {key!r} given, use {OPTIONS[key]} instead")
        if not _has(known, key):
            section, _, name = key.rpartition(".")
            near = {one for one in known if one.startswith(f"{section}.") or one.endswith(f".{name}")}
            raise unknown(option, key, near or known)
        if option == "--sweep" and given.count(key) > 1:
            raise TDPFedError(f"{option}: {key!r} given {given.count(key)} times, must be given once, with all values")


def _has(keys: Iterable[str], key: str) -> bool:
    """Whether a key exists or belongs to a table that does, as ``data.options.alpha`` to ``data.options``."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def _seeded(source: str, name: str, seeds: int, settings: Sequence[Setting], common: Sequence[str]) -> list[Cell]:
    words = [name, *(f"{key.removeprefix('algorithm.')}={value}" for key, value in settings)]
    label = file_name("-".join(words))
    chosen = [*common, f"algorithm.name={name}", *(f"{key}={value}" for key, value in settings)]
    try:
        first = load_config(source, chosen).run.seed
        return [
            Cell(f"{label}-seed{seed}", load_config(source, [*chosen, f"run.seed={seed}", "run.seeds=1"]))
            for seed in range(first, first + seeds)
        ]
    except TDPFedError as error:
        foreign = any(isinstance(one, UnknownError) and one.field == "algorithm" for one in each(error))
        hint = "; put settings of a single method into a table [algorithms.NAME]" if foreign else ""
        raise error.noting(f"for {label}{hint}") from None
