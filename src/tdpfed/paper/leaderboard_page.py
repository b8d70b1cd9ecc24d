"""The page of a benchmark: published numbers, ours at both moments of evaluation, bytes, rates and provenance."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.files import write_file
from tdpfed.paper.leaderboard import FACTORS, TUNING, Entry, Plan, Setting, accuracy, groups, label
from tdpfed.paper.study import provenance
from tdpfed.report.group import Group, Stat
from tdpfed.studies.tune import Search, as_csv

FEWER = 50
"""How many times fewer bytes a method must upload to be named as the best that saves many."""

POINT = 1.0
"""A difference from the published number that is explained, in percent."""

HEADS = (
    "", "published", "ours, best", "difference", "before training: best", "last", "after training: best", "last",
    "MB up per client and round", "x fewer", "seconds per round", "rounds", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A method's results in a setting; accuracies in percent."""

    entry: Entry
    factored: bool
    published: float | None
    ours: Stat  # the number that is compared: the best over rounds
    before: tuple[Stat, Stat]  # received models: best over rounds, last round
    after: tuple[Stat, Stat]  # personalized models
    megabytes: float | None  # uploaded by a client in a round
    fewer: float | None  # how many times fewer bytes than all values in float32; None without any
    seconds: float | None  # per round
    rounds: float | None
    seeds: int
    group: Group | None

    @property
    def title(self) -> str:
        """The method's name, and whether its updates are factored."""
        return f"{self.entry.title}, factored updates" if self.factored else self.entry.title

    @property
    def difference(self) -> float | None:
        """Ours minus the published number."""
        return None if self.ours.mean is None or self.published is None else self.ours.mean - self.published


def lines_of(plan: Plan, setting: Setting, found: Mapping[str, Group]) -> list[Line]:
    """Return a line for each method, those with factored updates last."""
    dense = [_line(setting, entry, found.get(label(setting, entry)), False) for entry in plan.entries]
    names = {entry: f"{label(setting, entry)}{FACTORS}" for entry in plan.entries}
    return dense + [
        _line(setting, entry, found[name], True) for entry, name in names.items() if name in found
    ]  # fmt: skip


def _line(setting: Setting, entry: Entry, group: Group | None, factored: bool) -> Line:
    def stat(figure: str, scale: float = 100) -> Stat:
        if group is None or not group.counted:
            return Stat(None)
        found = group.stat(figure)
        return Stat(*(None if value is None else scale * value for value in (found.mean, found.spread)))

    runs = () if group is None else group.counted
    clients = [float(run.setting("data.clients") or len(run.clients)) for run in runs]
    rounds, sent = stat("rounds", 1).mean, stat("uplink_bytes", 1e-6).mean
    seconds, rate = stat("seconds", 1).mean, stat("compression_rate", 1).mean
    return Line(
        entry, factored, entry.published.get(setting.name), stat(f"best_{accuracy(entry)}"),
        (stat("best_received_accuracy"), stat("received_accuracy")),
        (stat("best_personalized_accuracy"), stat("personalized_accuracy")),
        sent / rounds / clients[0] if sent and rounds else 0.0 if runs else None, rate,
        seconds / rounds if seconds is not None and rounds else None, rounds, len(runs), group,
    )  # fmt: skip


def write(plan: Plan, folder: Path, searches: Mapping[tuple[str, str], Search], failed: Sequence[str]) -> list[Path]:
    """Write the page, the results as JSON, and all trials; return the files."""
    found = groups(folder)
    tables = {setting: lines_of(plan, setting, found) for setting in plan.settings}
    used = {line.group.label: line.group for lines in tables.values() for line in lines if line.group is not None}
    origin = {**provenance(used), "settings": list(plan.overrides), "trials": plan.trials}
    files = {}
    for setting in plan.settings:
        mine = [one for (name, _), one in searches.items() if name == setting.name]
        if mine:
            files[f"trials-{setting.name}.csv"] = as_csv(mine, folder / TUNING / setting.name)
    files["README.md"] = "\n".join(_page(plan, tables, origin, failed))
    rows = {setting.name: [_plain(line) for line in lines] for setting, lines in tables.items()}
    plain = {"provenance": origin, "source": plan.board.source, "settings": rows, "failed": list(failed)}
    files["results.json"] = json.dumps(plain, indent=2) + "\n"
    for name, text in files.items():
        write_file(folder / name, text, field="--out")
    return [folder / name for name in files]


