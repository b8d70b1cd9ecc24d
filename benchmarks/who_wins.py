"""Which method should I use? All methods in many settings, tuned alike, each also with ``personalize = "best"``.

``python benchmarks/who_wins.py results/methods/study.toml`` tunes every method in every setting like ``tdpfed tune``,
writes what was chosen to ``SETTING.toml`` (``tdpfed compare`` and ``tdpfed run`` take these files), runs what is not
finished in the folder ``runs`` next to the study, and writes the tables for the settings that are finished. Restore
packed runs first, and pack them again at the end:

    python benchmarks/pack.py unpack results/methods/runs.jsonl.gz results/methods/runs
    python benchmarks/who_wins.py results/methods/study.toml
    python benchmarks/pack.py pack results/methods

A study gives ``title``, ``text``, ``advice``, the number of ``trials`` and of tuning ``seeds``, the share for
``validation``, ``groups`` of ``methods`` (each with settings ``set`` and the method that trains ``alone``) and
``settings`` (``preset``, ``seeds``, ``set``). A client is *worse than alone* if its accuracy is below that of the same
client trained alone on all of its training samples by more than two standard errors of its test set.
"""

import argparse
import json
import math
import shutil
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import provenance, slug, write
from pack import PACKED
from settings import origin, shown

from tdpfed.config.loading import load_config, to_toml
from tdpfed.report.group import Group
from tdpfed.report.read import Run, read_run
from tdpfed.runs.folder import CONFIG, FEDERATION, RunFolder
from tdpfed.runs.grid import Cell, CellResult, run_cells
from tdpfed.studies.tune import Search, as_csv, as_toml, searches

OWN, BEST, FAILED = "own", "best", "failed"
SMALL, LARGE = 0.01, 0.003
"""How far ``best`` may be below the better of the method and training alone, with fewer than 100 training samples or
more."""
MOST_WORSE = 0.03


@dataclass(frozen=True)
class Entry:
    """A method of a group in a setting."""

    setting: str
    group: Mapping[str, Any]
    method: str

    @property
    def label(self) -> str:
        return f"{self.method}{self.group.get('suffix', '')}"


def tuned_file(out: Path, setting: str, group: Mapping[str, Any]) -> Path:
    """Return the file of the values chosen for a group of methods in a setting."""
    return out / f"{slug(setting + group.get('suffix', ''))}.toml"


def overrides(study: Mapping[str, Any], setting: str, group: Mapping[str, Any]) -> list[str]:
    return [*study.get("set", ()), *study["settings"][setting]["set"], *group.get("set", ())]


def tuning(
    study: Mapping[str, Any], setting: str, group: Mapping[str, Any], data_root: Path | None
) -> tuple[list[Search], list[str]]:
    """Return the searches of a group's methods in a setting, with names of their own, and their common settings."""
    given = [*overrides(study, setting, group), f"data.validation={study['validation']}"]
    names, preset = ",".join(group["methods"]), study["settings"][setting]["preset"]
    found, _ = searches(preset, names, study["trials"], study["seeds"], given, data_root)
    where = slug(setting + group.get("suffix", ""))

    def named(one: Search) -> Search:
        trials = (
            replace(trial, cells=tuple(Cell(f"{where}_{cell.name}", cell.config) for cell in trial.cells))
            for trial in one.trials
        )
        return replace(one, trials=tuple(trials))

    return [named(one) for one in found], given


def cells_of(study: Mapping[str, Any], entry: Entry, out: Path) -> dict[str, list[Cell]]:
    """Return a method's runs at its chosen values: its own models on all samples, and with the choice of models."""
    file, where = str(tuned_file(out, entry.setting, entry.group)), slug(entry.setting + entry.group.get("suffix", ""))
    alone = load_config(file, [f"algorithm.name={entry.group['alone']}"]).algorithm["eta"]
    kinds = {OWN: ["data.validation="]}
    if entry.method != entry.group["alone"]:
        choice = ["evaluation.personalize=best", f"evaluation.alone_rate={alone}", *study.get("best", ())]
        kinds[BEST] = ["data.validation=", *choice]
    return {
        kind: [
            Cell(
                f"{where}_{entry.method}_{kind}_seed{seed}",
                load_config(file, [f"algorithm.name={entry.method}", f"run.seed={seed}", *given]),
            )
            for seed in range(study["settings"][entry.setting]["seeds"])
        ]
        for kind, given in kinds.items()
    }


