"""The results as a table, one row per group with mean and spread over its seeds; as CSV, Markdown or LaTeX.

``rounds to target`` and ``MB to target`` count the cost of a run until its personalized accuracy first reaches the
target; they are empty if a run never reaches it. Among groups of the same task, the highest accuracy and the lowest
cost are marked as best, and values that are not separated from the best are marked ≈.
"""

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError, unknown
from tdpfed.report.group import Group, Stat, rivals_of
from tdpfed.report.look import floor
from tdpfed.report.parse import ACCURACIES, Number
from tdpfed.report.read import Run

BEST, CLOSE = "best", "close"


@dataclass(frozen=True)
class Column:
    """A column: its key, its heading with the unit, a scale factor, the number of decimals, and which value is best."""

    key: str
    title: str
    scale: float = 1.0
    decimals: int = 0
    best: int = 0  # 1: the highest; -1: the lowest; 0: neither


COLUMNS = (
    Column("personalized_accuracy", "personalized %", 100, 2, 1),
    Column("local_accuracy", "local %", 100, 2, 1),
    Column("global_accuracy", "global %", 100, 2, 1),
    Column("worst_decile_accuracy", "worst decile %", 100, 2, 1),
    Column("uplink_bytes", "up MB", 1e-6, 2, -1),
    Column("downlink_bytes", "down MB", 1e-6, 2, -1),
    Column("seconds", "seconds", 1, 1, -1),
    Column("best_personalized_accuracy", "best personalized %", 100, 2, 1),
    Column("compression_rate", "upload rate", 1, 2),
    Column("rounds", "rounds"),
)
REACH = (
    Column("rounds_to_target", "rounds to target", 1, 1, -1),
    Column("uplink_bytes_to_target", "MB to target", 1e-6, 2, -1),
)
REACH_AT = 6
"""Position of the columns ``REACH`` among ``COLUMNS``."""
PAPER = ("personalized %", "global %", "worst decile %", "up MB", "MB to target")
"""The columns of a LaTeX table beside the method: as many as fit a page."""
CHOICES = tuple(column.title for column in (*COLUMNS, *REACH))
"""The columns that a LaTeX table may have."""


@dataclass(frozen=True)
class Cell:
    """A value in the column's unit, its spread, and a mark if it is the best of its task or not separated from it."""

    value: Number
    spread: Number = None
    decimals: int = 0
    mark: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return "-"
        text = f"{self.value:,.{self.decimals}f}"
        return text if self.spread is None else f"{text} ± {self.spread:,.{max(1, self.decimals)}f}"


@dataclass(frozen=True)
class Table:
    """Headings, and rows of texts and cells."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]


def cells(group: Group, rivals: Sequence[Group]) -> list[Cell]:
    """Return the results of a group, marked by comparison with its rivals."""
    return [_marked(column, group.stat(column.key), [one.stat(column.key) for one in rivals]) for column in COLUMNS]


def reach_cells(group: Group, rivals: Sequence[Group], target: Number) -> list[Cell]:
    """Return a group's cost of reaching a target, marked in the same way."""
    stats, others = reach(group, target), [reach(one, target) for one in rivals]
    return [_marked(column, stats[i], [one[i] for one in others]) for i, column in enumerate(REACH)]


def _marked(column: Column, stat: Stat, rivals: Sequence[Stat]) -> Cell:
    """Return a cell; if all means are equal, none is marked."""
    means = [one.mean for one in rivals if one.mean is not None]
    mark = ""
    if column.best and stat.mean is not None and len(set(means)) > 1:
        top = max(means) if column.best > 0 else min(means)
        # If several are best, the one with the largest spread.
        best = max((one for one in rivals if one.mean == top), key=lambda one: one.spread or 0.0)
        mark = BEST if stat.mean == top else "" if stat.separated(best) else CLOSE
    return _cell(column, stat, mark)


def run_cells(run: Run) -> list[Cell]:
    """Return the results of a single run."""
    return [_cell(column, Stat(run.figures[column.key])) for column in COLUMNS]


