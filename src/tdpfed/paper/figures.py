"""The paper's figures: test accuracy and training loss by round, at both compression rates side by side.

The training loss is that of the model a curve is named after, on all training samples. Runs that did not measure it
show the loss on the last minibatch instead, and the axis says so.
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

TRAINING = {"personalized_accuracy": "personalized_train_loss", "global_accuracy": "global_train_loss"}
TITLES = {"accuracy": "test accuracy, %", "loss": "training loss", "minibatch": "loss on the last minibatch"}


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
            quantity = study.figures[number]
            if quantity == "loss" and not any(_measured(group) for group in groups.values()):
                quantity = "minibatch"
            for axes, (panel, rows) in zip(panels, study.curves.items(), strict=True):
                for i, row in enumerate(rows):
                    _curve(axes, i, row, quantity, groups.get(row.run))
                axes.set(title=f"({panel})", xlabel="communication round")
                axes.legend(fontsize=7.5)
            panels[0].set_ylabel(TITLES[quantity])
            files.append(folder / f"figure-{number}.svg")
            drawn = BytesIO()
            figure.savefig(drawn, format="svg", metadata={"Date": None})
            write_file(files[-1], drawn.getvalue(), field="--out")
    return files


def _measured(group: Group) -> bool:
    """Whether the runs know the loss on all training samples."""
    return bool(group.counted) and any(
        value is not None for value in group.mean.get(TRAINING["personalized_accuracy"], ())
    )


def _curve(axes: Any, i: int, row: Row, kind: str, group: Group | None) -> None:
    if group is None or not group.counted:
        return
    field, scale = {
        "accuracy": (row.accuracy, 100.0), "loss": (TRAINING.get(row.accuracy, ""), 1.0),
        "minibatch": ("minibatch_loss", 1.0),
    }[kind]  # fmt: skip
    if field not in group.mean:
        return
    label = row.label if kind == "minibatch" else f"{row.label}, {OF[row.accuracy]}"
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