def entries(study: Mapping[str, Any], setting: str) -> list[Entry]:
    return [Entry(setting, group, method) for group in study["groups"] for method in group["methods"]]


@dataclass(frozen=True)
class Row:
    """The results of a method in a setting: of its own models, of the choice, and of training alone.

    A method whose run diverged at its tuned values, in one seed or more, has no result: its kind is in ``diverged``.
    """

    own: Group | None
    best: Group | None
    alone: Group
    diverged: frozenset[str] = frozenset()

    def worse(self, group: Group) -> float:
        """Return the share of clients that are worse than alone by more than two standard errors."""
        pairs = [pair for run, other in zip(group.runs, self.alone.runs, strict=True) for pair in _pairs(run, other)]
        return sum(_is_worse(*pair) for pair in pairs) / len(pairs)

    @property
    def loss(self) -> float | None:
        """By how much the choice is below the better of the method and training alone; None for training alone."""
        if self.best is None:
            return None
        own = self.alone if self.own is None else self.own
        return max(accuracy(own), accuracy(self.alone)) - accuracy(self.best)

    def shown(self, kind: str, text: Callable[[Group], str]) -> str:
        """Return a cell of a table: the text for the models of a kind, a dash if there are none."""
        group: Group | None = getattr(self, kind)
        return text(group) if group is not None else "diverges" if kind in self.diverged else "-"


def accuracy(group: Group) -> float:
    return group.stat("personalized_accuracy").mean or 0.0


def _pairs(run: Run, alone: Run) -> list[tuple[float, float, int]]:
    sizes = json.loads((run.path / FEDERATION).read_text(encoding="utf-8"))["test_size"]
    found = zip(run.clients, alone.clients, sizes, strict=True)
    return [(mine, other, size) for mine, other, size in found if mine is not None and other is not None]


def _is_worse(mine: float, alone: float, size: int) -> bool:
    mean = (mine + alone) / 2
    return alone - mine > 2 * math.sqrt(mean * (1 - mean) / size) + 1e-12


def rows_of(study: Mapping[str, Any], setting: str, out: Path) -> dict[str, Row] | None:
    """Return the results of all methods in a setting; None if not all runs are finished."""
    groups: dict[tuple[str, str], Group] = {}
    diverged: dict[str, set[str]] = defaultdict(set)
    for entry in entries(study, setting):
        if not tuned_file(out, setting, entry.group).exists():
            return None
        for kind, cells in cells_of(study, entry, out).items():
            ends = {_end(out / "runs" / cell.name, cell) for cell in cells}
            if None in ends:
                return None
            if FAILED in ends:
                diverged[entry.label].add(kind)
                continue
            runs = tuple(read_run(out / "runs" / cell.name) for cell in cells)
            groups[entry.label, kind] = Group(entry.label, runs)
    alone = {entry.label: entry.group["alone"] + entry.group.get("suffix", "") for entry in entries(study, setting)}
    return {
        label: Row(
            groups.get((label, OWN)), groups.get((label, BEST)), groups[alone[label], OWN], frozenset(diverged[label])
        )
        for label in alone
    }  # fmt: skip


def _end(path: Path, cell: Cell) -> str | None:
    """Return how a run ended; None if it did not, or is another run."""
    if not (path / CONFIG).exists() or to_toml(load_config(str(path / CONFIG))) != to_toml(cell.config):
        return None
    if RunFolder(path).done:
        return "done"
    summary = json.loads(file.read_text()) if (file := path / "summary.json").exists() else {}
    return FAILED if summary.get("status") == FAILED else None  # the output of the study says why


# The page


