"""The paper's figures: test accuracy and training loss by round, at both compression rates side by side.

Both are of the models a curve is named after; the training loss is that on all training samples of all clients.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tdpfed.files import write_file
from tdpfed.paper.published import Row, Study
from tdpfed.report.figures import MARKERS, STYLE, check
from tdpfed.report.group import Group
from tdpfed.report.look import COLORS

OF = {"personalized_accuracy": "personalized", "global_accuracy": "global", "local_accuracy": "local"}
LOSS = {"personalized_accuracy": "personalized_train_loss", "global_accuracy": "global_train_loss"}
"""The training loss of the models whose accuracy is shown."""
MINIBATCH = "minibatch_loss"
"""Shown instead if a run did not record the training loss; it is of no model that the paper names."""


def draw(study: Study, folder: Path, figures: Sequence[int], groups: Mapping[str, Group]) -> list[Path]:
    """Draw the figures as SVG, two panels each; return the files."""
    if not figures:
        return []
    check("--figure")
    import matplotlib
    from matplotlib.figure import Figure

    files = []
    with matplotlib.rc_context(STYLE):
        for number in figures:
            figure = Figure(figsize=(8.4, 3.4), layout="constrained")
            panels = figure.subplots(1, len(study.curves), sharey=True)
            fields, name = quantity(study, study.figures[number], groups)
            for axes, (panel, rows) in zip(panels, study.curves.items(), strict=True):
                for i, row in enumerate(rows):
                    _curve(axes, i, row, fields[row.accuracy], groups.get(row.run))
                axes.set(title=f"({panel})", xlabel="communication round")
                axes.legend(fontsize=7.5)
            panels[0].set_ylabel(name)
            files.append(folder / f"figure-{number}.svg")
            drawn = BytesIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None})
            write_file(files[-1], drawn.getvalue(), field="--out")
    return files


def quantity(study: Study, kind: str, groups: Mapping[str, Group]) -> tuple[Mapping[str, str], str]:
    """Return which field of the records a figure shows, by the accuracy of a row, and its name for the axis."""
    if kind == "accuracy":
        return {name: name for name in OF}, "test accuracy, %"
    rows = [row for panel in study.curves.values() for row in panel]
    shown = [(groups[row.run], LOSS[row.accuracy]) for row in rows if row.run in groups and groups[row.run].counted]
    if all(any(value is not None for value in group.mean[field]) for group, field in shown):
        return LOSS, "training loss"
    return dict.fromkeys(OF, MINIBATCH), "loss on the last minibatch"


def _curve(axes: Any, i: int, row: Row, field: str, group: Group | None) -> None:
    if group is None or not group.counted:
        return
    scale = 100.0 if field in OF else 1.0
    label = row.label if field == MINIBATCH else f"{row.label}, {OF[row.accuracy]}"
    known = [
        (at, scale * mean, scale * (spread or 0.0))
        for at, mean, spread in zip(group.mean["round"], group.mean[field], group.spread[field], strict=True)
        if at is not None and mean is not None
    ]
    if not known:
        return
    at, mean, spread = zip(*known, strict=True)
    look = {"color": COLORS[i], "marker": MARKERS[i], "markevery": max(1, len(at) // 8)}
    axes.plot(at, mean, label=label, **look)
    low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(at, low, high, color=COLORS[i], alpha=0.16, linewidth=0)
