"""Metrics equal scikit-learn's, of each client and of all pooled, however the samples are cut into pieces."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.nn import functional

import work_cases as cases
from tdpfed import FedAvg, Federation
from tdpfed.core.metrics import Metric
from tdpfed.core.tasks import Task
from tdpfed.engine import evaluate
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError

CLASSES = 4


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Given(nn.Module):
    """The outputs of a sample are its inputs, in some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.scale = shape, nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape) * self.scale


def federation(outputs: Tensor, y: Tensor, **more: Any) -> Federation:
    """Return clients of 5, 9 and 40 test samples whose inputs are the outputs of the model."""
    owner = torch.arange(3).repeat_interleave(torch.tensor([7, 11, 42]))
    first = torch.cat([torch.arange(n) for n in (7, 11, 42)])
    return Federation.from_tensors(
        outputs.flatten(1), y, owner, test_mask=first >= 2, normalize="none", dtype=torch.float64, **more
    )


def sharp(outputs: Tensor) -> Any:
    return functional.softmax(outputs, -1).numpy()


def several_auc(y: Tensor, scores: Any, columns: int) -> float:
    areas = [
        sk.roc_auc_score((y == c).numpy(), scores[:, c]) for c in range(columns) if 0 < int((y == c).sum()) < len(y)
    ]
    return float(np.mean(areas))


def label_auc(outputs: Tensor, y: Tensor) -> float:
    some = [c for c in range(y.shape[1]) if 0 < int(y[:, c].sum()) < len(y)]
    return float(np.mean([sk.roc_auc_score(y[:, c].long().numpy(), outputs[:, c].numpy()) for c in some]))


