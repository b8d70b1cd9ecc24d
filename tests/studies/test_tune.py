"""``tdpfed tune``: as many trials for every method, blind to test samples, resumed to the same choice, for compare."""

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app
from tdpfed.config import load_config, to_toml
from tdpfed.errors import TDPFedError
from tdpfed.report.read import read_run
from tdpfed.runs import grid
from tdpfed.studies import tune
from tdpfed.studies.tune import Search, Trial, search, searches

TINY = ["run.rounds=3", "run.evaluate_every=3", "data.clients=4", "data.max_samples=40", "run.device=cpu"]
LINEAR, LINEAR_ONLY = "model.name=logistic", {"mocha"}
FAST = [part for setting in (*TINY, LINEAR, "checkpoint.every=0") for part in ("--set", setting)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["tune", *arguments])


def tuned(out: str, *arguments: str) -> dict[str, Any]:
    done = call(*arguments, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def clients(path: Path, shift: int) -> str:
    """Write clients' samples to a file; ``shift`` changes the labels and the inputs of the test samples only."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(160, 6)).astype(np.float32), generator.integers(0, 3, 160)
    x += np.eye(3, 6)[y].astype(np.float32)
    owner, test = np.repeat(np.arange(4), 40), np.tile(np.arange(40) >= 30, 4)
    np.savez(path, x=np.where(test[:, None], x - shift, x), y=np.where(test, (y + shift) % 3, y), client_ids=owner,
             test_mask=test)  # fmt: skip
    return str(path)


# The trials


def test_every_method_has_as_many_trials_with_the_same_seeds_and_held_out_samples() -> None:
    names, found, notes = dict.fromkeys(ALGORITHMS), list[Search](), list[str]()
    for model, some in (("dnn", names.keys() - LINEAR_ONLY), ("logistic", LINEAR_ONLY)):
        more, notes = searches(
            "digits", ",".join(some), 3, 2, [*TINY, "data.max_samples=90", f"model.name={model}", "run.seed=7"]
        )
        found += more
    assert {one.name for one in found} == names.keys()
    for one in found:
        assert [trial.number for trial in one.trials] == [0, 1, 2]
        cells = [cell for trial in one.trials for cell in trial.cells]
        assert [cell.config.run.seed for cell in cells] == [1007, 1008] * 3
        assert {cell.config.data.validation for cell in cells} == {tune.SHARE}
        assert len({to_toml(cell.config) for cell in cells}) == len({cell.name for cell in cells}) == 6
        first = one.trials[0].cells[0].config
        assert (first.method, first.server) == (one.config.method, one.config.server)
        assert one.config.method.search.keys() == {k.partition(".")[2] for k in one.ranges if k != "server.rate"}
        assert 1 <= len(one.ranges) <= 5
    assert notes == [f"data.validation is 0: trials hold out {tune.SHARE:g} of each client's training samples"]


def test_a_share_that_is_held_out_anyway_is_kept() -> None:
    found, notes = searches("digits", "fedavg", 1, 1, [*TINY, LINEAR, "data.validation=0.3"])
    assert found[0].trials[0].cells[0].config.data.validation == 0.3
    assert notes == []


def test_the_servers_rate_is_searched_where_the_server_averages() -> None:
    found, _ = searches("digits", "fedavg,local,mocha,hypcluster", 2, 1, [*TINY, LINEAR])
    assert ["server.rate" in one.ranges for one in found] == [True, False, False, True]
    server = found[0].trials[1].cells[0].config.server
    assert (server.optimizer, server.rate) == ("sgd", found[0].trials[1].values["server.rate"])
    (other,), _ = searches("digits", "fedavg", 2, 1, [*TINY, LINEAR, "server.optimizer=yogi", "server.rate=0.01"])
    assert other.ranges["server.rate"] == (0.005, 0.02)
    assert other.trials[1].cells[0].config.server.optimizer == "yogi"


def test_more_trials_begin_with_the_same_and_fill_the_ranges() -> None:
    config = load_config("digits", [*TINY, LINEAR, "algorithm.name=ditto"])
    few, many = (search(config, count, 1) for count in (4, 17))
    assert many.trials[:4] == few.trials
    for key, (low, high) in many.ranges.items():
        values = np.array([trial.values[key] for trial in many.trials[1:]])
        assert ((low <= values) & (values <= high)).all()
        factors = high >= 10 * low
        places = np.log(values / low) / np.log(high / low) if factors else (values - low) / (high - low)
        assert np.bincount((4 * places).astype(int)).min() >= 2  # every quarter of a range is searched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_declared_ranges_are_allowed_and_multiples_contain_the_own_value(name: str) -> None:
    method = ALGORITHMS[name]()
    for key, limits in method.search.items():
        own = getattr(method, key)
        assert limits[0] < own < limits[1], key
        for value in limits:
            replace(method, **{key: type(own)(value)})
    assert method.rates.keys() - method.search.keys() <= {"eta_g"}  # scaffold's is the server's rate


def test_whole_numbers_stay_whole() -> None:
    found = search(load_config("digits", [*TINY, LINEAR, "algorithm.name=hypcluster"]), 12, 1)
    assert {trial.values["algorithm.clusters"] for trial in found.trials[1:]} == {1, 2, 3, 4, 5}


# The choice


def finished(folder: Path, accuracy: float | None, status: str = "finished") -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"round": n, "validation_accuracy": a, "personalized_accuracy": 1 - (a or 0)}) + "\n"
                for n, a in ((1, 0.99), (2, accuracy)))
    )  # fmt: skip
    (folder / "summary.json").write_text(json.dumps({"status": status, "rounds": 2}))


def made(folder: Path, scores: list[list[float | None]]) -> Search:
    """Return a search over eta whose trials have these validation accuracies in the last round; None failed."""
    config = load_config("digits", ["algorithm.name=fedavg"])
    trials = []
    for number, by_seed in enumerate(scores):
        cells = tuple(grid.Cell(f"t{number}s{seed}", config) for seed in range(len(by_seed)))
        for cell, score in zip(cells, by_seed, strict=True):
            finished(folder / cell.name, score, "failed" if score is None else "finished")
        trials.append(Trial(number, {"algorithm.eta": 0.02 * number} if number else {}, cells))
    return Search("fedavg", config, {"algorithm.eta": (0.01, 0.25)}, tuple(trials))


def test_the_best_mean_of_the_last_round_wins_and_of_equal_ones_the_first(tmp_path: Path) -> None:
    found = made(tmp_path, [[0.5, 0.6], [0.9, 0.4], [0.6, 0.7], [0.7, 0.6]])
    assert [trial.score(tmp_path) for trial in found.trials] == pytest.approx([0.55, 0.65, 0.65, 0.65])
    assert found.best(tmp_path) is found.trials[1]
    chosen = found.chosen(tmp_path)
    assert chosen is not None
    assert chosen.algorithm["eta"] == 0.02


def test_a_trial_that_diverged_is_the_worst(tmp_path: Path) -> None:
    found = made(tmp_path, [[0.2, 0.2], [None, 0.99], [0.1, 0.4]])
    assert found.best(tmp_path) is found.trials[2]
    assert [row["validation_accuracy"] for row in found.rows(tmp_path)] == pytest.approx([0.2, None, 0.25])
    none = made(tmp_path / "none", [[None], [None]])
    assert none.best(tmp_path / "none") is None
    assert none.chosen(tmp_path / "none") is None


def test_a_choice_near_an_end_is_reported(tmp_path: Path) -> None:
    found = made(tmp_path, [[0.5]])
    ends = {value: list(found.at_edge(Trial(1, {"algorithm.eta": value}, ()))) for value in (0.011, 0.05, 0.24, 0.5)}
    assert [bool(texts) for texts in ends.values()] == [True, False, True, True]
    assert ends[0.24] == ["algorithm.eta = 0.24 is at the upper end of 0.01 to 0.25"]


# The command


def test_test_samples_have_no_influence_and_validation_samples_do(tmp_path: Path) -> None:
    files = [clients(tmp_path / f"{shift}.npz", shift) for shift in (0, 1)]
    texts, accuracies = [], []
    for number, file in enumerate(files):
        Path("clients.npz").write_bytes(Path(file).read_bytes())
        found = tuned(f"out{number}", *FAST, "--set", "data.name=clients.npz", "--set", "data.max_samples=",
                      "--set", "data.partition=natural", "--algorithms", "fedavg,local", "--trials", "3")  # fmt: skip
        texts.append([Path(path).read_bytes() for path in found["files"].values()])
        run = read_run(Path(f"out{number}") / "fedavg-trial1-seed1000")
        accuracies.append((run.series["personalized_accuracy"], run.series["validation_accuracy"]))
    assert texts[0] == texts[1]
    assert accuracies[0][0] != accuracies[1][0]  # the test samples are others
    assert accuracies[0][1] == accuracies[1][1]
    by_trial = {row["validation_accuracy"] for row in found["trials"] if row["method"] == "fedavg"}
    assert len(by_trial) > 1


def test_one_that_is_stopped_is_resumed_to_the_same_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [*FAST, "--algorithms", "fedavg,ditto", "--trials", "3", "--seeds", "1"]
    whole = tuned("whole", *given)
    ran, run = list[str](), grid._run

    def stopping(cells: Any, *rest: Any) -> Any:
        if len(ran) == 4:
            raise KeyboardInterrupt
        ran.extend(cell.name for cell in cells)
        return run(cells, *rest)

    monkeypatch.setattr(grid, "_run", stopping)
    stopped = call(*given, "--out", "part")
    assert stopped.exit_code == 130
    assert not Path("part/tuned.toml").exists()
    before = list(ran)
    ran.clear()
    again = tuned("part", *given)
    assert len(before) == 4
    assert len(ran) == 2
    assert not set(ran) & set(before)
    assert again["trials"] == whole["trials"]
    assert Path("part/tuned.toml").read_text() == Path("whole/tuned.toml").read_text()
    ran.clear()
    tuned("part", *given)
    assert ran == []


def test_compare_and_run_take_the_file() -> None:
    given = [*FAST, "--set", "algorithm.batch_size=7", "--set", "algorithm.eta=0.1", "--trials", "4", "--seeds", "1"]
    found = tuned("out", *given, "--algorithms", "fedavg,local,ditto")
    file = found["files"]["tuned.toml"]
    overrides = given[1:-4:2]
    for name in ("fedavg", "local", "ditto"):
        (row,) = [row for row in found["trials"] if row["chosen"] and row["method"] == name]
        values = [f"{key}={value}" for key, value in row["values"].items()]
        averages = ["server.optimizer=sgd"] if row["trial"] and "server.rate" in row["values"] else []
        expected = load_config("digits", [*overrides, f"algorithm.name={name}", *values, *averages])
        assert load_config(file, [f"algorithm.name={name}"]) == expected
        assert expected.data.validation == 0
    untouched = load_config(file, ["algorithm.name=fedbabu"])
    assert untouched.algorithm["fine_tune"] == load_config("digits", ["algorithm.name=fedbabu"]).algorithm["fine_tune"]
    done = CliRunner().invoke(app, ["compare", file, "--algorithms", "fedavg,ditto", "--seeds", "1", "--json"])
    assert done.exit_code == 0, done.output
    (etas,) = {tuple(read_run(Path(path)).setting("algorithm.eta") for path in row["runs"])
               for row in json.loads(done.stdout)["rows"] if row["method"] == "FedAvg"}  # fmt: skip
    assert etas == (load_config(file, ["algorithm.name=fedavg"]).algorithm["eta"],)


def test_the_table_of_trials_has_every_value() -> None:
    found = tuned("out", *FAST, "--algorithms", "fedavg,mocha", "--trials", "2", "--seeds", "2")
    rows = list(csv.DictReader(io.StringIO(Path(found["files"]["trials.csv"]).read_text())))
    assert [(row["method"], row["trial"]) for row in rows] == [(m, t) for m in ("fedavg", "mocha") for t in "01"]
    for row, trial in zip(rows, found["trials"], strict=True):
        assert {key: float(row[key]) for key in trial["values"]} == trial["values"]
        assert float(row["validation_accuracy"]) == trial["validation_accuracy"]
        assert len(row["by_seed"].split()) == 2
    shown = call(*FAST, "--algorithms", "fedavg,mocha", "--trials", "2", "--seeds", "2", "--out", "out")
    assert shown.exit_code == 0
    assert "mocha" in shown.stdout


def test_a_method_all_of_whose_trials_fail_is_left_out_and_said() -> None:
    given = [*FAST, "--algorithms", "fedavg,local", "--trials", "2", "--seeds", "1", "--out", "out"]
    done = call(*given, "--set", "algorithms.local.eta=1e37", "--set", "model.name=dnn", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert {name.partition("-")[0] for name in found["failed"]} == {"local"}
    assert all("local" in error or "diverge" in error for error in found["failed"].values())
    assert "# validation accuracy" in Path("out/tuned.toml").read_text()
    assert load_config("out/tuned.toml", ["algorithm.name=local"]).algorithm["eta"] == 1e37  # as it was


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--trials", "0"], "--trials: 0 given, must be at least 1"),
        (["--seeds", "0"], "--seeds: 0 given, must be at least 1"),
        (["--algorithms", "fedvg"], "--algorithms: unknown 'fedvg', did you mean 'fedavg'?"),
        (["--algorithms", "fedavg,mocha", "--set", "model.name=dnn"], "algorithm.name: 'mocha' given, must be another"),
        (["--set", "run.seed=9223372036854775807"], "run.seed: 9223372036854776807 given, must be"),
        (["--set", "data.validation=1"], "data.validation: 1 given, must be"),
        (["--set", "data.max_samples=2"], "data.validation: 0.2 given, must be 0, or with at least 2"),
        (["--set", "algorithm.name=fedavg"], "--set: 'algorithm.name' given, use --algorithms instead"),
        (["--algorithms", "hypcluster", "--set", "algorithm.clusters=9"], "algorithm.clusters: 9 given, must be"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(given: list[str], text: str) -> None:
    done = call(*FAST, *given, "--out", "out")
    assert isinstance(done.exception, TDPFedError)
    assert text in str(done.exception)
    assert not Path("out").exists()


def test_a_folder_with_other_trials_is_refused() -> None:
    tuned("out", *FAST, "--algorithms", "fedavg", "--trials", "1", "--seeds", "1")
    done = call(*FAST, "--set", "algorithm.batch_size=3", "--algorithms", "fedavg", "--trials", "1", "--out", "out")
    assert isinstance(done.exception, TDPFedError)
    assert "--out: " in str(done.exception)


@pytest.mark.hostile
def test_a_trial_whose_records_are_lost_or_cut_counts_as_failed() -> None:
    given = [
        "digits",
        "--algorithms",
        "fedavg",
        "--trials",
        "2",
        "--seeds",
        "1",
        *FAST,
        "--set",
        "run.evaluate_every=1",
    ]
    whole = tuned("out", *given)
    file = Path("out/fedavg-trial1-seed1000/metrics.jsonl")
    lines = file.read_text().splitlines(keepends=True)
    for kept in ([], lines[:1]):
        file.write_text("".join(kept))
        rows = tuned("out", *given)["trials"]
        assert [row["validation_accuracy"] for row in rows] == [whole["trials"][0]["validation_accuracy"], None]
        assert [row["chosen"] for row in rows] == [True, False]
