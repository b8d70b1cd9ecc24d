"""The page of the study of updates: accuracy against uploaded bytes, for every form of an upload in every setting.

    python benchmarks/settings.py results/updates/study.toml --no-page    # runs what is not finished, best on a GPU
    python benchmarks/updates.py results/updates                          # tables, curves and results.json

Bytes are those of whole messages, headers included, summed over all clients and rounds. ``x up`` is the uplink of dense
float32 messages over that of a form; ``x down`` likewise.
"""

import argparse
import math
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
from settings import cells_of, finished_in, origin, shown

from tdpfed.report import look as looks
from tdpfed.report.figures import MARKERS, STYLE
from tdpfed.report.group import Group

Groups = Mapping[str, Group]
Finished = Mapping[str, Groups]

COLORS = looks.COLORS[:7]
DENSE = "FedAvg"
FACTORS = ("FedAvg, 8 terms", "FedAvg, 4 terms", "FedAvg, 2 terms", "FedAvg, 1 term")
EQUAL = 5e-5
"""Accuracies that differ by less are equal: they are shown in percent with two digits."""

ABOUT = 1.05
"""Bytes up to so many times others are about equal."""

RIVALS = {
    "FedAvg, 4 terms": ("FedAvg, top-k like 4 terms", "FedAvg, int8", "FedAvg, int4"),
    "FedAvg, 1 term": ("FedAvg, top-k like 1 term", "FedAvg, int8", "FedAvg, int4"),
}
"""What a form is compared with at equal bytes."""


def mean(group: Group, key: str) -> float:
    """Return the mean of a number over seeds; NaN if a run has none."""
    found = group.stat(key).mean
    return math.nan if found is None else found


def times(groups: Groups, method: str, key: str) -> float:
    """Return how many times fewer bytes a method sends than dense FedAvg."""
    sent = mean(groups[method], key)
    return mean(groups[DENSE], key) / sent if sent else math.inf


def at_bytes(group: Group, limit: float) -> tuple[float, float]:
    """Return the accuracy once ``limit`` bytes are uploaded, or at the first evaluation, and the bytes sent by then."""
    sent, accuracy = group.mean["uplink_bytes"], group.mean["personalized_accuracy"]
    known = [(b, a) for b, a in zip(sent, accuracy, strict=True) if b is not None and a is not None]
    within = [pair for pair in known if pair[0] <= 1.01 * limit] or known[:1]
    return within[-1][1], within[-1][0]


def glance(finished: Finished) -> list[str]:
    """Return accuracy of the forms in all settings, with the factor of saved bytes."""
    lines = [
        f"| personalized % | alone | dense | {' | '.join(name.partition(', ')[2] for name in FACTORS)} |",
        "| --- |" + " ---: |" * (2 + len(FACTORS)),
    ]
    for setting, groups in finished.items():
        cells = []
        for name in ("local", DENSE, *FACTORS):
            accuracy = f"{100 * mean(groups[name], 'personalized_accuracy'):.1f}" if name in groups else "-"
            saved = f" ({times(groups, name, 'uplink_bytes'):.0f}x)" if name in FACTORS and name in groups else ""
            cells.append(accuracy + saved)
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


