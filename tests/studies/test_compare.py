"""``tdpfed compare``: the right runs, each once; its table says what the runs' summaries say."""

import csv
import io
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from spy import Spy
from tdpfed.cli import app, display
from tdpfed.config.loading import load_config
from tdpfed.errors import TDPFedError
from tdpfed.report import table as tables
from tdpfed.report.table import Cell, Table
from tdpfed.runs.grid import CellResult
from tdpfed.runs.session import Session
from tdpfed.studies.compare import CAPTION, cells_of

TINY = ("run.rounds=4", "run.evaluate_every=1", "data.clients=4", "data.max_samples=40", "data.per_client=5")
QUICK = [part for setting in (*TINY, "algorithm.tau=2") for part in ("--set", setting)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def call(*arguments: str, width: int = 200) -> Result:
    return CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["compare", *arguments])


def answer(*arguments: str, status: int = 0) -> dict[str, Any]:
    done = call(*arguments, "--json")
    assert done.exit_code == status, done.output
    assert done.stdout.count("\n") == 1
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(path) / "summary.json").read_text())
    return found


# The grid.


def test_every_method_runs_every_value_of_what_it_has_with_every_seed() -> None:
    sweeps = ["algorithm.compression=2, 4,8", "data.alpha=0.1,1.0"]
    cells, notes = cells_of("digits", "tdpfed, fedavg,local", 2, sweeps, ["run.seed=5"])
    assert [cell.name for cell in cells if cell.config.algorithm["name"] == "fedavg"] == [
        "fedavg-data.alpha=0.1-seed5", "fedavg-data.alpha=0.1-seed6",
        "fedavg-data.alpha=1.0-seed5", "fedavg-data.alpha=1.0-seed6",
    ]  # fmt: skip
    assert len(cells) == len({cell.name for cell in cells}) == 3 * 2 * 2 + 2 * 2 + 2 * 2
    for cell in cells:
        method, *words, seed = cell.name.split("-")
        settings = dict(word.split("=") for word in words)
        expected = [f"algorithm.name={method}", f"run.seed={seed.removeprefix('seed')}"]
        if method == "tdpfed":
            expected.append(f"algorithm.compression={settings['compression']}")
        assert cell.config == load_config("digits", [*expected, f"data.alpha={settings['data.alpha']}"])
    assert notes == [f"{name} has no algorithm.compression: not swept over it" for name in ("fedavg", "local")]


def test_a_setting_counts_for_the_methods_that_have_it() -> None:
    overrides = ["algorithm.lam=3.0", "algorithm.tau=7", "algorithms.pfedme.eta=0.01"]
    cells, notes = cells_of("digits", "tdpfed,pfedme,fedavg", 1, [], overrides)
    assert [cell.config.algorithm.get("lam") for cell in cells] == [3, 3, None]
    assert [cell.config.algorithm["tau"] for cell in cells] == [7, 7, 7]
    assert cells[1].config.algorithm["eta"] == 0.01
    assert notes == ["fedavg has no algorithm.lam: runs without it"]


@pytest.mark.parametrize(
    ("sweep", "values"),
    [
        ("run.threads=1,auto", [1, "auto"]),
        ("wire.codec= float32 , int8", ["float32", "int8"]),
        ("algorithm.exclude=['fc1*','fc2*'],[]", [("fc1*", "fc2*"), ()]),
        ("algorithm.ranks={'fc1*'=2, 'fc2*'=3},{'fc1*'=4}", [{"fc1*": 2, "fc2*": 3}, {"fc1*": 4}]),
        ("data.options.alpha=0.5,1", [{"alpha": 0.5}, {"alpha": 1}]),
        ("algorithm.keep_theta=true,false", [True, False]),
        ("algorithm.lam=1e1", [10]),
    ],
)
def test_values_are_split_at_commas_and_read_as_toml(sweep: str, values: list[Any]) -> None:
    cells, _ = cells_of("digits", "tdpfed", 1, [sweep])
    section, key = sweep.partition("=")[0].split(".")[:2]
    assert [cell.config.as_dict()[section][key] for cell in cells] == values


