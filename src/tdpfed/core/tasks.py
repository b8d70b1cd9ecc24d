"""What is learned: the kind of targets, the loss that clients minimize, and the metrics that models are judged by.

Everything is computed for each sample, ``(B, ...)`` to ``(B, S)``, and added up. So sums over minibatches, clients and
processes are those of all samples together, and a metric is a function of sums: F1 of counts, R2 of sums of squares. A
metric that is no function of sums, as AUC, is computed from the collected outputs of all samples, exactly.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal, Self, get_args

from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from tdpfed.core import metrics
from tdpfed.core.losses import (
    LossFunction,
    bce,
    cross_entropy,
    each_cross_entropy,
    huber,
    many_cross_entropies,
    mse,
    positions,
)
from tdpfed.core.metrics import Function as MetricFunction
from tdpfed.core.metrics import Metric
from tdpfed.core.setting import check, setting
from tdpfed.errors import TDPFedError, unknown, wrong

Kind = Literal["classes", "labels", "numbers", "tokens"]
"""Of targets: a class number for each sample; 0 or 1 for each of several labels; real numbers; a sequence of tokens."""

KINDS = get_args(Kind)


@dataclass(frozen=True)
class Loss:
    """A loss: its name, its mean over a batch, and the targets for which it is defined."""

    name: str
    mean: LossFunction
    kinds: tuple[Kind, ...] = KINDS


LOSSES = {
    "cross_entropy": Loss("cross_entropy", cross_entropy, ("classes", "tokens")),
    "bce": Loss("bce", bce, ("labels", "classes")),
    "mse": Loss("mse", mse, ("numbers",)),
    "huber": Loss("huber", huber, ("numbers",)),
}
"""The losses by name."""

AUTO: dict[Kind, str] = {"classes": "cross_entropy", "labels": "bce", "numbers": "mse", "tokens": "cross_entropy"}
"""The loss for each kind of targets."""

USUAL_METRICS: dict[Kind, tuple[str, ...]] = {
    "classes": ("accuracy",), "labels": ("f1", "auc"), "numbers": ("mse", "r2"), "tokens": ("accuracy", "perplexity"),
}  # fmt: skip
"""The metrics for each kind of targets; the first is the main one."""


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    """The loss that clients minimize, and the metrics that are reported."""

    loss: str = setting(
        "auto",
        "cross_entropy, bce, mse, huber, or your own as package.module:function; auto: cross_entropy for classes and "
        "sequences of tokens, bce for labels of 0 and 1, mse for numbers",
    )
    metrics: tuple[str, ...] = setting(
        (),
        "accuracy, topK as in top5, f1, auc, mse, r2, perplexity, or your own as package.module:function; the first is "
        "the main one. Default: what fits the targets",
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Task:
    """A loss and metrics for one kind of targets."""

    loss: Loss
    metrics: tuple[Metric, ...]
    kind: Kind = "classes"

    @classmethod
    def of(
        cls,
        loss: str | LossFunction = "auto",
        metrics: Sequence[str | Metric | MetricFunction] = (),
        kind: Kind = "classes",
    ) -> Self:
        """Return the task of a loss and metrics, each by name or as a function."""
        given = [metrics] if isinstance(metrics, str) else list(metrics)
        found = tuple(metric_of(one, kind) for one in (given or USUAL_METRICS[kind]))
        names = [one.name for one in found]
        if len(set(names)) < len(names):
            raise wrong("task.metrics", ", ".join(names), "each metric once")
        return cls(loss_of(loss, kind), found, kind)

    @property
    def main(self) -> Metric:
        """The metric by which runs are compared."""
        return self.metrics[0]

    @property
    def usual(self) -> bool:
        """Whether the only metric is accuracy."""
        return [one.name for one in self.metrics] == ["accuracy"]

    @property
    def rates(self) -> bool:
        """Whether a prediction is right or wrong."""
        return self.kind != "numbers"

    def right(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return which samples are predicted correctly, ``(B,)``; of several targets, the share of them."""
        if self.kind == "classes" and not self.one_output(outputs):
            return outputs.argmax(-1) == targets
        right, counted = metrics.correct(outputs, targets).unbind(-1)
        return right / counted.clamp_min(1)

    def each(self, outputs: Tensor, targets: Tensor, *, many: bool = False) -> Tensor:
        """Return the loss of each sample, ``(B,)``; ``many``: faster for many samples, with another rounding."""
        if self.loss.name == "cross_entropy":
            if many and targets.ndim == 1:
                return many_cross_entropies(outputs, targets)
            return each_cross_entropy(outputs, targets)
        losses: Tensor = vmap(lambda output, target: self.loss.mean(output[None], target[None]))(outputs, targets)
        return losses

    def weight(self, targets: Tensor) -> Tensor:
        """Return for how much each sample counts in a mean loss, ``(B,)``: its positions that have a target, or 1."""
        return positions(targets) if self.kind == "tokens" else targets.new_ones(len(targets))

    def one_output(self, outputs: Tensor) -> bool:
        """Whether outputs ``(B, ...)`` are one value for each sample, as of two classes with a binary loss."""
        return outputs[0].numel() == 1

    def check_outputs(self, outputs: Tensor, targets: Tensor, classes: int) -> None:
        """Refuse outputs ``(B, ...)`` that do not fit the targets, in shape or in what they mean."""
        shape = tuple(outputs.shape[1:])
        if len(outputs) != len(targets):
            raise TDPFedError(f"{len(outputs)} outputs for {len(targets)} samples; must be one for each", field="model")
        if self.kind == "classes":
            self._check_classes(shape, classes)
        elif self.kind == "tokens":
            length = targets.shape[1]
            if len(shape) != 2 or shape[0] != length or shape[1] < classes:
                raise _outputs(shape, f"({length}, tokens) with at least the data's {classes} tokens")
        elif shape not in (tuple(targets.shape[1:]), (1, *targets.shape[1:]), (*targets.shape[1:], 1)):
            raise _outputs(shape, f"{tuple(targets.shape[1:])}, as a sample's targets")

    def _check_classes(self, shape: tuple[int, ...], classes: int) -> None:
        one = shape in ((), (1,))
        if self.loss.name == "bce":
            if not one or classes > 2:
                raise _outputs(shape, "() or (1,), for two classes, with the loss 'bce'")
        elif self.loss.name in LOSSES or not one:
            if len(shape) != 1 or shape[0] < classes:
                hint = "; or task.loss = 'bce' for two classes with one output" if one and classes == 2 else ""
                raise _outputs(shape, f"(classes,) with at least the data's {classes} classes{hint}")
        elif any(metric.built_in for metric in self.metrics):
            raise _outputs(
                shape, "one value for each class with a loss of your own: which class one value means is not known. "
                "task.loss = 'bce' takes one value for two classes; or give metrics of your own too",
            )  # fmt: skip