def table(groups: Groups) -> list[str]:
    """Return every form's numbers in a setting."""
    lines = [
        "| | personalized % | to dense | global % | worst decile % | MB up | x up | x down |",
        "| --- |" + " ---: |" * 7,
    ]
    for name, group in groups.items():
        gap = 100 * (mean(group, "personalized_accuracy") - mean(groups[DENSE], "personalized_accuracy"))
        sent = mean(group, "uplink_bytes")
        up, down = (f"{times(groups, name, key):,.1f}" if sent else "-" for key in ("uplink_bytes", "downlink_bytes"))
        cells = [
            shown(group.stat("personalized_accuracy")), f"{gap:+.2f}", shown(group.stat("global_accuracy")),
            shown(group.stat("worst_decile_accuracy")), shown(group.stat("uplink_bytes"), 1e-6), up, down,
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def equal_bytes(finished: Finished) -> list[str]:
    """Return tables of accuracies when as many bytes are uploaded as a form of rank-one terms takes in all rounds."""
    lines: list[str] = []
    for ours, rivals in RIVALS.items():
        names = [name.partition(", ")[2] for name in (ours, *rivals)]
        lines += [f"| personalized % | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
        places: dict[str, list[str]] = {"the best": [], "equal to the best": [], "not the best": []}
        for setting, groups in finished.items():
            if ours not in groups:
                continue
            limit, own = (mean(groups[ours], key) for key in ("uplink_bytes", "personalized_accuracy"))
            others = [at_bytes(groups[name], limit) if name in groups else None for name in rivals]
            compared = [own, *(one[0] for one in others if one is not None and one[1] <= ABOUT * limit)]
            ahead = max(compared) > own + EQUAL
            tied = sum(accuracy > own - EQUAL for accuracy in compared) > 1
            places["not the best" if ahead else "equal to the best" if tied else "the best"].append(setting)
            lines.append(f"| {setting} | {' | '.join(_cells(own, others, limit, max(compared)))} |")
        told = [f"{place} in {len(found)}" for place, found in places.items() if found]
        lines += ["", f"Of {sum(map(len, places.values()))} settings, {names[0]} is {', '.join(told)}.", ""]
    return lines[:-1]


def _cells(own: float, others: Sequence[tuple[float, float] | None], limit: float, best: float) -> list[str]:
    cells = []
    for one in ((own, limit), *others):
        if one is None:
            cells.append("-")
            continue
        accuracy, sent = one
        text = f"{100 * accuracy:.2f}"
        if sent > ABOUT * limit:
            cells.append(f"{text} ({sent / limit:.0f}x the bytes)")
        else:
            cells.append(f"**{text}**" if accuracy > best - EQUAL else text)
    return cells


def draw(groups: Groups, title: str, path: Path) -> None:
    """Draw accuracy by uploaded bytes; training alone is a horizontal line."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes: Any = figure.subplots()
        for i, (name, group) in enumerate(groups.items()):
            accuracy = [None if a is None else 100 * a for a in group.mean["personalized_accuracy"]]
            look = {"color": COLORS[i % len(COLORS)], "linestyle": ("-", "--")[i >= len(COLORS)], "label": name}
            sent = [None if b is None else b / 1e6 for b in group.mean["uplink_bytes"]]
            if any(sent):
                axes.plot(sent, accuracy, marker=MARKERS[i % len(MARKERS)], markevery=(i % 3, 3), **look)
            else:
                axes.axhline(accuracy[-1], **look | {"linestyle": ":"})
        axes.set(xscale="log", xlabel="uploaded by all clients together, MB", ylabel="personalized accuracy, %")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title)
        figure.legend(loc="outside right upper", fontsize=7)
        figure.savefig(path, metadata={"Date": None})


def picture(groups: Groups, title: str, path: Path) -> None:
    """Draw the last round's accuracy of each form by the bytes uploaded: README's picture."""
    families = {
        "rank-one terms of the change": FACTORS,
        "largest values (top-k)": ("FedAvg, top-k like 4 terms", "FedAvg, top-k like 1 term"),
        "all values, fewer bits": ("FedAvg", "FedAvg, int8", "FedAvg, int4"),
        "TDPFed": ("TDPFed", "TDPFed, int8", "TDPFed, int4"),
    }
    with matplotlib.rc_context(STYLE | {"font.size": 10, "lines.markersize": 6}):
        figure = Figure(figsize=(7.2, 3.9), layout="constrained")
        axes: Any = figure.subplots()
        for (family, all_names), color, marker in zip(families.items(), COLORS, MARKERS, strict=False):
            names = tuple(name for name in all_names if name in groups)
            sent = [mean(groups[name], "uplink_bytes") / 1e6 for name in names]
            stats = [groups[name].stat("personalized_accuracy") for name in names]
            accuracy = [100 * (stat.mean or math.nan) for stat in stats]
            spread = [100 * (stat.spread or 0.0) for stat in stats]
            axes.errorbar(sent, accuracy, spread, color=color, marker=marker, label=family, capsize=2, elinewidth=0.8)
            above = -15 if family in ("TDPFed", "largest values (top-k)") else 8
            for name, x, y in zip(names, sent, accuracy, strict=True):
                text = {"FedAvg": "float32", "TDPFed": "float32"}.get(
                    name, name.partition(", ")[2].removeprefix("top-k ")
                )
                axes.annotate(
                    text, (x, y), (0, above), textcoords="offset points", ha="center", fontsize=7.5, color=color
                )
        alone = 100 * mean(groups["local"], "personalized_accuracy")
        axes.axhline(alone, color="#4a4f57", linestyle=":", linewidth=1)
        axes.annotate(
            "training alone", (1, alone), (-2, 3), ("axes fraction", "data"), "offset points", ha="right", fontsize=8
        )
        axes.set(
            xscale="log",
            xlabel="uploaded by all clients in all rounds, MB",
            ylabel="personalized accuracy, %",
            title=title,
        )
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(x=0.08, y=0.12)
        axes.legend(loc="center", fontsize=8)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the study")
    parser.add_argument("--runs", type=Path, default=None, help="folder of its runs; runs in the study's by default")
    parser.add_argument("--set", action="append", default=[], dest="extra", help="a setting that all runs had")
    options = parser.parse_args()
    study = tomllib.loads((options.folder / "study.toml").read_text())
    runs = options.runs or options.folder / "runs"
    finished = finished_in(runs, cells_of(study, list(study["settings"]), options.extra, runs))
    for setting, groups in finished.items():
        draw(groups, setting, options.folder / f"{slug(setting)}.svg")
    if study["picture"] in finished:
        picture(finished[study["picture"]], study["picture"], options.folder / "picture.svg")
    made = provenance(0, torch.device("cpu"))
    lines = [f"# {study['title']}", "", study["text"].strip(), "", *glance(finished), ""]
    lines += ["## At equal bytes", "", study["equal"].strip(), "", *equal_bytes(finished), ""]
    lines += ["## Rates", "", study["tuned"].strip(), "", *tuning.table(study, list(finished), runs, options.extra), ""]
    for setting, groups in finished.items():
        given, one = study["settings"][setting], next(iter(groups.values())).runs[0]
        lines += [f"## {setting}", "", *table(groups), "", f"Preset `{given['preset']}`"]
        lines[-1] += "".join(f", `{value}`" for value in given["set"])
        lines[-1] += f", {given['seeds']} seed{'s' * (given['seeds'] != 1)}, {one.rounds} rounds."
        lines += ["", f"![Accuracy by uploaded bytes]({slug(setting)}.svg)", ""]
    where = Counter(origin(run) for groups in finished.values() for group in groups.values() for run in group.runs)
    lines += [
        "## How this was made",
        "",
        study["made"].strip(),
        "",
        *(f"- {place}: {n} runs" for place, n in where.items()),
        "",
    ]
    (options.folder / "README.md").write_text("\n".join(lines))
    keys = (
        "personalized_accuracy", "global_accuracy", "worst_decile_accuracy", "uplink_bytes", "downlink_bytes",
        "rounds",
    )  # fmt: skip
    figures = {
        setting: {
            name: {key: vars(group.stat(key)) for key in keys}
            | {"times_up": times(groups, name, "uplink_bytes") if mean(group, "uplink_bytes") else None}
            | {"times_down": times(groups, name, "downlink_bytes") if mean(group, "uplink_bytes") else None}
            | {"made": sorted({origin(run) for run in group.runs})}
            for name, group in groups.items()
        }
        for setting, groups in finished.items()
    }
    page = {"command": made["command"], "date": made["date"]}
    write(options.folder / "results.json", {"provenance": page, "settings": figures})


if __name__ == "__main__":
    main()
