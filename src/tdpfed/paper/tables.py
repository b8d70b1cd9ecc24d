"""The paper's tables with our numbers next to its own, as Markdown and CSV."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.cp.plan import FactorPlan
from tdpfed.models import from_spec
from tdpfed.paper.published import OURS, RANKS, ROUNDS, TITLES, Row, Study
from tdpfed.report.group import Group, Stat
from tdpfed.report.parse import Number

WORDS = {
    "personalized_accuracy": "personalized", "local_accuracy": "local, after training", "global_accuracy": "global",
}  # fmt: skip
LATE = 10
"""How many of the last evaluations count as late."""

HEADS = (
    "", "paper", "ours", "of", "difference", "personalized", "late", "best", "global", "MB up per round",
    "MB down per round", "MB up in total", "seconds", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A row, and the results of our runs; all accuracies in percent."""

    row: Row
    ours: Stat
    personalized: Stat
    late: Stat  # personalized, the median of the last evaluations
    best: Stat
    global_: Stat
    megabytes: Number
    megabytes_down: Number
    rounds: Number
    seconds: Stat
    seeds: int


@dataclass(frozen=True)
class Table:
    """A table by its number; the first has ranks instead of accuracies."""

    number: int
    lines: Sequence[Line] = ()
    ranks: Sequence[tuple[str, str, int, int, int, int]] = ()  # layer, shape, the paper's two ranks, ours


def make(study: Study, number: int, groups: Mapping[str, Group]) -> Table:
    """Return a table of the groups of runs that exist; cells without a run stay empty."""
    if number == 1:
        return Table(1, ranks=_ranks(study.model))
    return Table(number, [_line(row, groups.get(row.run)) for row in study.tables[number]])


def _line(row: Row, group: Group | None) -> Line:
    def stat(figure: str) -> Stat:
        if group is None or not group.counted:
            return Stat(None)
        found = group.stat(figure)
        return Stat(*(None if value is None else 100 * value for value in (found.mean, found.spread)))

    up, down, rounds, seconds = (Stat(None),) * 4 if group is None else (
        group.stat("uplink_bytes"), group.stat("downlink_bytes"), group.stat("rounds"), group.stat("seconds")
    )  # fmt: skip
    sent, received = (None if bytes_.mean is None else bytes_.mean / 1e6 for bytes_ in (up, down))
    return Line(
        row, stat(row.accuracy), stat("personalized_accuracy"), _late(group), stat("best_personalized_accuracy"),
        stat("global_accuracy"), sent, received, rounds.mean, seconds, 0 if group is None else len(group.counted),
    )  # fmt: skip


def _late(group: Group | None) -> Stat:
    """Return the median of the last evaluations, which one bad round does not change."""
    runs = () if group is None else group.counted
    curves = [[value for value in run.series["personalized_accuracy"][-LATE:] if value is not None] for run in runs]
    return Stat.of([100 * statistics.median(curve) if curve else None for curve in curves])


def _ranks(model: str) -> list[tuple[str, str, int, int, int, int]]:
    """Return every layer with the paper's ranks and those of our plans, at compression 1.5 and 2."""
    built = from_spec(model)
    plans = [{row.name: row for row in FactorPlan.of(built, rate).rows()} for rate in (1.5, 2.0)]
    rows = []
    for layer, paper in RANKS[model].items():
        found = [plan[f"{layer}.weight"] for plan in plans]
        shape = "x".join(map(str, found[0].shape))
        rows.append((layer, shape, *paper, found[0].rank or 0, found[1].rank or 0))
    return rows


def cells(line: Line) -> list[str]:
    """Return a line's text, column by column."""
    up, down = (
        total / line.rounds if total is not None and line.rounds else None
        for total in (line.megabytes, line.megabytes_down)
    )
    difference = None
    if line.ours.mean is not None and line.row.paper is not None:
        difference = line.ours.mean - line.row.paper
    return [
        line.row.label, _number(line.row.paper), _stat(line.ours), WORDS[line.row.accuracy],
        "-" if difference is None else f"{difference:+.2f}", _stat(line.personalized), _stat(line.late),
        _stat(line.best), _stat(line.global_), _number(up), _number(down), _number(line.megabytes),
        _number(line.seconds.mean, 0), str(line.seeds),
    ]  # fmt: skip


