"""Loss, gradient and correct answers of (model, flat parameters, batch), for one client or for K at once.

The model stays an ordinary ``nn.Module`` and is called as a function of a flat vector. With a client axis, parameters
``(K, P)`` meet batches ``(K, B, ...)`` and one ``vmap`` computes all clients together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from tdpfed.layout import Layout

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """``f(theta; batch)``: the mean loss of a model's output on a batch."""

    model: nn.Module
    layout: Layout
    loss: Loss

    @classmethod
    def of(cls, model: nn.Module, loss: Loss = nn.functional.cross_entropy) -> "Objective":
        """Make the objective of ``model``; ``loss(outputs, targets)`` gives the mean over the batch."""
        return cls(model, Layout.of(model), loss)

    def initial(self) -> Tensor:
        """Return the model's own parameters as a flat vector ``(P,)``."""
        return self.layout.flatten({name: value.detach() for name, value in self.model.named_parameters()})

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs for parameters ``(P,)`` and inputs ``(B, ...)``."""
        result: Tensor = functional_call(self.model, self.layout.unflatten(theta), (x,))
        return result

    def value(self, theta: Tensor, batch: Batch) -> Tensor:
        """Return the loss of parameters ``(P,)`` on a batch."""
        return self.loss(self.outputs(theta, batch[0]), batch[1])

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return gradient ``(..., P)`` and loss ``(...)``, with or without a leading client axis."""
        compute = self._many if theta.ndim == 2 else self._one
        gradient, loss = compute(theta, batch)
        return gradient, loss

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
    def _one(self) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        return grad_and_value(self.value)

    @cached_property
    def _many(self) -> Callable[[Tensor, Batch], tuple[Tensor, Tensor]]:
        return vmap(grad_and_value(self.value))