def loss_of(given: str | LossFunction, kind: Kind) -> Loss:
    """Return a loss by name, or made from a function of outputs and targets."""
    if callable(given):
        if given is functional.cross_entropy and kind == "classes":
            return replace(LOSSES["cross_entropy"], mean=functional.cross_entropy)
        found = next((one for one in LOSSES.values() if one.mean is given), None)
        if found is None:
            return Loss(getattr(given, "__name__", type(given).__name__), given)
        given = found.name
    elif ":" in given:
        return Loss(given, load("task.loss", given))
    name = AUTO[kind] if given == "auto" else given
    if name not in LOSSES:
        raise unknown("task.loss", name, ["auto", *LOSSES, "module:function"])
    if kind not in LOSSES[name].kinds:
        fits = [one.name for one in LOSSES.values() if kind in one.kinds]
        raise wrong("task.loss", name, f"{' or '.join(map(repr, fits))} for data whose targets are {kind}")
    return LOSSES[name]


def metric_of(given: str | Metric | MetricFunction, kind: Kind) -> Metric:
    """Return a metric by name, or made from a function of all outputs and targets."""
    if isinstance(given, Metric):
        return given
    if callable(given):
        return Metric.own(given)
    if ":" in given:
        return Metric.own(load("task.metrics", given), given)
    found = metrics.named(given)
    if found is None:
        raise unknown("task.metrics", given, [*metrics.NAMES, "module:function"])
    if kind not in found.kinds:
        fits = [name for name in metrics.NAMES if kind in metrics.named(name).kinds]  # type: ignore[union-attr]
        raise wrong("task.metrics", given, f"{', '.join(fits)} for data whose targets are {kind}")
    return found


def load(field: str, spec: str) -> Callable[..., Tensor]:
    """Return the user's own function ``package.module:function``."""
    module, _, attribute = spec.partition(":")
    try:
        found = attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:  # the user's own code may raise anything
        raise TDPFedError(
            f"{spec!r} failed ({type(error).__name__}: {error}); allowed: 'package.module:function'", field=field
        ) from error
    if not callable(found):
        raise wrong(field, spec, "a function, as 'package.module:function'")
    function: Callable[..., Tensor] = found
    return function


def _outputs(shape: tuple[int, ...], allowed: str) -> TDPFedError:
    return TDPFedError(f"outputs of shape {shape} for a sample, must be {allowed}", field="model")
