"""Metrics as functions of sums over samples, and exact ones of all outputs where no sums would do."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from tdpfed.core.losses import IGNORED, alike, each_cross_entropy, positions

Function = Callable[[Tensor, Tensor], float | Tensor]
"""Maps the outputs of a set of samples and their targets to a number."""

NAMES = ("accuracy", "top5", "f1", "auc", "mse", "r2", "perplexity")
"""The built-in metrics; ``top5`` stands for any ``topK``."""


@dataclass(frozen=True)
class Metric:
    """A metric of models on samples: what of each sample adds up, and the result of the sums.

    Without ``values`` the metric is a function ``whole`` of all outputs ``(n, ...)`` and targets ``(n, ...)``.
    Undefined results, as without samples, are NaN.
    """

    name: str
    higher: bool  # whether a higher value is better
    kinds: tuple[str, ...] = ()
    values: Callable[[Tensor, Tensor], Tensor] | None = None  # outputs, targets (B, ...) to (B, S)
    result: Callable[[Tensor], Tensor] | None = None  # sums (..., S) to (...)
    whole: Function | None = None
    built_in: bool = True

    @classmethod
    def own(cls, function: Function, name: str = "") -> Self:
        """Return the metric of the user's own function; ``function.lower_is_better = True`` turns it round."""
        name = name or getattr(function, "__name__", type(function).__name__)
        return cls(name, not getattr(function, "lower_is_better", False), whole=function, built_in=False)


def named(name: str) -> Metric | None:
    """Return a built-in metric; None if there is none of this name."""
    if found := re.fullmatch(r"top([1-9]\d{0,5})", name):
        return Metric(name, True, ("classes", "tokens"), _top(int(found[1])), _share)
    return _BY_NAME.get(name)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how many targets of each sample are predicted correctly, and how many there are, ``(B, 2)``.

    The largest output is the predicted class. Of labels, and of two classes with one output, those above 0 are.
    """
    predicted, targets, counted = _predicted(outputs, targets)
    right = (predicted == targets) & counted
    return torch.stack([right.sum(1), counted.sum(1)], -1)


def _predicted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return predictions and targets in one shape ``(B, n)``, and which of them count."""
    if _binary(outputs, targets):
        found, targets = _rows(outputs) > 0, _rows(targets)
    else:
        found, targets = _rows(outputs.max(-1).indices), _rows(targets)  # as argmax, in less time
    return found.to(targets.dtype), targets, targets != IGNORED


def _rows(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _binary(outputs: Tensor, targets: Tensor) -> bool:
    """Whether outputs are logits of labels, one for each target."""
    return outputs[0].numel() == targets[0].numel()


def in_percent(name: str) -> bool:
    """Whether the metric of this name is a share that people give in percent."""
    return re.fullmatch(r"accuracy|top\d+", name) is not None


def _top(k: int) -> Callable[[Tensor, Tensor], Tensor]:
    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        best = outputs.topk(min(k, outputs.shape[-1]), -1).indices
        counted = targets != IGNORED
        right = (best == targets.unsqueeze(-1)).any(-1) & counted
        return torch.stack([_rows(right).sum(1), _rows(counted).sum(1)], -1)

    return values


def _share(sums: Tensor) -> Tensor:
    return sums[..., 0] / sums[..., 1]


def _confusion(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each class or label the true positives, the predicted and the actual ones, ``(B, 3 C)``."""
    if _binary(outputs, targets) and not (targets.ndim == 1 or targets.shape[1:] == (1,)):
        predicted, actual = _rows(outputs) > 0, _rows(targets) > 0.5
        return torch.cat([predicted & actual, predicted, actual], 1)
    found, targets, counted = _predicted(outputs, targets)
    classes = max(2, outputs.shape[-1] if outputs.ndim > 1 else 2)
    numbers = torch.arange(classes, device=targets.device)
    predicted, actual = ((one.unsqueeze(-1) == numbers) & counted.unsqueeze(-1) for one in (found, targets))
    return torch.cat([(predicted & actual).sum(1), predicted.sum(1), actual.sum(1)], 1)


def _macro_f1(sums: Tensor) -> Tensor:
    """Return the mean F1 over the classes that occur or are predicted."""
    both, predicted, actual = sums.unflatten(-1, (3, -1)).unbind(-2)
    there: Tensor = predicted + actual > 0
    scores: Tensor = torch.where(there, 2 * both / (predicted + actual), 0)
    return scores.sum(-1) / there.sum(-1)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    squares = _rows((outputs.double() - alike(targets, outputs).double()).square())
    return torch.stack([squares.mean(1), torch.ones_like(squares[:, 0])], -1)


def _squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return for each value the squared error, the target, its square, and 1, ``(B, 4 D)``."""
    y = _rows(alike(targets, outputs).double())
    error = _rows(outputs.double()) - y
    return torch.cat([error.square(), y, y.square(), torch.ones_like(y)], 1)


def _r2(sums: Tensor) -> Tensor:
    """Return 1 minus the squared error over the variance, the mean over target values; NaN if they are constant."""
    error, y, squares, n = sums.unflatten(-1, (4, -1)).unbind(-2)
    around = squares - y.square() / n
    least = 1e-12 * squares  # what is left of constant targets is rounding
    return torch.where(around > least, 1 - error / around, torch.nan).mean(-1)


def _surprise(outputs: Tensor, targets: Tensor) -> Tensor:
    counts = positions(targets) if targets.ndim > 1 else torch.ones_like(targets)
    return torch.stack([each_cross_entropy(outputs, targets).double() * counts, counts.double()], -1)


def _auc(outputs: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve, the mean over labels, or over classes each against the others.

    Exact, from the ranks of all outputs; ties count half. Classes without positive or without negative samples are left
    out. Scores of classes are their probabilities.
    """
    if _binary(outputs, targets):
        scores, actual = _rows(outputs).double(), _rows(targets) > 0.5
    else:
        scores = functional.softmax(outputs.double(), -1)
        actual = targets.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=targets.device)
    areas = []
    for column, truth in zip(scores.T, actual.T, strict=True):
        positive = int(truth.sum())
        if 0 < positive < len(truth):
            _, inverse, counts = column.unique(return_inverse=True, return_counts=True)
            ranks = (counts.cumsum(0).double() - (counts - 1) / 2)[inverse]
            areas.append((float(ranks[truth].sum()) - positive * (positive + 1) / 2)
                         / (positive * (len(truth) - positive)))  # fmt: skip
    return sum(areas) / len(areas) if areas else float("nan")


SURPRISE = _surprise
"""What perplexity adds up: the cross-entropy of each sample, and the positions it is of."""

ACCURACY = Metric("accuracy", True, ("classes", "labels", "tokens"), correct, _share)
"""Correct predictions over predictions."""

_BY_NAME = {
    "accuracy": ACCURACY,
    "f1": Metric("f1", True, ("classes", "labels", "tokens"), _confusion, _macro_f1),
    "auc": Metric("auc", True, ("classes", "labels"), whole=_auc),
    "mse": Metric("mse", False, ("numbers",), _errors, _share),
    "r2": Metric("r2", True, ("numbers",), _squares, _r2),
    "perplexity": Metric("perplexity", False, ("classes", "tokens"), _surprise, lambda sums: _share(sums).exp()),
}
