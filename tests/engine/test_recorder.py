"""What a record says: models of all three kinds by hand, honest clients alone, and a sample of clients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed import FedAvg, Participation, PFedMe
from tdpfed.engine import evaluate, recorder
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.simulate import simulate


def test_a_record_by_hand() -> None:
    """Personalized, local and global accuracy, losses, bytes and who took part, from the states alone."""
    data = small.federation()
    simulation = Simulation(small.mlp(), data, PFedMe(**small.COMMON), participation=Participation(3))
    simulation.step()
    record = simulation.record(1.5)
    chosen = simulation.participation.draw(simulation.seed, 1, simulation.federation.clients)[0].tolist()
    local = simulation._trained[1].upload["w"] if simulation._trained else None
    assert local is not None

    def right(theta: Tensor, k: int) -> tuple[int, float]:
        outputs = simulation.objective.outputs(theta, data.client(k)[2])
        y = data.client(k)[3]
        return int((outputs.argmax(1) == y).sum()), float(nn.functional.cross_entropy(outputs, y, reduction="sum"))

    own = [right(simulation.private["theta"][k], k) for k in range(5)]
    common = [right(simulation.server["w"], k) for k in range(5)]
    tests = data.test_size.tolist()
    assert record.personalized_accuracy == sum(n for n, _ in own) / sum(tests)
    assert record.global_accuracy == sum(n for n, _ in common) / sum(tests)
    reported = sum(right(local[row], k)[0] for row, k in enumerate(chosen))
    assert record.local_accuracy == reported / sum(tests[k] for k in chosen)
    assert record.personalized_loss == pytest.approx(sum(loss for _, loss in own) / sum(tests))
    assert record.global_loss == pytest.approx(sum(loss for _, loss in common) / sum(tests))
    assert record.client_accuracy == [n / count for (n, _), count in zip(own, tests, strict=True)]
    assert (record.participants, record.seconds, record.round, record.diagnostics) == (3, 1.5, 1, None)
    assert small.carries(record.uplink_bytes, 3, simulation.objective.layout.size)
    assert small.carries(record.downlink_bytes, 3, simulation.objective.layout.size)
    assert record.minibatch_loss == simulation.minibatch_loss


@pytest.mark.parametrize(("name", "passes"), [("fedavg", 2), ("pfedme", 3), ("local", 1)])
def test_models_that_are_the_same_are_evaluated_once(name: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of FedAvg uploads the model that it keeps; pFedMe has three models for each client."""
    simulation = small.train(small.variants()[name], 1)
    scored = small.watched(monkeypatch, evaluate, "score")
    simulation.record(0.0)
    assert sum(int(score.count.sum()) for score in scored) == passes * int(simulation.federation.test_size.sum())


def test_training_losses_are_those_of_the_models_they_are_named_after() -> None:
    """On all training samples, where the loss of the last minibatch is another number."""
    data = small.federation()
    simulation = small.train(PFedMe(**small.COMMON), 1, train_loss=True, data=data)
    record = simulation.record(0.0)

    def mean_loss(models: Callable[[int], Tensor]) -> float:
        found = [
            nn.functional.cross_entropy(simulation.objective.outputs(models(k), x), y, reduction="sum")
            for k, (x, y, _, _) in enumerate(map(data.client, range(5)))
        ]
        return float(torch.stack(found).sum()) / int(data.train_size.sum())

    own = mean_loss(lambda k: simulation.private["theta"][k])
    assert record.personalized_train_loss == pytest.approx(own)
    assert record.global_train_loss == pytest.approx(mean_loss(lambda _: simulation.server["w"]))
    assert record.minibatch_loss != pytest.approx(own, rel=1e-3)


def test_only_honest_clients_accuracy_counts() -> None:
    """A client that trains on flipped labels answers wrongly by intent: its accuracy is listed, not counted."""
    simulation = small.train(FedAvg(**small.COMMON), attack=Attack("label-flip", 0.4))
    record = simulation.record(0.0)
    sizes = simulation.federation.test_size.double()
    each = torch.tensor([accuracy or 0.0 for accuracy in record.client_accuracy], dtype=torch.float64)
    weights = sizes * simulation.honest
    assert int((~simulation.honest).sum()) == 2
    assert record.personalized_accuracy == pytest.approx(float((each * weights).sum() / weights.sum()))
    assert record.participants == 5


def test_only_a_sample_of_the_clients_is_evaluated() -> None:
    data = small.federation(9)
    runs = [
        simulate(small.mlp(), data, small.variants()["fedavg"], 2, seed=4, evaluate_clients=some) for some in (None, 3)
    ]
    whole, some = (run.final for run in runs)
    judged = [k for k, accuracy in enumerate(some.client_accuracy) if accuracy is not None]
    assert judged == runs[1].simulation.recorder.evaluated.tolist()
    assert len(judged) == 3
    assert [some.client_accuracy[k] for k in judged] == [whole.client_accuracy[k] for k in judged]
    right = sum(round(some.client_accuracy[k] * int(data.test_size[k])) for k in judged)  # type: ignore[operator, misc]
    assert some.personalized_accuracy == right / int(data.test_size[judged].sum())
    assert some.local_accuracy == whole.local_accuracy  # of those who trained
    assert small.equal(runs[0].simulation, runs[1].simulation)
    again = simulate(small.mlp(), data, small.variants()["fedavg"], 1, seed=5, evaluate_clients=3)
    assert again.simulation.recorder.evaluated.tolist() != judged


@pytest.mark.parametrize("given", [0, 10])
def test_a_sample_that_cannot_be_is_refused(given: int) -> None:
    with pytest.raises(TDPFedError, match=rf"run\.evaluate_clients: {given} given, must be at least 1 and at most 9"):
        Simulation(small.mlp(), small.federation(9), small.variants()["fedavg"], evaluate_clients=given)


def test_rows_are_equal_only_if_all_their_parameters_are() -> None:
    one = torch.randn(4, 3 * recorder.FEW, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[1, 0] += 1  # among those that are compared first
    other[2, -1] += 1  # behind them
    assert recorder._equal_rows(one, other).tolist() == [True, False, False, True]
    assert recorder._equal_rows(one, one).all()
