"""The progress of runs on standard error: a live line on a terminal, elsewhere a plain line every so often."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tdpfed.core.metrics import in_percent
from tdpfed.engine.simulation import Simulation
from tdpfed.server.records import Record

FIRST_SECONDS, MOST_SECONDS = 10.0, 120.0
"""When the first plain line is printed, and the most seconds between two; in between the intervals double."""


class Pace:
    """Decides when a plain line is due, and estimates the time left from the rounds since the first one."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self._clock = total, clock
        self._start: tuple[float, int] | None = None  # after the first round, which also prepares the others
        self._next, self._pause = 0.0, FIRST_SECONDS

    def left(self, done: int) -> str | None:
        """Return the time left after so many rounds if a line is due, else None."""
        now = self._clock()
        if self._start is None:
            self._start, self._next = (now, done), now + self._pause
        began, first = self._start
        if now < self._next or not first < done < self.total:
            return None
        self._pause = min(2 * self._pause, MOST_SECONDS)
        self._next = now + self._pause
        return f"{duration((now - began) / (done - first) * (self.total - done))} left"


@contextmanager
def progress(simulation: Simulation, rounds: int, records: list[Record]) -> Iterator[Callable[[Simulation], None]]:
    """Show round, main metric, loss, megabytes sent and time left; yield a function to call after each round."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console, pace = Console(stderr=True), Pace(rounds)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        title = f"{simulation.algorithm.name} on {simulation.federation.name}"
        task = bar.add_task(title, total=rounds, state="")

        def on_round(current: Simulation) -> None:
            sent = (current.ledger.uplink + current.ledger.downlink) / 1e6
            loss = "-" if current.minibatch_loss is None else f"{current.minibatch_loss:.4f}"
            last = records[-1] if records else None
            private = last is not None and last.epsilon is not None
            spent = f"  epsilon {last.epsilon:.3f} at round {last.round}" if last and private else ""
            state = f"{quality(last)}  loss {loss}  {sent:,.1f} MB{spent}"
            bar.update(task, completed=current.round, state=state)
            if not console.is_terminal and (left := pace.left(current.round)):
                say(f"round {current.round} of {rounds}  {state}  {left}")

        yield on_round


@contextmanager
def no_progress(simulation: Simulation, rounds: int, records: list[Record]) -> Iterator[Callable[[Simulation], None]]:
    """Show nothing."""
    del simulation, rounds, records
    yield lambda _: None


def say_stopping() -> None:
    """Say that Ctrl-C was understood; written directly, because a signal may interrupt any print."""
    os.write(2, b"\nstopping after this round, with a checkpoint; press Ctrl-C again to stop at once\n")


def say(line: str) -> None:
    """Print a line on standard error at once, so that it is in a log file when it is looked at."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def quality(record: Record | None) -> str:
    """Return the main metric of the personalized models in a record."""
    name, value = (record.main.name, record.main.personalized) if record is not None else ("accuracy", None)
    return f"{name} {shown(value, name)}"


def shown(value: float | None, metric: str) -> str:
    """Return the value of a metric: accuracies in percent."""
    if value is None or in_percent(metric):
        return percent(value)
    return f"{value:.4g}"


def percent(fraction: float | None) -> str:
    """Return a fraction as a percentage with two decimals, or a dash."""
    return "-" if fraction is None else f"{100 * fraction:.2f} %"


def duration(seconds: float) -> str:
    """Return a time in the units a person would use."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"
