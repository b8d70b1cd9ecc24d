"""Terminal output: the progress of grids of runs (on standard error), and tables."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from tdpfed.cp.plan import FactorPlan
from tdpfed.report import table as tables
from tdpfed.runs.grid import Cell, CellResult
from tdpfed.runs.progress import Pace, quality, say, shown
from tdpfed.runs.session import Session

COLUMNS = {
    "personalized %": "personal %", "global %": "global %", "worst decile %": "worst decile %", "up MB": "up MB",
    "down MB": "down MB", "rounds to target": "rounds to target", "MB to target": "MB to target", "seconds": "seconds",
}  # fmt: skip
"""The columns of a comparison shown in the terminal, with shorter headings; the files have more columns."""


class GridProgress:
    """Bars for all runs of a grid and for the current ones, elsewhere plain lines; a line for each finished run."""

    def __init__(self, cells: Sequence[Cell], bar: Progress) -> None:
        self.bar, self.runs, self.ended, self.kept = bar, len(cells), 0, 0
        total = sum(cell.config.run.rounds for cell in cells)
        self.pace, self.done = Pace(total), 0
        self.all = bar.add_task("all runs", total=total, state="")
        self.now = bar.add_task("", total=None, state="", visible=False)
        self.rounds: dict[str, int] = {}
        self.warned: set[str] = set()

    def start(self, cells: Sequence[Cell]) -> None:
        """Show that these runs start."""
        self.show_kept()
        others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
        total = sum(cell.config.run.rounds for cell in cells)
        self.bar.update(self.now, description=f"{cells[0].name}{others}", total=total, completed=0, visible=True)

    def round(self, session: Session) -> None:
        """Show the progress of a run."""
        rounds, name = session.simulation.round, session.folder.path.name
        step, self.rounds[name] = rounds - self.rounds.get(name, 0), rounds
        state = quality(session.records[-1] if session.records else None)
        self.bar.update(self.now, advance=step, state=state)
        self.bar.update(self.all, advance=step)
        self.done += step
        if not self.bar.console.is_terminal and (left := self.pace.left(self.done)):
            say(f"{name}: round {rounds} of {session.config.run.rounds}  {state}; all runs: {left}")

    def end(self, result: CellResult) -> None:
        """Show the result of a run."""
        rounds, name = result.cell.config.run.rounds, result.cell.name
        self.ended += 1
        self.done += rounds - self.rounds.get(name, 0)
        self.bar.update(self.all, advance=rounds - self.rounds.get(name, 0), state=f"{self.ended} of {self.runs} runs")
        for warning in [one for one in result.warnings if one not in self.warned]:
            self.warned.add(warning)  # runs of one configuration share their warnings
            self._print(f"warning: {name}: {warning}")
        if result.kept:
            self.kept += 1
        else:
            self._print(f"{self.ended} of {self.runs}: {name} {'finished' if result.error is None else 'failed'}")

    def show_kept(self) -> None:
        """Show once how many runs were already finished."""
        if self.kept:
            self._print(f"{self.kept} of {self.runs} runs were already finished")
            self.kept = 0

    def _print(self, text: str) -> None:
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def grid_progress(cells: Sequence[Cell]) -> Iterator[GridProgress]:
    """Show the progress of a grid on standard error."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        show = GridProgress(cells, bar)
        yield show
        show.show_kept()


def comparison_table(made: tables.Table, title: str, caption: str, width: int = 120) -> Table:
    """Return a table of methods: the best value of a column in bold, values within the spread of it marked by ≈."""
    at = {name: i for i, name in enumerate(made.titles)}
    # A single data set or target is shown once, not in every row.
    datasets, targets = ({str(row[at[name]]) for row in made.rows} for name in ("data set", "target %"))
    first = [*(["data set"] if len(datasets) > 1 else []), "method"]
    # If runs failed, the means cover different numbers of runs.
    counts = ["runs"] if len({row[at["runs"]] for row in made.rows}) > 1 else []
    columns = [*first, *counts, *COLUMNS, *(["target %"] if len(targets) > 1 else [])]
    goal = "target" if len(targets) > 1 else f"{min(targets)} %"
    narrow = width < 120  # spreads and units are then on separate lines
    padding = (0, 0 if narrow else 1, 0, 0)
    shown = Table(title=title, caption=caption, caption_justify="left", box=SIMPLE_HEAD, padding=padding)
    shown.show_edge = shown.pad_edge = False
    for column in columns:
        heading = COLUMNS[column].replace("target", goal) if column in COLUMNS else column
        justify: Literal["left", "right"] = "left" if column in first else "right"
        shown.add_column(heading.replace(" ", "\n", 1) if narrow else heading, justify=justify, overflow="fold")
    for row in made.rows:
        shown.add_row(*(_marked(row[at[column]], "\n± " if narrow else " ± ") for column in columns))
    return shown


