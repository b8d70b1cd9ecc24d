"""The paper's tables: our ranks are its ranks, every row has a run, and what is written is what the runs came to."""

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import small
from tdpfed.cli import app
from tdpfed.cli.display import grid_progress
from tdpfed.config import load_config, to_toml
from tdpfed.errors import TDPFedError
from tdpfed.paper.figures import _curve, quantity
from tdpfed.paper.published import GLOBAL, LOCAL, PERSONAL, STUDIES, TITLES
from tdpfed.paper.study import cells_of, choose, find, overruled, write
from tdpfed.paper.tables import _late, make, to_page
from tdpfed.report.group import Group
from tdpfed.report.read import read_runs
from tdpfed.runs.grid import run_cells

SMALL = ["data.name=digits", "data.clients=5", "algorithm.tau=1", "run.device=cpu"]


def run(folder: Path, *, tables: Any = (), figures: Any = (), rounds: int = 2, seeds: int = 2, more: Any = ()) -> Any:
    study = find("mnist")
    wanted = choose(study, tables, figures)
    cells = cells_of(study, study.needed(*wanted), rounds, seeds, [*SMALL, *more], wanted[1])
    with grid_progress(cells) as show:
        outcomes = run_cells(cells, folder / "runs", None, on_start=show.start, on_round=show.round, on_end=show.end)
    return write(study, folder, outcomes, *wanted), outcomes


@pytest.mark.parametrize("name", STUDIES)
def test_table_one_gives_the_papers_ranks(name: str) -> None:
    ranks = make(STUDIES[name], 1, {}).ranks
    assert len(ranks) == {"mnist": 2, "cifar10": 8}[name]
    for _, _, *numbers in ranks:
        assert numbers[:2] == numbers[2:]


@pytest.mark.parametrize("name", STUDIES)
def test_every_row_has_a_run_and_every_run_a_configuration_that_differs_from_all_others(name: str) -> None:
    study = STUDIES[name]
    rows = [row for table in study.tables.values() for row in table]
    assert {row.run for row in rows} == set(study.runs)
    assert set(study.needed((2, 3, 4), ())) == set(study.runs)
    cells = cells_of(study, list(study.runs), None, 1)
    assert len({to_toml(cell.config) for cell in cells}) == len(cells)
    assert all(cell.config.run.rounds == 800 for cell in cells)
    assert {row.accuracy for row in rows if row.paper is None} == {LOCAL, PERSONAL}
    assert all(row.accuracy == GLOBAL for row in rows if row.label.startswith("FedAvg") and row.paper is not None)


def test_settings_that_runs_have_of_their_own_are_named() -> None:
    study = STUDIES["mnist"]
    given = ["algorithm.compression=4", "run.seed=4", "run.rounds=3", "algorithm.eta_p=0.07"]
    lines = overruled(study, ["tdpfed-x2", "local"], 1, given)
    assert lines == [
        "--set algorithm.compression: has no effect on tdpfed-x2, which set it themselves",
        "--set run.seed: has no effect, use --seeds",
        "--set run.rounds: has no effect, use --rounds",
    ]
    assert overruled(study, ["tdpfed-x2"], None, given[2:]) == []


def test_without_matplotlib_nothing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["reproduce", "mnist", "--rounds", "1", "--out", str(tmp_path / "made")])
    assert isinstance(result.exception, TDPFedError)
    assert str(result.exception).startswith("--figure: matplotlib is not installed")
    assert not (tmp_path / "made").exists()


def test_the_baseline_is_the_preset() -> None:
    for study in STUDIES.values():
        (cell,) = cells_of(study, ["tdpfed-x2"], None, 1)
        assert cell.config.algorithm == load_config(study.preset).algorithm
        assert cell.config.data == load_config(study.preset).data


def test_settings_of_a_row_are_those_it_names() -> None:
    study = STUDIES["mnist"]
    words = {"lambda": "lam", "s'": "s_prime"}
    for row in study.tables[4][1:]:
        key, _, value = row.label.partition(" = ")
        (cell,) = cells_of(study, [row.run], None, 1)
        base = load_config(study.preset).algorithm
        changed = {name for name in base if cell.config.algorithm[name] != base[name]}
        assert changed == {words.get(key, key)}
        assert cell.config.algorithm[words.get(key, key)] == float(value)


def test_figures_of_losses_name_the_loss_that_they_show(tmp_path: Path) -> None:
    """That on all training samples, of the model a curve is named after; without it, that on the last minibatch."""
    few = [*SMALL, "data.max_samples=20"]
    for given, shown in (([], "training loss"), (["run.train_loss=false"], "loss on the last minibatch")):
        folder = tmp_path / shown
        (figure,) = [
            file
            for file in run(folder, figures=(3,), rounds=1, seeds=1, more=[*few, *given])[0]
            if "figure" in file.name
        ]
        assert f">{shown}</text>" in figure.read_text()
        record = json.loads((folder / "runs/fedavg-seed0/metrics.jsonl").read_text().splitlines()[-1])
        assert ("personalized_train_loss" in record) == (not given)


