"""A run from Python has the folder, the numbers and the second chances of one from the command line."""

import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import small
from tdpfed import FedAvg, Federation, Optimizer, Participation, Wire, load_run, make_federation, simulate
from tdpfed.algorithms import Best
from tdpfed.cli import app
from tdpfed.config import load_config, to_toml
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.report import read_runs
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.server.records import Record
from tdpfed.server.robust import Rule

OWN = [
    "run.rounds=4", "run.threads=1", "run.device=cpu", "run.evaluate_every=2", "run.seed=3", "data.clients=5",
    "data.partition=dirichlet", "data.alpha=0.4", "data.min_samples=20", "data.seed=7", "algorithm.name=fedavg",
    "algorithm.tau=2", "participation.clients=3", "wire.update=factors", "wire.terms=2", "optimizer.momentum=0.5",
]  # fmt: skip


def mixed() -> Federation:
    return make_federation("digits", clients=5, partition="dirichlet", alpha=0.4, min_samples=20, seed=7)


def python_run(out: Path, federation: Federation, rounds: int = 4, *, resume: bool = False) -> None:
    simulate(
        "dnn", federation, FedAvg(tau=2), rounds, seed=3, evaluate_every=2, participation=Participation(clients=3),
        wire=Wire(update="factors", terms=2), optimizer=Optimizer(momentum=0.5), out=out, resume=resume,
    )  # fmt: skip


def state(run: Path) -> dict[str, torch.Tensor]:
    found = Checkpoints(run / "checkpoints").load()
    assert found is not None
    private = found[0].private
    return {**found[0].server, **private.rows(torch.arange(private.clients))}


def assert_same(left: Path, right: Path) -> None:
    assert small.lines(left / "metrics.jsonl", "seconds") == small.lines(right / "metrics.jsonl", "seconds")
    mine, theirs = state(left), state(right)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_python_and_the_command_line_write_the_same_run(tmp_path: Path) -> None:
    python_run(tmp_path / "python", mixed())
    arguments = [part for one in OWN for part in ("--set", one)]
    (tmp_path / "own.toml").touch()
    command = ["run", str(tmp_path / "own.toml"), *arguments, "--out", str(tmp_path / "command"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert_same(tmp_path / "python", tmp_path / "command")
    names = [sorted(path.name for path in (tmp_path / one).iterdir()) for one in ("python", "command")]
    assert names[0] == names[1]
    ours, theirs = (tomllib.loads((tmp_path / one / "config.toml").read_text()) for one in ("python", "command"))
    assert ours == theirs
    runs, notes = read_runs([tmp_path / "python"])
    assert [run.status for run in runs] == ["finished"]
    assert not notes


def test_the_command_line_extends_a_run_of_python_to_the_same_bits(tmp_path: Path) -> None:
    python_run(tmp_path / "whole", mixed(), 6)
    python_run(tmp_path / "part", mixed(), 4)
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "part"), "--set", "run.rounds=6", "--json"])
    assert done.exit_code == 0, done.output
    assert_same(tmp_path / "whole", tmp_path / "part")


def test_python_resumes_where_a_callback_stopped_the_run(tmp_path: Path) -> None:
    data, model, seen = small.federation(), small.mlp(), list[int]()

    def stop_at_two(record: Record, simulation: Simulation) -> bool:
        assert simulation.round == record.round
        seen.append(record.round)
        return record.round == 2

    simulate(model, data, FedAvg(tau=2), 5, out=tmp_path / "whole")
    simulate(model, data, FedAvg(tau=2), 5, out=tmp_path / "part", callbacks=[stop_at_two])
    assert seen == [1, 2]
    assert load_run(tmp_path / "part").summary["status"] == "stopped"
    result = simulate(model, data, FedAvg(tau=2), 5, out=tmp_path / "part", resume=True)
    assert [record.round for record in result.records] == [1, 2, 3, 4, 5]
    assert_same(tmp_path / "whole", tmp_path / "part")


def test_without_a_folder_callbacks_see_the_same_records(tmp_path: Path) -> None:
    seen: list[Record] = []
    result = simulate(
        small.mlp(), small.federation(), FedAvg(tau=1), 4, evaluate_every=2,
        callbacks=[lambda record, _: seen.append(record), lambda record, _: record.round == 2],
    )  # fmt: skip
    assert seen == result.records
    assert [record.round for record in seen] == [2]
    assert result.folder is None


def test_an_object_cannot_be_rebuilt_by_the_command_line(tmp_path: Path) -> None:
    simulate(small.mlp(), small.federation(), FedAvg(tau=1), 2, out=tmp_path / "run")
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["model"]["name"] == "Sequential (given in Python)"
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "run"), "--set", "run.rounds=3"])
    assert isinstance(done.exception, TDPFedError)
    assert done.exception.field == "model.name"
    assert "resume=True" in str(done.exception)
    simulate("dnn", small.federation(), FedAvg(tau=1), 2, out=tmp_path / "named")
    done = CliRunner().invoke(app, ["run", "--resume", str(tmp_path / "named"), "--set", "run.rounds=3"])
    assert isinstance(done.exception, TDPFedError)
    assert done.exception.field == "data.name"