def _marked(cell: str | tables.Cell, between: str) -> str:
    if isinstance(cell, str):
        return escape(cell)
    text = str(cell).replace(" ± ", between)
    return {tables.BEST: f"[bold]{text}[/bold]", tables.CLOSE: f"≈ {text}"}.get(cell.mark, text)


def plan_table(plan: FactorPlan, title: str) -> Table:
    """Return the paper's Table I for a plan."""
    table = Table(title=title, caption="rank -: the parameter stays dense")
    for column in ("parameter", "shape", "rank", "dense", "factored", "rate"):
        table.add_column(column, justify="left" if column == "parameter" else "right", overflow="fold")
    for row in plan.rows():
        size = "x".join(map(str, row.shape))
        table.add_row(row.name, size, str(row.rank or "-"), f"{row.dense:,}", f"{row.factored:,}", f"{row.rate:.2f}")
    table.add_section()
    table.add_row("total", "", "", f"{plan.dense.size:,}", f"{plan.factors.size:,}", f"{plan.compression_rate:.2f}")
    return table


def summary_table(summary: Mapping[str, Any], folder: str) -> Table:
    """Return the summary of a run as a table."""
    counted = "" if summary.get("metrics") else "accuracy: correct predictions. "
    hostile = summary.get("hostile_clients")
    who = f"the honest clients; hostile are numbers {', '.join(map(str, hostile))}" if hostile else "all clients"
    caption = (
        f"{counted}On the held-out samples of {who}. personalized: each client's own model after its latest "
        "training, or the initial model if it was never chosen; local: the models that clients report to the server; "
        "global: the server's model"
    )
    title = f"{summary['algorithm']} on {summary['dataset']}: {summary['status']}"
    table = Table(title=title, show_header=False, caption=caption, caption_justify="left")
    table.add_column()
    table.add_column(overflow="fold")
    up, down = summary["uplink_bytes"] / 1e6, summary["downlink_bytes"] / 1e6
    rate = summary["compression_rate"]
    trained = summary.get("clients_trained", summary["clients"])
    part = "" if trained == summary["clients"] else f", {trained} of them trained"
    rows = {
        **_metric_rows(summary),
        "sent": f"{up:,.2f} MB up, {down:,.2f} MB down",
        "a dense run would send": f"{summary['dense_uplink_bytes'] / 1e6:,.2f} MB up",
        "upload compression": "-" if rate is None else f"{rate:.2f}x (dense model over upload)",
        "rounds, clients": f"{summary['rounds']}, {summary['clients']}{part}",
        "time": "-" if summary["seconds"] is None else f"{summary['seconds']:.1f} s on {summary['device']}",
        "run folder": folder,
    }
    if summary["epsilon"] is not None:
        rows["privacy"] = f"epsilon {summary['epsilon']:.4g} at delta {summary['delta']:g}, per client"
    if summary["rejected_uploads"]:
        rows["refused uploads"] = f"{summary['rejected_uploads']:,} (refusals.jsonl)"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _metric_rows(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the rows of the accuracies or, if a run has other metrics, of these; the first is the main one."""
    keys = ("personalized", "local", "global", "best_personalized", "worst_decile")
    accuracy = {key: summary[f"{key}_accuracy"] for key in keys}
    rows: dict[str, str] = {}
    for name, one in (summary.get("metrics") or {"accuracy": accuracy}).items():
        personal, local, common, best, worst = (shown(one.get(key), name) for key in keys)
        main = not rows
        rows[f"personalized {name}"] = personal
        if main:
            rows["best round, worst clients"] = f"{best}, {worst} (mean of the worst tenth)"
        rows |= {f"local model {name}": local, f"global model {name}": common}
    return rows


def show(table: Table) -> None:
    """Print a table; in a file or a pipe as wide as it needs to be, so that nothing is cut."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, console.measure(table, options=console.options.update(width=10_000)).maximum)
    console.print(table)


def hanging(line: str, indent: int) -> None:
    """Print a line; on a terminal, what does not fit continues below its last column."""
    console = Console()
    if console.is_terminal and console.width > 2 * indent:
        line = textwrap.fill(
            line, console.width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
        )
    typer.echo(line)
