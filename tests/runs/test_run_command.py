"""``tdpfed run`` and ``tdpfed data`` as a user runs them: streams, status, the run folder, and what is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import small
from tdpfed import cli
from tdpfed.config.loading import parse_config
from tdpfed.data import load

FILES = ("config.toml", "federation.json", "metrics.jsonl", "summary.json")
MAIN = [sys.executable, "-c", "from tdpfed.cli import main; main()"]
TINY = ["run.rounds=3", "data.clients=4", "data.max_samples=40", "algorithm.tau=2", "data.per_client=5"]
KEYS = {
    "algorithm", "dataset", "model", "rounds", "seed", "clients", "personalized_accuracy", "global_accuracy",
    "best_personalized_accuracy", "uplink_bytes", "downlink_bytes", "bytes_per_client_round", "compression_rate",
    "seconds", "device", "versions",
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, no data of this machine and no network."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no network in tests")

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("TDPFED_DATA", raising=False)
    monkeypatch.setattr("pooch.os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setattr("requests.Session.request", refuse)


def options(*overrides: str, tiny: bool = True) -> list[str]:
    return [part for override in ([*TINY] if tiny else []) + [*overrides] for part in ("--set", override)]


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the console script's function in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["tdpfed", *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def real(*arguments: str) -> subprocess.CompletedProcess[str]:
    # One thread each: OpenMP's threads wait by spinning, and crawl where tests share the cores with other work.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*MAIN, *arguments], capture_output=True, text=True, check=False, env=env)


def left() -> list[str]:
    """What lies in the working directory."""
    return sorted(str(path) for path in Path().rglob("*") if path.is_file())


@pytest.mark.parametrize("chosen", [1, 4])
def test_the_summary_says_how_many_clients_have_trained(
    chosen: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """One that has not counts with the common start: with few participants personal accuracy is low at first."""
    more = ("run.rounds=1", f"participation.clients={chosen}", "participation.train=selected")
    assert call(["run", *options(*more), "--out", "run"], monkeypatch) == 0
    assert json.loads(Path("run/summary.json").read_text())["clients_trained"] == chosen
    told = " ".join(capsys.readouterr().out.split())
    assert ("1, 4, 1 of them trained" in told) == (chosen == 1) == ("of them" in told)


def test_one_line_of_json_and_a_run_folder() -> None:
    done = real("run", *options("run.evaluate_every=2"), "--out", "my/run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    summary = json.loads(done.stdout)
    assert summary.pop("folder") == "my/run"
    assert set(summary) >= KEYS
    assert (summary["status"], summary["algorithm"], summary["dataset"]) == ("finished", "tdpfed", "digits")
    assert (summary["rounds"], summary["clients"], summary["model"]) == (3, 4, "dnn")
    folder = Path("my/run")
    assert [name for name in left() if "checkpoints" not in name] == [f"my/run/{name}" for name in FILES]
    assert [name for name in left() if name.endswith(".json") and "checkpoints" in name]
    assert small.summary(folder / "summary.json") == summary
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [2, 3]
    assert lines[-1]["personalized_accuracy"] == summary["personalized_accuracy"]
    assert lines[-1]["uplink_bytes"] == summary["uplink_bytes"]
    config = parse_config(tomllib.loads((folder / "config.toml").read_text()))
    assert (config.run.rounds, config.data.clients, config.algorithm["tau"]) == (3, 4, 2)


def test_the_written_configuration_runs_again_to_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert call(["run", *options(), "--out", "a"], monkeypatch) == 0
    assert call(["run", "a/config.toml", "--out", "b"], monkeypatch) == 0
    lines = [small.lines(Path(name) / "metrics.jsonl", "seconds") for name in ("a", "b")]
    assert lines[0] == lines[1]
    assert (Path("a") / "config.toml").read_text() == (Path("b") / "config.toml").read_text()


def test_a_table_for_people_and_a_folder_by_default() -> None:
    result = CliRunner().invoke(cli.app, ["run", *options()])
    assert result.exit_code == 0
    for words in (
        "tdpfed on digits: finished",
        "personalized accuracy",
        "global model accuracy",
        "MB up",
        "runs/digits",
    ):
        assert words in result.stdout
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-tdpfed-0-")
    assert (folder / "summary.json").exists()


@pytest.mark.parametrize("name", ["fedavg", "fedavg_sar", "pfedme", "perfedavg", "local"])
def test_every_algorithm_by_name(name: str) -> None:
    result = CliRunner().invoke(cli.app, ["run", *options(f"algorithm.name={name}"), "--out", "run", "--json"])
    assert result.exit_code == 0, result.exception
    summary = json.loads(result.stdout)
    assert summary["algorithm"] == name
    assert 0 < summary["personalized_accuracy"] <= 1
    assert (summary["global_accuracy"] is None) == (name == "local")


def test_selection_dropout_diagnostics_chunks_and_loop_from_the_command_line() -> None:
    settings = options(
        "participation.clients=2", "participation.dropout=0.4", "participation.train=all", "run.diagnostics_every=2",
        "run.chunk=2", "run.rounds=6", "run.runner=batched",
    )  # fmt: skip
    result = CliRunner().invoke(cli.app, ["run", *settings, "--out", "run", "--json"])
    assert result.exit_code == 0, result.exception
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if line["diagnostics"]] == [2, 4, 6]
    loop = CliRunner().invoke(cli.app, ["run", *options("run.runner=loop"), "--out", "loop", "--json"])
    assert loop.exit_code == 0


BAD: dict[str, tuple[list[str], list[str]]] = {
    "preset": (["digts"], ["'digts'", "did you mean 'digits'"]),
    "key": (options("run.round=3"), ["'round'", "did you mean 'rounds'"]),
    "algorithm": (options("algorithm.name=tdpfad"), ["'tdpfad'", "did you mean 'tdpfed'"]),
    "data set": (options("data.name=digit"), ["'digit'", "did you mean 'digits'"]),
    "model": (options("model.name=dn"), ["'dn'", "did you mean 'dnn'"]),
    "lambda": (options("algorithm.lam=-3"), ["algorithm.lam", "-3", "at least 0"]),
    "rate": (options("algorithm.eta=-3"), ["algorithm.eta", "-3", "above 0"]),
    "tau": (options("algorithm.tau=0"), ["algorithm.tau", "0", "at least 1"]),
    "batch": (options("algorithm.batch_size=0"), ["algorithm.batch_size", "0", "at least 1"]),
    "more clients than samples": (
        options("data.clients=5000", "data.partition=iid", tiny=False), ["clients", "5000"],
    ),
    "classes that cannot be dealt": (options("data.per_client=11", tiny=False), ["11", "10"]),
    "classes that are not all held": (options("data.clients=2", "data.per_client=2", tiny=False), ["2"]),
    "more participants than clients": (options("participation.clients=9"), ["participation.clients", "9", "4"]),
    "pattern": (options("algorithm.exclude=['conv*']"), ["exclude", "'conv*'", "fc1.weight"]),
    "diagnostics of another method": (
        options("algorithm.name=fedavg", "run.diagnostics_every=1"), ["diagnostics", "not defined for 'fedavg'"],
    ),
    "model for other inputs": (options("model.name=vgg8"), ["input_shape", "(1, 8, 8)", "32"]),
    "missing data file": (options("data.name=none.npz"), ["none.npz"]),
    "own data, nan": (options("data.name=nan.npz", tiny=False), ["nan.npz", "NaN"]),
    "own data, truncated": (options("data.name=cut.npz", tiny=False), ["cut.npz"]),
    "labels outside": (options("data.name=own.npz", "data.options.classes=2", tiny=False), ["own.npz", "2"]),
    "own model": (options("model.name=own:narrow"), ["model", "classes", "10"]),
    "own model fails": (options("model.name=own:missing"), ["own:missing"]),
    "used folder": ([*options(), "--out", "used"], ["--out", "'used'", "not empty"]),
    "a file for a folder": ([*options(), "--out", "own.npz"], ["--out", "'own.npz'"]),
    "no toml": (["own.toml"], ["own.toml", "TOML"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_status_2_and_leaves_nothing(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_files()
    before = {path: Path(path).read_bytes() for path in left()}
    monkeypatch.delitem(sys.modules, "own", raising=False)
    arguments, words = BAD[case]
    assert call(["run", *arguments, "--json"], monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert {path: Path(path).read_bytes() for path in left() if "__pycache__" not in path} == before


def test_data_that_are_not_here_and_no_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", "mnist", "--json"], monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("error: ")
    assert "train-images-idx3-ubyte" in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err
    assert left() == []


def own_files() -> None:
    """Data and models of one's own, good and bad, and a folder in use, in the working directory."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    x = (rng.normal(size=(60, 5)) + 2 * np.eye(3, 5)[y]).astype(np.float32)
    np.savez("own.npz", x=x, y=y, client_ids=np.arange(60) // 15)
    np.savez("nan.npz", x=np.where(np.arange(60)[:, None] == 7, np.nan, x), y=y)
    Path("cut.npz").write_bytes(Path("own.npz").read_bytes()[:200])
    Path("own.toml").write_text("[run\n")
    Path("used").mkdir()
    Path("used/notes.txt").write_text("mine")
    Path("own.py").write_text(
        "from torch import nn\n\n"
        "def make(shape, classes):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.Linear(7, classes))\n\n"
        "def narrow():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 9))\n"
    )


def test_data_and_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    own_files()
    monkeypatch.delitem(sys.modules, "own", raising=False)
    data = options("data.name=own.npz", "data.clients=4", "model.name=logistic", "run.rounds=2", tiny=False)
    assert call(["run", *data, "--out", "a", "--json"], monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == ""
    summary = json.loads(out)
    assert (summary["clients"], summary["rounds"]) == (4, 2)
    assert summary["parameters"] == 5 * 3 + 3
    assert call(["run", *options("model.name=own:make"), "--out", "b", "--json"], monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == ""
    summary = json.loads(out)
    assert summary["model"] == "own:make"
    assert summary["parameters"] == 64 * 7 + 7 + 7 * 10 + 10


def test_a_diverging_run_says_so_and_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diverges = options("algorithm.eta_p=1e20", "run.rounds=20")
    assert call(["run", *diverges, "--out", "run", "--json"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in ("error: round 1: ", "client ", "not finite", "lower the learning rates", "eta=0.002", "eta_p=1e+20"):
        assert word in err
    summary = json.loads(Path("run/summary.json").read_text())
    assert (summary["status"], summary["rounds"], summary["personalized_accuracy"]) == ("failed", 0, None)
    assert Path("run/metrics.jsonl").read_text() == ""


def test_ctrl_c_ends_cleanly() -> None:
    arguments = ["run", *options("run.rounds=100000"), "--out", "run", "--json", "--data-root", "my data"]
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    process = subprocess.Popen(
        [*MAIN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509
    )  # fmt: skip
    metrics = Path("run/metrics.jsonl")
    until = time.monotonic() + 60
    while time.monotonic() < until and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "resume with: tdpfed run --resume run --data-root 'my data'" in err
    summary = json.loads(out)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert summary["status"] == json.loads(Path("run/summary.json").read_text())["status"] == "interrupted"
    assert len(lines) >= 3
    assert 0 <= summary["rounds"] - lines[-1]["round"] <= 2  # evaluated every second round
    assert summary["personalized_accuracy"] == lines[-1]["personalized_accuracy"]
    assert {"config.toml", "metrics.jsonl", "summary.json"} <= set(os.listdir("run")) <= {*FILES, "checkpoints"}


def test_the_default_run_reaches_its_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``tdpfed run`` as a newcomer types it: at least 94 % on digits, where training alone reaches 90 %."""
    assert call(["run", "--json"], monkeypatch) == 0
    out, err = capsys.readouterr()
    assert all(line.startswith("round ") for line in err.splitlines())  # lines of progress on a slow machine
    summary = json.loads(out)
    assert summary["personalized_accuracy"] >= 0.94
    assert summary["global_accuracy"] > 0.5
    assert summary["compression_rate"] > 1.5


def test_data_list(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["data", "list", "--json"])
    assert result.exit_code == 0
    listing: dict[str, Any] = json.loads(result.stdout)
    assert set(listing) == {
        "digits", "digits-properties", "diabetes", "mnist", "fashion-mnist", "cifar10", "cifar100", "qmnist-writers",
        "shakespeare", "synthetic",
    }  # fmt: skip
    assert listing["digits"] == {"samples": 1797, "shape": [1, 8, 8], "classes": 10, "path": None, "embedded": True}
    assert listing["mnist"]["path"] is None
    table = CliRunner().invoke(cli.app, ["data", "list"])
    assert table.exit_code == 0
    assert all(name in table.stdout for name in listing)
    assert "embedded" in table.stdout


def test_data_get(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["data", "get", "digits", "--json"], monkeypatch) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"name": "digits", "samples": 1797, "shape": [1, 8, 8], "classes": 10}
    assert len(load("digits").y) == 1797
    assert call(["data", "get", "digits"], monkeypatch) == 0
    assert "1797" in capsys.readouterr().out
    for name, word in (("mnits", "did you mean 'mnist'"), ("mnist", "train-images")):
        assert call(["data", "get", name], monkeypatch) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert word in captured.err
        assert "Traceback" not in captured.err


BLOCKED = """
import importlib.abc, importlib.machinery, sys

class Blocker(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pydantic", "typer", "rich", "sklearn", "pooch", "requests", "click"}:
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f"blocked: {spec.name}", name=spec.name)

    def exec_module(self, module):
        raise AssertionError

sys.meta_path.insert(0, Blocker())
import torch
import tdpfed
from torch import nn

x, y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
data = tdpfed.Federation.from_tensors(x, y, torch.arange(40) // 10)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
for algorithm in (tdpfed.TDPFed(tau=2), tdpfed.FedAvg(tau=2), tdpfed.PFedMe(tau=2), tdpfed.FedAvgSAR(tau=2),
                  tdpfed.PerFedAvg(tau=2), tdpfed.Local(tau=2)):
    print(tdpfed.simulate(model, data, algorithm, rounds=2).final.round)
try:
    import pydantic
except ModuleNotFoundError:
    print("blocked")
"""


def test_the_library_needs_torch_and_numpy_only() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2"] * 6 + ["blocked"]


def test_several_seeds_end_in_a_table_and_are_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", *options("run.seeds=2", "algorithm.name=fedavg"), "--out", "both", "--json"], monkeypatch) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(made["rows"]) == 1
    assert {path.name for path in Path("both").glob("seed*")} == {"seed0", "seed1", "seeds.toml"}
    assert call(["run", "--resume", "both"], monkeypatch) == 0
    shown = capsys.readouterr()
    assert "both/table.md" in shown.out
    assert "2 of 2 runs were already finished" in shown.err


def test_the_summary_shows_the_metrics_of_the_task(tmp_path: Path) -> None:
    settings = ["data.name=diabetes", "model.name=logistic", "algorithm.name=fedavg", "run.rounds=1", "algorithm.tau=1"]
    options = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(cli.app, ["run", *options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    shown = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if "│" in line}
    for name, one in json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"].items():
        assert shown[f"personalized {name}"] == f"{one['personalized']:.4g}"
        assert shown[f"global model {name}"] == f"{one['global']:.4g}"
    assert "personalized accuracy" not in shown