def test_it_writes_tables_figures_and_origin_and_runs_nothing_twice(tmp_path: Path) -> None:
    files, outcomes = run(tmp_path, tables=(1, 2), figures=(2, 3))
    names = {file.name for file in files}
    assert names == {
        "table-1.csv", "table-2.csv", "README.md", "results.json", "figure-2.svg", "figure-3.svg",
    }  # fmt: skip
    assert all(file.stat().st_size > 50 for file in files)
    assert len(outcomes) == 2 * 11
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["provenance"]["seeds"] == [0, 1]
    assert result["failed"] == []
    for line in result["tables"]["2"]:
        summaries = [
            json.loads((tmp_path / "runs" / f"{line['run']}-seed{seed}" / "summary.json").read_text())
            for seed in (0, 1)
        ]
        mean = 100 * sum(one["personalized_accuracy"] for one in summaries) / 2
        assert line["ours"]["mean"] == pytest.approx(mean)
        curves = [
            [json.loads(text)["personalized_accuracy"] for text in path.read_text().splitlines()]
            for path in (tmp_path / "runs" / f"{line['run']}-seed{seed}" / "metrics.jsonl" for seed in (0, 1))
        ]
        assert line["late"]["mean"] == pytest.approx(50 * sum(statistics.median(curve[-10:]) for curve in curves))
        assert line["megabytes_down"] == pytest.approx(sum(one["downlink_bytes"] for one in summaries) / 2e6)
        assert line["megabytes_up"] == pytest.approx(sum(one["uplink_bytes"] for one in summaries) / 2e6)
    page = (tmp_path / "README.md").read_text()
    assert f"| AFM, x2 | 98.97 | {result['tables']['2'][0]['ours']['mean']:.2f} ±" in page
    assert "(figure-2.svg)" in page
    again = run(tmp_path, tables=(1, 2), figures=(2, 3))[1]
    assert all(outcome.kept for outcome in again)


class Axes:
    """Keeps what is drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[Any, Any]] = {}

    def plot(self, at: Any, mean: Any, label: str, **look: Any) -> None:
        self.drawn[label] = list(at), list(mean)

    def fill_between(self, *given: Any, **look: Any) -> None:
        pass


def curves(folder: Path) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """Return the name of what the figure of losses shows, and its curves."""
    study, axes = find("mnist"), Axes()
    paths = sorted((folder / "runs").iterdir())
    groups = {
        name: Group(name, tuple(read_runs([path for path in paths if path.name.startswith(f"{name}-seed")])[0]))
        for name in {path.name.rpartition("-seed")[0] for path in paths}
    }
    fields, name = quantity(study, "loss", groups)
    for row in study.curves["x2"]:
        _curve(axes, 0, row, fields[row.accuracy], groups.get(row.run))
    return name, axes.drawn


def test_a_figure_of_losses_shows_those_of_the_models_its_curves_are_named_after(tmp_path: Path) -> None:
    """On all training samples; earlier runs that did not record them show the minibatches' losses, under that name."""
    later, earlier = tmp_path / "later", tmp_path / "earlier"
    run(later, figures=(3,), seeds=1)
    name, drawn = curves(later)
    assert name == "training loss"
    for label, run_name, model in (
        ("FedAvg, global", "fedavg", "global"), ("pFedMe, personalized", "pfedme", "personalized"),
        ("FedAvg (s.a.r.), x2, global", "fedavg_sar-x2", "global"),
    ):  # fmt: skip
        lines = small.lines(later / "runs" / f"{run_name}-seed0" / "metrics.jsonl")
        assert drawn[label] == ([1, 2], pytest.approx([line[f"{model}_train_loss"] for line in lines]))
    run(earlier, tables=(3,), seeds=1)
    outcomes = run(earlier, figures=(3,), seeds=1)[1]
    assert all(outcome.kept for outcome in outcomes if "eta" not in outcome.cell.name)
    name, drawn = curves(earlier)
    assert name == "loss on the last minibatch"
    lines = small.lines(earlier / "runs" / "fedavg-seed0" / "metrics.jsonl")
    assert drawn["FedAvg"] == ([1, 2], pytest.approx([line["minibatch_loss"] for line in lines]))


def test_only_runs_in_a_figure_of_losses_evaluate_training_samples() -> None:
    study = STUDIES["mnist"]
    runs = list(study.runs)
    shown = {row.run for panel in study.curves.values() for row in panel}
    for figures, expected in (((), set[str]()), ((2,), set()), ((2, 3), shown)):
        cells = cells_of(study, runs, None, 1, (), figures)
        assert {cell.name.rpartition("-seed")[0] for cell in cells if cell.config.run.train_loss} == expected


