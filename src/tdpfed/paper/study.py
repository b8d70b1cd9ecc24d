"""Run what a study needs, and write its tables, figures and provenance into one folder."""

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tdpfed.config import load_config
from tdpfed.errors import TDPFedError, unknown
from tdpfed.files import write_file
from tdpfed.paper import tables
from tdpfed.paper.figures import draw
from tdpfed.paper.published import STUDIES, TITLES, Study
from tdpfed.report.group import Group
from tdpfed.report.read import SUMMARY, Run, read_runs
from tdpfed.runs.grid import Cell, CellResult

PACKED = "runs.jsonl.gz"
"""Runs of a folder as `benchmarks/pack.py` packs them."""

Groups = dict[str, Group]


def find(name: str) -> Study:
    """Return a study by the name of its data set."""
    if name not in STUDIES:
        raise unknown("data set", name, STUDIES)
    return STUDIES[name]


def choose(study: Study, tables_: Sequence[int], figures: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tables and figures to make: those named, or all."""
    for kind, given, allowed in (("table", tables_, TITLES), ("figure", figures, study.figures)):
        for number in given:
            if number not in allowed:
                raise unknown(f"--{kind}", number, map(str, allowed))
    if not tables_ and not figures:
        return tuple(TITLES), tuple(study.figures)
    return tuple(dict.fromkeys(tables_)), tuple(dict.fromkeys(figures))


def with_earlier(folder: Path, tables_: Sequence[int], figures: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return what to make so that tables and figures of earlier calls with this folder are kept.

    A folder whose runs are packed is refused: without them the tables would contain only new runs.
    """
    if (folder / PACKED).exists() and not (folder / "runs").exists():
        raise TDPFedError(
            f"--out: {str(folder)!r} holds packed runs; restore them with `python benchmarks/pack.py unpack "
            f"{folder / PACKED} {folder / 'runs'}`, or give a new folder"
        )
    try:
        made = json.loads((folder / "results.json").read_text(encoding="utf-8"))["made"]
        return sorted({*tables_, *made["tables"]}), sorted({*figures, *made["figures"]})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return tables_, figures


def cells_of(
    study: Study,
    runs: Sequence[str],
    rounds: int | None,
    seeds: int,
    settings: Sequence[str] = (),
    figures: Sequence[int] = (),
) -> list[Cell]:
    """Return the runs with every seed; those in a figure of losses record the loss on all training samples."""
    if seeds < 1:
        raise TDPFedError(f"--seeds: {seeds} given, must be at least 1")
    if rounds is not None and rounds < 1:
        raise TDPFedError(f"--rounds: {rounds} given, must be at least 1")
    common = list(settings)
    if rounds is not None:
        common += [f"run.rounds={rounds}", f"run.evaluate_every={min(10, max(1, rounds // 10))}"]
    losses = any(study.figures[number] == "loss" for number in figures)
    drawn = {row.run for panel in study.curves.values() for row in panel} if losses else set()
    first = {
        run: ["checkpoint.every=50", "checkpoint.keep=1", f"run.train_loss={str(run in drawn).lower()}"] for run in runs
    }
    return [
        Cell(
            f"{run}-seed{seed}", load_config(study.preset, [*first[run], *common, *study.runs[run], f"run.seed={seed}"])
        )
        for run in runs
        for seed in range(seeds)
    ]


def overruled(study: Study, runs: Sequence[str], rounds: int | None, settings: Sequence[str]) -> list[str]:
    """Return a line for each given setting that is ignored by some of the runs, which set it themselves."""
    lines = []
    for key in dict.fromkeys(setting.partition("=")[0].strip() for setting in settings):
        own = [run for run in runs if any(one.partition("=")[0] == key for one in study.runs[run])]
        if key == "run.seed" or (rounds is not None and key in ("run.rounds", "run.evaluate_every")):
            option = "--seeds" if key == "run.seed" else "--rounds"
            lines.append(f"--set {key}: has no effect, use {option}")
        elif own:
            lines.append(f"--set {key}: has no effect on {', '.join(own)}, which set it themselves")
    return lines


def write(
    study: Study,
    folder: Path,
    outcomes: Sequence[CellResult],
    wanted: tuple[int, ...],
    figures: tuple[int, ...],
    settings: Sequence[str] = (),
) -> list[Path]:
    """Write the results of the finished runs: a page of all tables, a CSV file for each, figures, and provenance."""
    finished: dict[str, list[Path]] = {}
    for outcome in outcomes:
        if outcome.error is None:
            finished.setdefault(outcome.cell.name.rpartition("-seed")[0], []).append(outcome.path)
    groups = {run: Group(run, tuple(read_runs(paths)[0])) for run, paths in finished.items()}
    folder.mkdir(parents=True, exist_ok=True)
    made = [tables.make(study, number, groups) for number in wanted]
    files = []
    for table in made:
        files.append(folder / f"table-{table.number}.csv")
        write_file(files[-1], tables.to_csv(table), field="--out")
    origin = {**provenance(groups), "settings": list(settings)}
    failed = [f"{outcome.cell.name}: {outcome.error}" for outcome in outcomes if outcome.error is not None]
    images = draw(study, folder, figures, groups)
    files += [folder / "README.md", folder / "results.json", *images]
    write_file(files[len(made)], tables.to_page(study, made, images, origin, failed), field="--out")
    rows = {table.number: [tables.as_dict(line) for line in table.lines] for table in made}
    asked = {"tables": wanted, "figures": figures}
    result = {"provenance": origin, "made": asked, "tables": rows, "failed": failed}
    write_file(files[len(made) + 1], json.dumps(result, indent=2) + "\n", field="--out")
    return files


def provenance(groups: Groups) -> dict[str, Any]:
    """Return the provenance of the numbers: command, commit, hardware, versions, seeds and rounds."""
    runs = [run for group in groups.values() for run in group.runs]
    return {
        "command": " ".join(["tdpfed", *sys.argv[1:]]),
        "commits": sorted({commit for run in runs if (commit := _summary(run).get("commit"))}),
        "devices": sorted({run.texts.get("device", "unknown") for run in runs}),
        "versions": sorted({_versions(run) for run in runs}),
        "seeds": sorted({int(run.setting("run.seed")) for run in runs}),
        "rounds": sorted({run.rounds for run in runs}),
        "seconds": {name: [run.figures["seconds"] for run in group.runs] for name, group in groups.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _versions(run: Run) -> str:
    return ", ".join(f"{name} {value}" for name, value in run.versions.items() if name != "commit")


def _summary(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / SUMMARY).read_text(encoding="utf-8"))
    return found
