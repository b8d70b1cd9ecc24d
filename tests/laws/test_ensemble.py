"""Runs computed together are the runs computed alone, to the bit on a CPU."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small
from tdpfed.algorithms import FedAvg, PFedMe
from tdpfed.config.loading import load_config
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.progress import progress
from tdpfed.runs.session import Session, run_together
from tdpfed.server.participation import Participation

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def begin(name: str, seed: int, model: str, participation: Participation, device: str = "cpu") -> Simulation:
    data = small.federation(5, seed=seed).to(device)
    return Simulation(small.MODELS[model](seed), data, small.variants()[name], seed=seed, participation=participation)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("participation", [Participation(), Participation(3, dropout=0.3, quorum=1)])
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", small.variants())
def test_seeds_together_equal_seeds_alone(name: str, model: str, participation: Participation, device: str) -> None:
    together = Ensemble([begin(name, seed, model, participation, device) for seed in (0, 2**40 + 1, 7)])
    alone = [begin(name, seed, model, participation, device) for seed in (0, 2**40 + 1, 7)]
    for _ in range(3):
        together.step()
        for simulation in alone:
            simulation.step()
    for one, other in zip(together.simulations, alone, strict=True):
        if device == "cpu":
            assert small.equal(one, other)
        else:
            small.assert_close(one, other, 1e-6)
        assert (one.ledger, one.round) == (other.ledger, other.round)


def test_too_many_for_one_computation_go_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [begin("fedavg", seed, "dense", Participation()) for seed in (0, 1)]
    for run in runs:
        object.__setattr__(run.runner, "chunk", 5)
    together = Ensemble(runs)
    monkeypatch.setattr(together, "_computed", None)
    together.step()
    assert [run.round for run in runs] == [1, 1]


def test_what_differs_is_refused() -> None:
    data = small.federation()
    with pytest.raises(TDPFedError, match="one algorithm on one device, in one precision and at the same round"):
        Ensemble([Simulation(small.mlp(), data, FedAvg()), Simulation(small.mlp(), data, PFedMe())])
    with pytest.raises(TDPFedError, match="none given"):
        Ensemble([])


def test_sessions_together_equal_sessions_alone_and_one_that_fails_stops_nobody_else(tmp_path: Path) -> None:
    settings = ["run.rounds=5", "run.evaluate_every=2", "checkpoint.every=2", "algorithm.tau=2", "algorithm.s_prime=2"]
    configs = [load_config("digits", [*settings, f"run.seed={seed}"]) for seed in (0, 1, 2)]
    for config in configs:
        Session.begin(config, tmp_path / f"alone-{config.run.seed}", None).run(progress)
    sessions = [Session.begin(config, tmp_path / f"together-{config.run.seed}", None) for config in configs]
    for _ in range(2):  # one was ahead when they were stopped
        sessions[1].simulation.step()
        sessions[1].after_round()
    sessions[1].folder.release()
    sessions[1] = Session.resume(tmp_path / "together-1", None)
    with torch.no_grad():
        sessions[2].simulation.private["theta"].fill_(torch.nan)
        sessions[2].simulation.server["factors"].fill_(torch.nan)
    shown: list[int] = []
    errors = run_together(sessions, lambda session: shown.append(session.config.run.seed))
    assert errors[:2] == [None, None]
    assert "not finite" in str(errors[2])
    assert [session.summary["status"] for session in sessions] == ["finished", "finished", "failed"]
    for seed in (0, 1):
        alone, together = (RunFolder(tmp_path / f"{how}-{seed}").rewind(99) for how in ("alone", "together"))
        assert [replace(r, seconds=0.0) for r in alone] == [replace(r, seconds=0.0) for r in together]
    assert run_together(sessions[:2], lambda _: None) == [None, None]  # nothing is left


def test_runs_whose_frozen_parameters_differ_are_not_mixed_up() -> None:
    def begun(seed: int) -> Simulation:
        model = small.mlp(seed)
        model.get_submodule("fc1").requires_grad_(False)
        return Simulation(model, small.federation(seed=seed), FedAvg(**small.COMMON), seed=seed)

    together, alone = Ensemble([begun(0), begun(1)]), [begun(0), begun(1)]
    for _ in range(2):
        assert together.step() == [None, None]
        for simulation in alone:
            simulation.step()
    assert all(small.equal(one, other) for one, other in zip(together.simulations, alone, strict=True))


def test_one_whose_folder_is_lost_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    settings = ["run.rounds=4", "algorithm.tau=1", "algorithm.s_prime=1"]
    sessions = [
        Session.begin(load_config("digits", [*settings, f"run.seed={seed}"]), tmp_path / str(seed), None)
        for seed in (0, 1)
    ]
    shutil.rmtree(tmp_path / "0")
    errors = run_together(sessions, lambda _: None)
    assert "cannot write" in str(errors[0])
    assert errors[1] is None
    assert sessions[1].summary["status"] == "finished"
