"""The figures of the page for papers, drawn by matplotlib: curves, final accuracy against megabytes, and clients.

Names from run folders are drawn literally, never interpreted as mathematics.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tdpfed.errors import TDPFedError
from tdpfed.report.group import Group
from tdpfed.report.look import COLORS, ceiling, floor
from tdpfed.report.parse import ACCURACIES, Number
from tdpfed.report.read import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "D", "^", "P", "X", "p")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 3)))
AXES = {"rounds": "communication round", "megabytes": "uploaded megabytes, all clients", "seconds": "seconds"}
CURVES = {
    "personalized_accuracy": ("accuracy-personalized", "personalized accuracy, %"),
    "local_accuracy": ("accuracy-local", "local accuracy, %"),
    "global_accuracy": ("accuracy-global", "global accuracy, %"),
    "minibatch_loss": ("loss-minibatch", "minibatch loss"),
    "personalized_loss": ("loss-personalized", "held-out loss, personalized"),
    "global_loss": ("loss-global", "held-out loss, global"),
    "personalized_train_loss": ("loss-personalized-training", "training loss, personalized"),
    "global_train_loss": ("loss-global-training", "training loss, global"),
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
        known = [group for group in groups if _known(group.mean[field])]
        for axis in AXES if known else ():
            yield f"{name}-{axis}", _curves(known, field, title, axis)
        if known and field in ACCURACIES:
            yield f"{name}-final", _final(known, field, title)
    pooled = [[100 * one for run in group.counted for one in run.clients if one is not None] for group in groups]
    if any(pooled):
        figure, axes = _blank("personalized accuracy of each client, %", "")
        figure.set_size_inches(4.8, 1.0 + 0.34 * len(groups))
        boxes = axes.boxplot(
            pooled, orientation="horizontal", patch_artist=True, widths=0.6, medianprops={"color": "#1c2128"}
        )
        for group, box in zip(groups, boxes["boxes"], strict=True):
            box.set(facecolor=_color(group) + "30", edgecolor=_color(group))
        axes.set_yticks(range(1, len(groups) + 1), [group.label for group in groups])
        axes.invert_yaxis()
        yield "clients", figure
    for quantity in dict.fromkeys(name for group in groups for run in group.runs for name in run.diagnostics):
        yield f"diagnostics-{quantity}", _diagnostic(groups, quantity)


def _curves(groups: Sequence[Group], field: str, title: str, axis: str) -> "Figure":
    figure, axes = _blank(AXES[axis], title)
    most = None if field in ACCURACIES else ceiling([_values(group.mean[field]) for group in groups])
    ends = [end for group in groups if (end := _x(group.mean, axis)[-1])] if axis == "megabytes" else []
    if _wide(ends):
        _logarithmic(axes.xaxis)
    for group in groups:
        _curve(axes, group, field, axis, most[1] if most else math.inf)
    if most is not None:
        low, high = most
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        tops = {group.label: max(_values(group.mean[field])) for group in groups}
        _note(axes, "above", [f"{label} (up to {top:.3g})" for label, top in tops.items() if top > high])
    _legend(figure, axes, groups)
    return figure


def _curve(axes: "Axes", group: Group, field: str, axis: str, most: float) -> None:
    """Draw the mean of a group; with a band of one standard deviation if no part of it is cut off."""
    x, y = _x(group.mean, axis), group.mean[field]
    scale = 100 if field in ACCURACIES else 1
    if axis == "megabytes" and not x[-1]:
        if y[-1] is not None:
            _level(axes, group, y[-1] * scale)
        return
    points = [
        (a, b * scale, (s or 0) * scale)
        for a, b, s in zip(x, y, group.spread[field], strict=True)
        if a is not None and b is not None
    ]
    at, mean, spread = zip(*points, strict=True) if points else ((), (), ())
    axes.plot(at, mean, **_look(group, len(at)))
    if len(group.counted) > 1 and max(mean, default=0) <= most:
        low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(at, low, high, color=_color(group), alpha=0.16, linewidth=0)


def _final(groups: Sequence[Group], field: str, title: str) -> "Figure":
    """Draw the final accuracies against the uploaded megabytes."""
    figure, axes = _blank(AXES["megabytes"], title)
    finals = [(group, group.stat(field), group.stat("uplink_bytes")) for group in groups]
    points = [
        (group, 100 * accuracy.mean, 100 * (accuracy.spread or 0), 1e-6 * sent.mean, 1e-6 * (sent.spread or 0))
        for group, accuracy, sent in finals
        if accuracy.mean is not None and sent.mean is not None
    ]
    sent = [megabytes for *_, megabytes, _ in points if megabytes]
    lowest = floor([accuracy for _, accuracy, *_ in points])
    if _wide(sent):
        _logarithmic(axes.xaxis)
    for group, accuracy, spread, megabytes, more in points:
        if lowest is not None and accuracy < lowest:
            continue
        if megabytes:
            axes.errorbar(megabytes, accuracy, spread or None, more or None, **{**_look(group, 1), "linestyle": ""})
        else:
            _level(axes, group, accuracy)
    if lowest is not None:
        low = {group.label: accuracy for group, accuracy, *_ in points if accuracy < lowest}
        _note(axes, "below", [f"{label} ({accuracy:.1f} %)" for label, accuracy in low.items()])
    if sent and not _wide(sent):
        axes.set_xlim(left=0)
    _legend(figure, axes, [group for group, *_ in points])
    return figure


def _level(axes: "Axes", group: Group, value: float) -> None:
    """Draw what uploads nothing as a horizontal line."""
    axes.axhline(value, **{**_look(group, 1), "marker": "", "linestyle": "dotted"})


def _note(axes: "Axes", where: str, names: Sequence[str]) -> None:
    """Name what lies outside of a plot."""
    axes.set_title(f"{where} the plot: {', '.join(names)}", fontsize=7, loc="right", wrap=True)


def _diagnostic(groups: Sequence[Group], quantity: str) -> "Figure":
    figure, axes = _blank(AXES["rounds"], quantity.replace("_", " "))
    _logarithmic(axes.yaxis)
    known = [group for group in groups if any(quantity in run.diagnostics for run in group.runs)]
    for group in known:
        for run in group.runs:
            if quantity in run.diagnostics:
                measured = run.diagnostics[quantity]
                axes.plot(measured["round"], measured["value"], **_look(group, len(measured["round"])))  # type: ignore[arg-type]
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


def _logarithmic(axis: "Axis") -> None:
    from matplotlib.ticker import LogFormatter

    (axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale)("log")
    for which in (axis.set_major_formatter, axis.set_minor_formatter):
        which(LogFormatter(minor_thresholds=(2, 0.5)))  # plain numbers; the default uses mathematical notation


def _wide(values: Sequence[float]) -> bool:
    """Whether values differ more than tenfold, so that a linear axis would squash the small ones."""
    return len(values) > 0 and max(values) > 10 * min(values)


def _color(group: Group) -> str:
    return COLORS[group.look.color]


def _look(group: Group, points: int) -> dict[str, Any]:
    look, every = group.look, max(1, points // 8)
    return {"color": _color(group), "marker": MARKERS[look.marker], "linestyle": DASHES[look.dash], "markevery": every}


def _legend(figure: "Figure", axes: "Axes", groups: Sequence[Group]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_look(group, 1)) for group in groups]
    # matplotlib omits labels that start with an underscore.
    names = [f" {group.label}" if group.label.startswith("_") else group.label for group in groups]
    if len(names) > 6 or max(map(len, names), default=0) > 30:
        figure.legend(handles, names, loc="outside lower center", ncols=1 + (max(map(len, names)) < 30), fontsize=7.5)
    elif len(names) > 1:
        axes.legend(handles, names, fontsize=8)


def _x(series: Series, axis: str) -> Sequence[Number]:
    fields: Mapping[str, str] = {"rounds": "round", "megabytes": "uplink_bytes", "seconds": "seconds"}
    scale = 1e-6 if axis == "megabytes" else 1
    return [None if value is None else value * scale for value in series[fields[axis]]]


def _values(values: Sequence[Number]) -> list[float]:
    return [value for value in values if value is not None]


def _known(values: Sequence[Number]) -> bool:
    return any(value is not None for value in values)
