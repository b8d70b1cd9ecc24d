"""Scores: ragged and empty test sets, pooled as sum over sum, in pieces of any size."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import FedAvg
from tdpfed.core import metrics
from tdpfed.core.objective import Objective
from tdpfed.data import Federation
from tdpfed.engine import evaluate
from tdpfed.engine.simulation import Simulation
from tdpfed.models import build

TESTS = [3, 0, 7, 1, 0]


def case(tests: list[int] = TESTS) -> tuple[Objective, Tensor, Federation]:
    """Return an objective, own parameters for each client, and clients with the given numbers of test samples."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.cat([torch.full((4 + count,), k) for k, count in enumerate(tests)])
    mask = torch.cat([torch.arange(4 + count) >= 4 for count in tests])
    x = torch.randn(len(owner), *small.SHAPE, generator=generator)
    y = torch.randint(small.CLASSES, (len(owner),), generator=generator)
    data = Federation.from_tensors(x, y, owner, test_mask=mask, classes=small.CLASSES, dtype=torch.float64)
    objective = Objective.of(small.mlp().double())
    theta = torch.randn(len(tests), objective.layout.size, dtype=torch.float64, generator=generator)
    return objective, theta, data


def correct(score: evaluate.Score) -> Tensor:
    """Return how many samples of each client are predicted correctly, ``(K,)``."""
    return score.sums["accuracy"][:, 0]


def by_hand(objective: Objective, theta: Tensor, data: Federation, k: int) -> tuple[int, float]:
    _, _, x, y = data.client(k)
    outputs = objective.outputs(theta, x)
    return int((outputs.argmax(1) == y).sum()), float(nn.functional.cross_entropy(outputs, y, reduction="sum"))


@pytest.mark.parametrize("at_once", [1, 3, 5, 8, 4096])
@pytest.mark.parametrize("kind", ["each", "one"])
def test_scores_by_hand_in_pieces_of_any_size(kind: str, at_once: int) -> None:
    objective, theta, data = case()
    if kind == "each":
        score = evaluate.score_each(objective, theta, data, torch.arange(5), at_once)
        expected = [by_hand(objective, theta[k], data, k) for k in range(5)]
    else:
        score = evaluate.score_one(objective, theta[2], data, at_once)
        expected = [by_hand(objective, theta[2], data, k) for k in range(5)]
    assert score.count.tolist() == TESTS
    assert correct(score).tolist() == [right for right, _ in expected]
    assert score.loss.tolist() == pytest.approx([loss for _, loss in expected], rel=1e-12)
    assert 0 < sum(correct(score).tolist()) < 11
    assert score.accuracy == sum(right for right, _ in expected) / 11
    assert score.mean_loss == pytest.approx(sum(loss for _, loss in expected) / 11, rel=1e-12)
    accuracies = score.per_client()
    assert accuracies[0] == expected[0][0] / 3
    assert (accuracies[1], accuracies[4]) == (None, None)


def test_some_clients_in_any_order() -> None:
    objective, theta, data = case()
    chosen = torch.tensor([4, 2, 0])
    score = evaluate.score_each(objective, theta[chosen], data, chosen)
    assert score.count.tolist() == [0, 7, 3]
    assert correct(score).tolist() == [by_hand(objective, theta[k], data, k)[0] for k in (4, 2, 0)]


def test_without_test_samples_there_is_no_accuracy() -> None:
    objective, theta, data = case([0, 0])
    for score in (
        evaluate.score_each(objective, theta, data, torch.arange(2)),
        evaluate.score_one(objective, theta[0], data),
    ):
        assert (score.accuracy, score.mean_loss, score.per_client()) == (None, None, [None, None])


