"""A round with too few uploads harms nothing: it is repeated with other draws, or the run stops and says why."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed.algorithms import FedAvg, Local, TDPFed
from tdpfed.config.loading import load_config
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.runs.progress import progress
from tdpfed.runs.session import Session
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule, krum, multi_krum, trimmed_mean

FAST: dict[str, Any] = {"tau": 2, "batch_size": 4}


def begin(participation: Participation, **options: Any) -> Simulation:
    algorithm = options.pop("algorithm", FedAvg(**FAST))
    return Simulation(small.mlp(), small.federation(6), algorithm, participation=participation, **options)


def survivors(participation: Participation, seed: int, number: int, attempt: int) -> Tensor:
    return participation.draw(seed, number, 6, attempt)[0]


def test_a_round_below_the_quorum_is_repeated_with_other_draws_until_it_has_enough() -> None:
    asked = Participation(dropout=0.5, quorum=4, attempts=1000)
    simulation = begin(asked)
    repeated = 0
    for number in range(1, 9):
        attempt = next(a for a in range(1000) if len(survivors(asked, 0, number, a)) >= 4)
        repeated += attempt
        simulation.step()
        assert simulation.round == number
        assert torch.equal(simulation.trained, survivors(asked, 0, number, attempt))
    assert repeated > 3


def test_what_a_failed_attempt_sent_counts_and_nothing_else_of_it_does() -> None:
    asked = Participation(dropout=0.5, quorum=6, attempts=1)
    simulation = begin(asked)
    before = {name: value.clone() for name, value in small.states(simulation).items()}
    alive = len(survivors(asked, 0, 1, 0))
    assert 0 < alive < 6
    with pytest.raises(QuorumError, match=rf"round 1: {alive} uploads accepted, participation\.quorum requires 6"):
        simulation.step()
    assert simulation.round == 0
    assert simulation.ledger.uploads == alive
    assert all(torch.equal(value, before[name]) for name, value in small.states(simulation).items())


@pytest.mark.parametrize(("below", "dropout", "tries"), [("stop", 0.001, 1), ("repeat", 0.001, 3), ("repeat", 0.0, 1)])
def test_the_run_stops_with_a_clear_error(below: Any, dropout: float, tries: int) -> None:
    """Where nothing is drawn another try would come to the same."""
    asked = Participation(quorum=6, below_quorum=below, attempts=3, dropout=dropout)
    simulation = begin(asked, rule=Rule(gauge=0.5), attack=Attack("gauge", 0.5), algorithm=TDPFed(**small.TDPFED))
    with pytest.raises(QuorumError, match=r"3 uploads accepted.*requires 6; the last refusal: message of client \d"):
        simulation.step()
    assert len(simulation.refused) == 3 * tries
    assert {one.rule for one in simulation.refused} == {"gauge"}


def test_without_a_quorum_an_empty_round_changes_nothing_and_counts() -> None:
    asked = Participation(1, dropout=0.9)
    simulation, empty = begin(asked), 0
    for number in range(1, 31):
        before = simulation.server["w"].clone()
        simulation.step()
        nobody = not len(survivors(asked, 0, number, 0))
        empty += nobody
        assert torch.equal(simulation.server["w"], before) == nobody
    assert 0 < empty < 30
    assert simulation.round == 30


def test_methods_that_send_nothing_need_no_quorum() -> None:
    simulation = begin(Participation(dropout=0.5, quorum=6, below_quorum="stop"), algorithm=Local(**FAST))
    for _ in range(3):
        simulation.step()
    assert simulation.round == 3


@pytest.mark.parametrize(
    ("rule", "average"),
    [
        (Rule("krum", byzantine=1), krum(1)),
        (Rule("multi-krum", byzantine=1, keep=5), multi_krum(1, 5)),
        (Rule("multi-krum", byzantine=0), multi_krum(0)),
        (Rule("trimmed-mean", fraction=0.4), trimmed_mean(0.4)),
        (Rule("trimmed-mean", fraction=0.1), trimmed_mean(0.1)),
    ],
)
def test_enough_says_when_a_rule_can_work(rule: Rule, average: Any) -> None:
    for clients in range(1, 12):
        uploads, weights = torch.randn(clients, 3), torch.ones(clients)
        try:
            average(uploads, weights)
        except TDPFedError:
            assert not rule.enough(clients)
        else:
            assert rule.enough(clients)


def test_a_rule_with_too_few_uploads_repeats_the_round_and_one_that_never_works_is_refused_at_once() -> None:
    asked = Participation(dropout=0.4, attempts=1000)
    simulation = begin(asked, rule=Rule("krum", byzantine=1))
    for _ in range(5):
        simulation.step()
        assert len(simulation.trained) >= 5
    with pytest.raises(QuorumError, match=r"robust\.name 'krum' needs more"):
        begin(Participation(dropout=0.9, below_quorum="stop"), rule=Rule("krum", byzantine=1)).step()
    with pytest.raises(TDPFedError, match=r"robust\.name: 'krum' given.*cannot work with the 4 clients"):
        begin(Participation(4), rule=Rule("krum", byzantine=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quorum": -1}, r"quorum: -1 given.*at least 0"),
        ({"attempts": 0}, r"attempts: 0 given.*at least 1"),
        ({"below_quorum": "wait"}, r"below_quorum: 'wait' given"),
        ({"sampling": "poison"}, r"sampling: 'poison' given.*did you mean 'poisson'"),
        ({"quorum": 7}, r"participation\.quorum: 7 given, must be at most 6, the clients chosen per round"),
        ({"clients": 2, "quorum": 3}, r"participation\.quorum: 3 given, must be at most 2"),
    ],
)
def test_bad_settings_are_named(options: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        begin(Participation(**options))


def test_poisson_sampling_draws_each_client_by_itself() -> None:
    asked = Participation(2, sampling="poisson")
    rounds = [set(survivors(asked, 5, number, 0).tolist()) for number in range(1, 3001)]
    sizes = torch.tensor([len(one) for one in rounds]).double()
    share = torch.tensor([sum(k in one for one in rounds) / 3000 for k in range(6)]).double()
    assert (share - 1 / 3).abs().max() < 0.03  # 3.5 standard deviations
    assert abs(sizes.mean() - 2) < 0.1
    assert abs(sizes.var() - 6 * (1 / 3) * (2 / 3)) < 0.15  # binomial: not a fixed size
    assert torch.equal(survivors(Participation(sampling="poisson"), 5, 1, 0), torch.arange(6))


def test_refusals_are_written_with_client_rule_and_tensor_and_survive_a_resume(tmp_path: Path) -> None:
    settings = [
        "run.rounds=3", "checkpoint.every=1", "robust.attack=gauge", "robust.gauge=0.5", "algorithm.tau=1",
        "algorithm.s_prime=1",
    ]  # fmt: skip
    session = Session.begin(load_config("digits", settings), tmp_path / "run", None)
    session.run(progress)
    file = tmp_path / "run" / "refusals.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    hostile = (~session.simulation.honest).nonzero().flatten().tolist()
    assert [(line["round"], line["client"]) for line in lines] == [(r, k) for r in (1, 2, 3) for k in hostile]
    assert {line["rule"] for line in lines} == {"gauge"}
    assert all(line["tensor"].startswith("factors/fc") and line["tensor"] in line["reason"] for line in lines)
    text = file.read_text()
    file.write_text(text + json.dumps(lines[0] | {"round": 4}) + '\n{"round": 5, "cli')
    Session.resume(tmp_path / "run", None).run(progress)
    assert file.read_text() == text


def test_refusals_of_a_round_that_ends_the_run_are_written(tmp_path: Path) -> None:
    settings = [
        "robust.attack=gauge",
        "robust.gauge=0.5",
        "participation.quorum=10",
        "participation.attempts=2",
        "data.clients=10",
    ]
    session = Session.begin(load_config("digits", [*settings, "algorithm.tau=1"]), tmp_path / "run", None)
    with pytest.raises(QuorumError):
        session.run(progress)
    lines = [json.loads(line) for line in (tmp_path / "run" / "refusals.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1] * 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