def glance(finished: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Return personalized accuracy in every setting, of the method and with the choice; the best in bold."""
    lines = [
        f"| personalized %, own / best | {' | '.join(finished)} | worse than alone, own / best | MB up, of FedAvg's |",
        "| --- |" + " ---: |" * (len(finished) + 2),
    ]
    top = {
        (setting, kind): max(round(100 * accuracy(group), 1) for row in rows.values() if (group := getattr(row, kind)))
        for setting, rows in finished.items()
        for kind in (OWN, BEST)
    }
    labels = list(next(iter(finished.values()), {}))
    for label in labels:
        cells = []
        for setting, rows in finished.items():
            parts = []
            for kind in (OWN, BEST):
                group = getattr(rows[label], kind)
                text = rows[label].shown(kind, lambda group: f"{100 * accuracy(group):.1f}")
                top_one = group is not None and round(100 * accuracy(group), 1) == top[setting, kind]
                parts.append(f"**{text}**" if top_one else text)
            cells.append(" / ".join(parts))
        worse = [_mean_worse(finished, label, kind) for kind in (OWN, BEST)]
        cells.append(" / ".join("-" if one is None else f"{100 * one:.1f} %" for one in worse))
        relative = _relative_bytes(finished, label)
        cells.append("-" if relative is None else f"{relative:.2f}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def _mean_worse(finished: Mapping[str, Mapping[str, Row]], label: str, kind: str) -> float | None:
    found = [rows[label].worse(group) for rows in finished.values() if (group := getattr(rows[label], kind))]
    return statistics.mean(found) if found else None


def _relative_bytes(finished: Mapping[str, Mapping[str, Row]], label: str) -> float | None:
    shares = [
        (own.stat("uplink_bytes").mean or 0) / (base.stat("uplink_bytes").mean or 1)
        for rows in finished.values()
        if (own := rows[label].own or rows[label].best) and (base := rows["fedavg"].own)
    ]
    return statistics.mean(shares) if shares else None


def table(rows: Mapping[str, Row]) -> list[str]:
    """Return every method's numbers in a setting."""
    lines = [
        "| | personalized % | with best % | worst decile % | with best % | worse than alone % | with best % | MB up |",
        "| --- |" + " ---: |" * 7,
    ]
    for label, row in rows.items():
        both = (OWN, BEST)
        cells = [
            *(row.shown(kind, lambda group: shown(group.stat("personalized_accuracy"))) for kind in both),
            *(row.shown(kind, lambda group: shown(group.stat("worst_decile_accuracy"))) for kind in both),
            *(row.shown(kind, lambda group: f"{100 * row.worse(group):.1f}") for kind in both),  # noqa: B023
            row.shown(OWN, lambda group: shown(group.stat("uplink_bytes"), 1e-6)),
        ]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def criteria(finished: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Return in how many cases ``best`` is what it is meant to be, and the cases in which it is not."""
    lost, cases, few, worse, clients = list[str](), 0, 0, 0.0, 0
    for setting, rows in finished.items():
        for label, row in rows.items():
            if BEST in row.diverged:
                cases += 1
                lost.append(f"{label} on {setting} (diverges)")
            if row.best is None or row.loss is None:
                continue
            cases += 1
            allowed = LARGE if _samples(row.alone) >= 100 else SMALL
            if row.loss > allowed:
                lost.append(f"{label} on {setting} ({100 * row.loss:.2f} points, at most {100 * allowed:.1f})")
            else:
                few += 1
            count = sum(len(run.clients) for run in row.best.runs)
            worse, clients = worse + row.worse(row.best) * count, clients + count
    share = worse / clients if clients else 0.0
    return [
        f"With `best` a method's mean accuracy is at least that of the better of the method and training alone, less "
        f"{100 * LARGE:.1f} points where clients have 100 training samples or more and {100 * SMALL:.1f} where they "
        f"have fewer, in {few} of {cases} cases." + (f" Not so: {'; '.join(lost)}." if lost else ""),
        f"Worse than alone are {100 * share:.2f} % of the clients.",
    ]  # fmt: skip


def _samples(group: Group) -> float:
    """Return how many training samples the clients have on average."""
    card = json.loads((group.runs[0].path / FEDERATION).read_text(encoding="utf-8"))
    return statistics.mean(map(int, card["train_size"]))


def page(study: Mapping[str, Any], finished: Mapping[str, Mapping[str, Row]], out: Path, command: str) -> list[str]:
    """Return the lines of the page."""
    lines = [f"# {study['title']}", "", study["text"].strip(), ""]
    if finished:
        lines += [*glance(finished), "", study["advice"].strip(), "", "## Never worse than alone", ""]
        lines += [line for text in criteria(finished) for line in (text, "")]
    for setting, rows in finished.items():
        given = study["settings"][setting]
        rounds = next(iter(rows.values())).alone.runs[0].rounds
        files = [tuned_file(out, setting, group).name for group in study["groups"]]
        links = " and ".join(f"[{name}]({name})" for name in files)
        sets = "".join(f", `{one}`" for one in given["set"])
        lines += [
            f"## {setting}", "", *table(rows), "",
            f"Preset `{given['preset']}`{sets}, {given['seeds']} seeds, {rounds} rounds. "
            f"Tuned values: {links}; all trials are in the files `.csv` of the same name.", "",
        ]  # fmt: skip
    every = [run for rows in finished.values() for row in rows.values() for one in (row.own, row.best) if one
             for run in one.runs]  # fmt: skip
    made = Counter(origin(run) for run in every)
    return [
        *lines, "## How this was made", "", f"Command: `{command}`. {study['made'].strip()}", "",
        *(f"- {where}: {count} runs" for where, count in made.items()), "",
    ]  # fmt: skip


def results(finished: Mapping[str, Mapping[str, Row]]) -> dict[str, Any]:
    """Return all numbers of the page."""
    keys = ("personalized_accuracy", "worst_decile_accuracy", "uplink_bytes", "downlink_bytes", "rounds")

    def plain(row: Row, group: Group) -> dict[str, Any]:
        found = {key: vars(group.stat(key)) for key in keys}
        return {**found, "worse_than_alone": row.worse(group), "choices": _choices(group)}

    return {
        setting: {
            label: {kind: plain(row, group) for kind in (OWN, BEST) if (group := getattr(row, kind))}
            | dict.fromkeys(sorted(row.diverged), "diverges")
            for label, row in rows.items()
        }
        for setting, rows in finished.items()
    }


def _choices(group: Group) -> dict[str, int]:
    """Return how many clients use which model, over all seeds."""
    found: Counter[str] = Counter()
    for run in group.runs:
        found.update(json.loads((run.path / "summary.json").read_text(encoding="utf-8")).get("choices", {}))
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder; that of the study by default")
    parser.add_argument("--only", action="append", default=[], help="settings whose name has this word; repeatable")
    parser.add_argument("--no-run", action="store_true", help="only write the results of finished runs")
    options = parser.parse_args()
    study = tomllib.loads(options.study.read_text())
    out = options.out or options.study.parent
    if (out / PACKED).exists() and not (out / "runs").exists():
        raise SystemExit(f"{out / PACKED}: restore these runs first, python benchmarks/pack.py unpack FILE {out}/runs")

    def say(outcome: CellResult) -> None:
        if not outcome.kept:
            print(outcome.cell.name, outcome.error or "done", flush=True)
        if outcome.error is None:
            shutil.rmtree(outcome.path / "checkpoints", ignore_errors=True)  # a finished run needs none

    def run(cells: Sequence[Cell]) -> None:
        run_cells(cells, out / "runs", options.data_root, on_start=_quiet, on_round=_quiet, on_end=say)

    for setting, given in study["settings"].items() if not options.no_run else ():
        if options.only and not any(word in setting for word in options.only):
            continue
        for group in study["groups"]:
            found, common = tuning(study, setting, group, options.data_root)
            run([cell for one in found for trial in one.trials for cell in trial.cells])
            file = tuned_file(out, setting, group)
            file.write_text(as_toml(found, out / "runs", given["preset"], common), encoding="utf-8")
            file.with_suffix(".csv").write_text(as_csv(found, out / "runs"), encoding="utf-8")
        run([
            cell
            for entry in entries(study, setting)
            for cells in cells_of(study, entry, out).values()
            for cell in cells
        ])  # fmt: skip
    found_rows = {setting: rows_of(study, setting, out) for setting in study["settings"]}
    finished = {setting: rows for setting, rows in found_rows.items() if rows is not None}
    made = provenance(0, torch.device("cpu"))
    (out / "README.md").write_text("\n".join(page(study, finished, out, made["command"])), encoding="utf-8")
    # The provenance of each run is stored with it; this is only the command that combined them.
    write(
        out / "results.json",
        {"provenance": {key: made[key] for key in ("command", "date")}, "settings": results(finished)},
    )


def _quiet(_: object) -> None:
    """Show nothing."""


if __name__ == "__main__":
    main()
