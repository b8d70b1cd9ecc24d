"""What all algorithms share: names, hyper-parameters and their checks, and purity."""

from typing import Any

import pytest
import torch

import small
from tdpfed.algorithms import ALGORITHMS, FedAvg, FedAvgSAR, Local, PerFedAvg, PFedMe, TDPFed
from tdpfed.core.state import Turn, to_each
from tdpfed.engine.runners import Runner
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.server.averages import robust_averages
from tdpfed.server.robust import Rule

BAD: list[tuple[type, str, Any, list[str]]] = [
    (FedAvg, "tau", 0, ["at least 1"]),
    (FedAvg, "tau", 2.5, ["whole number"]),
    (FedAvg, "tau", True, ["whole number"]),
    (FedAvg, "tau", "5", ["whole number"]),
    (FedAvg, "tau", None, ["whole number"]),
    (FedAvg, "batch_size", -3, ["at least 1"]),
    (FedAvg, "eta", 0, ["above 0"]),
    (FedAvg, "eta", float("nan"), ["finite"]),
    (FedAvg, "eta", float("inf"), ["finite"]),
    (FedAvg, "eta", "fast", ["number"]),
    (FedAvg, "weights", "sample", ["did you mean 'samples'", "uniform"]),
    (FedAvg, "weights", ["samples"], ["uniform"]),
    (FedAvgSAR, "compression", 0.5, ["at least 1"]),
    (Local, "eta", -1.0, ["above 0"]),
    (PFedMe, "lam", -1, ["at least 0"]),
    (PFedMe, "beta", 0, ["above 0"]),
    (PFedMe, "momentum", 1.5, ["at least 0 and at most 1"]),
    (PerFedAvg, "alpha", -0.1, ["at least 0"]),
    (PerFedAvg, "delta", 0, ["above 0"]),
    (PerFedAvg, "variant", "firstorder", ["did you mean 'first-order'"]),
    (TDPFed, "compression", 0, ["above 0"]),
    (TDPFed, "compression", float("inf"), ["finite"]),
    (TDPFed, "lam", -0.5, ["at least 0"]),
    (TDPFed, "s", 0, ["at least 1"]),
    (TDPFed, "s_prime", 0, ["at least 1"]),
    (TDPFed, "eta_p", 0.0, ["above 0"]),
    (TDPFed, "momentum", -0.1, ["at least 0"]),
    (TDPFed, "optimizer", "adma", ["did you mean 'adam'"]),
    (TDPFed, "aggregation", "fma", ["afm"]),
    (TDPFed, "keep_theta", "yes", ["true or false"]),
    (TDPFed, "keep_theta", 1, ["true or false"]),
    (TDPFed, "exclude", "fc*", ["list of text"]),
    (TDPFed, "include", (1,), ["list of text"]),
    (TDPFed, "ranks", 8, ["table of whole numbers"]),
    (TDPFed, "als_damping", -1.0, ["at least 0"]),
    (TDPFed, "act_sweeps", 0, ["at least 1"]),
]


@pytest.mark.parametrize(("algorithm", "field", "value", "words"), BAD, ids=lambda value: str(value)[:30])
def test_bad_values_are_told(algorithm: type, field: str, value: Any, words: list[str]) -> None:
    with pytest.raises(TDPFedError) as error:
        algorithm(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}: ")
    assert repr(value) in message
    assert all(word in message for word in words), message


def test_als_alternates_by_itself() -> None:
    with pytest.raises(TDPFedError, match=r"factor_steps: 'alternating' given, must be 'joint'"):
        TDPFed(optimizer="als", factor_steps="alternating")


def test_limits_themselves_are_allowed() -> None:
    TDPFed(lam=0, momentum=1.0, s=1, s_prime=1, tau=1, beta=1.8, als_damping=0.0, include=["*"])  # type: ignore[arg-type]
    PerFedAvg(alpha=0)
    FedAvgSAR(compression=1)