def _cell(column: Column, stat: Stat, mark: str = "") -> Cell:
    value, spread = (None if number is None else number * column.scale for number in (stat.mean, stat.spread))
    if not column.key.endswith("accuracy") and spread is not None and spread < 0.5 * 10**-column.decimals:
        spread = None  # bytes and rounds: practically the same for every seed
    return Cell(value, spread, column.decimals, mark)


def target_of(groups: Sequence[Group], accuracy: str = ACCURACIES[0]) -> Number:
    """Return, as a fraction, the highest whole percentage that every run with this accuracy reached, but outliers."""
    curves = [run.series[accuracy] for group in groups for run in group.counted]
    known = [max(values) for curve in curves if (values := [value for value in curve if value is not None])]
    lowest = floor([100 * value for value in known])
    least = min((value for value in known if lowest is None or 100 * value >= lowest), default=0.0)
    return next((percent / 100 for percent in range(100, 0, -1) if percent / 100 <= least), None)


def goal_of(group: Group, groups: Sequence[Group], target: Number) -> Number:
    """Return the accuracy whose cost is shown for a group: ``target``, or what all runs of its data set reached."""
    return target_of([other for other in groups if other.dataset == group.dataset]) if target is None else target


def cost_to(run: Run, target: float) -> tuple[Number, Number]:
    """Return rounds and uploaded bytes until personalized accuracy first reaches ``target``; None, None if never."""
    for accuracy, round_, sent in zip(
        run.series["personalized_accuracy"], run.series["round"], run.series["uplink_bytes"], strict=True
    ):
        if accuracy is not None and accuracy >= target:
            return round_, sent
    return None, None


def reach(group: Group, target: Number) -> tuple[Stat, Stat]:
    """Return :func:`cost_to` over the runs of a group; no means if one of them never reaches the target."""
    costs = [cost_to(run, target) if target is not None else (None, None) for run in group.counted]
    return Stat.of([rounds for rounds, _ in costs]), Stat.of([sent for _, sent in costs])


def _goal(target: Number) -> Cell:
    """Return a target in percent, with decimals only if needed."""
    return Cell(None) if target is None else Cell(100 * target, decimals=0 if round(100 * target, 6) % 1 == 0 else 2)


def results(groups: Sequence[Group], target: Number = None) -> Table:
    """Return the groups' results, ordered by data set, with the cost of reaching a common accuracy.

    That accuracy is ``target``, a fraction, or the result of :func:`target_of` for each data set.
    """
    rows: list[list[str | Cell]] = []
    for group in groups:
        rivals = rivals_of(group, groups)
        goal = goal_of(group, groups, target)
        rows.append(
            [
                group.dataset,
                group.label,
                f"{len(group.counted)}",
                *(figures := cells(group, rivals))[:REACH_AT],
                _goal(goal),
                *reach_cells(group, rivals, goal),
                *figures[REACH_AT:],
                group.status,
            ]
        )
    titles, costs = [column.title for column in COLUMNS], ["target %", *(column.title for column in REACH)]
    titles = [*titles[:REACH_AT], *costs, *titles[REACH_AT:]]
    return Table(["data set", "method", "runs", *titles, "status"], rows)


def single_runs(groups: Sequence[Group]) -> Table:
    """Return the results of each run."""
    rows: list[list[str | Cell]] = [
        [group.dataset, group.label, run.name, str(run.setting("run.seed", "-")), *run_cells(run), run.status]
        for group in groups
        for run in group.runs
    ]
    return Table(["data set", "method", "run", "seed", *(column.title for column in COLUMNS), "status"], rows)