def test_resuming_refuses_other_settings_models_and_frozen_parameters(tmp_path: Path) -> None:
    def net(hidden: int = 8, shift: float = 0.0) -> nn.Module:
        body, head = nn.Linear(36, hidden), nn.Linear(hidden, small.CLASSES)
        for parameter in body.parameters():
            nn.init.constant_(parameter, 0.1 + shift)
        return nn.Sequential(nn.Flatten(), body.requires_grad_(False), nn.Tanh(), head)

    data, out = small.federation(), tmp_path / "run"
    simulate(net(), data, FedAvg(tau=1), 2, out=out)
    for model, method, field in (
        (net(), FedAvg(tau=2), "algorithm.tau"),
        (net(hidden=9), FedAvg(tau=1), "model.name"),
        (net(shift=0.1), FedAvg(tau=1), "model.name"),
    ):
        with pytest.raises(TDPFedError) as error:
            simulate(model, data, method, 3, out=out, resume=True)
        assert error.value.field == field
    assert load_run(out).summary["status"] == "finished"
    simulate(net(), data, FedAvg(tau=1), 3, out=out, resume=True)


@pytest.mark.parametrize(("more", "field"), [({"resume": True}, "resume"), ({"loggers": ["tensorboard"]}, "loggers")])
def test_what_needs_a_folder_says_so(more: dict[str, object], field: str) -> None:
    with pytest.raises(TDPFedError, match="out") as error:
        simulate(small.mlp(), small.federation(), FedAvg(tau=1), 1, **more)  # type: ignore[arg-type]
    assert error.value.field == field


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TDPFedError, match="not empty") as error:
        simulate(small.mlp(), small.federation(), FedAvg(tau=1), 1, out=tmp_path)
    assert error.value.field == "out"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupted_run_of_python_leaves_a_checkpoint_and_interrupts(tmp_path: Path) -> None:
    def interrupt(record: Record, simulation: Simulation) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(small.mlp(), small.federation(), FedAvg(tau=1), 3, out=tmp_path / "run", callbacks=[interrupt])
    assert load_run(tmp_path / "run").summary["status"] == "interrupted"


def test_every_argument_is_in_the_configuration(tmp_path: Path) -> None:
    """The file says what the simulation does: it is parsed, and gives the same settings again."""
    simulate(
        small.mlp(), small.federation(), Best.of(FedAvg(tau=2), validation=0.3, margin=0.7), 2, seed=5,
        evaluate_clients=2, rule=Rule(name="median"), attack=Attack("scale", 0.3, 4.0), chunk=3, runner="loop",
        state="ram", out=tmp_path / "run",
    )  # fmt: skip
    text = (tmp_path / "run/config.toml").read_text()
    values = tomllib.loads(text)
    assert values["run"] | {"seed": 5, "evaluate_clients": 2, "chunk": 3, "runner": "loop"} == values["run"]
    assert values["evaluation"] | {"personalize": "best", "margin": 0.7} == values["evaluation"]
    assert values["evaluation"] | {"validation": 0.3, "choose_rounds": 1} == values["evaluation"]  # half of the rounds
    assert values["data"]["validation"] == 0
    robust = {"name": "median", "attack": "scale", "attack_fraction": 0.3, "attack_strength": 4.0}
    assert values["robust"] | robust == values["robust"]
    assert to_toml(load_config(str(tmp_path / "run/config.toml"))) == text


def mine(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_losses_and_metrics_are_named_where_they_have_a_name(tmp_path: Path) -> None:
    data, out = small.federation(), tmp_path / "run"
    simulate(small.mlp(), data, FedAvg(tau=1), 1, loss=mine, metrics=["top5", "accuracy"], out=out)
    values = tomllib.loads((out / "config.toml").read_text())
    assert values["task"] == {"loss": f"{__name__}:mine", "metrics": ["top5", "accuracy"]}
    other = tmp_path / "lambda"
    simulate(small.mlp(), data, FedAvg(tau=1), 1, loss=lambda outputs, targets: 2 * mine(outputs, targets), out=other)
    assert tomllib.loads((other / "config.toml").read_text())["task"]["loss"].endswith("(given in Python)")
    run = load_run(other, model=small.mlp())
    assert run.global_model()(data.x[:2]).shape == (2, 3)
    with pytest.raises(TDPFedError, match="function") as error:
        run.personalize(data.x[:20], data.y[:20])
    assert error.value.field == "task"
