"""Compare methods in many settings: which is best, by how much, and with how many uploaded bytes.

``python benchmarks/settings.py results/settings/study.toml`` runs what is not finished in the folder ``runs`` next to
the study, and writes tables, verdicts and plots of accuracy against uploaded bytes for the settings that are finished.
The checkpoints of finished runs are deleted. Restore the packed runs first, and pack them again at the end:

    python benchmarks/pack.py unpack results/settings/runs.jsonl.gz results/settings/runs
    python benchmarks/settings.py results/settings/study.toml
    python benchmarks/pack.py pack results/settings

A study gives ``title``, ``text``, ``methods`` (a name and its settings, where ``{word}`` is a value of the setting),
which of them trains ``alone`` and which are in the table at a ``glance``, and ``settings`` (``preset``, ``seeds``,
``set``, and optionally ``values`` of words and ``only`` some of the methods). With ``tune``, rates are chosen first
(:mod:`tuning`).
"""

import argparse
import json
import shutil
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
import tuning
from common import provenance, slug, write
from matplotlib.figure import Figure
from pack import PACKED

from tdpfed.config import Config
from tdpfed.config.loading import load_config, to_toml
from tdpfed.report.figures import MARKERS, STYLE
from tdpfed.report.group import Group, Stat
from tdpfed.report.look import COLORS
from tdpfed.report.read import SUMMARY, Run, read_run
from tdpfed.report.table import reach
from tdpfed.runs.folder import CONFIG, RunFolder
from tdpfed.runs.grid import Cell, CellResult, run_cells

COLUMNS = {
    "personalized_accuracy": "personalized %", "global_accuracy": "global %", "worst_decile_accuracy": "worst decile %",
}  # fmt: skip
CODED = ", int8"
"""Suffix of methods that differ from another one only in their codec: drawn dotted in the same color."""
ALL_COLORS = (*COLORS[:7], "#7f5539", "#808080", "#b5bd00")


def wanted(study: Mapping[str, Any], only: Sequence[str]) -> list[str]:
    """Return the settings with one of the words in their name; all of them without words."""
    return [setting for setting in study["settings"] if not only or any(word in setting for word in only)]


def cells_of(
    study: Mapping[str, Any], settings: Sequence[str], extra: Sequence[str], runs: Path
) -> dict[str, dict[str, list[Cell]]]:
    """Return the runs of each method in each setting, at the rates that the trials in ``runs`` chose."""
    found: dict[str, dict[str, list[Cell]]] = {}
    for setting in settings:
        given, rates = study["settings"][setting], tuning.chosen(study, setting, runs, extra)
        found[setting] = {}
        for method, template in study["methods"].items():
            if method not in given.get("only", study["methods"]):
                continue
            own = [one.format(**given.get("values", {})) for one in template]
            values = ["checkpoint.every=50", "checkpoint.keep=1", *extra, *given["set"], *own, *rates.get(method, ())]
            found[setting][method] = [
                Cell(
                    f"{slug(setting)}_{slug(method)}_seed{seed}",
                    load_config(given["preset"], [*values, f"run.seed={seed}"]),
                )
                for seed in range(given["seeds"])
            ]
    return found


def shown(stat: Stat, scale: float = 100, decimals: int = 2) -> str:
    """Return a mean as text; accuracies with their spread."""
    if stat.mean is None:
        return "-"
    spread = "" if stat.spread is None or scale != 100 else f" ± {scale * stat.spread:.{decimals}f}"
    return f"{scale * stat.mean:,.{decimals}f}{spread}"