def test_every_algorithm_has_its_name_documented_settings_and_rates() -> None:
    assert set(ALGORITHMS) == {
        "tdpfed", "fedavg", "fedavg_sar", "pfedme", "perfedavg", "local",
        "fedala", "fedpara", "pfedpara", "finetune", "hypcluster", "mapper", "dapper", "fedmac", "mocha",
        "fedprox", "scaffold", "ditto", "apfl", "fedper", "fedrep", "lgfedavg", "fedbabu",
    }  # fmt: skip
    for name, algorithm in ALGORITHMS.items():
        assert algorithm.name == name
        assert all(item.metadata["doc"] for item in algorithm.hyper_parameters())
        assert "layout" not in {item.name for item in algorithm.hyper_parameters()}
        assert "eta" in algorithm().rates or name == "mocha"  # dual steps have no rate
    assert TDPFed().rates == {"eta": 8e-4, "eta_p": 0.08}
    assert PerFedAvg().rates == {"eta": 0.05, "alpha": 0.01}


def test_the_papers_settings_are_the_defaults() -> None:
    d = TDPFed()
    assert (d.tau, d.s, d.s_prime, d.lam, d.beta, d.eta, d.eta_p, d.batch_size) == (23, 5, 17, 12, 1, 8e-4, 0.08, 20)
    assert (d.momentum, d.optimizer, d.factor_steps, d.aggregation) == (0.5, "adam", "joint", "afm")


def test_a_message_for_each_is_a_view() -> None:
    state = {"w": torch.arange(3.0)}
    assert to_each(state, Turn(0, 1, torch.tensor(4)))["w"].shape == (3,)
    many = to_each(state, Turn(0, 1, torch.tensor([4, 5])))["w"]
    assert many.shape == (2, 3)
    assert many.data_ptr() == state["w"].data_ptr()


@pytest.mark.parametrize("name", small.variants())
@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_no_function_changes_its_arguments(name: str, runner: Any) -> None:
    simulation = small.train(small.variants()[name], rounds=1, runner=runner)
    server = {key: value.clone() for key, value in simulation.server.items()}
    private = {key: value.clone() for key, value in simulation.private.items()}
    turn = Turn(0, 2, torch.arange(5))
    outcome = simulation.runner.run(simulation.server, simulation.private, turn)
    uploads = {key: value.clone() for key, value in outcome.upload.items()}
    kept = {key: value.clone() for key, value in outcome.private.items()}
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    center = simulation.algorithm.center(simulation.server) if simulation.server else {}
    averages = robust_averages(outcome.upload, weights, center, Rule())
    simulation.algorithm.aggregate(simulation.server, outcome.upload, averages, turn)
    simulation.algorithm.local_model(outcome.private, outcome.upload)
    simulation.algorithm.global_model(simulation.server)
    for before, after in (
        (server, simulation.server), (private, simulation.private), (uploads, outcome.upload), (kept, outcome.private),
    ):  # fmt: skip
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", small.variants())
def test_the_personalized_model_is_not_overwritten_by_what_follows(name: str) -> None:
    """theta_k is what local training ended with, not the local model nor the next broadcast (a known fault)."""
    simulation = small.train(small.variants()[name], rounds=1)
    fresh = Simulation(small.mlp(), small.federation(), small.variants()[name])
    outcome = Runner(fresh.algorithm, fresh.objective, fresh.federation).run(
        fresh.server, fresh.private, Turn(0, 1, torch.arange(5))
    )
    assert torch.equal(simulation.personalized(), outcome.private["theta"])
    shipped = simulation.global_model()
    if shipped is not None:
        assert not any(torch.equal(theta, shipped) for theta in simulation.personalized())


def test_a_method_of_ones_own_is_called_by_its_class_and_not_by_what_it_derives_from() -> None:
    class Mine(PFedMe):
        name = "mine"

    class Yours(Mine):
        name = "yours"
        title = "Your method"

    assert (PFedMe.title, Mine.title, Yours.title) == ("pFedMe", "Mine", "Your method")
    assert len({method.title for method in ALGORITHMS.values()}) == len(ALGORITHMS)
