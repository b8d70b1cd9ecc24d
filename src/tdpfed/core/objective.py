"""Loss, gradient and correct predictions of (model, flat parameters, batch), for one client or for K at once.

The model is an ordinary ``nn.Module``, called as a function of a flat vector. With parameters ``(K, P)`` and batches
``(K, B, ...)`` one ``vmap`` computes all clients together.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from tdpfed.core.layout import Layout, refuse_running_statistics
from tdpfed.core.local import Batch
from tdpfed.errors import TDPFedError

Loss = Callable[[Tensor, Tensor], Tensor]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``(B, C)`` and class numbers ``(B,)``, with fewer operators than PyTorch's."""
    return nn.functional.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).mean().neg()


@dataclass(frozen=True)
class Objective:
    """``f(theta; batch)``: the mean loss of a model's output on a batch."""

    model: nn.Module
    layout: Layout  # of the parameters that are trained; frozen ones stay in the model
    loss: Loss
    short: bool = False  # layers compute in bfloat16 where autocast does; parameters and loss do not

    @classmethod
    def of(cls, model: nn.Module, loss: Loss = cross_entropy, *, short: bool = False) -> "Objective":
        """Return the objective of ``model``; ``loss(outputs, targets)`` is the mean over the batch."""
        refuse_running_statistics(model)
        for name, layer in model.named_modules():
            if isinstance(layer, nn.modules.dropout._DropoutNd) and layer.training and layer.p > 0:
                raise TDPFedError(
                    f"model: layer {name!r} is a {type(layer).__name__} in training mode, whose draws are not "
                    "reproducible; remove it, set p=0 or call model.eval()"
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
        """Return the number of activations per sample, measured on inputs ``(B, ...)``."""
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

    def gradient(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the gradient ``(..., P)`` and the loss ``(...)`` by autograd; K clients at once by ``vmap``."""
        if theta.ndim == 2 or torch.is_inference_mode_enabled():  # autograd records nothing in inference mode
            compute = grad_and_value(self.value)
            gradient, loss = (vmap(compute) if theta.ndim == 2 else compute)(theta, *batch)
            return gradient, loss
        with torch.enable_grad():
            leaf = theta.detach().requires_grad_()
            loss = self.value(leaf, *batch)
            return torch.autograd.grad(loss, leaf)[0], loss.detach()

    def hessian_product(self, theta: Tensor, batch: Batch, vector: Tensor) -> Tensor:
        """Return the product ``(..., P)`` of the loss's Hessian with a vector ``(..., P)``."""
        compute = vmap(self.hessian_product_of_one) if theta.ndim == 2 else self.hessian_product_of_one
        return compute(theta, *batch, vector)

    def hessian_product_of_one(self, theta: Tensor, x: Tensor, y: Tensor, vector: Tensor) -> Tensor:
        """Return :meth:`hessian_product` of one client: the gradient of the gradient's product with the vector."""

        def along(theta: Tensor) -> Tensor:
            gradient: Tensor = grad(self.value)(theta, x, y)
            return gradient @ vector

        found: Tensor = grad(along)(theta)
        return found

    def one_by_one(self, theta: Tensor) -> bool:
        """Whether to compute clients one by one: a CPU runs K convolutions faster than one with K groups."""
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


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise TDPFedError("model: no parameter requires a gradient, at least one must be trained")
    return trained