def test_memory_is_bounded_by_the_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    inner = metrics.correct

    def spy(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(len(outputs))
        return inner(outputs, targets)

    spied = replace(metrics.ACCURACY, values=spy)
    objective, theta, data = case()
    objective = replace(objective, task=replace(objective.task, metrics=(spied,)))
    evaluate.score_each(objective, theta, data, torch.arange(5), at_once=10)
    assert 1 < max(seen) <= 10
    seen.clear()
    evaluate.score_one(objective, theta[0], data, at_once=10)
    assert max(seen) <= 10
    monkeypatch.setattr(evaluate, "PARAMETERS_AT_ONCE", 1)
    clients: list[int] = []

    def some(rows: slice) -> Tensor:
        clients.append(len(theta[rows]))
        return theta[rows]

    evaluate.score(objective, some, data, torch.arange(5))
    assert clients == [3, 2]


@pytest.mark.parametrize("kind", ["each", "one"])
def test_a_score_does_not_depend_on_who_is_scored_with_it(kind: str) -> None:
    """To the bit, at the paper's size: of several processes each scores its own clients."""
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(11).repeat_interleave(torch.arange(4, 26, 2))
    data = Federation.from_tensors(torch.randn(len(owner), 784, generator=generator), owner % 10, owner, classes=10)
    objective = Objective.of(build("dnn", seed=0))
    spread = torch.randn(11, objective.layout.size, generator=generator) / 100
    theta = objective.initial() + (spread if kind == "each" else 0)

    def score(clients: Tensor) -> evaluate.Score:
        return evaluate.score(objective, lambda rows: theta[clients[rows]] if kind == "each" else theta, data, clients)

    whole = score(torch.arange(11))
    for company in ([4], [10, 2], [0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9], [9, 8, 7, 6]):
        some = score(torch.tensor(company))
        assert torch.equal(some.loss, whole.loss[company])
        assert torch.equal(correct(some), correct(whole)[company])
    assert len(score(torch.arange(0)).loss) == 0


def test_a_large_model_gets_fewer_samples_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    objective, _, data = case()
    assert evaluate.samples_at_once(objective, data) == evaluate.SAMPLES_AT_ONCE
    monkeypatch.setattr(evaluate, "ACTIVATIONS_AT_ONCE", 3 * objective.activation_size(data.x[:2]))
    assert evaluate.samples_at_once(objective, data) == 3


def test_clients_with_many_samples_are_scored_by_themselves_with_the_same_outcome() -> None:
    """To the bit whoever is scored with them, and however many samples fit at once."""
    many = evaluate.ONE_BY_ONE_TARGETS
    objective, theta, data = case([many + 30, 5, 0, many, many - 1])
    whole = evaluate.score_each(objective, theta, data, torch.arange(5))
    expected = [by_hand(objective, theta[k], data, k) for k in range(5)]
    assert correct(whole).tolist() == [right for right, _ in expected]
    assert whole.loss.tolist() == pytest.approx([loss for _, loss in expected], rel=1e-12)
    for company in ([0], [3, 4], [4, 2, 0]):
        some = evaluate.score(objective, lambda rows, c=company: theta[c][rows], data, torch.tensor(company))  # type: ignore[misc]
        assert torch.equal(some.loss, whole.loss[company])
    pieces = evaluate.score_each(objective, theta, data, torch.arange(5), 17)
    assert correct(pieces).tolist() == correct(whole).tolist()


def test_convolutions_are_scored_client_by_client_on_a_cpu_with_the_same_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = small.federation()
    objective = Objective.of(small.convnet().double())
    theta = objective.initial() + torch.linspace(-0.1, 0.1, 5, dtype=torch.float64)[:, None]
    singly = evaluate.score_each(objective, theta, data, torch.arange(5))
    monkeypatch.setattr(Objective, "one_by_one", lambda self, theta: False)
    together = evaluate.score_each(objective, theta, data, torch.arange(5))
    assert torch.equal(correct(singly), correct(together))
    torch.testing.assert_close(singly.loss, together.loss)


class InPlace(nn.Module):
    """A model that changes its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x.sub_(1.0))
        return outputs


@pytest.mark.parametrize("each", [8, 400])
def test_a_model_that_changes_its_inputs_changes_no_sample(each: int) -> None:
    x, owner = torch.randn(4 * each, 3), torch.arange(4 * each) // each
    data = Federation.from_tensors(x, torch.arange(4 * each) % 2, owner)
    before = data.x.clone()
    made = Simulation(InPlace(), data, FedAvg(tau=1, batch_size=4), train_loss=True)
    made.step()
    made.record(0.0)
    assert torch.equal(data.x, before)
