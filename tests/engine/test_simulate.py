"""The round loop: what it records and returns, when it stops, and what it refuses."""

import json
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed import FedAvg, FedAvgSAR, Federation, Local, Participation, PerFedAvg, PFedMe, TDPFed, simulate
from tdpfed.core.state import Turn
from tdpfed.engine import checks
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.updates import FINITE, Updates
from tdpfed.errors import TDPFedError
from tdpfed.server.records import Ledger, Record

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FAST: dict[str, Any] = {"tau": 1, "batch_size": 2}


@pytest.mark.parametrize(
    ("rounds", "every", "expected"), [(4, 1, [1, 2, 3, 4]), (7, 3, [3, 6, 7]), (2, 5, [2]), (6, 3, [3, 6])]
)
def test_a_record_every_so_many_rounds_and_after_the_last(rounds: int, every: int, expected: list[int]) -> None:
    result = simulate(small.mlp(), small.federation(), FedAvg(**FAST), rounds, evaluate_every=every)
    assert [record.round for record in result.records] == expected
    assert result.final is result.records[-1]
    assert result.simulation.round == rounds
    seconds = [record.seconds for record in result.records]
    assert seconds == sorted(seconds)


def test_a_run_goes_on_where_it_stopped() -> None:
    parted = Simulation(small.mlp(), small.federation(), TDPFed(**small.TDPFED))
    records = [*parted.run(2), *parted.run(1)]
    assert [record.round for record in records] == [1, 2, 3]
    assert small.equal(parted, small.train(TDPFed(**small.TDPFED), 3))


def test_records_are_json_even_where_numbers_are_not() -> None:
    record = Record(
        1, 2.0, 0.5, None, 0.5, math.inf, math.nan, [None, 1.0], 3, 4, 5, 6.0, {"drift": math.nan, "x": 1.0}
    )
    answer = json.loads(json.dumps(record.as_dict(), allow_nan=False))
    assert (answer["personalized_loss"], answer["global_loss"], answer["minibatch_loss"]) == (None, None, 2.0)
    assert answer["diagnostics"] == {"drift": None, "x": 1.0}
    assert answer["client_accuracy"] == [None, 1.0]


def test_learning_happens_and_every_model_is_scored() -> None:
    for name, algorithm in small.variants().items():
        result = simulate(small.mlp(), small.federation(), algorithm, 8, evaluate_every=8)
        final = result.final
        assert final.personalized_accuracy is not None
        assert final.personalized_accuracy > 0.6, name
        partial = name in ("local", "fedper", "fedrep", "lgfedavg")  # the server has no model, or a part of one
        assert (final.global_accuracy is None) == partial
        assert (result.global_model() is None) == partial


def test_the_result_loads_into_the_model() -> None:
    data = small.federation(dtype=torch.float32)
    result = simulate(small.convnet(), data, TDPFed(**small.TDPFED), 2)
    correct = 0
    for k, parameters in enumerate(result.personalized()):
        model = small.convnet(seed=9)
        model.load_state_dict(parameters)
        correct += int((model(data.client(k)[2]).argmax(1) == data.client(k)[3]).sum())
    assert result.final.personalized_accuracy == correct / int(data.test_size.sum())
    shipped = result.global_model()
    assert shipped is not None
    model = small.convnet(seed=9)
    model.load_state_dict(shipped)
    right = sum(int((model(data.client(k)[2]).argmax(1) == data.client(k)[3]).sum()) for k in range(5))
    assert result.final.global_accuracy == right / int(data.test_size.sum())


