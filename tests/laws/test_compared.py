"""What holds for every method that others compare with: in any runner, chunk and order, over any wire, resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import by_hand
import small
from hub import together
from tdpfed.algorithms import (
    Algorithm,
    Dapper,
    FedALA,
    FedMac,
    FedPara,
    FineTune,
    HypCluster,
    Mapper,
    Mocha,
    PerFedAvg,
    PFedPara,
)
from tdpfed.core.state import Turn
from tdpfed.engine.attacks import Attack
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.snapshot import restore, snapshot_of
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.robust import Rule
from tdpfed.wire import Wire

METHODS: dict[str, Algorithm] = {
    "fedala": FedALA(**small.COMMON, weight_steps=2),
    "fedpara": FedPara(**small.COMMON),
    "pfedpara": PFedPara(**small.COMMON),
    "finetune": FineTune(**small.COMMON, tune_steps=2, layers=("last",)),
    "hypcluster": HypCluster(**small.COMMON, clusters=3, choice_batches=2),
    "mapper": Mapper(**small.COMMON, mixes=(0.0, 0.4, 1.0), choice_batches=2),
    "dapper": Dapper(**small.COMMON, public=11),
    "fedmac": FedMac(**small.COMMON, s=2),
    "mocha": Mocha(**small.COMMON),
    "perfedavg exact": PerFedAvg(**small.COMMON, alpha=0.05, variant="exact"),
}
LINEAR = {"mocha"}
"""Methods for linear models."""

LOSSY = Participation(3, dropout=0.3)


def model_for(name: str, kind: str = "dense") -> nn.Module:
    return by_hand.MODULES["linear" if name in LINEAR else kind]()


def simulation(name: str, clients: int = 5, *, kind: str = "dense", exact: bool = False, **options: Any) -> Simulation:
    data = small.federation(clients, dtype=torch.float64 if exact else torch.float32)
    algorithm = options.pop("algorithm", METHODS[name])
    return Simulation(model_for(name, kind), data, algorithm, **options)


def run(name: str, rounds: int = 3, **options: Any) -> Simulation:
    made = simulation(name, **options)
    for _ in range(rounds):
        made.step()
    return made


def finite(made: Simulation) -> bool:
    return all(bool(value.isfinite().all()) for value in small.states(made).values() if value.is_floating_point())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", small.MODELS)
@pytest.mark.parametrize("participation", [Participation(), LOSSY], ids=str)
def test_batched_equals_loop(name: str, kind: str, participation: Participation) -> None:
    runs = [
        run(name, kind=kind, runner=runner, participation=participation, exact=True) for runner in ("batched", "loop")
    ]
    small.assert_close(runs[0], runs[1], 1e-9)
    assert runs[0].minibatch_loss == pytest.approx(runs[1].minibatch_loss, rel=1e-9)
    assert by_hand.moved(runs[0]) > 0.01


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", small.MODELS)
def test_any_chunking_equals_none_bit_for_bit(name: str, kind: str) -> None:
    whole = run(name, 2, clients=11, kind=kind)
    for chunk in (1, 3, 4, 8):
        assert small.equal(whole, run(name, 2, clients=11, kind=kind, chunk=chunk)), chunk


@pytest.mark.parametrize("name", METHODS)
def test_a_client_does_not_depend_on_its_company_and_nothing_is_overwritten(name: str) -> None:
    made = run(name, 1, clients=8)
    before = {key: value.clone() for key, value in small.states(made).items()}

    def results(clients: list[int]) -> dict[str, Tensor]:
        turn = Turn(0, 2, torch.tensor(clients))
        rows = {key: value[turn.clients] for key, value in made.private.items()}
        outcome = made.runner.run(made.server, rows, turn)
        return {**{f"own {k}": v for k, v in outcome.private.items()}, **outcome.upload, **outcome.metrics}

    whole = results(list(range(8)))
    for company in ([4], [6, 4, 1], [5, 4, 3, 2, 1, 0]):
        for key, value in results(company).items():
            assert all(torch.equal(value[row], whole[key][client]) for row, client in enumerate(company)), key
    assert all(torch.equal(value, before[key]) for key, value in small.states(made).items())


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seed_gives_the_same_bits(name: str) -> None:
    first, again, other = (run(name, seed=seed, participation=LOSSY) for seed in (5, 5, 6))
    assert small.equal(first, again)
    assert not torch.equal(first.private["theta"], other.private["theta"])


@pytest.mark.parametrize("name", METHODS)
def test_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    whole, stopped, resumed = (simulation(name, participation=LOSSY, wire=Wire(codec="int8")) for _ in range(3))
    for _ in range(4):
        whole.step()
    for _ in range(2):
        stopped.step()
    Checkpoints(tmp_path).save(snapshot_of(stopped), None)
    found = Checkpoints(tmp_path).load()
    assert found is not None
    restore(resumed, found[0])
    for _ in range(2):
        resumed.step()
    assert small.equal(whole, resumed)
    assert vars(whole.ledger) == vars(resumed.ledger)


@pytest.mark.parametrize("name", METHODS)
def test_several_processes_equal_one(name: str) -> None:
    def work(ranks: Ranks) -> tuple[list[Any], dict[str, Tensor]]:
        made = simulation(name, 7, seed=3, participation=LOSSY, ranks=ranks)
        return [record.as_dict() | {"seconds": 0} for record in made.run(3)], made.server

    records, server = work(ALONE)
    for result in together(3, work):
        assert isinstance(result, tuple), result
        assert result[0] == records
        assert all(torch.equal(value, server[key]) for key, value in result[1].items())


@pytest.mark.parametrize("name", METHODS)
def test_several_seeds_together_equal_each_alone(name: str) -> None:
    together_, alone = ([simulation(name, 4, seed=seed, exact=True) for seed in (1, 2)] for _ in range(2))
    ensemble = Ensemble(together_)
    for _ in range(2):
        assert ensemble.step() == [None, None]
        for one in alone:
            one.step()
    for left, right in zip(together_, alone, strict=True):
        small.assert_close(left, right, 1e-9)


WIRES = {
    "int8": Wire(codec="int8"),
    "int8, errors kept": Wire(codec="int8", feedback=True),
    "factors": Wire(update="factors"),
    "top-k": Wire(update="top-k", share=0.2),
    "factors both ways": Wire(update="factors", down="factors", down_terms=2),
}
REFUSED_WIRES: dict[str, tuple[str, ...]] = {"mocha": ("factors both ways",)}
"""Wires that a method refuses, and the field that its error names."""


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("wire", WIRES)
def test_every_wire_runs_and_stays_finite_or_is_refused(name: str, wire: str) -> None:
    if wire in REFUSED_WIRES.get(name, ()):
        with pytest.raises(TDPFedError, match=r"^wire\.\w+: "):
            simulation(name, wire=WIRES[wire])
        return
    made = run(name, 6, wire=WIRES[wire], participation=Participation(4, dropout=0.2))
    assert finite(made)
    assert by_hand.moved(made) > 0.01


REFUSED_RULES = {"mocha"}


@pytest.mark.parametrize("name", METHODS)
def test_robust_rules_withstand_an_attack_or_are_refused(name: str) -> None:
    for rule in (Rule("median"), Rule("trimmed-mean", clip="median"), Rule("krum")):
        if name in REFUSED_RULES:
            with pytest.raises(TDPFedError, match=r"^robust\.name: "):
                simulation(name, 7, rule=rule)
        else:
            assert finite(run(name, 3, clients=7, rule=rule, attack=Attack("scale", 0.2)))


REFUSED_PRIVACY = {"hypcluster", "dapper", "mocha"}


@pytest.mark.parametrize("name", METHODS)
def test_privacy_holds_or_is_refused(name: str) -> None:
    options: dict[str, Any] = {
        "privacy": Privacy(0.5, 1.0), "algorithm": replace(METHODS[name], weights="uniform"),
        "participation": Participation(4, sampling="poisson"),
    }  # fmt: skip
    if name in REFUSED_PRIVACY:
        with pytest.raises(TDPFedError, match=r"^algorithm\.name: "):
            simulation(name, **options)
        return
    made = run(name, 3, **options)
    assert finite(made)
    assert made.epsilon is not None
    plain = run(name, 3, **{**options, "privacy": None})
    assert not small.equal(made, plain)
