"""A published benchmark: its numbers beside ours, at both moments of evaluation, with few bytes, resumable."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tdpfed.algorithms import find
from tdpfed.cli import app
from tdpfed.config import load_config, to_toml
from tdpfed.errors import TDPFedError
from tdpfed.paper.leaderboard import NAMES, Board, accuracy, groups, load_board, plan
from tdpfed.paper.leaderboard_page import FEWER, HEADS
from tdpfed.report.parse import FIGURES

DIGITS = (
    "data.name=digits", "data.clients=5", "data.normalize=symmetric", "model.name=dnn", "run.device=cpu",
    "run.precision=float32",
)  # fmt: skip
FEW = ("fedavg", "ditto", "fedper", "local")


def command(out: Path, *more: str, methods: tuple[str, ...] = FEW, settings: tuple[str, ...] = DIGITS) -> Any:
    """Run the benchmark on few samples for two rounds."""
    options = [part for one in settings for part in ("--set", one)]
    base = ["reproduce", "pfllib", "--rounds", "2", "--methods", ",".join(methods), "--out", str(out), "--json"]
    return CliRunner().invoke(app, [*base, "--setting", "dirichlet", *options, *more])


def numbers(run: Path, key: str) -> list[Any]:
    return [json.loads(line).get(key) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_every_published_method_is_ours_and_every_setting_a_preset(name: str) -> None:
    board = load_board(name)
    methods = ("fedavg", "fedprox", "perfedavg", "pfedme", "ditto", "apfl", "fedper", "fedrep", "fedbabu", "fedala")
    assert tuple(board.methods) == (*methods, "local")
    for entry in board.methods.values():
        assert find(entry.name).name == entry.name
        assert set(entry.published) == (set(board.settings) if entry.name != "local" else set())
        assert accuracy(entry) in FIGURES
        assert f"best_{accuracy(entry)}" in FIGURES
    whole = plan(board)
    configs = list(whole.configs())
    assert len({to_toml(config) for _, _, config in configs}) == len(configs) == 22
    for setting, entry, config in configs:
        assert config.method_name == entry.name
        assert (config.method.epochs, config.method.batch_size, config.data.clients) == (1.0, 10, 20)
        assert (config.data.name, config.model.name, config.evaluation.received) == ("fashion-mnist", "cnn", True)
        assert config.data == load_config(setting.preset).data
        assert config.run.evaluate_every == 1


def test_the_best_published() -> None:
    board = load_board("pfllib")
    assert board.best_published("pathological") == ("GPFL", 99.85)
    assert board.best_published("dirichlet") == ("FedCP", 97.89)
    assert Board("", "", "", 1, {}, board.methods, {}).best_published("dirichlet") == ("FedALA", 97.66)


def test_it_tunes_runs_factors_the_best_and_writes_what_the_runs_say(tmp_path: Path) -> None:
    out = tmp_path / "made"
    done = command(out, "--seeds", "2", "--trials", "2", "--tuning-rounds", "1")
    assert done.exit_code == 0, done.output
    assert "a round takes" in done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert made["failed"] == {}
    assert [Path(file).name for file in made["files"]] == ["trials-dirichlet.csv", "README.md", "results.json"]
    result = json.loads((out / "results.json").read_text())
    rows = {(row["method"], row["factored"]): row for row in result["settings"]["dirichlet"]}
    assert [method for method, factored in rows if not factored] == list(FEW)
    dense = {method: row["ours"]["mean"] for (method, factored), row in rows.items() if not factored}
    senders = sorted(set(FEW) - {"local"}, key=lambda method: -dense[method])
    assert {method for method, factored in rows if factored} == set(senders[:3])
    for (method, factored), row in rows.items():
        runs = [out / "runs" / f"dirichlet-{method}{'-factors' * factored}-seed{seed}" for seed in (0, 1)]
        for moment, key in (("before", "received_accuracy"), ("after", "personalized_accuracy")):
            curves = [numbers(run, key) for run in runs]
            assert row[f"{moment}_best"]["mean"] == pytest.approx(50 * sum(max(curve) for curve in curves))
            assert row[f"{moment}_last"]["mean"] == pytest.approx(50 * sum(curve[-1] for curve in curves))
        assert row["ours"] == row["before_best"]
        published = load_board("pfllib").methods[method].published.get("dirichlet")
        assert row["published"] == published
        assert (row["difference"] is None) == (published is None)
        sent = sum(numbers(run, "uplink_bytes")[-1] for run in runs) / 2
        assert row["megabytes_up"] == pytest.approx(sent / 2 / 5 / 1e6)
        assert row["seeds"] == 2
        assert all((run / "checkpoints").exists() for run in runs)  # more rounds may follow
        if factored:
            assert row["times_fewer"] > 10
            names = runs[0].name, runs[0].name.replace("-factors", "")
            tuned, alike = (load_config(str(out / "runs" / name / "config.toml")) for name in names)
            assert tuned.method == alike.method
            assert tuned.server == alike.server
    page = (out / "README.md").read_text()
    assert "| Ditto | 97.47 |" in page
    assert f"At {FEWER} times fewer" in page or f"uploads {FEWER} times fewer bytes" in page
    assert "2 trials of each method, each of 1 rounds" in page
    table = [line for line in page.splitlines() if line.startswith("| FedAvg, factored updates")]
    assert len(table) == 1
    assert table[0].count("|") == len(HEADS) + 1


def test_it_is_resumed_and_refused_otherwise(tmp_path: Path) -> None:
    out, options = tmp_path / "made", ("--seeds", "1", "--trials", "1")
    assert command(out, *options, methods=("fedavg",)).exit_code == 0
    first = (out / "runs" / "dirichlet-fedavg-seed0" / "summary.json").read_bytes()
    again = command(out, *options, methods=FEW[:2])
    assert "holds runs already; add --resume" in str(again.exception)
    assert command(out, *options, "--resume", methods=FEW[:2]).exit_code == 0
    assert (out / "runs" / "dirichlet-fedavg-seed0" / "summary.json").read_bytes() == first
    assert not (out / "tuning").exists()
    assert set(groups(out)) == {
        "dirichlet-fedavg", "dirichlet-ditto", "dirichlet-fedavg-factors", "dirichlet-ditto-factors",
    }  # fmt: skip
    page = (out / "README.md").read_text()
    assert "the presets' own, not tuned" in page
    (out / "README.md").unlink()
    assert command(out, *options, "--no-run", methods=FEW[:2]).exit_code == 0
    assert [line for line in (out / "README.md").read_text().splitlines() if line.startswith("| ")] == [
        line for line in page.splitlines() if line.startswith("| ")
    ]


def test_a_run_that_fails_leaves_its_row_empty(tmp_path: Path) -> None:
    settings = (*DIGITS, "algorithm.eta=1e30")
    done = command(tmp_path / "r", "--seeds", "1", "--trials", "1", methods=("fedavg", "local"), settings=settings)
    assert done.exit_code == 1
    page = (tmp_path / "r" / "README.md").read_text()
    assert "| FedAvg | 85.85 | - |" in page
    assert "not finite" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pfllib", "--methods", "fedavgg"], "--methods: .*'fedavgg'.*did you mean 'fedavg'"),
        (["pfllib", "--setting", "iid"], "--setting: unknown 'iid'"),
        (["pfllib", "--trials", "0"], "--trials: 0 given"),
        (["pfllib", "--tuning-rounds", "0"], "--tuning-rounds: 0 given"),
        (["pfllib", "--seeds", "0"], "--seeds: 0 given"),
        (["pfllib", "--rounds", "0"], "--rounds: 0 given"),
        (["pfllib", "--table", "2"], "--table: .* no meaning for 'pfllib'"),
        (["pfllib", "--set", "run.rounds=4"], "--set: run.rounds given, must be given as --rounds"),
        (["pfllib", "--device", "gpu"], "run.device: 'gpu'"),
        (["pfllib", "--no-run"], "--no-run: .* holds no finished run"),
        (["mnist", "--trials", "3"], "--trials: 3 given, which has no meaning for 'mnist'"),
        (["mnist", "--methods", "fedavg"], "--methods: 'fedavg' given"),
        (["pfllibb"], "experiments: unknown 'pfllibb', did you mean 'pfllib'"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert isinstance(result.exception, TDPFedError)
    with pytest.raises(TDPFedError, match=message):
        raise result.exception
    assert not any(tmp_path.iterdir())
