"""A method with messages of its own in a federation: the simulation's numbers, bytes, minibatches and refusals."""

import pytest

pytest.importorskip("flwr")

from pathlib import Path

import torch
from fake import NODES, Case, as_vector, worst
from safetensors.torch import load_file

import page_methods
from own_methods import OWN, Halves
from page_methods import METHODS
from tdpfed.algorithms import ALGORITHMS
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.flower.node import Node, Side


@pytest.fixture(autouse=True)
def _by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, method in OWN.items():
        monkeypatch.setitem(ALGORITHMS, name, method)


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=changes",),
        ("algorithm.name=changes", "participation.clients=2", "participation.train=all"),
        ("algorithm.name=changes", "wire.codec=bfloat16", "algorithm.weights=uniform", "run.rounds=1"),
        ("algorithm.name=changes", "robust.clip=0.05"),
        ("algorithm.name=halves",),
        ("algorithm.name=fedavg", "optimizer.name=adamw", "optimizer.clip=1", "optimizer.schedule=cosine"),
        ("algorithm.name=halves", "robust.name=median", "robust.clip=median"),
    ],
    ids=" ".join,
)
def test_a_run_is_the_simulation(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    case = Case(tmp_path, *overrides, "algorithm.tau=2")
    summary, record = case.run(), case.simulation.record(0.0)
    assert worst(tmp_path, case.simulation) <= 1e-6
    assert summary["uplink_bytes"] == case.simulation.ledger.uplink
    assert summary["downlink_bytes"] == case.simulation.ledger.downlink
    for name in ("personalized_accuracy", "local_accuracy", "global_accuracy"):
        assert summary[name] == pytest.approx(getattr(record, name)), name


@pytest.mark.parametrize(
    ("method", "epochs"), [("fedavg", "1"), pytest.param("perfedavg", "1.5", marks=pytest.mark.slow)]
)
def test_epochs_are_those_of_the_simulation(tmp_path: Path, method: str, epochs: str) -> None:
    case = Case(tmp_path, f"algorithm.name={method}", f"algorithm.epochs={epochs}", "algorithm.batch_size=7")
    case.run()
    assert bool((case.simulation.federation.train_size % 7).any())  # the last minibatch of a pass is shorter
    assert worst(tmp_path, case.simulation) <= 1e-6


@pytest.mark.parametrize("name", ["changes", "halves"])
def test_int8_is_the_simulations_but_where_a_last_bit_tips_a_step(tmp_path: Path, name: str) -> None:
    """A change is a difference: its relative rounding is larger than a model's, and now and then crosses a step."""
    case = Case(tmp_path, f"algorithm.name={name}", "algorithm.tau=2", "wire.codec=int8", "run.rounds=1")
    assert case.run()["uplink_bytes"] == case.simulation.ledger.uplink
    shipped = case.simulation.global_model()
    assert shipped is not None
    wanted = case.simulation.objective.state_dict(shipped)
    gap = (as_vector(load_file(tmp_path / "run" / "global.safetensors")) - as_vector(wanted)).abs()
    assert case.simulation._trained is not None
    largest = max(float(value.abs().max()) for value in case.simulation._trained[1].upload.values())
    assert float(gap.max()) <= largest / 127
    assert int((gap > 1e-7).sum()) <= len(gap) // 200


@pytest.mark.parametrize("name", ["changes", "halves"])
def test_it_is_fedavg(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path, f"algorithm.name={name}", "algorithm.tau=2")
    case.run()
    assert worst(tmp_path, Case(tmp_path / "fedavg", "algorithm.name=fedavg", "algorithm.tau=2").simulation) <= 1e-6


@pytest.mark.parametrize("method", ["changes", "fedavg", "fedavg_sar", "pfedme", "perfedavg", "tdpfed optimizer=gd"])
def test_it_is_the_simulation_of_all_clients_at_once_as_well(tmp_path: Path, method: str) -> None:
    """Up to rounding, which Adam would magnify: it divides by gradients that are all but 0."""
    name, *settings = method.split()
    case = Case(tmp_path, "run.runner=batched", f"algorithm.name={name}", *(f"algorithm.{text}" for text in settings))
    case.run()
    assert worst(tmp_path, case.simulation) <= 1e-6


@pytest.mark.parametrize("expected", [1, 3, 6, 9])
def test_minibatches_beyond_those_expected_are_the_simulations(tmp_path: Path, expected: int) -> None:
    settings = ("algorithm.name=thirsty", "algorithm.tau=2", "algorithm.more=4")
    case = Case(tmp_path, *settings, f"algorithm.expected={expected}")
    case.run()
    assert worst(tmp_path, case.simulation) <= 1e-6
    longer = Case(tmp_path / "longer", "algorithm.name=fedavg", "algorithm.tau=6")
    assert worst(tmp_path, longer.simulation) <= 1e-6


@pytest.mark.parametrize("fault", ["name", "length", "loss"])
def test_an_upload_that_was_not_declared_is_lost_with_the_reason(tmp_path: Path, fault: str) -> None:
    case = Case(tmp_path, "algorithm.name=fedavg", "algorithm.tau=1", "participation.below_quorum=stop")
    case.settings |= {"algorithm.name": "undeclared", "algorithm.fault": fault}
    grid = case.grid()
    with pytest.raises(QuorumError, match="round 1: 0 uploads accepted"):
        case.run(grid)
    failed = [answer.error.reason or "" for answer in grid.sent if answer.has_error()]
    assert len(failed) == NODES
    assert all("undeclared.update: " in reason for reason in failed)
    assert case.state(0).upto(10) is None  # a round that failed leaves nothing


def test_both_sides_know_how_many_clients_there_are(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=halves", "algorithm.tau=1")
    node = Node(case.task, case.settings, {"partition-id": 1, "state-dir": str(tmp_path / "state")})
    server = Side.of(case.task, case.config, NODES, torch.device("cpu"))
    assert node.side.algorithm.population == server.algorithm.population == NODES
    assert case.simulation.algorithm.population == NODES
    assert isinstance(server.algorithm, Halves)


@pytest.mark.parametrize("name", METHODS)
def test_two_nodes_with_the_methods_of_the_docs_are_the_simulation(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_methods.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    given = (f"algorithm.name={name}", "algorithm.tau=2", "data.clients=2", "data.per_client=5")
    case = Case(tmp_path / "flower", *given, nodes=2)
    summary = case.run(case.grid(nodes=range(2)))
    assert summary["status"] == "finished"
    assert summary["uplink_bytes"] == case.simulation.ledger.uplink
    assert summary["personalized_accuracy"] == pytest.approx(case.simulation.record(0.0).personalized_accuracy)
    for client in range(2):
        kept = case.state(client).upto(3)
        assert kept is not None
        assert torch.allclose(kept["theta"], case.simulation.private["theta"][client], atol=1e-6)


SAMPLED = ("scaffold", "apfl", "fedrep", "pfedpara", "hypcluster")
NEEDS_SAMPLES = ("dapper", "mocha")
EVERY = [
    pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.slow)
    for name, method in ALGORITHMS.items()
    if method.communicates and name not in NEEDS_SAMPLES
]


@pytest.mark.parametrize("name", EVERY)
def test_every_method_is_the_simulation(name: str, tmp_path: Path) -> None:
    case = Case(tmp_path, f"algorithm.name={name}", "algorithm.tau=2", "run.rounds=2")
    summary, record = case.run(), case.simulation.record(0.0)
    assert summary["uplink_bytes"] == case.simulation.ledger.uplink
    assert summary["downlink_bytes"] == case.simulation.ledger.downlink
    for accuracy in ("personalized_accuracy", "local_accuracy", "global_accuracy"):
        expected = getattr(record, accuracy)
        assert summary[accuracy] == (expected if expected is None else pytest.approx(expected)), accuracy
    if case.simulation.global_model() is not None:
        assert worst(tmp_path, case.simulation) <= 1e-6
    for client in range(NODES):
        kept = case.state(client).upto(2)
        assert kept is not None
        for entry, value in case.simulation.private.items():
            assert torch.allclose(kept[entry], value[client], atol=1e-5), entry


@pytest.mark.parametrize("name", NEEDS_SAMPLES)
def test_a_method_that_needs_samples_a_node_has_not_is_refused(name: str, tmp_path: Path) -> None:
    case = Case(tmp_path, f"algorithm.name={name}", "run.rounds=1", "model.name=logistic")
    with pytest.raises(TDPFedError, match=f"^algorithm.name: '{name}' given, must be another"):
        case.run()
