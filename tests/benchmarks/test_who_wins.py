"""A method that diverges at its tuned values has no result, and is said to diverge."""

from pathlib import Path

import pytest
import who_wins

import folders
from tdpfed.config.loading import load_config
from tdpfed.report.group import Group
from tdpfed.report.read import Run, read_run
from tdpfed.runs.folder import CONFIG
from tdpfed.runs.grid import Cell


def made(path: Path, level: float) -> Run:
    return read_run(folders.with_data(folders.make(path, f"algorithm.name={path.name}", level=level)))


def test_what_diverges_is_said_to_and_counts_as_a_case_that_is_not_met(tmp_path: Path) -> None:
    alone = Group("local", (made(tmp_path / "local", 0.8),))
    mine = Group("fedavg", (made(tmp_path / "fedavg", 0.9),))
    rows = {
        "local": who_wins.Row(alone, None, alone),
        "fedavg": who_wins.Row(mine, mine, alone),
        "ditto": who_wins.Row(None, None, alone, frozenset({who_wins.OWN, who_wins.BEST})),
    }
    lines = who_wins.glance({"digits": rows})
    assert "diverges" not in lines[2] + lines[3]
    assert lines[4].count("diverges") == 2
    assert "| diverges | diverges |" in who_wins.table(rows)[4]
    assert "in 1 of 2 cases. Not so: ditto on digits (diverges)" in who_wins.criteria({"digits": rows})[0]
    assert who_wins.results({"digits": rows})["digits"]["ditto"] == {"best": "diverges", "own": "diverges"}


@pytest.mark.parametrize(("status", "end"), [("finished", "done"), ("failed", "failed"), ("interrupted", None)])
def test_the_end_of_a_run_is_that_of_its_summary(tmp_path: Path, status: str, end: str | None) -> None:
    path = folders.make(tmp_path / "run", "algorithm.name=fedavg", status=status)
    config = load_config(str(path / CONFIG))
    assert who_wins._end(path, Cell("run", config)) == end
    assert who_wins._end(path, Cell("run", load_config(str(path / CONFIG), ["run.seed=77"]))) is None
    assert who_wins._end(tmp_path / "none", Cell("run", config)) is None
