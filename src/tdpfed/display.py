"""What a person sees in the terminal: the live progress of a run (on standard error), and tables."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from tdpfed.engine.records import Record
from tdpfed.engine.simulate import Simulation
from tdpfed.plan import FactorPlan


@contextmanager
def progress(simulation: Simulation, rounds: int, records: list[Record]) -> Iterator[Callable[[Simulation], None]]:
    """Show a bar with accuracy, loss, megabytes sent and time left; yield what to call after each round."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        title = f"{simulation.algorithm.name} on {simulation.federation.name}"
        task = bar.add_task(title, total=rounds, state="")

        def on_round(current: Simulation) -> None:
            accuracy = records[-1].personalized_accuracy if records else None
            sent = (current.ledger.uplink + current.ledger.downlink) / 1e6
            loss = "-" if current.train_loss is None else f"{current.train_loss:.4f}"
            spent = "" if not records or records[-1].epsilon is None else f"  epsilon {records[-1].epsilon:.3f}"
            state = f"accuracy {percent(accuracy)}  loss {loss}  {sent:,.1f} MB{spent}"
            bar.update(task, completed=current.round, state=state)

        yield on_round


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
    """Return what a run came to."""
    caption = (
        "accuracy: right answers over all, on the clients' held-out samples. personalised: each client's own model "
        "after its last training; local: what clients report to the server; global: the server's model"
    )
    title = f"{summary['algorithm']} on {summary['dataset']}: {summary['status']}"
    table = Table(title=title, show_header=False, caption=caption, caption_justify="left")
    up, down = summary["uplink_bytes"] / 1e6, summary["downlink_bytes"] / 1e6
    rate = summary["compression_rate"]
    best, worst = percent(summary["best_personalized_accuracy"]), percent(summary["worst_decile_accuracy"])
    rows = {
        "personalised accuracy": percent(summary["personalized_accuracy"]),
        "best round, worst clients": f"{best}, {worst} (mean of the worst tenth)",
        "local model accuracy": percent(summary["local_accuracy"]),
        "global model accuracy": percent(summary["global_accuracy"]),
        "sent": f"{up:,.2f} MB up, {down:,.2f} MB down",
        "upload compression": "-" if rate is None else f"{rate:.2f}x (dense model over upload)",
        "rounds, clients": f"{summary['rounds']}, {summary['clients']}",
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


def percent(fraction: float | None) -> str:
    """Return a fraction as per cent with two decimals, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"