def test_the_users_model_is_left_alone() -> None:
    model = small.mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    simulate(model, small.federation(), FedAvg(**FAST), 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_clients_without_test_samples_are_trained_and_not_scored() -> None:
    data = small.federation()
    owner = torch.arange(5).repeat_interleave(data.train_size)
    train = torch.cat(
        [torch.arange(int(s), int(s + n)) for s, n in zip(data.train_start, data.train_size, strict=True)]
    )
    nobody = Federation.from_tensors(
        data.x[train], data.y[train], owner, test_mask=torch.zeros(len(owner), dtype=torch.bool), dtype=torch.float64
    )
    final = simulate(small.mlp(), nobody, FedAvg(**FAST), 1).final
    assert final.minibatch_loss is not None
    assert final.client_accuracy == [None] * 5
    assert (final.personalized_accuracy, final.local_accuracy, final.global_accuracy) == (None, None, None)
    some = Federation.from_tensors(
        data.x[train],
        data.y[train],
        owner,
        test_mask=(owner == 0) & (torch.arange(len(owner)) < 3),
        dtype=torch.float64,
    )
    scored = [
        simulate(small.mlp(), some, FedAvg(**FAST), 1, seed=seed, participation=Participation(1)).final
        for seed in range(24)
    ]
    assert {record.local_accuracy is None for record in scored} == {True, False}  # client 0 is chosen or not
    assert all(record.personalized_accuracy is not None for record in scored)


@pytest.mark.parametrize(
    ("algorithm", "rates"),
    [
        (FedAvg(tau=5, eta=1e30), "eta=1e+30"),
        (Local(tau=5, eta=1e30), "eta=1e+30"),
        (FedAvgSAR(tau=5, eta=1e30), "eta=1e+30"),
        (PFedMe(tau=3, eta_p=1e30), "eta=0.05, eta_p=1e+30"),
        (PerFedAvg(tau=5, eta=1e30), "eta=1e+30, alpha=0.01"),
        (TDPFed(tau=3, eta_p=1e30), "eta=0.0008, eta_p=1e+30"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_a_diverging_run_names_round_client_and_rates(algorithm: Any, rates: str, runner: Any) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), nn.Linear(12, small.CLASSES))
    simulation = Simulation(model, small.federation(dtype=torch.float32), algorithm, runner=runner)
    with pytest.raises(TDPFedError) as error:
        list(simulation.run(20))
    assert f"round {simulation.round + 1}: " in str(error.value)
    assert re.search(r"of client [0-4] are not finite", str(error.value))
    assert f"lower the learning rates ({rates})" in str(error.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_divergence_names_the_client_and_leaves_the_state_before_it(device: str) -> None:
    """Client 3's inputs turn infinite; the rounds before are kept, the failed one is not counted."""
    data = small.federation(dtype=torch.float32).to(torch.device(device))
    simulation = Simulation(small.mlp(), data, FedAvg(**FAST))
    simulation.step()
    before = {name: value.clone() for name, value in small.states(simulation).items()}
    up = simulation.ledger.uplink
    start, size = int(data.train_start[3]), int(data.train_size[3])
    data.x[start : start + size] = torch.inf
    with pytest.raises(TDPFedError, match=r"round 2: .* of client 3 are not finite"):
        simulation.step()
    assert simulation.round == 1
    assert simulation.ledger.uplink == up
    assert simulation.refused == []
    assert all(torch.equal(value, before[name]) for name, value in small.states(simulation).items())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_divergence_is_reported_instead_of_the_errors_it_causes(device: str) -> None:
    turn, flags = Turn(0, 4, torch.tensor([5, 8])), torch.tensor([True, False], device=device)
    updates = Updates({}, {}, {FINITE: flags})
    with (
        pytest.raises(TDPFedError, match=r"round 4: .* of client 8 are not finite"),
        checks.finite(updates, turn, FedAvg(), None),
    ):
        raise ZeroDivisionError
    for fine in (None, Updates({}, {}, {FINITE: flags[:1]})):
        with pytest.raises(ZeroDivisionError), checks.finite(fine, turn, FedAvg(), None):
            raise ZeroDivisionError


def test_parameters_that_are_not_finite_are_seen_in_their_round() -> None:
    """The last step of the last round overflows: its loss, taken before the step, is still finite."""

    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e4 * nn.functional.cross_entropy(outputs, targets)

    data = small.federation(dtype=torch.float32)
    simulation = Simulation(small.mlp(), data, FedAvg(tau=1, eta=1e38), loss=steep)
    with pytest.raises(TDPFedError, match="round 1: loss or parameters of client 0"):
        simulation.step()


class Reshaping(nn.Module):
    """Takes any input, and answers in a shape of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), *self.weight.shape)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 2)), ["outputs of shape (2,) for a sample", "3 classes"]),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(35, 3)), ["inputs of shape (1, 6, 6)"]),
        (lambda: nn.Conv2d(3, 4, 3), ["inputs of shape (1, 6, 6)"]),
        (lambda: nn.Conv2d(1, 3, 3), ["outputs of shape (3, 4, 4) for a sample"]),
        (lambda: Reshaping(5, 3), ["outputs of shape (5, 3) for a sample"]),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3)), ["'2'", "BatchNorm1d", "GroupNorm"]),
        (nn.Flatten, ["no parameter requires a gradient"]),
    ],
)
def test_a_model_that_does_not_fit_the_data(model: Any, words: list[str]) -> None:
    with pytest.raises(TDPFedError) as error:
        Simulation(model(), small.federation(), FedAvg())
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"participation": Participation(6)}, ["participation.clients", "6", "at most 5"]),
        ({"runner": "bached"}, ["runner", "did you mean 'batched'"]),
        ({"chunk": 0}, ["chunk", "0", "at least 1"]),
        ({"chunk": "auto"}, ["chunk", "'auto'", "at least 1", "None"]),
        ({"chunk": True}, ["chunk", "True", "at least 1"]),
        ({"participation": 3}, ["participation", "3", "Participation"]),
        ({"federation": (torch.zeros(90, 9), torch.zeros(90))}, ["federation", "a tuple", "Federation"]),
        ({"loss": "mse"}, ["task.loss", "'mse'", "'cross_entropy' or 'bce'"]),
        ({"loss": 3}, ["loss", "3", "function"]),
        ({"rounds": 0}, ["rounds", "0", "at least 1"]),
        ({"evaluate_every": 0}, ["evaluate_every", "0", "at least 1"]),
    ],
)
def test_bad_arguments(options: dict[str, Any], words: list[str]) -> None:
    data = options.pop("federation", small.federation())
    with pytest.raises(TDPFedError) as error:
        simulate(small.mlp(), data, FedAvg(**FAST), options.pop("rounds", 1), **options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "options",
    [{"clients": 0}, {"clients": -1}, {"train": "some"}, {"dropout": 1.0}, {"dropout": -0.1}, {"dropout": math.nan}],
)
def test_bad_participation(options: dict[str, Any]) -> None:
    with pytest.raises(TDPFedError, match=f"{next(iter(options))}: "):
        Participation(**options)


def test_a_pattern_that_matches_nothing_is_told_before_any_work() -> None:
    with pytest.raises(TDPFedError, match=r"exclude: the pattern 'conv\*' matches no parameter"):
        Simulation(small.mlp(), small.federation(), TDPFed(exclude=("conv*",)))


def test_a_loss_of_ones_own_may_use_other_outputs() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square().mean()

    def distance(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs().mean()

    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 1))
    result = simulate(model, small.federation(), FedAvg(**FAST, eta=0.01), 5, loss=squared, metrics=[distance])
    losses = [record.personalized_loss for record in result.records]
    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]


def test_the_ledger() -> None:
    assert Ledger().per_client_round == 0
    assert Ledger(30, 10, 4).per_client_round == 10