def counted(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs and targets at the positions that have a target."""
    there = y != -100
    return outputs[there], y[there]


def in_top(outputs: Tensor, y: Tensor, k: int) -> float:
    return float(sk.top_k_accuracy_score(y.numpy(), outputs.numpy(), k=k, labels=range(outputs.shape[-1])))


Expected = Callable[[Tensor, Tensor], float]
ONE_OF: dict[str, Expected] = {
    "accuracy": lambda o, y: sk.accuracy_score(y, o.argmax(-1)),
    "top2": lambda o, y: in_top(o, y, 2),
    "f1": lambda o, y: sk.f1_score(y, o.argmax(-1), average="macro"),
    "auc": lambda o, y: several_auc(y, sharp(o), o.shape[-1]),
    "perplexity": lambda o, y: float(np.exp(sk.log_loss(y, sharp(o), labels=range(o.shape[-1])))),
}
TWO: dict[str, Expected] = {
    "accuracy": lambda o, y: sk.accuracy_score(y, o[:, 0] > 0),
    "f1": lambda o, y: sk.f1_score(y, o[:, 0] > 0, average="macro"),
    "auc": lambda o, y: float(sk.roc_auc_score(y, o[:, 0])),
}
LABELS: dict[str, Expected] = {
    "accuracy": lambda o, y: sk.accuracy_score(y.flatten(), o.flatten() > 0),
    "f1": lambda o, y: sk.f1_score(y, o > 0, average="macro"),
    "auc": label_auc,
}
NUMBERS: dict[str, Expected] = {
    "mse": lambda o, y: sk.mean_squared_error(y, o), "r2": lambda o, y: sk.r2_score(y, o),
}  # fmt: skip


def at_positions(expected: Expected) -> Expected:
    return lambda outputs, y: expected(*counted(outputs, y))


TOKENS = {name: at_positions(expected) for name, expected in ONE_OF.items() if name != "auc"}


def tokens() -> Tensor:
    y = torch.randint(CLASSES, (60, 3), generator=torch.Generator().manual_seed(1))
    y[::4, 1:] = -100
    return y


def labels() -> Tensor:
    return (draws(60, CLASSES, seed=3) > 0).long()


TASKS: dict[str, tuple[tuple[int, ...], Callable[[], Tensor], dict[str, Expected], dict[str, Any]]] = {
    "classes": ((CLASSES,), lambda: torch.arange(60) * 7 % 11 % CLASSES, ONE_OF, {}),
    "two classes, one output": ((1,), lambda: torch.arange(60) * 7 % 11 % 2, TWO, {"loss": "bce"}),
    "labels": ((CLASSES,), labels, LABELS, {}),
    "numbers": ((2,), lambda: draws(60, 2, seed=4), NUMBERS, {}),
    "tokens": ((3, CLASSES), tokens, TOKENS, {}),
}
CASES = [(task, name) for task, (_, _, names, _) in TASKS.items() for name in names]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@pytest.mark.parametrize("at_once", [6, 4096])
@pytest.mark.parametrize(("task", "name"), CASES)
def test_a_metric_is_scikit_learns_for_each_client_and_for_all(task: str, name: str, at_once: int) -> None:
    shape, targets, expected, options = TASKS[task]
    data = federation(2 * draws(60, *shape), targets())
    simulation = Simulation(Given(shape), data, FedAvg(tau=1), metrics=[name], **options)
    metric, theta = simulation.objective.task.main, simulation.objective.initial()
    score = evaluate.score_one(simulation.objective, theta, data, at_once)
    parts = [data.client(k)[2:] for k in range(3)]
    wanted = [expected[name](x.reshape(len(x), *shape), y) for x, y in parts]
    assert score.per_client(metric) == pytest.approx(wanted, rel=1e-9)
    x, y = (torch.cat(both) for both in zip(*parts, strict=True))
    assert score.result(metric) == pytest.approx(expected[name](x.reshape(len(x), *shape), y), rel=1e-9)


def test_records_hold_every_metric_and_the_first_is_the_main_one() -> None:
    def share_of_zeros(outputs: Tensor, targets: Tensor) -> float:
        return float((targets == 0).double().mean())

    shape, targets, _, _ = TASKS["classes"]
    data = federation(2 * draws(60, *shape), targets())
    simulation = Simulation(Given(shape), data, FedAvg(tau=1), metrics=["f1", "top2", share_of_zeros])
    simulation.step()
    record = simulation.record(0.0)
    assert record.metrics is not None
    assert list(record.metrics) == ["f1", "top2", "share_of_zeros"]
    assert record.main.name == "f1"
    assert record.personalized_accuracy is None
    held_out = torch.cat([data.client(k)[3] for k in range(3)])
    assert record.metrics["share_of_zeros"]["global"] == pytest.approx(float((held_out == 0).double().mean()))
    assert record.metrics["share_of_zeros"]["clients"] == [
        pytest.approx(float((data.client(k)[3] == 0).double().mean())) for k in range(3)
    ]


def test_a_metric_of_ones_own_may_be_better_when_lower_and_its_errors_are_named() -> None:
    def error(outputs: Tensor, targets: Tensor) -> float:
        return float((outputs.squeeze(-1) - targets).abs().mean())

    error.lower_is_better = True  # type: ignore[attr-defined]
    assert not Metric.own(error).higher

    def broken(outputs: Tensor, targets: Tensor) -> float:
        raise ZeroDivisionError("oh")

    simulation = Simulation(Given((1,)), federation(draws(60, 1), draws(60, seed=4)), FedAvg(tau=1), metrics=[broken])
    simulation.step()
    with pytest.raises(TDPFedError, match=r"task\.metrics: 'broken' failed \(ZeroDivisionError: oh\)"):
        simulation.record(0.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [(["hinge"], "hinge"), (["f1", "f1"], "each metric once"), (["top0"], "top0"), (["no_module:f"], "failed")],
)
def test_bad_metrics_are_refused(given: list[str], words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Simulation(nn.Linear(6, 3).double(), cases.classes(cases.FLAT), FedAvg(), metrics=given)


def test_losses_of_many_samples_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(3)
    outputs = 30 * torch.randn(400, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(7, (400,), generator=generator)
    task = Task.of()
    torch.testing.assert_close(
        task.each(outputs, targets, many=True), task.each(outputs, targets), rtol=1e-12, atol=1e-12
    )
