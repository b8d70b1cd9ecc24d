"""Plain progress lines: rare, growing rarer, and right about the time left."""

import io
import itertools
import re

import pytest
from rich.console import Console

import small
from tdpfed import FedAvg, simulate
from tdpfed.runs import progress
from tdpfed.runs.progress import FIRST_SECONDS, MOST_SECONDS, Pace, duration


class Clock:
    """A clock that the test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_rare_and_the_time_left_is_that_of_a_steady_run() -> None:
    clock, due = Clock(), list[tuple[float, str]]()
    pace = Pace(1000, clock)
    for done in range(1, 1001):
        clock.now += 60 if done == 1 else 1  # the first round prepares the others, and does not count
        left = pace.left(done)
        if left is not None:
            due.append((clock.now, left))
            assert left == f"{duration(1000 - done)} left"
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(due)]
    assert due[0][0] == 160 + FIRST_SECONDS
    assert gaps == sorted(gaps)
    assert max(gaps) == MOST_SECONDS


def test_no_line_before_a_round_was_measured_and_none_after_the_last() -> None:
    clock = Clock()
    pace = Pace(3, clock)
    assert pace.left(1) is None
    clock.now += 1000
    assert pace.left(1) is None  # nothing is known of the speed yet
    assert pace.left(2) == "17 min left"
    clock.now += 1000
    assert pace.left(3) is None


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0 s"), (99, "99 s"), (150, "2 min"), (6000, "1 h 40 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_prints_lines_only_where_no_bar_is_shown(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr("rich.console.Console", lambda **_: Console(file=screen, force_terminal=terminal, width=160))
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "MOST_SECONDS", 0.0)
    result = simulate(small.mlp(), small.federation(), FedAvg(tau=1), 3, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [int(found[1]) for line in lines if (found := re.match(r"round (\d) of 3 ", line))] == (
        [] if terminal else [2]
    )
    accuracy = result.records[1].personalized_accuracy
    assert accuracy is not None
    assert all(f"{100 * accuracy:.2f} %" in line and line.endswith(" left") for line in lines)
