"""Algorithms that coincide at the edges of their settings, and what the server does with who reports."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed.algorithms import Algorithm, FedAvg, FedAvgSAR, Local, PerFedAvg, PFedMe, TDPFed
from tdpfed.core.state import Turn
from tdpfed.engine.simulation import Simulation
from tdpfed.server.averages import robust_averages
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule, weighted_mean

CONDITIONS = [Participation(), Participation(3), Participation(2, "all"), Participation(4, dropout=0.3)]
DENSE: dict[str, Any] = {"exclude": ("*",), "optimizer": "gd", "s_prime": 1}


def assert_same_course(left: Algorithm, right: Algorithm, participation: Participation, model: str) -> None:
    """Run both for three rounds: the global and all personalized models agree after each."""
    runs = [
        Simulation(small.MODELS[model](), small.federation(), algorithm, participation=participation)
        for algorithm in (left, right)
    ]
    for _ in range(3):
        for run in runs:
            run.step()
        for a, b in (
            (runs[0].global_model(), runs[1].global_model()),
            (runs[0].algorithm.local_model(*_last(runs[0])), runs[1].algorithm.local_model(*_last(runs[1]))),
        ):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(runs[0].minibatch_loss, runs[1].minibatch_loss)


def _last(run: Simulation) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    assert run._trained is not None
    outcome = run._trained[1]
    return outcome.private, outcome.upload


@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("participation", CONDITIONS, ids=str)
class TestCoincide:
    def test_sar_that_sends_everything_is_fedavg(self, model: str, participation: Participation) -> None:
        sar = FedAvgSAR(**small.COMMON, compression=1.0)
        assert_same_course(sar, FedAvg(**small.COMMON), participation, model)

    @pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
    def test_perfedavg_that_does_not_adapt_is_fedavg(
        self, variant: Any, model: str, participation: Participation
    ) -> None:
        meta = PerFedAvg(**small.COMMON, alpha=0.0, variant=variant)
        assert_same_course(meta, FedAvg(**small.COMMON), participation, model)

    @pytest.mark.parametrize("momentum", [0.0, 0.6])
    def test_tdpfed_with_nothing_factorized_is_pfedme(
        self, momentum: float, model: str, participation: Participation
    ) -> None:
        shared: dict[str, Any] = {
            **small.COMMON, "lam": 7.0, "eta": 0.03, "eta_p": 0.06, "momentum": momentum, "s": 3, "beta": 0.8,
        }  # fmt: skip
        tdpfed, pfedme = TDPFed(**shared, **DENSE), PFedMe(**shared)
        assert_same_course(tdpfed, pfedme, participation, model)
        runs = [small.train(a, 3, model=model, participation=participation) for a in (tdpfed, pfedme)]
        torch.testing.assert_close(runs[0].personalized(), runs[1].personalized(), rtol=1e-10, atol=1e-11)


def uploads_of(algorithm: Algorithm) -> tuple[Simulation, dict[str, Tensor], Turn]:
    """Return a simulation after a round, and what its clients would send in the next."""
    simulation = small.train(algorithm, 1)
    turn = Turn(0, 2, torch.arange(5))
    return simulation, simulation.runner.run(simulation.server, simulation.private, turn).upload, turn


MIXING: dict[str, Algorithm] = {
    "pfedme": PFedMe(**small.COMMON),
    "afm": TDPFed(**small.TDPFED),
    "act": TDPFed(**small.TDPFED, aggregation="act"),
}


@pytest.mark.parametrize("name", MIXING)
def test_beta_mixes_the_average_into_the_old_global_model(name: str) -> None:
    """1 is plain averaging, a half is halfway, and 1.8 goes beyond by 0.8."""
    simulation, uploads, turn = uploads_of(MIXING[name])
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    results = {}
    for beta in (0.5, 1.0, 1.8):
        algorithm = replace(simulation.algorithm, beta=beta)  # type: ignore[call-arg]
        averages = robust_averages(uploads, weights, algorithm.center(simulation.server), Rule())
        results[beta] = algorithm.aggregate(simulation.server, uploads, averages, turn)
    if name == "act":
        key, plan = "theta", simulation.algorithm.plan
        assert plan is not None
        old, sent = plan.compose(simulation.server["factors"]), plan.compose(uploads["factors"])
    else:
        (key,) = uploads
        old, sent = simulation.server[key], uploads[key]
    mean = sum(n * row for n, row in enumerate(sent, start=1)) / 15
    for beta, server in results.items():
        torch.testing.assert_close(server[key], old + beta * (mean - old), rtol=1e-10, atol=1e-12)


def test_act_with_one_client_equals_afm_up_to_the_fit() -> None:
    """One client's composed tensor has factors that fit it: many sweeps find them again."""
    data = small.federation(1)
    runs = {
        kind: small.train(
            TDPFed(**small.TDPFED, aggregation=kind, act_sweeps=300),
            3,
            data=data,
            model="conv",
        )
        for kind in ("afm", "act")
    }
    afm, act = runs["afm"].global_model(), runs["act"].global_model()
    assert afm is not None
    assert act is not None
    moved = float((afm - small.train(TDPFed(**small.TDPFED), 0, data=data, model="conv").global_model()).norm())  # type: ignore[operator]
    assert moved > 0.1
    assert float((afm - act).norm()) < 0.02 * moved


def test_act_with_one_client_and_full_rank_equals_afm_exactly_in_the_first_round() -> None:
    ranks = {"fc1.weight": 12, "fc2.weight": 3}
    data = small.federation(1)
    runs = [
        small.train(TDPFed(**small.TDPFED, ranks=ranks, aggregation=kind, act_sweeps=50), 1, data=data)
        for kind in ("afm", "act")
    ]
    plan = runs[1].algorithm.plan
    assert plan is not None
    composed = plan.compose(runs[0].server["factors"])
    torch.testing.assert_close(runs[1].server["theta"], composed, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plan.compose(runs[1].server["factors"]), composed, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["samples", "uniform"])
