"""The figures of the page for papers, drawn by matplotlib: curves over rounds, megabytes and seconds, and clients.

Colors are those of Okabe and Ito, darkened for print; groups also differ by marker and, from the eighth on, by dash.
Names from run folders are drawn literally, never interpreted as mathematics.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tdpfed.errors import TDPFedError
from tdpfed.report.group import Group
from tdpfed.report.parse import ACCURACIES, Number
from tdpfed.report.read import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8578c", "#b97f00", "#3d9bd1", "#4a4f57")
MARKERS = ("o", "s", "D", "^", "P", "X", "p")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 3)))
AXES = {"rounds": "communication round", "megabytes": "uploaded megabytes, all clients", "seconds": "seconds"}
CURVES = {
    "personalized_accuracy": ("accuracy-personalized", "personalized accuracy, %"),
    "local_accuracy": ("accuracy-local", "local accuracy, %"),
    "global_accuracy": ("accuracy-global", "global accuracy, %"),
    "loss": ("loss-training", "training loss"),
    "personalized_loss": ("loss-personalized", "held-out loss, personalized"),
    "global_loss": ("loss-global", "held-out loss, global"),
}
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.linewidth": 0.4,
    "grid.alpha": 0.5, "lines.linewidth": 1.4, "lines.markersize": 4, "legend.frameon": False,
    "legend.handlelength": 2.8, "savefig.dpi": 300, "text.parse_math": False, "svg.fonttype": "none",
    "svg.hashsalt": "tdpfed", "pdf.fonttype": 42,
}  # fmt: skip


def check(option: str = "--export") -> None:
    """Raise an error that names the option if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise TDPFedError(f"{option}: matplotlib is not installed; pip install 'tdpfed[report]'") from error


def draw(groups: Sequence[Group], save: Callable[[str, "Figure"], None]) -> None:
    """Draw every figure for which groups of one data set have values, and pass each with its name to ``save``."""
    check()
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name with letters that the font does not have
        for name, figure in _figures(groups):
            save(name, figure)


def _figures(groups: Sequence[Group]) -> Iterator[tuple[str, "Figure"]]:
    for field, (name, title) in CURVES.items():
        known = [(i, group) for i, group in enumerate(groups) if _known(group.mean[field])]
        for axis in AXES if known else ():
            figure, axes = _blank(AXES[axis], title)
            for i, group in known:
                _curve(axes, i, group, field, axis)
            _legend(figure, axes, known)
            yield f"{name}-{axis}", figure
    pooled = [[100 * one for run in group.counted for one in run.clients if one is not None] for group in groups]
    if any(pooled):
        figure, axes = _blank("accuracy of the personalized model on each client, %", "")
        figure.set_size_inches(4.8, 1.0 + 0.34 * len(groups))
        boxes = axes.boxplot(
            pooled, orientation="horizontal", patch_artist=True, widths=0.6, medianprops={"color": "#1c2128"}
        )
        for i, box in enumerate(boxes["boxes"]):
            box.set(facecolor=COLORS[i % 7] + "30", edgecolor=COLORS[i % 7])
        axes.set_yticks(range(1, len(groups) + 1), [group.label for group in groups])
        axes.invert_yaxis()
        yield "clients", figure
    for quantity in dict.fromkeys(name for group in groups for run in group.runs for name in run.diagnostics):
        yield f"diagnostics-{quantity}", _diagnostic(groups, quantity)


def _curve(axes: "Axes", i: int, group: Group, field: str, axis: str) -> None:
    x, y = _x(group.mean, axis), group.mean[field]
    scale = 100 if field in ACCURACIES else 1
    if axis == "megabytes" and not x[-1]:  # uploads nothing: a horizontal line at its last value
        if y[-1] is not None:
            axes.axhline(y[-1] * scale, **{**_look(i, 1), "marker": "", "linestyle": "dotted"})
        return
    points = [
        (a, b * scale, (s or 0) * scale)
        for a, b, s in zip(x, y, group.spread[field], strict=True)
        if a is not None and b is not None
    ]
    at, mean, spread = zip(*points, strict=True) if points else ((), (), ())
    axes.plot(at, mean, **_look(i, len(at)))
    if len(group.counted) > 1:
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=COLORS[i % 7], alpha=0.16, linewidth=0)


def _diagnostic(groups: Sequence[Group], quantity: str) -> "Figure":
    from matplotlib.ticker import LogFormatter

    figure, axes = _blank(AXES["rounds"], quantity.replace("_", " "))
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(2, 0.5)))  # plain numbers; the default uses mathematical notation
    known = [(i, group) for i, group in enumerate(groups) if any(quantity in run.diagnostics for run in group.runs)]
    for i, group in known:
        for run in group.runs:
            if quantity in run.diagnostics:
                measured = run.diagnostics[quantity]
                axes.plot(measured["round"], measured["value"], **_look(i, len(measured["round"])))  # type: ignore[arg-type]
    _legend(figure, axes, known)
    return figure


def _blank(x: str, y: str) -> tuple["Figure", "Axes"]:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(4.8, 3.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x, ylabel=y)
    if x == AXES["rounds"]:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure, axes


def _look(i: int, points: int) -> dict[str, Any]:
    every = max(1, points // 8)
    return {"color": COLORS[i % 7], "marker": MARKERS[i % 7], "linestyle": DASHES[i // 7 % 5], "markevery": every}


def _legend(figure: "Figure", axes: "Axes", known: Sequence[tuple[int, Group]]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_look(i, 1)) for i, _ in known]
    # matplotlib omits labels that start with an underscore.
    names = [f" {group.label}" if group.label.startswith("_") else group.label for _, group in known]
    if len(names) > 6 or max(map(len, names), default=0) > 30:
        figure.legend(handles, names, loc="outside lower center", ncols=1 + (max(map(len, names)) < 30), fontsize=7.5)
    elif len(names) > 1:
        axes.legend(handles, names, fontsize=8)


def _x(series: Series, axis: str) -> Sequence[Number]:
    fields: Mapping[str, str] = {"rounds": "round", "megabytes": "uplink_bytes", "seconds": "seconds"}
    scale = 1e-6 if axis == "megabytes" else 1
    return [None if value is None else value * scale for value in series[fields[axis]]]


def _known(values: Sequence[Number]) -> bool:
    return any(value is not None for value in values)