BAD = {
    "unknown method": (["--algorithms", "tdpfed,fedvg"], ["--algorithms", "'fedvg'", "did you mean 'fedavg'"]),
    "no method": (["--algorithms", ""], ["--algorithms", "''", "Allowed", "tdpfed"]),
    "an empty name": (["--algorithms", "tdpfed,"], ["--algorithms", "''", "Allowed"]),
    "a method twice": (["--algorithms", "local,tdpfed,local"], ["--algorithms", "'local'", "only once"]),
    "no seed": (["--seeds", "0"], ["--seeds", "0", "at least 1"]),
    "seeds too large": (["--set", "run.seed=9223372036854775807", "--seeds", "2"], ["run.seed", "below"]),
    "target in per cent": (["--target", "95"], ["--target", "95", "at most 1"]),
    "target zero": (["--target", "0"], ["--target", "0", "above 0"]),
    "target nan": (["--target", "nan"], ["--target", "nan", "above 0"]),
    "sweep without values": (["--sweep", "algorithm.compression"], ["--sweep", "section.key=value"]),
    "sweep without section": (["--sweep", "compression=2,4"], ["--sweep", "'compression=2,4'", "section.key"]),
    "sweep with a gap": (["--sweep", "algorithm.compression=2,,4"], ["--sweep", "2,,4", "commas"]),
    "sweep with no value": (["--sweep", "algorithm.compression="], ["--sweep", "commas"]),
    "sweep key misspelt": (
        ["--sweep", "algorithm.compresion=2,4"],
        ["--sweep", "'algorithm.compresion'", "did you mean 'algorithm.compression'"],
    ),
    "sweep key of another section": (["--sweep", "algo.compression=2"], ["did you mean 'algorithm.compression'"]),
    "sweep section unknown": (["--sweep", "no.such=2"], ["--sweep", "'no.such'", "Allowed"]),
    "sweep key no method has": (
        ["--algorithms", "fedavg,local", "--sweep", "algorithm.compression=2"],
        ["--sweep", "'algorithm.compression'", "algorithm.eta"],
    ),
    "sweep over methods": (["--sweep", "algorithm.name=tdpfed,local"], ["--sweep", "--algorithms"]),
    "sweep over seeds": (["--sweep", "run.seed=1,2"], ["--sweep", "--seeds"]),
    "sweep twice": (
        ["--sweep", "algorithm.tau=1", "--sweep", "algorithm.tau=2"],
        ["--sweep", "'algorithm.tau'", "2 times", "once"],
    ),
    "one value twice": (["--sweep", "algorithm.compression=2,2.0"], ["--sweep", "the same run"]),
    "sweep value out of range": (["--sweep", "algorithm.tau=1,0"], ["algorithm.tau", "0", "tau=0"]),
    "set no method has": (["--set", "algorithm.compresion=2"], ["--set", "did you mean 'algorithm.compression'"]),
    "set the method": (["--set", "algorithm.name=local"], ["--set", "--algorithms"]),
    "set nonsense": (["--set", "rounds"], ["--set", "'rounds'", "section.key=value"]),
    "set unknown": (["--set", "run.round=3"], ["run: unknown 'round'", "did you mean 'rounds'"]),
    "unknown preset": (["digit"], ["preset", "'digit'", "did you mean 'digits'"]),
    "out is a file": (["--out", "file"], ["--out", "'file'"]),
    "a file's own method only": (["own.toml"], ["algorithm: unknown 'lam'", "fedavg", "[algorithms.NAME]"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_error_and_runs_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    Path("own.toml").write_text("[algorithm]\nname = 'tdpfed'\nlam = 3.0\n")
    spy = Spy(monkeypatch)
    arguments, words = BAD[case]
    done = call(*arguments)
    assert isinstance(done.exception, TDPFedError), done.output
    assert done.stdout == ""
    assert all(word in str(done.exception) for word in words), str(done.exception)
    assert (spy.begun, sorted(path.name for path in Path().iterdir())) == ([], ["file", "own.toml"])


# What it comes to.


def test_the_table_is_that_of_the_summaries_and_a_second_call_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["digits", "--algorithms", "fedavg,local", "--seeds", "3", *QUICK]
    first = answer(*arguments)
    assert first["folder"] == "runs/compare-digits"
    assert [row["method"] for row in first["rows"]] == ["FedAvg", "Local"]
    for row in first["rows"]:
        assert [Path(path).name for path in row["runs"]] == [f"{row['algorithm']}-seed{seed}" for seed in range(3)]
        runs = [summary(path) for path in row["runs"]]
        assert [run["seed"] for run in runs] == [0, 1, 2]
        for key in ("personalized_accuracy", "worst_decile_accuracy", "uplink_bytes", "downlink_bytes", "seconds"):
            values = [run[key] for run in runs]
            assert row[key]["mean"] == pytest.approx(statistics.fmean(values))
            assert row[key]["spread"] == pytest.approx(statistics.stdev(values))
    fedavg, local = first["rows"]
    assert fedavg["global_accuracy"]["mean"] is not None
    assert local["global_accuracy"]["mean"] is None
    assert {row["personalized_accuracy"]["mark"] for row in first["rows"]} >= {"best"}
    assert set(first["files"]) == {"table.md", "table.csv", "report.html"}
    (line, _) = csv.DictReader(io.StringIO(Path(first["files"]["table.csv"]).read_text()))
    assert float(line["personalized %"]) == pytest.approx(100 * fedavg["personalized_accuracy"]["mean"])
    assert CAPTION in Path(first["files"]["table.md"]).read_text()
    assert "fedavg" in Path(first["files"]["report.html"]).read_text()
    spy = Spy(monkeypatch)
    assert answer(*arguments) == first
    assert (spy.begun, spy.resumed, spy.rounds) == ([], [], 0)


def test_the_cost_of_a_target_is_that_of_the_first_round_at_it() -> None:
    common = ["--algorithms", "fedavg", "--seeds", "2", *QUICK]
    (row,) = answer(*common)["rows"]
    curves = []
    for path in row["runs"]:
        lines = [json.loads(line) for line in (Path(path) / "metrics.jsonl").read_text().splitlines()]
        curves.append([(line["personalized_accuracy"], line["round"], line["uplink_bytes"]) for line in lines])
    assert row["target"] <= min(max(point[0] for point in curve) for curve in curves) < row["target"] + 0.01
    target = min(curve[1][0] for curve in curves)
    (asked,) = answer(*common, "--target", str(target))["rows"]
    (line,) = csv.DictReader(io.StringIO(Path("runs/compare-digits/table.csv").read_text()))
    assert float(line["target %"]) == pytest.approx(100 * target)
    assert float(line["rounds to target"]) == asked["rounds_to_target"]["mean"]
    reached = [next(point for point in curve if point[0] >= target) for curve in curves]
    assert asked["target"] == target
    assert asked["rounds_to_target"]["mean"] == statistics.fmean(point[1] for point in reached)
    assert asked["uplink_bytes_to_target"]["mean"] == statistics.fmean(point[2] for point in reached)
    (never,) = answer(*common, "--target", "1")["rows"]
    assert never["rounds_to_target"]["mean"] is None


def test_what_fails_is_reported_and_the_rest_shown() -> None:
    sweep = ["--algorithms", "fedavg", "--seeds", "2", "--sweep", "algorithm.eta=0.05,1e30,0.1", *QUICK]
    done = call(*sweep)
    assert done.exit_code == 1
    assert "FedAvg, eta 0.05" in done.stdout
    assert "FedAvg, eta 0.1" in done.stdout
    assert "1e+30" not in done.stdout
    failures = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failures) == 1
    assert failures[0].startswith("failed: fedavg-eta=1e30-seed0, fedavg-eta=1e30-seed1: round 1")
    assert "diverges" in failures[0]
    again = answer(*sweep, status=1)
    assert [row["method"] for row in again["rows"]] == ["FedAvg, eta 0.05", "FedAvg, eta 0.1"]
    assert [one["run"] for one in again["failed"]] == ["fedavg-eta=1e30-seed0", "fedavg-eta=1e30-seed1"]


def test_where_everything_fails_the_reason_is_said_once_and_there_is_no_table() -> None:
    done = call("--algorithms", "fedavg", "--seeds", "2", "--set", "participation.clients=999", *QUICK)
    assert done.exit_code == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("failed: fedavg-seed0, fedavg-seed1: participation.clients: 999 given")
    empty = answer("--algorithms", "fedavg", "--set", "participation.clients=999", *QUICK, status=1)
    assert (empty["rows"], empty["files"], len(empty["failed"])) == ([], {}, 3)


def test_interrupted_it_says_how_to_go_on_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--algorithms", "fedavg", "--seeds", "3", "--out", "here", *QUICK]
    shown = display.GridProgress.round

    def stop(progress: display.GridProgress, session: Session) -> None:
        shown(progress, session)
        if (session.config.run.seed, session.simulation.round) == (1, 2):
            raise KeyboardInterrupt

    monkeypatch.setattr(display.GridProgress, "round", stop)
    done = call(*arguments)
    assert done.exit_code == 130
    assert done.stdout == ""
    assert "interrupted; the same command resumes" in done.stderr
    monkeypatch.setattr(display.GridProgress, "round", shown)
    spy = Spy(monkeypatch)
    done = call(*arguments)
    assert done.exit_code == 0
    assert (spy.begun, spy.resumed) == (["fedavg-seed2"], ["fedavg-seed1"])
    lines = ["1 of 3 runs were already finished", "2 of 3: fedavg-seed1 finished", "3 of 3: fedavg-seed2 finished"]
    assert done.stderr.splitlines() == lines


def test_without_plotly_there_is_a_table_and_a_word_on_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    made = answer("--algorithms", "local", "--seeds", "1", *QUICK)
    assert set(made["files"]) == {"table.md", "table.csv"}
    assert any("tdpfed[report]" in note for note in made["notes"])
    assert not (Path(made["folder"]) / "report.html").exists()


def test_results_that_cannot_be_written_are_told() -> None:
    Path("here/table.md").mkdir(parents=True)
    done = call("--algorithms", "local", "--seeds", "1", "--out", "here", *QUICK)
    assert isinstance(done.exception, TDPFedError)
    assert "--out: cannot write to 'here/table.md'" in str(done.exception)


def test_a_table_needs_no_plotting_package() -> None:
    modules = "tdpfed.studies.compare, tdpfed.cli.display"
    code = f"import sys, {modules}; print({{'plotly', 'matplotlib', 'pandas'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_model_of_ones_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    Path("own_compared.py").write_text(source)
    monkeypatch.delitem(sys.modules, "own_compared", raising=False)
    made = answer("--algorithms", "local", "--seeds", "1", "--set", "model.name=own_compared:net", *QUICK)
    assert len(made["rows"]) == 1


# What a person sees.


def shown(made: Table, width: int = 200) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system="standard")
    console.print(display.comparison_table(made, "title", CAPTION, width))
    return screen.getvalue()


def example(*datasets: str) -> Table:
    titles = tables.results([]).titles
    cells = {"personalized %": [Cell(98.21, 0.34, 2, "best"), Cell(98.0, 0.5, 2, "close"), Cell(90.0, 0.1, 2)]}
    rows: list[list[str | Cell]] = []
    for i, dataset in enumerate(datasets):
        words: dict[str, str | Cell] = {"data set": dataset, "method": f"[red]m{i}", "target %": Cell(90.0 + i // 3)}
        rows.append([cells[title][i % 3] if title in cells else words.get(title, Cell(None)) for title in titles])
    return Table(titles, rows)


def test_the_best_is_bold_and_what_is_close_to_it_marked() -> None:
    text = shown(example("digits", "digits", "digits"))
    assert "\x1b[1m98.21 ± 0.34\x1b[0m" in text
    assert "≈ 98.00 ± 0.50" in text
    assert "≈ 90.00" not in text
    assert "\x1b[1m90.00" not in text
    assert "[red]m1" in text
    assert "rounds to 90 %" in text
    assert "data set" not in text
    assert "not separated" in text


def test_how_many_runs_a_mean_is_over_is_shown_where_some_failed() -> None:
    made = example("digits", "digits", "digits")
    at = made.titles.index("runs")
    counts = ["3", "3", "2"]
    rows = [[counts[i] if k == at else cell for k, cell in enumerate(row)] for i, row in enumerate(made.rows)]
    assert "runs" in shown(Table(made.titles, rows))
    assert "runs" not in shown(made)


def test_one_seed_is_said_to_tell_little() -> None:
    assert any("one seed" in note for note in answer("--algorithms", "fedavg,local", "--seeds", "1", *QUICK)["notes"])


def test_eighty_columns_are_enough() -> None:
    text = shown(example("digits", "digits", "digits"), width=80)
    for word in ("personal", "98.21", "± 0.34", "≈ 98.00", "rounds", "to 90 %", "seconds", "[red]m2"):
        assert word in text


def test_several_data_sets_have_a_column_and_targets_of_their_own() -> None:
    text = shown(example("digits", "digits", "digits", "mnist", "mnist", "mnist"))
    assert "data set" in text
    assert "target %" in text
    assert "rounds to target" in text


def test_one_display_for_all_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda **_: Console(file=screen, force_terminal=True, width=160))
    done = call("--algorithms", "fedavg,local", "--seeds", "1", *QUICK)
    assert done.exit_code == 0
    for words in ("all runs", "8/8", "2 of 2 runs", "fedavg-seed0", "accuracy", "1 of 2: fedavg-seed0 finished"):
        assert words in screen.getvalue()


def test_what_a_run_warns_of_is_said_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    (cell,), _ = cells_of("digits", "local", 1)
    with display.grid_progress([cell]) as show:
        show.end(CellResult(cell, Path("x"), warnings=["checkpoint 3 is damaged [/bold]"]))
    said = ["warning: local-seed0: checkpoint 3 is damaged [/bold]", "1 of 1: local-seed0 finished"]
    assert capsys.readouterr().err.splitlines() == said


def test_seeds_that_run_together_share_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda **_: Console(file=screen, force_terminal=True, width=160))
    monkeypatch.setattr("tdpfed.runs.grid._groups", lambda cells: [cells] if cells else [])
    done = call("--algorithms", "fedavg", "--seeds", "3", *QUICK)
    assert done.exit_code == 0
    assert "fedavg-seed0 and 2 more" in screen.getvalue()
    assert "12/12" in screen.getvalue()