def paper_columns(text: str) -> list[str]:
    """Return the columns that a text with commas names."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in CHOICES:
            raise unknown("--columns", name, CHOICES)
        if names.count(name) > 1:
            raise TDPFedError(f"--columns: {text!r} given, must name {name!r} only once")
    return names


def for_paper(table: Table, columns: Sequence[str]) -> Table:
    """Return a table of results or runs with the given columns only; the data set is named if there are several."""
    several = len({row[0] for row in table.rows}) > 1
    first = [*(["data set"] if several else []), "method", "seed"]
    at = [table.titles.index(title) for title in [*first, *columns] if title in table.titles]
    goals = {str(row[table.titles.index("target %")]) for row in table.rows} if "target %" in table.titles else set()
    goal = f"{goals.pop()} %" if len(goals) == 1 else "target"
    titles = [table.titles[i].replace("to target", f"to {goal}") for i in at]
    return Table(titles, [[row[i] for i in at] for row in table.rows])


def plan_rows(plans: Sequence[tuple[Group, FactorPlan]]) -> Table:
    """Return the sizes of each parameter under each plan, and the totals."""
    rows: list[list[str | Cell]] = []
    for group, plan in plans:
        lines = [(row.name, "x".join(map(str, row.shape)), row.rank, row.dense, row.factored) for row in plan.rows()]
        for name, shape, rank, dense, factored in [*lines, ("total", "", None, plan.dense.size, plan.factors.size)]:
            rate = Cell(dense / factored, decimals=2)
            rows.append([group.label, name, shape, str(rank or "-"), Cell(dense), Cell(factored), rate])
    return Table(["method", "parameter", "shape", "rank", "dense", "factored", "rate"], rows)


def to_csv(table: Table) -> str:
    """Return unrounded numbers as CSV, with a separate column for each spread."""
    spread = [
        any(isinstance(row[i], Cell) and row[i].spread is not None for row in table.rows)  # type: ignore[union-attr]
        for i in range(len(table.titles))
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([one for i, name in enumerate(table.titles) for one in [name, f"{name} sd"][: 1 + spread[i]]])
    for row in table.rows:
        line: list[str | Number] = []
        for i, cell in enumerate(row):
            line += ([cell.value, cell.spread] if isinstance(cell, Cell) else [cell, None])[: 1 + spread[i]]
        writer.writerow(line)
    return text.getvalue()


def to_markdown(table: Table) -> str:
    """Return a Markdown table; the best is bold, ≈ marks values that are not separated from it."""
    escape = _escaper({"\\": "\\\\", "|": "\\|", "<": "&lt;", "*": "\\*", "_": "\\_", "`": "\\`", "\n": " "})
    rows = [[_text(cell, escape, "**{}**", "≈ {}") for cell in row] for row in table.rows]
    kinds = table.rows[0] if table.rows else table.titles
    rule = ["---:" if isinstance(cell, Cell) else "---" for cell in kinds]
    return "".join(f"| {' | '.join(row)} |\n" for row in [[escape(title) for title in table.titles], rule, *rows])


def to_latex(table: Table) -> str:
    """Return a LaTeX ``tabular`` with booktabs rules."""
    words = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum"}
    special = {char: f"\\{char}" for char in "&%$#_{}"} | {char: f"\\{word}{{}}" for char, word in words.items()}
    escape = _escaper({**special, "\n": " "})
    rows = [[_text(cell, escape, "\\textbf{{{}}}", "$\\approx$ {}") for cell in row] for row in table.rows]
    kinds = table.rows[0] if table.rows else table.titles
    columns = "".join("r" if isinstance(cell, Cell) else "l" for cell in kinds)
    lines = [" & ".join(row) + " \\\\" for row in [[escape(title) for title in table.titles], *rows]]
    body = [f"\\begin{{tabular}}{{{columns}}}", "\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"]
    return "\n".join([*body, "\\end{tabular}", ""]).replace("±", "$\\pm$")


def _text(cell: str | Cell, escape: Callable[[str], str], best: str, close: str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    return {BEST: best, CLOSE: close}.get(cell.mark, "{}").format(cell)


def _escaper(table: dict[str, str]) -> Callable[[str], str]:
    codes: dict[int, str] = {ord(char): text for char, text in table.items()}
    return lambda text: text.translate(codes)