def as_dict(line: Line) -> dict[str, Any]:
    """Return a line as plain values."""
    stats = {
        "ours": line.ours, "personalized": line.personalized, "late": line.late, "global": line.global_,
        "best": line.best,
    }  # fmt: skip
    plain = {name: {"mean": stat.mean, "sd": stat.spread} for name, stat in stats.items()}
    settings = {"label": line.row.label, "run": line.row.run, "paper": line.row.paper, "of": line.row.accuracy}
    sent = {"megabytes_up": line.megabytes, "megabytes_down": line.megabytes_down}
    return {**settings, **plain, **sent, "rounds": line.rounds, "seeds": line.seeds}


def to_csv(table: Table) -> str:
    """Return a table as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if table.ranks:
        writer.writerow(["layer", "shape", "paper x1.5", "paper x2", "ours x1.5", "ours x2"])
        writer.writerows(table.ranks)
    else:
        writer.writerow(["setting", *HEADS[1:]])
        writer.writerows(cells(line) for line in table.lines)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """Return a table as Markdown."""
    if table.ranks:
        heads: Sequence[str] = ("layer", "shape", "paper, x1.5", "paper, x2", "ours, x1.5", "ours, x2")
        rows = [[str(value) for value in rank] for rank in table.ranks]
    else:
        heads, rows = HEADS, [cells(line) for line in table.lines]
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_page(
    study: Study, made: Sequence[Table], images: Sequence[Path], origin: Mapping[str, Any], failed: Sequence[str]
) -> str:
    """Return all tables and figures on one Markdown page, with their provenance."""
    seeds, rounds = len(origin["seeds"]), " or ".join(map(str, origin["rounds"])) or "no"
    parts = [f"# The paper's experiments, preset `{study.preset}`: {rounds} rounds, {seeds} seed{'s' * (seeds != 1)}\n"]
    parts.append(
        "Accuracies are in percent after the last round, mean ± standard deviation over seeds. `ours` is our number "
        "that is compared with the paper's; the column `of` says of which models it is the accuracy. `late` is the "
        f"median of a run's last {LATE} personalized accuracies, `best` the highest of all. `local, after training` "
        "means the clients' models before they are averaged. If seeds were computed together, `seconds` is the time "
        "of all of them; runs that shared a machine took longer."
        + f" The paper's numbers are after {ROUNDS} rounds." * (origin["rounds"] != [ROUNDS])
        + f" Settings of all runs without their own value: {' '.join(f'`{one}`' for one in origin['settings'])}."
        * bool(origin["settings"])
        + " Lines with 0 seeds have no finished run." * any(line.seeds == 0 for table in made for line in table.lines)
        + "\n"
    )
    for table in made:
        parts.append(f"## Table {table.number}: {TITLES[table.number]}\n\n{to_markdown(table)}")
        ours = [line.row for line in table.lines if line.row.run.endswith(OURS)]
        given = "".join(f"- {row.label}: {' '.join(f'`{one}`' for one in study.runs[row.run])}\n" for row in ours)
        parts += [f"Settings in addition to the preset:\n\n{given}"] if ours else []
    for image in images:
        parts.append(f"## {image.stem.replace('-', ' ').capitalize()}\n\n![{image.stem}]({image.name})\n")
    if failed:
        parts.append("## Runs that failed\n\n" + "".join(f"- {line}\n" for line in failed))
    parts.append(
        f"## How this was made\n\n- command: `{origin['command']}`\n"
        f"- commit: {', '.join(origin['commits']) or 'unknown'}\n"
        f"- device: {', '.join(origin['devices'])}\n- versions: {'; '.join(origin['versions'])}\n"
        f"- seeds: {', '.join(map(str, origin['seeds']))}\n- date: {origin['date']}\n"
    )
    return "\n".join(parts)


def _stat(stat: Stat) -> str:
    if stat.mean is None:
        return "-"
    return f"{stat.mean:.2f}" + ("" if stat.spread is None else f" ± {stat.spread:.2f}")


def _number(value: Number, decimals: int = 2) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
