"""The models with which clients begin a round: after the server's message, before training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from tdpfed.algorithms import (
    APFL,
    Algorithm,
    Best,
    Ditto,
    FedALA,
    FedAvg,
    FedAvgSAR,
    FedBABU,
    FedMac,
    FedPara,
    FedPer,
    FedProx,
    FedRep,
    FineTune,
    HypCluster,
    LGFedAvg,
    Local,
    Mapper,
    PerFedAvg,
    PFedMe,
    PFedPara,
    Scaffold,
    TDPFed,
)
from tdpfed.engine import evaluate
from tdpfed.engine.simulation import Simulation
from tdpfed.runs.simulate import simulate
from tdpfed.server.participation import Participation
from tdpfed.server.records import Record
from tdpfed.wire import Wire

NOTHING = 1e-30
"""A learning rate at which no parameter changes."""

COMMON: dict[str, Any] = {**small.COMMON, "eta": 0.1}
STARTS = {
    "fedavg": FedAvg(**COMMON), "fedprox": FedProx(**COMMON, mu=0.5), "scaffold": Scaffold(**COMMON),
    "ditto": Ditto(**COMMON), "apfl": APFL(**COMMON, alpha=0.4), "fedper": FedPer(**COMMON),
    "fedrep": FedRep(**COMMON, head_steps=2), "lgfedavg": LGFedAvg(**COMMON), "local": Local(**COMMON),
    "fedavg_sar": FedAvgSAR(**COMMON, compression=2.5), "fedpara": FedPara(**COMMON),
    "pfedpara": PFedPara(**COMMON), "fedala": FedALA(**COMMON, weight_steps=2),
    "hypcluster": HypCluster(**COMMON, clusters=2), "perfedavg": PerFedAvg(**COMMON, alpha=0.05),
}  # fmt: skip
"""Methods whose personalized model is where training began if training changes nothing."""

TUNED = {"fedbabu": FedBABU(**COMMON, fine_tune=4), "finetune": FineTune(**COMMON, tune_steps=3)}
"""Methods whose personalized model of a round is made of the received one by their own training."""

KEPT = {
    "pfedme": PFedMe(**small.COMMON), "tdpfed": TDPFed(**small.TDPFED), "local": Local(**COMMON),
    "fedmac": FedMac(**small.COMMON, eta=0.01, eta_p=0.01), "ditto": Ditto(**COMMON),
}  # fmt: skip
"""Methods whose personalized model does not depend on the message."""

EVERYBODY = torch.arange(5)


def next_personalized(before: Simulation, algorithm: Algorithm, **options: Any) -> torch.Tensor:
    """Return the personalized models one round after ``before``, computed by another simulation."""
    after = small.train(algorithm, 0, **options)
    after.resume_from(before.round, before.server, before.store, before.ledger)
    after.step()
    return after.personalized()


@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", STARTS)
def test_a_round_that_trains_nothing_ends_where_it_began(name: str, model: str) -> None:
    method: Any = STARTS[name]
    before = small.train(method, 3, model=model)
    start, own = before.received(EVERYBODY), before.personalized().clone()
    end = next_personalized(before, replace(method, eta=NOTHING), model=model)
    assert torch.equal(start, own) == (name in KEPT)
    torch.testing.assert_close(start, end, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TUNED)
def test_fine_tuning_of_the_next_round_is_what_a_client_uses(name: str) -> None:
    before = small.train(TUNED[name], 2)
    start, own = before.received(EVERYBODY), before.personalized().clone()
    torch.testing.assert_close(start, next_personalized(before, TUNED[name]), rtol=1e-12, atol=1e-12)
    assert float((start - own).norm()) > 1e-3


@pytest.mark.parametrize("name", KEPT)
def test_a_model_that_is_kept_does_not_depend_on_the_message(name: str) -> None:
    before = small.train(KEPT[name], 2)
    assert torch.equal(before.received(EVERYBODY), before.personalized())


def test_mixtures_by_hand() -> None:
    mapper = small.train(Mapper(**COMMON, mixes=(0.25, 0.75)), 2)
    private, w = mapper.private, mapper.server["w"]
    torch.testing.assert_close(
        mapper.received(EVERYBODY), private["lam"] * private["own"] + (1 - private["lam"]) * w, rtol=1e-12, atol=1e-12
    )
    best = small.train(Best.of(FedAvg(**COMMON), validation=0.3), 2)
    choice = torch.tensor([[0.0], [1.0], [0.0], [3.0], [2.0]], dtype=torch.float64)
    best.store.put(EVERYBODY, {**{name: value.clone() for name, value in best.private.items()}, "choice": choice})
    expected = torch.where(choice == 0, best.server["w"], best.personalized())
    assert torch.equal(best.received(EVERYBODY), expected)


@pytest.mark.parametrize("options", [{}, {"chunk": 2}, {"model": "conv"}], ids=str)
@pytest.mark.parametrize("name", small.variants())
def test_batched_equals_loop(name: str, options: dict[str, Any]) -> None:
    method, loop = small.variants()[name], {key: value for key, value in options.items() if key == "model"}
    batched = small.train(method, 2, **options).received(EVERYBODY)
    alone = small.train(method, 2, runner="loop", **loop).received(EVERYBODY)
    torch.testing.assert_close(batched, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "fedbabu", "fedrep", "perfedavg", "fedala"])
def test_clients_that_pass_through_their_samples(name: str) -> None:
    method = {**STARTS, **TUNED}[name]
    method = replace(method, tau=type(method).tau, epochs=1.0)
    before, alone = small.train(method, 2), small.train(method, 2, runner="loop")
    torch.testing.assert_close(before.received(EVERYBODY), alone.received(EVERYBODY), rtol=1e-9, atol=1e-9)
    ordered = before.received(torch.tensor([3, 1]))
    torch.testing.assert_close(ordered, before.received(EVERYBODY)[[3, 1]], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*STARTS, *TUNED, *KEPT])
def test_a_record_holds_the_accuracy_of_these_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if clients are computed a few at a time, and for some of the clients only."""
    monkeypatch.setattr("tdpfed.engine.recorder.AT_ONCE", 2)
    method = {**STARTS, **TUNED, **KEPT}[name]
    for count in (None, 3):
        run = small.train(method, 2, received=True, evaluate_clients=count)
        clients = run.recorder.evaluated
        score = evaluate.score_each(run.objective, run.received(clients), run.federation, clients)
        assert run.record(0.0).received_accuracy == score.accuracy


def test_the_last_message_is_that_of_the_wire() -> None:
    """With a server that sends rank-one terms, clients begin with the model that they know, not with the server's."""
    run = small.train(FedAvg(**COMMON), 2, wire=Wire(down="factors", down_terms=1))
    assert torch.equal(run.received(EVERYBODY)[0], run.broadcast.known["w"])
    assert not torch.equal(run.broadcast.known["w"], run.server["w"])


def test_the_results_of_a_run_do_not_depend_on_it(tmp_path: Path) -> None:
    def records(**options: Any) -> list[Record]:
        data, method = small.federation(dtype=torch.float32), PerFedAvg(**COMMON)
        return simulate(small.mlp(), data, method, 4, participation=Participation(clients=3), **options).records

    plain, more = records(), records(received=True)
    with_folder = records(received=True, out=tmp_path / "run")
    for one, other, kept in zip(plain, more, with_folder, strict=True):
        assert other.received_accuracy is not None
        assert replace(other, received_accuracy=None, seconds=0.0) == replace(one, seconds=0.0)
        assert "received_accuracy" not in one.as_dict()
        assert Record.from_dict(other.as_dict()) == other
        assert replace(kept, seconds=0.0) == replace(other, seconds=0.0)
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "received = true" in text