def test_a_run_that_fails_is_named_and_leaves_its_row_empty(tmp_path: Path) -> None:
    """A learning rate for which TDPFed diverges; the other methods' rows stand."""
    files, outcomes = run(tmp_path, tables=(2,), rounds=3, seeds=1, more=["algorithm.eta=1e30"])
    assert all(outcome.error is not None for outcome in outcomes)
    assert "not finite" in (tmp_path / "README.md").read_text()
    assert "| AFM, x2 | 98.97 | - |" in (tmp_path / "README.md").read_text()
    assert len(files) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": (5,)}, "--table: unknown 5"),
        ({"figures": (4,)}, "--figure: unknown 4"),
        ({"seeds": 0}, "--seeds: 0 given"),
        ({"rounds": 0}, "--rounds: 0 given"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        run(tmp_path, **options)
    with pytest.raises(TDPFedError, match="data set: unknown 'minst', did you mean 'mnist'"):
        find("minst")
    assert not any(tmp_path.iterdir())


def test_the_command_makes_a_table_goes_on_when_told_and_refuses_otherwise(tmp_path: Path) -> None:
    options = [part for setting in SMALL for part in ("--set", setting)]
    arguments = ["reproduce", "mnist", "--table", "2", "--rounds", "1", "--seeds", "1", "--out", str(tmp_path / "r")]
    first = CliRunner().invoke(app, [*arguments, *options, "--json"])
    assert first.exit_code == 0, first.output
    made = json.loads(first.output.splitlines()[-1])
    assert made["failed"] == {}
    assert sorted(Path(file).name for file in made["files"]) == ["README.md", "results.json", "table-2.csv"]
    again = CliRunner().invoke(app, [*arguments, *options])
    assert "holds runs already; add --resume" in str(again.exception)
    more = [part if part != "2" else "1" for part in arguments]
    assert CliRunner().invoke(app, [*more, *options, "--resume"]).exit_code == 0
    assert sorted(json.loads((tmp_path / "r" / "results.json").read_text())["tables"]) == ["1", "2"]


def test_without_a_run_the_finished_ones_are_written_and_the_others_named_as_missing(tmp_path: Path) -> None:
    options = [part for setting in SMALL for part in ("--set", setting)]
    arguments = ["reproduce", "mnist", "--rounds", "1", "--seeds", "1", "--out", str(tmp_path / "r")]
    nothing = CliRunner().invoke(app, [*arguments, *options, "--table", "3", "--no-run"])
    assert "--no-run" in str(nothing.exception)
    assert "no finished run" in str(nothing.exception)
    assert not (tmp_path / "r").exists()
    run(tmp_path / "r", tables=(2,), rounds=1, seeds=1)
    more = [*options, "--set", "run.device=cuda"]  # a finished run may come from another machine
    made = CliRunner().invoke(app, [*arguments, *more, "--table", "3", "--no-run", "--json"])
    assert made.exit_code == 0, made.output
    page = (tmp_path / "r" / "README.md").read_text()
    assert "| FedAvg | 96.78 | - | global | - |" in page
    assert "| AFM, x2 | 98.97 | - |" not in page
    assert sorted(path.name for path in (tmp_path / "r" / "runs").iterdir() if "fedavg" in path.name) == []


def test_without_a_folder_it_is_one_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "reproduce-mnist" / "runs" / "begun").mkdir(parents=True)
    refused = CliRunner().invoke(app, ["reproduce", "mnist", "--table", "1", "--rounds", "1"])
    assert "'runs/reproduce-mnist' holds runs already" in str(refused.exception)


def test_a_folder_whose_runs_are_packed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl.gz").touch()
    result = CliRunner().invoke(app, ["reproduce", "mnist", "--rounds", "1", "--out", str(tmp_path)])
    assert isinstance(result.exception, TDPFedError)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl.gz"]


def test_without_a_choice_everything_is_made() -> None:
    study = STUDIES["cifar10"]
    assert choose(study, (), ()) == (tuple(TITLES), (4, 5))
    assert choose(study, (3, 3), ()) == ((3,), ())


def test_late_is_the_median_of_the_last_ten_evaluations() -> None:
    first = [*[1.0] * 6, *[0.5] * 4, None, *[0.7] * 4, 0.1]  # of the last ten one is missing and one is a dip
    runs = [SimpleNamespace(series={"personalized_accuracy": values}) for values in (first, [0.9] * 12)]
    late = _late(SimpleNamespace(counted=runs))  # type: ignore[arg-type]
    assert late.mean == pytest.approx(70.0)
    assert late.spread == pytest.approx(20 * 2**0.5)
    assert _late(None).mean is None


def test_a_page_says_what_our_configuration_is() -> None:
    study = STUDIES["cifar10"]
    origin: dict[str, Any] = {"command": "c", "commits": [], "devices": [], "versions": [], "seeds": [0], "date": "d"}
    origin |= {"rounds": [800], "settings": ["data.partition=classes-in-turn"]}
    page = to_page(study, [make(study, 3, {})], [], origin, [])
    assert "Settings of all runs without their own value: `data.partition=classes-in-turn`." in page
    told = [line for line in page.splitlines() if line.startswith("- ") and "our configuration" in line]
    assert len(told) == 3
    assert all("`data.augment=flip-shift`" in line for line in told)
    plain = to_page(study, [make(study, 2, {})], [], {**origin, "settings": []}, [])
    assert "in addition to the preset" not in plain
    assert "Settings of all runs" not in plain
    assert "after 800 rounds" not in page
