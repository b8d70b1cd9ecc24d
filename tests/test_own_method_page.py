"""The methods of ``docs/own-method.md`` everywhere a built-in one works: batched as looped, by name, resumed."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import page_methods
import small
from page_methods import METHODS
from tdpfed import Algorithm, simulate
from tdpfed.algorithms import find
from tdpfed.cli import app
from tdpfed.wire import Wire

QUICK = ("--set", "run.rounds=2", "--set", "algorithm.tau=2", "--set", "data.clients=5")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a user who has written the page's file."""
    page_methods.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_methods", None)


def made(name: str, **options: Any) -> Algorithm:
    return find(name)(**{"tau": 3, "batch_size": 4, **options})


def call(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, (arguments, done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("options", [{}, {"wire": Wire(codec="float16")}], ids=["float32", "float16"])
@pytest.mark.parametrize("model", ["dense", "conv"])
def test_batched_is_looped(name: str, options: dict[str, Any], model: str) -> None:
    batched, looped = (small.train(made(name), model=model, runner=runner, **options) for runner in ("batched", "loop"))
    small.assert_close(batched, looped, 1e-3 if options else 1e-9)


def test_ditto_pulls_its_own_model_towards_the_global_one() -> None:
    """By hand: shared and own model of one client, step by step."""
    simulation = small.train(made(METHODS[0], lam=0.5), rounds=0)
    shared = own = theta = simulation.objective.initial()
    batches = simulation.runner.batches(simulation._turn(1, torch.tensor(2)))
    for t in range(3):
        shared = shared - 0.05 * simulation.objective.gradient(shared, batches(t))[0]
        own = own - 0.05 * (simulation.objective.gradient(own, batches(t))[0] + 0.5 * (own - theta))
    simulation.step()
    assert simulation._trained is not None
    assert torch.allclose(simulation.private["theta"][2], own)
    assert torch.allclose(simulation._trained[1].upload["w"][2], shared)


def test_fedper_shares_the_body_and_keeps_the_head() -> None:
    simulation = small.train(made(METHODS[1]), rounds=1)
    layout = simulation.objective.layout
    body, private = layout.without("last"), simulation.private["theta"]
    share = simulation.federation.train_size.double() / simulation.federation.train_size.sum()
    assert torch.allclose(simulation.server["body"], share @ layout.take(private, body))
    heads = layout.take(private, layout.select("last"))
    assert not torch.allclose(heads[0], heads[1])
    assert simulation.algorithm.up() == {"body": body}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(
    "settings",
    [
        ("wire.codec=int8",),
        ("wire.update=factors", "wire.down=factors"),
        ("wire.update=top-k", "wire.share=0.1", "server.optimizer=adam", "server.rate=0.01"),
        ("robust.name=median",),
        ("robust.name=trimmed-mean", "robust.attack=sign-flip"),
    ],
    ids=" ".join,
)
def test_runs_with_codecs_and_robust_rules(name: str, settings: tuple[str, ...], folder: Path) -> None:
    given = [part for one in (f"algorithm.name={name}", *settings) for part in ("--set", one)]
    summary = call("run", *QUICK, *given, "--out", str(folder / "run"))
    assert summary["status"] == "finished"
    assert summary["uplink_bytes"] > 0


@pytest.mark.parametrize("name", METHODS)
def test_resumes_to_the_bit(name: str, folder: Path) -> None:
    given = [*QUICK, "--set", f"algorithm.name={name}", "--set", "checkpoint.every=1"]
    whole = call("run", *given, "--out", str(folder / "whole"))
    call("run", *given, "--set", "run.rounds=1", "--out", str(folder / "half"))
    config = folder / "half" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 1\n", "rounds = 2\n"))
    (folder / "half" / "summary.json").unlink()
    resumed = call("run", "--resume", str(folder / "half"))
    assert resumed["personalized_accuracy"] == whole["personalized_accuracy"]
    last = [small.lines(folder / run / "metrics.jsonl", "seconds")[-1] for run in ("whole", "half")]
    assert last[0] == last[1]


def test_compares_with_built_in_methods(folder: Path) -> None:
    names = ",".join([*METHODS, "fedavg"])
    made = call("compare", "digits", "--algorithms", names, "--seeds", "1", *QUICK, "--out", str(folder / "compare"))
    assert [row["algorithm"] for row in made["rows"]] == ["ditto", "fedper", "fedavg"]
    assert not made["failed"]


def test_simulate_takes_an_instance() -> None:
    result = simulate(small.mlp(), small.federation(), made(METHODS[0]), rounds=2)
    assert len(result.records) == 2
