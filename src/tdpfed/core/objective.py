"""Loss, gradient and correct answers of (model, flat parameters, batch), for one client or for K at once.

The model stays an ordinary ``nn.Module`` and is called as a function of a flat vector. With a client axis, parameters
``(K, P)`` meet batches ``(K, B, ...)`` and one ``vmap`` computes all clients together.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tdpfed.core.layout import Layout, refuse_running_statistics
from tdpfed.errors import TDPFedError
from tdpfed.fast.first_layer import Steps
from tdpfed.fast.recorded_gradient import Replayed, after_gradient

Batch = tuple[Tensor, Tensor]
Grad = Callable[[Tensor, Batch], tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``(B, C)`` and class numbers ``(B,)``: PyTorch's in a third of its operators."""
    return nn.functional.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).mean().neg()


@dataclass(frozen=True)
class Objective:
    """``f(theta; batch)``: the mean loss of a model's output on a batch."""

    model: nn.Module
    layout: Layout  # of the parameters that are trained; frozen ones stay in the model
    loss: Loss
    short: bool = False  # layers compute in bfloat16 where autocast lets them; parameters and loss stay as they are

    @classmethod
    def of(cls, model: nn.Module, loss: Loss = cross_entropy, *, short: bool = False) -> "Objective":
        """Make the objective of ``model``; ``loss(outputs, targets)`` gives the mean over the batch."""
        refuse_running_statistics(model)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
                raise TDPFedError(
                    f"model: layer {name!r} is a {type(layer).__name__} in training mode, whose draws no seed of ours "
                    "repeats; remove it, set p=0 or call model.eval()"
                )
        return cls(model, Layout.of(_trained(model)), loss, short)

    def initial(self) -> Tensor:
        """Return the model's own trained parameters as a flat vector ``(P,)``."""
        return self.layout.flatten({name: value.detach() for name, value in _trained(self.model).items()})

    def state_dict(self, theta: Tensor) -> dict[str, Tensor]:
        """Return the model's whole ``state_dict`` with parameters ``(P,)``: tied and frozen ones and buffers too."""
        model = copy.deepcopy(self.model)
        values = self.layout.unflatten(theta.detach())
        for name, parameter in _trained(model).items():
            parameter.data.copy_(values[name])
        return model.state_dict()

    def computes_as(self, other: "Objective") -> bool:
        """Whether another objective gives the same values: the same loss, and all but the trained parameters equal."""
        mine, its = (
            {name: value for name, value in one.model.state_dict().items() if name not in one.layout.names}
            for one in (self, other)
        )
        same = (self.layout, self.loss, self.short, mine.keys()) == (other.layout, other.loss, other.short, its.keys())
        return same and all(torch.equal(value, its[name]) for name, value in mine.items())

    def activation_size(self, x: Tensor) -> int:
        """Return how many values the layers give per sample, counted on inputs ``(B, ...)``."""
        counts: list[int] = []
        leaves = [layer for layer in self.model.modules() if not any(layer.children())]
        hooks = [
            layer.register_forward_hook(lambda *call: counts.append(call[2].numel() if torch.is_tensor(call[2]) else 0))
            for layer in leaves
        ]
        try:
            self.outputs(self.initial(), x)
        finally:
            for hook in hooks:
                hook.remove()
        return (x.numel() + sum(counts)) // len(x)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs for parameters ``(P,)`` and inputs ``(B, ...)``."""
        parameters = self.layout.unflatten(theta)
        with torch.autocast(theta.device.type, torch.bfloat16, enabled=self.short, cache_enabled=False):
            result: Tensor = functional_call(self.model, parameters, (x,))
        return result.to(theta.dtype) if self.short else result

    def value(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of parameters ``(P,)`` on a batch."""
        return self.loss(self.outputs(theta, x), y)

    @cached_property
    def gradient(self) -> "Gradient":
        """``gradient(theta, batch)`` gives gradient and loss, ``gradient.descend`` what steps down come to."""
        return Gradient(self)

    def one_by_one(self, theta: Tensor) -> bool:
        """Whether clients are better computed singly: a CPU runs K convolutions faster than one of K groups."""
        return theta.device.type == "cpu" and self.convolves

    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return each sample's loss and whether the largest output is its target, ``(..., B)`` each."""
        with torch.no_grad():
            compute = vmap(self._per_sample) if theta.ndim == 2 else self._per_sample
            losses, correct = compute(theta, batch)
        return losses, correct

    def _per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(theta, batch[0])
        losses = vmap(lambda output, target: self.loss(output[None], target[None]))(outputs, batch[1])
        return losses, outputs.argmax(-1) == batch[1]

    @cached_property
    def convolves(self) -> bool:
        """Whether the model has convolutions."""
        return any(isinstance(layer, CONVOLUTIONS) for layer in self.model.modules())


class Gradient:
    """The gradient of an objective, with or without a leading client axis."""

    def __init__(self, objective: Objective) -> None:
        self._one_by_one = objective.one_by_one
        self._one = Replayed(grad_and_value(objective.value))
        self._many = Replayed(vmap(grad_and_value(objective.value)))

    def __call__(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient ``(..., P)`` and loss ``(...)``."""
        if theta.ndim == 1:
            return self._one(theta, *batch)
        if self._one_by_one(theta):
            gradients, losses = zip(*(self._one(*row) for row in zip(theta, *batch, strict=True)), strict=True)
            return torch.stack(gradients), torch.stack(losses)
        return self._many(theta, *batch)

    def descend(self, theta: Tensor, batches: Callable[[int], Batch], steps: int, lr: float) -> tuple[Tensor, Tensor]:
        """Return what ``steps`` steps ``theta - lr g`` come to, and the loss before the last.

        Step ``t`` is on the minibatch ``batches(t)``, all of one shape. ``theta`` is given up: where steps can be taken
        in its memory, no gradient is ever written down.
        """
        if theta.ndim == 1 or theta.device.type != "cpu":
            for t in range(steps):
                g, loss = self(theta, batches(t))
                theta = after_gradient(theta, g, None, 0.0, lr)
            return theta, loss
        alone = self._one_by_one(theta)
        gradient, own = (self._one, list(theta)) if alone else (self._many, [theta])

        def minibatches(t: int) -> list[Batch]:
            return list(zip(*batches(t), strict=True)) if alone else [batches(t)]

        now = minibatches(0)
        movers = [gradient.mover(part, *batch, lr) for part, batch in zip(own, now, strict=True)]
        for t in range(1, steps):
            for mover, batch in zip(movers, now, strict=True):
                mover.move(*batch)
            now = minibatches(t)
        losses = [mover.move_and_tell(*batch) for mover, batch in zip(movers, now, strict=True)]
        return theta, torch.stack(losses) if alone else losses[0]

    def steps(self, theta: Tensor, batch: Batch, lr: float, w: Tensor, pull: float, count: int) -> Steps:
        """Return what ``count`` steps ``theta + pull (w - theta) - lr g`` on one minibatch come to, and the last loss.

        The loss is that before the last step. ``theta`` is given up: the result may lie in its memory.
        """
        if theta.ndim == 1:
            for _ in range(count):
                g, loss = self(theta, batch)
                theta = after_gradient(theta, g, w, pull, lr)
            return theta, loss, None
        if not self._one_by_one(theta):
            return self._many.steps(theta, *batch, w, pull, lr, count)
        losses = []
        for row, x, y, anchor in zip(theta, *batch, w, strict=True):
            moved, loss, _ = self._one.steps(row, x, y, anchor, pull, lr, count)
            losses.append(loss)
            if moved is not row:
                row.copy_(moved)
        return theta, torch.stack(losses), None

    def steps_with_momentum(
        self, theta: Tensor, batch: Batch, lr: float, w: Tensor, lam: float, momentum: float, count: int
    ) -> Steps | None:
        """Return what ``count`` Nesterov steps on ``f + lam/2 ||theta - w||^2`` with one minibatch come to.

        None, and theta as it was, where the steps themselves are as quick; else theta is given up.
        """
        if theta.ndim == 1 or self._one_by_one(theta):
            return None
        return self._many.steps_with_momentum(theta, *batch, w, lam, lr, momentum, count)

    def skips_first_layer(self, theta: Tensor, batch: Batch) -> bool:
        """Whether several steps on a minibatch like this one touch the first layer's weights once."""
        return theta.ndim == 2 and not self._one_by_one(theta) and self._many.first_layer(theta, *batch) is not None


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise TDPFedError("model: no parameter requires a gradient, at least one must be trained")
    return trained
