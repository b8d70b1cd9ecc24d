"""Hostile clients in a run, and what the gate and the rules do about them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import small
from tdpfed import FedAvg, FedAvgSAR, PFedMe, TDPFed, TDPFedError
from tdpfed.engine.attacks import Attack, attackers
from tdpfed.engine.simulation import Simulation
from tdpfed.server.robust import Rule
from tdpfed.wire import Wire

QUICK: dict[str, Any] = {"tau": 2, "batch_size": 4}
AVERAGING = (FedAvg(**QUICK), FedAvgSAR(**QUICK), PFedMe(**QUICK), TDPFed(**QUICK), TDPFed(**QUICK, aggregation="act"))


def one_round(algorithm: Any, **options: Any) -> Simulation:
    simulation = Simulation(small.mlp(), small.federation(10), algorithm, **options)
    simulation.step()
    return simulation


def shift(simulation: Simulation, honest: Simulation) -> float:
    one, other = simulation.global_model(), honest.global_model()
    assert one is not None
    assert other is not None
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    "rule", [Rule("median"), Rule("trimmed-mean"), Rule("krum"), Rule("multi-krum"), Rule(clip="median")]
)
@pytest.mark.parametrize(
    "algorithm", AVERAGING, ids=lambda algorithm: f"{algorithm.name} {getattr(algorithm, 'aggregation', '')}"
)
def test_every_rule_works_with_every_algorithm_that_averages(algorithm: Any, rule: Rule) -> None:
    simulation = one_round(algorithm, rule=rule)
    assert shift(simulation, one_round(algorithm)) > 0  # the rule was asked
    assert all(bool(value.isfinite().all()) for value in simulation.server.values())


@pytest.mark.parametrize(
    "rule", [Rule("median"), Rule("trimmed-mean"), Rule("multi-krum", byzantine=2), Rule(clip="median")]
)
def test_a_scaled_update_of_two_in_ten_moves_the_mean_and_not_the_rule(rule: Rule) -> None:
    attack = Attack("scale", strength=1000.0)
    honest = one_round(FedAvg(**QUICK))
    assert shift(one_round(FedAvg(**QUICK), attack=attack, rule=Rule(bound="off")), honest) > 10
    assert shift(one_round(FedAvg(**QUICK), attack=attack, rule=replace(rule, bound="off")), honest) < 0.3
    assert shift(one_round(FedAvg(**QUICK), attack=attack), honest) < 0.3  # the bound, without any rule


def test_the_gauge_attack_wrecks_plain_averages_of_factors_and_is_refused_at_the_gate() -> None:
    algorithm, attack = TDPFed(**QUICK, s_prime=2), Attack("gauge")
    honest = one_round(algorithm)
    plain = one_round(algorithm, attack=attack, rule=Rule(bound="off"))
    assert shift(plain, honest) > 1
    assert plain.refused == []
    gated = one_round(algorithm, attack=attack, rule=Rule(gauge=1.0))
    bad = attackers(0, 10, 0.2).nonzero().flatten().tolist()
    assert sorted(one.client or 0 for one in gated.refused) == bad
    assert all(one.rule == "gauge" and one.tensor and one.tensor.startswith("factors/") for one in gated.refused)
    assert gated.ledger.rejected == 2
    assert shift(gated, honest) < 0.1
    record = gated.record(0.0)
    assert record.rejected == 2


def test_when_all_are_refused_the_server_stays_as_it_is() -> None:
    simulation = Simulation(small.mlp(), small.federation(4), TDPFed(**QUICK), rule=Rule(gauge=1e-9))
    before = simulation.server["factors"].clone()
    simulation.step()
    assert len(simulation.refused) == 4
    assert torch.equal(simulation.server["factors"], before)


def test_label_flip_changes_training_labels_of_the_hostile_only() -> None:
    data = small.federation(10)
    simulation = Simulation(small.mlp(), data, FedAvg(**QUICK), attack=Attack("label-flip", 0.3))
    for k, bad in enumerate(attackers(0, 10, 0.3).tolist()):
        mine, theirs = simulation.federation.client(k), data.client(k)
        assert torch.equal(mine[3], theirs[3])
        assert torch.equal(mine[1], data.classes - 1 - theirs[1] if bad else theirs[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"attack": Attack("gauge")}, "robust.attack: 'gauge' given"),
        ({"wire": Wire(update="factors", terms=100)}, "wire.terms: 100 given, must be at most 12"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options: Any, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Simulation(small.mlp(), small.federation(), FedAvg(), **options)


@pytest.mark.parametrize(
    "make",
    [lambda: Attack("sleep"), lambda: Attack("noise", 2.0), lambda: Attack("noise", 0.1, -1.0)],  # type: ignore[arg-type]
)
def test_attacks_are_checked(make: Any) -> None:
    with pytest.raises(TDPFedError, match="must be"):
        make()
