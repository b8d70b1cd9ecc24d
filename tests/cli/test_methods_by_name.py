"""A method of the user's own on the command line: found in the working directory, by every command."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import my_own_method
from tdpfed.cli import app
from tdpfed.errors import CombinedError, TDPFedError
from tdpfed.report.plans import plan_of
from tdpfed.report.read import read_run

NAME = my_own_method.NAME
TINY = ("run.rounds=2", "run.evaluate_every=1", "data.clients=4", "data.max_samples=40", "data.per_client=5")
QUICK = [part for setting in (*TINY, f"algorithms.{NAME}.tau=1") for part in ("--set", setting)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    my_own_method.write(tmp_path, monkeypatch, on_path=False)
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)


def test_its_keys_are_listed_and_suggested() -> None:
    listed = json.loads(call("keys", NAME, "--json").stdout)
    assert listed["algorithm.lam"]["meaning"] == "pull towards the global model"
    assert "package.module:Class" in listed["algorithm.name"]["allowed"]
    assert "did you mean 'Ditto'" in str(call("keys", "users_methods:Dito").exception)


def test_it_runs_is_resumed_and_reported_and_a_report_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = call("run", *QUICK, "--set", f"algorithm.name={NAME}", "--json")
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["algorithm"], summary["rounds"]) == ("ditto", 2)
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("digits-users_methods_Ditto-0-")
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    monkeypatch.delitem(sys.modules, "users_methods")
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(Path.cwd())])
    again = call("run", "--resume", str(folder), "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["rounds"] == 3
    monkeypatch.delitem(sys.modules, "users_methods")
    assert call("report", str(folder), "--json").exit_code == 0
    run = read_run(folder)
    assert run.algorithm == "ditto"
    assert "does not import" in str(plan_of(run))
    assert "users_methods" not in sys.modules


def test_a_run_whose_method_is_gone_is_not_resumed() -> None:
    assert call("run", *QUICK, "--set", f"algorithm.name={NAME}", "--out", "run").exit_code == 0
    Path("users_methods.py").unlink()
    del sys.modules["users_methods"]
    error = call("run", "--resume", "run").exception
    assert isinstance(error, TDPFedError)
    assert error.field == "algorithm.name"
    assert "no module 'users_methods'" in str(error)
    assert "config.toml" in str(error)


def test_its_mistakes_are_told_with_all_others() -> None:
    settings = (f"algorithm.name={NAME}", "algorithm.bond=1", "algorithm.lam=-1", "run.rounds=0")
    error = call("run", *(part for setting in settings for part in ("--set", setting))).exception
    assert isinstance(error, CombinedError)
    assert [one.field for one in error.errors] == ["algorithm", "algorithm.lam", "run.rounds"]
    assert "did you mean 'bound'" in error.lines[0]
    assert sorted(path.name for path in Path().iterdir() if path.name != "__pycache__") == ["users_methods.py"]


def test_it_is_compared_with_others() -> None:
    options = ["--algorithms", f"fedavg,{NAME}", "--seeds", "1", "--set", "algorithm.tau=1", *QUICK, "--json"]
    done = call("compare", *options, "--sweep", "algorithm.lam=0.5,1")
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert [row["algorithm"] for row in made["rows"]] == ["fedavg", "ditto", "ditto"]
    assert [row["method"] for row in made["rows"]] == ["FedAvg", "Ditto, lam 0.5", "Ditto, lam 1"]
    assert {path.name for path in Path(made["folder"]).iterdir() if path.is_dir()} == {
        "fedavg-seed0", "users_methods_Ditto-lam=0.5-seed0", "users_methods_Ditto-lam=1-seed0",
    }  # fmt: skip
    assert made["notes"][0] == "fedavg has no algorithm.lam: not swept over it"
    for names, word in (("users_methods:Dito", "did you mean 'Ditto'"), ("nowhere:Ditto", "no module 'nowhere'")):
        error = call("compare", "--algorithms", f"fedavg,{names}").exception
        assert isinstance(error, TDPFedError)
        assert error.field == "--algorithms"
        assert word in str(error)
