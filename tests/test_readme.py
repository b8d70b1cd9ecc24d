"""README's own code and promises, and what its readers may type."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import small
from tdpfed import TDPFed
from tdpfed.cli import app
from tdpfed.config.loading import load_config
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs import prepare, progress
from tdpfed.server.records import Record

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs_and_learns() -> None:
    example = next(re.finditer(r"```python\n(.*?)```", README, re.DOTALL)).group(1)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True)
    accuracy, uploaded = done.stdout.split()
    assert float(accuracy) > 0.75
    assert int(uploaded) > 0


def test_every_command_line_in_readme_parses() -> None:
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if block.startswith("tdpfed ")]
    block = "".join(blocks)
    commands = [shlex.split(line, comments=True) for line in block.splitlines()]
    assert len(commands) >= 8
    for _, name, *arguments in commands:
        done = CliRunner().invoke(app, [name, *arguments, "--help"])
        assert done.exit_code == 0, done.output
        overrides = [arguments[n + 1] for n, word in enumerate(arguments) if word == "--set"]
        if name == "run" and (not arguments or not arguments[0].endswith(".toml")):
            load_config(arguments[0] if arguments and not arguments[0].startswith("-") else "digits", overrides)


def test_the_progress_bar_shows_accuracy_loss_and_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, width=160)
    monkeypatch.setattr("rich.console.Console", lambda **_: shown)
    simulation = Simulation(small.mlp(), small.federation(), TDPFed(tau=1, s=1, s_prime=1))
    records: list[Record] = []
    with progress.progress(simulation, 2, records) as on_round:
        for record in simulation.run(2):
            records.append(record)
            on_round(simulation)
    for words in ("tdpfed on", "accuracy", "loss", "MB", "2/2"):
        assert words in screen.getvalue()


def test_the_variable_that_makes_products_repeat_is_set_even_after_torch() -> None:
    code = "import torch; import os, tdpfed; print(os.environ['MKL_CBWR'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "AUTO,STRICT"


def test_a_module_of_the_working_directory_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise SystemExit('shadowed')")
    code = "from tdpfed.cli import main; main()"
    arguments = ["run", "--set", "run.rounds=1", "--set", "algorithm.tau=1", "--json"]
    command = [sys.executable, "-P", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["--classes", "1000000000000"], ["--input-shape", "10000000000,1000000"]])
def test_a_plan_of_any_size_needs_no_memory(arguments: list[str]) -> None:
    assert CliRunner(env={"COLUMNS": "200"}).invoke(app, ["plan", "dnn", *arguments]).exit_code == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.name=synthetic", "data.options.alpha=abc"], "alpha"),
        (["data.name=synthetic", "data.options.clients=2.5"], "clients"),
        (["algorithm.batch_size=1000000000000000"], "batch_size"),
        (["algorithm.ranks={'fc1.weight'=100000000000}"], "rank"),
        (["data.partition=dirichlet", "data.alpha=1e308"], "alpha"),
    ],
)
def test_absurd_sizes_are_refused_in_words(overrides: list[str], words: str, tmp_path: Path) -> None:
    arguments = [word for override in overrides for word in ("--set", override)]
    done = CliRunner().invoke(app, ["run", *arguments, "--out", str(tmp_path / "run")])
    assert isinstance(done.exception, TDPFedError)
    assert words in str(done.exception)
    assert not (tmp_path / "run").exists()


def test_threads_follow_the_size_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(small.mlp(), small.federation(), TDPFed(tau=1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert prepare.threads(load_config("digits"), simulation) == 1
    assert prepare.threads(load_config("digits", ["run.threads=3"]), simulation) == 3
    monkeypatch.setattr("tdpfed.core.threads.ONE_THREAD_PARAMETERS", 0)
    assert prepare.threads(load_config("digits"), simulation) == 7
