"""Differential privacy in a run: what is refused, what is released, what it costs, and that it survives a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import small
from tdpfed.algorithms import Algorithm, FedAvg, FedAvgSAR, Local, PerFedAvg, PFedMe, TDPFed
from tdpfed.cli import app
from tdpfed.cli.display import summary_table
from tdpfed.config.loading import load_config
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.prepare import prepare
from tdpfed.runs.progress import progress
from tdpfed.runs.session import Session
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant, Privacy
from tdpfed.server.robust import Rule

FAST: dict[str, Any] = {"tau": 2, "batch_size": 4, "weights": "uniform"}
PRIVACY = Privacy(1.0, 2.0)


def begin(algorithm: Algorithm, participation: Participation | None = None, **options: Any) -> Simulation:
    asked, privacy = participation or Participation(), options.pop("privacy", PRIVACY)
    return Simulation(small.mlp(), small.federation(6), algorithm, participation=asked, privacy=privacy, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": FedAvg(tau=2)}, r"algorithm\.weights: 'samples' given, must be 'uniform' with privacy"),
        ({"algorithm": Local(**FAST)}, r"algorithm\.name: 'local' given"),
        ({"algorithm": FedAvgSAR(**FAST)}, r"algorithm\.name: 'fedavg_sar' given"),
        ({"participation": Participation(3)}, r"participation\.sampling: 'fixed' given, must be 'poisson'"),
        ({"participation": Participation(quorum=1)}, r"participation\.quorum: 1 given, must be 0"),
        ({"rule": Rule("median")}, r"robust\.name: 'median' given, must be 'mean'"),
        ({"rule": Rule(clip="median")}, r"robust\.clip: 'median' given, must be unset"),
        ({"attack": Attack("alie")}, r"robust\.attack: 'alie' given, must be another"),
        ({"privacy": Privacy(1.0, 0.5, epsilon=0.1)}, r"privacy\.epsilon: 0\.1 given, must be at least .* for 1 round"),
    ],
)
def test_what_the_accounting_does_not_cover_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        begin(options.pop("algorithm", FedAvg(**FAST)), **options)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_noise_of_a_round_does_not_depend_on_who_came(dropout: float) -> None:
    """With hardly any update a round moves the model by noise alone: z * clip / (rate * clients), within 1 %."""
    asked = Participation(3, sampling="poisson", dropout=dropout)
    simulation = begin(FedAvg(**FAST, eta=1e-12), asked, privacy=Privacy(0.7, 1.5))
    moves = []
    for _ in range(150):
        before = simulation.server["w"].clone()
        simulation.step()
        moves.append(simulation.server["w"] - before)
    noise = torch.stack(moves)
    assert noise.numel() > 70_000  # a relative error of 0.27 % at one deviation
    assert float(noise.std() / (1.5 * 0.7 / 3)) == pytest.approx(1, abs=0.01)
    assert abs(float(noise.mean())) < 4 * float(noise.std()) / noise.numel() ** 0.5


def test_a_round_in_which_nobody_came_is_released_with_noise_as_well() -> None:
    asked = Participation(1, sampling="poisson", dropout=0.95)
    for algorithm in (FedAvg(**FAST), TDPFed(**small.TDPFED, weights="uniform")):
        simulation, nobody = begin(algorithm, asked), 0
        for _ in range(8):
            before = {name: value.clone() for name, value in simulation.server.items()}
            simulation.step()
            nobody += not len(simulation.trained)
            assert all(not torch.equal(value, before[name]) for name, value in simulation.server.items())
        assert nobody > 3


@pytest.mark.parametrize(
    "algorithm",
    [
        PFedMe(**FAST), PerFedAvg(**FAST), TDPFed(**small.TDPFED, weights="uniform"),
        TDPFed(**small.TDPFED, weights="uniform", aggregation="act"),
    ],
)  # fmt: skip
def test_where_nothing_is_clipped_it_is_the_uniform_mean_and_the_noise(algorithm: Algorithm) -> None:
    private, plain = begin(algorithm, privacy=Privacy(10.0, 1e-3)), begin(algorithm, privacy=None)
    for run in (private, plain):
        run.step()
    name = next(name for name in ("theta", "w", "factors") if name in plain.server)
    noise = (private.server[name] - plain.server[name]).square().mean().sqrt()
    assert float(noise) == pytest.approx(1e-3 * 10 / 6, rel=0.15)  # of some 400 values


def test_epsilon_is_recorded_and_the_budget_ends_the_run_before_it_is_exceeded(tmp_path: Path) -> None:
    settings = [
        "data.clients=10", "run.rounds=40", "run.evaluate_every=3", "checkpoint.every=2",
        "algorithm.tau=1", "algorithm.s_prime=1",
        "algorithm.weights=uniform", "participation.clients=5", "participation.sampling=poisson",
        "privacy.clip=1", "privacy.noise=1.2", "privacy.epsilon=6", "privacy.delta=1e-4",
    ]  # fmt: skip
    accountant = Accountant(Privacy(1.0, 1.2, delta=1e-4), 0.5)
    most = accountant.rounds_within(6.0)
    assert 4 < most < 40
    session = Session.begin(load_config("digits", settings), tmp_path / "run", None)
    summary = session.run(progress)
    assert (summary["status"], summary["rounds"]) == ("privacy budget spent", most)
    assert summary["epsilon"] == accountant.epsilon(most) <= 6 < accountant.epsilon(most + 1)
    assert [r.epsilon for r in session.records] == [accountant.epsilon(r.round) for r in session.records]
    assert session.records[-1].round == most
    with pytest.raises(TDPFedError, match=rf"privacy\.epsilon: 6\.0 given.*for {most + 1} rounds"):
        session.simulation.step()
    again = Session.resume(tmp_path / "run", None)
    assert again.simulation.epsilon == summary["epsilon"]
    assert again.run(progress)["status"] == "privacy budget spent"
    assert again.simulation.round == most


def test_epsilon_survives_a_resume_in_the_middle(tmp_path: Path) -> None:
    settings = ["run.rounds=6", "checkpoint.every=3", "algorithm.tau=1", "algorithm.weights=uniform"]
    config = load_config("digits", [*settings, "privacy.clip=0.5", "privacy.noise=3"])
    whole = Session.begin(config, tmp_path / "whole", None)
    whole.run(progress)

    cut = Session.begin(config, tmp_path / "cut", None)
    for _ in range(4):
        cut.simulation.step()
        cut.after_round()
    cut.folder.release()
    resumed = Session.resume(tmp_path / "cut", None)
    assert resumed.simulation.round == 3
    resumed.run(progress)
    assert [r.epsilon for r in resumed.records] == [r.epsilon for r in whole.records]
    assert small.equal(resumed.simulation, whole.simulation)


def test_the_command_line_shows_what_was_spent(tmp_path: Path) -> None:
    settings = ["run.rounds=2", "algorithm.tau=1", "algorithm.weights=uniform", "privacy.clip=1", "privacy.noise=4"]
    options = [part for setting in settings for part in ("--set", setting)]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["run", *options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"epsilon {summary['epsilon']:.4g} at delta 1e-05" in done.output
    assert summary_table(summary, "run").row_count > 9


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["privacy.clip=1"], r"privacy\.noise: none given, clip and noise must be given together"),
        (["privacy.noise=1"], r"privacy\.clip: none given"),
        (["privacy.epsilon=1"], r"privacy\.epsilon: 1.0 given, but no clip and no noise"),
        (["privacy.clip=-1"], r"privacy\.clip: -1 given"),
        (["privacy.clip=1", "privacy.noise=1", "privacy.delta=1e-20"], r"privacy\.delta: 1e-20 given"),
    ],
)
def test_half_a_privacy_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        prepare(load_config("digits", ["algorithm.weights=uniform", *settings]))