def table(groups: Mapping[str, Group], alone: str) -> list[str]:
    """Return every method's numbers; the last column counts the bytes until the accuracy of training alone."""
    target = _target(groups, alone)
    lines = [
        f"| | {' | '.join(COLUMNS.values())} | MB up | MB up to {100 * target:.2f} % |",
        "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]
    for method, group in groups.items():
        figures = [shown(group.stat(key)) for key in COLUMNS]
        sent = [shown(group.stat("uplink_bytes"), 1e-6), shown(_to_alone(groups, method, alone), 1e-6)]
        lines.append(f"| {method} | {' | '.join([*figures, *sent])} |")
    return lines


def _target(groups: Mapping[str, Group], alone: str) -> float:
    return groups[alone].stat("personalized_accuracy").mean or 0.0


def _to_alone(groups: Mapping[str, Group], method: str, alone: str) -> Stat:
    """Return the bytes that a method uploads until it reaches the accuracy of training alone."""
    return Stat(0.0) if method == alone else reach(groups[method], _target(groups, alone))[1]


def glance(finished: Mapping[str, Mapping[str, Group]], methods: Sequence[str]) -> list[str]:
    """Return the personalized accuracy of some methods in all settings, the best of them in bold."""
    lines = [f"| personalized % | {' | '.join(methods)} |", "| --- |" + " ---: |" * len(methods)]
    for setting, groups in finished.items():
        means = [groups[method].stat("personalized_accuracy").mean or 0.0 for method in methods]
        texts = [f"{100 * mean:.1f}" for mean in means]
        cells = [f"**{text}**" if text == f"{100 * max(means):.1f}" else text for text in texts]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    sent = [
        {setting: groups[method].stat("uplink_bytes").mean or 0.0 for setting, groups in finished.items()}
        for method in methods
    ]
    full = [max(one[setting] for one in sent) for setting in finished]
    shares = [
        sum(one[setting] / most for setting, most in zip(finished, full, strict=True)) / len(full) for one in sent
    ]
    lines.append(f"| uploaded, relative to the largest | {' | '.join(f'{share:.2f}' for share in shares)} |")
    return lines


def verdict(groups: Mapping[str, Group]) -> str:
    """Return which method is best, which are not separated from it, and which of these uploads the fewest bytes."""
    stats = {method: group.stat("personalized_accuracy") for method, group in groups.items()}
    best = max(stats, key=lambda method: stats[method].mean or 0.0)
    close = [method for method in stats if method != best and not stats[method].separated(stats[best])]
    text = f"Best personalized accuracy: **{best}**, {shown(stats[best])} %"
    if stats[best].spread is None:
        return f"{text}. With one seed it is not known which differences are significant."
    text += f". Not separated from it: {'; '.join(close)}." if close else ". All others are separated from it."
    sends = {method: groups[method].stat("uplink_bytes").mean or 0.0 for method in (best, *close)}
    least = min(sends, key=lambda method: sends[method])
    return f"{text} Of these, *{least}* uploads the fewest bytes, {sends[least] / 1e6:,.2f} MB." if close else text


def draw(groups: Mapping[str, Group], title: str, path: Path) -> None:
    """Draw accuracy by uploaded bytes; a method that sends nothing is a horizontal line."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes: Any = figure.subplots()
        plain = list(dict.fromkeys(method.removesuffix(CODED) for method in groups))
        for method, group in groups.items():
            i, dash = plain.index(method.removesuffix(CODED)), ":" if method.endswith(CODED) else "-"
            sent = [None if b is None else b / 1e6 for b in group.mean["uplink_bytes"]]
            accuracy = [None if a is None else 100 * a for a in group.mean["personalized_accuracy"]]
            look = {"color": ALL_COLORS[i % len(ALL_COLORS)], "label": method}
            if not any(sent):
                axes.axhline(accuracy[-1], linestyle="--", **look)
                continue
            axes.plot(sent, accuracy, linestyle=dash, marker=MARKERS[i % len(MARKERS)], markevery=(i % 3, 3), **look)
        axes.set(xscale="log", xlabel="uploaded by all clients together, MB", ylabel="personalized accuracy, %")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize=7)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder; that of the study by default")
    parser.add_argument("--only", action="append", default=[], help="settings whose name has this word; repeatable")
    parser.add_argument("--set", action="append", default=[], dest="extra", help="a setting for all runs; repeatable")
    parser.add_argument("--no-run", action="store_true", help="only write the results of finished runs")
    parser.add_argument("--no-page", action="store_true", help="only run")
    options = parser.parse_args()
    study = tomllib.loads(options.study.read_text())
    out = options.out or options.study.parent
    if (out / PACKED).exists() and not (out / "runs").exists():
        raise SystemExit(f"{out / PACKED}: restore these runs first, python benchmarks/pack.py unpack FILE {out}/runs")
    settings = wanted(study, options.only)
    if not options.no_run:

        def say(outcome: CellResult) -> None:
            print(outcome.cell.name, outcome.error or ("kept" if outcome.kept else "done"), flush=True)
            if outcome.error is None:
                shutil.rmtree(outcome.path / "checkpoints", ignore_errors=True)  # a finished run needs none

        def run(cells: Sequence[Cell]) -> None:
            run_cells(cells, out / "runs", options.data_root, on_start=_quiet, on_round=_quiet, on_end=say)

        run([cell for trial in tuning.all_trials(study, settings, options.extra) for cell in trial.cells])
        grid = cells_of(study, settings, options.extra, out / "runs")
        run([cell for methods in grid.values() for cells in methods.values() for cell in cells])
    if options.no_page:
        return
    finished = finished_in(out / "runs", cells_of(study, list(study["settings"]), options.extra, out / "runs"))
    for setting, groups in finished.items():
        draw(groups, setting, out / f"{slug(setting)}.svg")
    made = provenance(0, torch.device("cpu"))
    rates = tuning.table(study, list(finished), out / "runs", options.extra) if "tune" in study else []
    (out / "README.md").write_text("\n".join(page(study, finished, made["command"], rates)))
    keys = (*COLUMNS, "uplink_bytes", "downlink_bytes", "rounds")
    figures = {
        setting: {
            method: {key: vars(group.stat(key)) for key in keys}
            | {"uplink_bytes_to_alone": vars(_to_alone(groups, method, study["alone"]))}
            | {"made": sorted({origin(run) for run in group.runs})}
            for method, group in groups.items()
        }
        for setting, groups in finished.items()
    }
    # The provenance of each run is stored with it; this is only the command that combined them.
    origin_of_page = {key: made[key] for key in ("command", "date")}
    write(out / "results.json", {"provenance": origin_of_page, "settings": figures})


def _quiet(_: object) -> None:
    """Show nothing."""


def finished_in(folder: Path, grid: Mapping[str, Mapping[str, Sequence[Cell]]]) -> dict[str, dict[str, Group]]:
    """Return the settings, with their methods, whose runs are all finished with the requested configuration."""
    return {
        setting: {
            method: Group(method, tuple(read_run(folder / cell.name) for cell in cells))
            for method, cells in methods.items()
        }
        for setting, methods in grid.items()
        if all(_is_finished(folder / cell.name, cell) for cells in methods.values() for cell in cells)
    }


def _is_finished(path: Path, cell: Cell) -> bool:
    if not RunFolder(path).done:
        return False
    stored = load_config(str(path / CONFIG))  # keys that are newer than the run get their defaults
    return _effective(stored) == _effective(cell.config)


def _effective(config: Config) -> dict[str, Any]:
    """Return a configuration without what has no effect, whose default may have changed since a run."""
    found = tomllib.loads(to_toml(config))
    if found["wire"]["down"] == "dense":
        del found["wire"]["down_codec"]
    return found


def origin(run: Run) -> str:
    """Return the device, PyTorch version and commit of a run."""
    commit = json.loads((run.path / SUMMARY).read_text(encoding="utf-8")).get("commit") or "unknown"
    return f"{run.texts.get('device', 'unknown')}, torch {run.versions.get('torch')}, commit {commit[:12]}"


def page(
    study: Mapping[str, Any], finished: Mapping[str, Mapping[str, Group]], command: str, rates: Sequence[str]
) -> list[str]:
    """Return the lines of the page of a study."""
    lines = [f"# {study['title']}", "", study["text"].strip(), ""]
    lines += [*glance(finished, study["glance"]), ""] if finished else []
    if rates:
        lines += ["## Rates", "", study["tuned"].strip(), "", *rates, ""]
    for setting, groups in finished.items():
        given, rounds = study["settings"][setting], next(iter(groups.values())).runs[0].rounds
        seeds, settings = given["seeds"], "".join(f", `{one}`" for one in given["set"])
        lines += [
            f"## {setting}", "", verdict(groups), "", *table(groups, study["alone"]), "",
            f"Preset `{given['preset']}`{settings}, {seeds} seed{'s' * (seeds != 1)}, {rounds} rounds.", "",
            f"![Accuracy by uploaded bytes]({slug(setting)}.svg)", "",
        ]  # fmt: skip
    runs = [run for groups in finished.values() for group in groups.values() for run in group.runs]
    made = Counter(origin(run) for run in runs)
    return [
        *lines,
        "## How this was made", "",
        f"Command: `{command}`. Numbers are mean ± standard deviation over seeds; two methods are separated if their "
        "means differ by more than the sum of their standard deviations. *MB up* counts all clients and rounds. The "
        "last column counts the bytes until the first evaluation with at least the accuracy of training alone; `-` "
        "means that some seed never reached it. All runs are in [runs.jsonl.gz](runs.jsonl.gz) (`python "
        "benchmarks/pack.py unpack` restores their folders), their settings in [study.toml](study.toml), and "
        "[results.json](results.json) says where each method was computed. Finished runs are not repeated: to repeat "
        "all of them give another folder with `--out`, or use the settings of one row with `tdpfed compare`.", "",
        *(f"- {where}: {count} runs" for where, count in made.items()), "",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