def _page(
    plan: Plan, tables: Mapping[Setting, Sequence[Line]], origin: Mapping[str, Any], failed: Sequence[str]
) -> Iterator[str]:
    board, rounds = plan.board, " or ".join(map(str, origin["rounds"])) or "no"
    seeds = len(origin["seeds"])
    yield f"# {board.title}: {rounds} rounds, {seeds} seed{'s' * (seeds != 1)}\n"
    yield (
        f"Published: {board.source}. Ours: mean ± standard deviation over seeds; accuracy over all clients' test "
        "samples. `before training` evaluates the models that clients use once they have the server's message and "
        "before they train, as the benchmark does; `after training` the clients' models after their local training. "
        "`best` is the highest of all evaluations of a run, `last` that of the last round. The best of many "
        "evaluations on the same test samples is too high; it is listed because the benchmark prints it. `ours, best` "
        "is the number that is "
        f"compared: before training, except for {_names(plan, 'personalized')}. `x fewer` says how many times fewer "
        "bytes a client uploads than all values in float32.\n"
    )
    if origin["rounds"] and origin["rounds"] != [board.rounds]:
        yield f"The published numbers are the best of {board.rounds:,} rounds, ours of {rounds}.\n"
    for setting, lines in tables.items():
        yield f"## {setting.title}\n"
        yield _markdown([HEADS, *(_cells(line) for line in lines)])
        yield f"{_verdict(plan, setting, lines)}\n"
        far = [line for line in lines if line.difference is not None and abs(line.difference) > POINT]
        if far:
            yield f"Differences of more than {POINT:g} point:\n"
            yield "".join(f"- {line.title}: {line.difference:+.2f}{_reason(line)}\n" for line in far)
    yield "## Rates\n"
    told = (
        f"`tdpfed tune` with {plan.trials} trials of each method" if plan.trials > 1 else "the presets' own, not tuned"
    )
    lengths = sorted({plan.rounds_of_trials(config) for _, _, config in plan.configs()})
    length = f", each of {' or '.join(map(str, lengths))} rounds and one seed that is not reported"
    yield f"Learning rates and keys that methods declare for tuning: {told}{length * (plan.trials > 1)}.\n"
    yield _markdown([("", *(setting.title for setting in tables)), *_rates(plan, tables)])
    if failed:
        yield "## Runs that failed\n\n" + "".join(f"- {line}\n" for line in failed)
    given = " ".join(f"`{one}`" for one in origin["settings"])
    yield (
        f"## How this was made\n\n- command: `{origin['command']}`\n"
        + f"- settings of all runs: {given}\n" * bool(given)
        + f"- commit: {', '.join(origin['commits']) or 'unknown'}\n"
        f"- device: {', '.join(origin['devices'])}\n- versions: {'; '.join(origin['versions'])}\n"
        f"- seeds: {', '.join(map(str, origin['seeds']))}\n- date: {origin['date']}\n"
    )


def _names(plan: Plan, compared: str) -> str:
    names = [entry.title for entry in plan.board.methods.values() if entry.compared == compared]
    return " and ".join(names) or "none"


def _verdict(plan: Plan, setting: Setting, lines: Sequence[Line]) -> str:
    """Return which row is the best, and which of those with few bytes, with its distance to the best published."""
    title, number = plan.board.best_published(setting.name)
    known = [line for line in lines if line.ours.mean is not None]
    if not known:
        return "No run is finished."
    text = f"The best published is {title} with {number:.2f}. "
    best = max(known, key=lambda line: line.ours.mean or 0.0)
    text += f"Our best is {best.title} with {_stat(best.ours)}. "
    few = [line for line in known if line.fewer is not None and line.fewer >= FEWER]
    if not few:
        return f"{text}No row uploads {FEWER} times fewer bytes."
    least = max(few, key=lambda line: line.ours.mean or 0.0)
    away = (least.ours.mean or 0.0) - number
    return (
        f"{text}At {FEWER} times fewer uploaded bytes or more it is {least.title} with {_stat(least.ours)} at "
        f"{least.fewer:.0f} times fewer, {abs(away):.2f} {'above' if away > 0 else 'below'} the best published."
    )


def _rates(plan: Plan, tables: Mapping[Setting, Sequence[Line]]) -> Iterator[list[str]]:
    """Yield for each method the values of the keys that tuning searches, as its runs had them."""
    for i, entry in enumerate(plan.entries):
        cells = [entry.title]
        for setting, lines in tables.items():
            group = lines[i].group
            search = next(config.method.search for at, one, config in plan.configs() if (at, one) == (setting, entry))
            keys = {key: f"algorithm.{key}" for key in search} | {"server rate": "server.rate"}
            found = {} if group is None else {name: group.runs[0].setting(key) for name, key in keys.items()}
            cells.append(", ".join(f"{name} {value:g}" for name, value in found.items() if value is not None) or "-")
        yield cells


def _reason(line: Line) -> str:
    return f" ({line.entry.note})" if line.entry.note else ""


def _cells(line: Line) -> list[str]:
    return [
        line.title, _number(line.published), _stat(line.ours),
        "-" if line.difference is None else f"{line.difference:+.2f}", *map(_stat, (*line.before, *line.after)),
        _number(line.megabytes, 4), _number(line.fewer, 0 if (line.fewer or 0) >= 10 else 1),
        _number(line.seconds), _number(line.rounds, 0), str(line.seeds),
    ]  # fmt: skip


def _plain(line: Line) -> dict[str, Any]:
    stats = {
        "ours": line.ours, "before_best": line.before[0], "before_last": line.before[1], "after_best": line.after[0],
        "after_last": line.after[1],
    }  # fmt: skip
    return {
        "method": line.entry.name, "title": line.title, "factored": line.factored, "published": line.published,
        "compared": line.entry.compared, "difference": line.difference,
        **{name: {"mean": stat.mean, "sd": stat.spread} for name, stat in stats.items()},
        "megabytes_up": line.megabytes, "times_fewer": line.fewer, "seconds_per_round": line.seconds,
        "rounds": line.rounds, "seeds": line.seeds,
    }  # fmt: skip


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _stat(stat: Stat) -> str:
    if stat.mean is None:
        return "-"
    return f"{stat.mean:.2f}" + ("" if stat.spread is None else f" ± {stat.spread:.2f}")


def _number(value: float | None, decimals: int = 2) -> str:
    return "-" if value is None else f"{value:,.{decimals}f}"