@pytest.mark.parametrize("name", ["fedavg", "pfedme", "tdpfed"])
def test_weights(kind: Any, name: str) -> None:
    algorithm = replace(small.variants()[name], weights=kind)
    simulation, uploads, _ = uploads_of(algorithm)
    sizes = simulation.federation.train_size.double()
    share = sizes / sizes.sum() if kind == "samples" else torch.full((5,), 0.2, dtype=torch.float64)
    assert len(set(sizes.tolist())) == 5
    simulation.step()
    (key,) = uploads
    torch.testing.assert_close(simulation.server[key], share @ uploads[key], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("who", ["selected", "all"])
def test_the_server_averages_those_who_report(dropout: float, who: Any) -> None:
    """The chosen that were not lost; under ``all`` the others train too, unheard."""
    participation = Participation(3, who, dropout)
    simulation = Simulation(small.mlp(), small.federation(), FedAvg(**small.COMMON), participation=participation)
    lost, sent, received = 0, 0, 0
    for _ in range(6):
        w, own = simulation.server["w"], simulation.private["theta"].clone()
        chosen, trained = simulation.participation.draw(
            simulation.seed, simulation.round + 1, simulation.federation.clients
        )
        assert set(chosen.tolist()) <= set(trained.tolist())
        lost += 3 - len(chosen)
        sent, received = sent + len(chosen), received + len(trained)
        simulation.step()
        theta = simulation.private["theta"]
        changed = [k for k in range(5) if not torch.equal(theta[k], own[k])]
        assert changed == trained.tolist()
        if len(chosen):
            sizes = simulation.federation.train_size[chosen].double()
            mean = (sizes[:, None] * theta[chosen]).sum(0) / sizes.sum()
            torch.testing.assert_close(simulation.server["w"], mean, rtol=1e-10, atol=1e-12)
        else:
            assert torch.equal(simulation.server["w"], w)
        if who == "all" and dropout == 0:
            assert changed == list(range(5))
        elif who == "selected":
            assert changed == chosen.tolist()
    assert (lost > 0) == (dropout > 0)
    size = simulation.objective.layout.size
    assert small.carries(simulation.ledger.uplink, sent, size)
    assert small.carries(simulation.ledger.downlink, received, size)
    assert simulation.ledger.uploads == sent
    assert simulation.ledger.client_rounds == received


def test_training_the_others_changes_them_and_not_the_server() -> None:
    runs = {
        who: small.train(FedAvg(**small.COMMON), 3, participation=Participation(2, who)) for who in ("all", "selected")
    }
    torch.testing.assert_close(runs["all"].server["w"], runs["selected"].server["w"], rtol=1e-12, atol=1e-13)
    assert not torch.equal(runs["all"].private["theta"], runs["selected"].private["theta"])


def test_a_round_in_which_all_are_lost_changes_nothing() -> None:
    participation = Participation(1, dropout=0.9)
    simulation = Simulation(small.mlp(), small.federation(), FedAvg(**small.COMMON), participation=participation)
    empty = 0
    for _ in range(12):
        before = {name: value.clone() for name, value in small.states(simulation).items()}
        bytes_before = simulation.ledger.uplink
        simulation.step()
        record = simulation.record(0.0)
        if record.participants == 0:
            empty += 1
            assert all(torch.equal(value, before[name]) for name, value in small.states(simulation).items())
            assert simulation.ledger.uplink == bytes_before
            assert (record.minibatch_loss, record.local_accuracy) == (None, None)
            assert record.personalized_accuracy is not None
    assert 0 < empty < 12
    assert simulation.round == 12
    assert simulation.compression_rate == pytest.approx(1.0, abs=1e-2)


def test_bytes_of_a_round() -> None:
    """Five clients, two rounds; ACT's full tensor goes down as well."""
    plan = TDPFed(**small.TDPFED).bind(small.train(Local(**small.COMMON), 0).objective.layout, 5).plan
    dense, factored = plan.dense.size, plan.factors.size
    assert factored < dense
    expected = {
        "fedavg": (dense, dense), "pfedme": (dense, dense), "perfedavg": (dense, dense), "local": (0, 0),
        "tdpfed": (factored, factored), "tdpfed act": (factored, factored + dense),
    }  # fmt: skip
    for name, (up, down) in expected.items():
        simulation = small.train(small.variants()[name], 2)
        messages = 0 if name == "local" else 2 * 5
        assert small.carries(simulation.ledger.uplink, messages, up), name
        assert small.carries(simulation.ledger.downlink, messages, down), name
        each = simulation.ledger.uplink + simulation.ledger.downlink
        assert simulation.ledger.per_client_round == each / max(1, messages)
        rate = simulation.compression_rate
        assert rate is None if name == "local" else rate == pytest.approx(dense / up, rel=0.2)


def test_local_training_does_not_depend_on_who_is_chosen() -> None:
    """Nothing travels: with all training, the clients' models are the same whoever is chosen."""
    runs = [small.train(Local(**small.COMMON), 3, participation=p) for p in (Participation(), Participation(1, "all"))]
    assert small.equal(*runs)


def test_weighted_mean_by_hand() -> None:
    uploads = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert weighted_mean(uploads, torch.tensor([1.0, 3.0])).tolist() == [2.5, 5.0]
    assert weighted_mean(uploads, torch.tensor([5.0, 5.0])).tolist() == [2.0, 4.0]
