"""Loss, gradient and correct predictions of (model, flat parameters, batch), for one client or for K at once.

The model is an ordinary ``nn.Module``, called as a function of a flat vector. With parameters ``(K, P)`` and batches
``(K, B, ...)`` one ``vmap`` computes all clients together.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap

from tdpfed.core.dropout import Drops, is_active, key_of, with_key
from tdpfed.core.inputs import Inputs
from tdpfed.core.layout import Layout, refuse_running_statistics
from tdpfed.core.local import Batch
from tdpfed.core.losses import LossFunction, cross_entropy
from tdpfed.core.state import Turn
from tdpfed.core.tasks import Task
from tdpfed.errors import TDPFedError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Objective:
    """``f(theta; batch)``: the mean loss of a model's output on a batch."""

    model: nn.Module
    layout: Layout  # of the parameters that are trained; frozen ones stay in the model
    task: Task
    short: bool = False  # layers compute in bfloat16 where autocast does; parameters and loss do not
    inputs: Inputs | None = None  # what a sample holds; None: a tensor, which the model is called with
    drops: bool = False  # whether layers drop in training
    attends: bool = False  # whether the model calls PyTorch's attention, whose kernels take one client at a time
    alone: bool = False  # whether the model cannot be computed for several clients at once
    mutates: bool = True  # whether the model may change its inputs in place, as far as is known

    @classmethod
    def of(
        cls,
        model: nn.Module,
        task: Task | LossFunction = cross_entropy,
        *,
        short: bool = False,
        inputs: Inputs | None = None,
    ) -> "Objective":
        """Return the objective of ``model`` and a task; a function of outputs and targets is the loss of classes."""
        refuse_running_statistics(model)
        refuse_lazy(model)
        drops = is_active(model)
        if drops and inputs is None:
            raise TDPFedError("dropout in training needs the shape of a sample; give inputs", field="model")
        task = task if isinstance(task, Task) else Task.of(task)
        attends = any(isinstance(one, nn.MultiheadAttention) for one in model.modules())
        return cls(model, Layout.of(_trained(model)), task, short, inputs, drops, attends)

    @property
    def loss(self) -> LossFunction:
        """The mean loss over a batch, a function of outputs and targets."""
        return self.task.loss.mean

    def keyed(self, batches: Callable[[int], Batch], turn: Turn) -> Callable[[int], Batch]:
        """Return minibatches that carry the keys of their dropout; the same ones if no layer drops."""
        if not self.drops or self.inputs is None:
            return batches
        dims = len(self.inputs.shape)

        def batch(step: int) -> Batch:
            x, y = batches(step)
            return with_key(x, dims, turn, step), y

        return batch

    def initial(self) -> Tensor:
        """Return the model's own trained parameters as a flat vector ``(P,)``."""
        return self.layout.flatten({name: value.detach() for name, value in _trained(self.model).items()})

    @cached_property
    def tied(self) -> bool:
        """Whether a parameter or buffer has several names."""
        one, every = (
            len([*self.model.named_parameters(remove_duplicate=once), *self.model.named_buffers(remove_duplicate=once)])
            for once in (True, False)
        )
        return one < every

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
        same = (self.layout, self.task, self.short, self.inputs, self.drops, mine.keys()) == (
            other.layout, other.task, other.short, other.inputs, other.drops, its.keys()
        )  # fmt: skip
        return same and all(torch.equal(value, its[name]) for name, value in mine.items())

    def activation_size(self, x: Tensor) -> int:
        """Return the number of activations per sample, measured on inputs ``(B, ...)``."""
        counts: list[int] = []
        leaves = [layer for layer in self.model.modules() if not any(layer.children())]
        hooks = [layer.register_forward_hook(lambda *call: counts.append(_values_in(call[2]))) for layer in leaves]
        try:
            self.outputs(self.initial(), x)
        finally:
            for hook in hooks:
                hook.remove()
        return (x.numel() + sum(counts)) // len(x)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the model's outputs for parameters ``(P,)`` and inputs ``(B, ...)``."""
        parameters = self.layout.unflatten(theta)

        def call(*args: Tensor, **named: Tensor) -> Tensor:
            result: Tensor = functional_call(self.model, parameters, args, named, tie_weights=self.tied)
            return result

        return self._called(call, theta, x)

    @contextmanager
    def replacing(self, like: Tensor) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
        """Yield :meth:`outputs` for many calls without a gradient, with parameters as ``like`` ``(..., P)``.

        The model's parameters are replaced until the end, which takes less time than a ``functional_call`` each time.
        """
        places = _trained(self.model)
        own = {name: parameter.data for name, parameter in places.items()}

        there: Tensor | None = None

        def outputs(theta: Tensor, x: Tensor) -> Tensor:
            nonlocal there
            if theta is not there:
                for name, value in self.layout.unflatten(theta).items():
                    places[name].data = value
                there = theta
            return self._called(self.model, theta, x)

        alike = all((one.dtype, one.device) == (like.dtype, like.device) for one in own.values())
        try:
            yield outputs if alike else self.outputs
        finally:
            for name, parameter in places.items():
                parameter.data = own[name]

    def _called(self, model: Callable[..., Tensor], theta: Tensor, x: Tensor) -> Tensor:
        """Call a model that has the parameters already."""
        replaced: AbstractContextManager[object] = nullcontext()
        if self.drops and self.inputs is not None:
            x, bits = key_of(x, self.inputs.shape)
            replaced = Drops(bits)
        elif self.attends:
            replaced = Drops(None)
        args, named = ((x,), {}) if self.inputs is None else self.inputs.arguments(x)
        with torch.autocast(theta.device.type, torch.bfloat16, enabled=self.short, cache_enabled=False), replaced:
            result = model(*args, **named)
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
        return self.alone or (theta.device.type == "cpu" and self.convolves)

    def per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return each sample's loss and whether it is predicted correctly, ``(..., B)`` each.

        Of several targets it is the share of them; None for numbers, which are neither right nor wrong.
        """
        with torch.no_grad():
            compute = vmap(self._per_sample) if theta.ndim == 2 else self._per_sample
            losses, correct = compute(theta, batch)
        return losses, correct if self.task.rates else None

    def _per_sample(self, theta: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self.outputs(theta, batch[0])
        losses = self.task.each(outputs, batch[1])
        return losses, self.task.right(outputs, batch[1]) if self.task.rates else torch.zeros_like(losses)

    @cached_property
    def convolves(self) -> bool:
        """Whether the model has convolutions."""
        return any(isinstance(layer, CONVOLUTIONS) for layer in self.model.modules())


def refuse_lazy(model: nn.Module) -> None:
    """Refuse parameters without a shape, which a lazy module gets when it is called for the first time."""
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, value in values.items() if nn.parameter.is_lazy(value)]
    if lazy:
        raise TDPFedError(
            f"{lazy[0]!r} of a lazy module has no shape yet; call the model once on a batch before, or give the sizes",
            field="model",
        )


def _values_in(found: object) -> int:
    """Return the number of values of the tensors in what a layer returns."""
    if isinstance(found, Tensor):
        return found.numel()
    return sum(map(_values_in, found)) if isinstance(found, tuple | list) else 0


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trained:
        raise TDPFedError("model: no parameter requires a gradient, at least one must be trained")
    return trained
