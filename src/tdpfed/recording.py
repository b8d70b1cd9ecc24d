"""A gradient recorded once as a graph of tensor operators, put in better order, and replayed.

Recording strips the overhead of the function transforms, which for small models costs as much as the arithmetic. How
the graph is changed, ``rewriting.py`` says; on a GPU convolutions become matrix products.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tdpfed.convolution import as_products
from tdpfed.rewriting import called_directly, joined_in_place, shortened, stepping, without_idle
from tdpfed.several import FirstLayer, first_layer

Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], tuple[Tensor, Tensor]]

Kept = TypeVar("Kept")

RECORDINGS = 16
"""Kinds of input a recorded gradient is kept for."""

ONE_AT_A_TIME = threading.RLock()
"""Held while a model's ``forward`` runs: a call with other parameters, and recording, change the module meanwhile."""


class Replayed:
    """A gradient, recorded once per kind of input and replayed: the same operations, and so the same bits.

    A function that cannot be recorded (its path depends on values) is called as it is. What a model's ``forward`` does
    outside of tensors happens at recording only. The ``RECORDINGS`` latest kinds are kept.
    """

    def __init__(self, function: Gradient) -> None:
        self._function = function
        self._gradients: OrderedDict[tuple[object, ...], Gradient] = OrderedDict()
        self._steps: OrderedDict[tuple[object, ...], Step] = OrderedDict()
        self._first_layers: OrderedDict[tuple[object, ...], FirstLayer | Literal["none"]] = OrderedDict()

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient and loss."""
        kind = _kind(theta, x, y)
        known = self._gradients.get(kind)
        if known is None:
            with ONE_AT_A_TIME:
                known = self._gradients.get(kind) or self._recorded_gradient(theta, x, y)
                _keep(self._gradients, kind, known)
        return known(theta, x, y)

    def step(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor | None, pull: float, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``theta + pull (w - theta) - lr g`` (``theta - lr g`` without a ``w``), and the loss.

        ``theta`` ``(K, P)`` is given up: the result may lie in its memory.
        """
        kind = _kind(theta, x, y)
        known = self._steps.get(kind)
        if known is None:
            with ONE_AT_A_TIME:
                known = self._steps.get(kind) or self._recorded_step(theta, x, y)
                _keep(self._steps, kind, known)
        return known(theta, x, y, w, pull, lr)

    def steps(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor, pull: float, lr: float, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return what ``count`` of these steps on one minibatch come to, and the loss before the last."""
        known = self.first_layer(theta, x, y) if count > 1 else None
        if known is not None:
            return known.steps(theta, x, y, w, pull, lr, count)
        for _ in range(count):
            theta, loss = self.step(theta, x, y, w, pull, lr)
        return theta, loss

    def first_layer(self, theta: Tensor, x: Tensor, y: Tensor) -> FirstLayer | None:
        """Return the gradient cut at its first layer, if several steps on one minibatch are less work so."""
        kind = _kind(theta, x, y)
        known = self._first_layers.get(kind)
        if known is None:
            with ONE_AT_A_TIME:
                known = self._first_layers.get(kind) or self._recorded_first_layer(theta, x, y)
                _keep(self._first_layers, kind, known)
        return None if known == "none" else known

    def _recorded_gradient(self, theta: Tensor, x: Tensor, y: Tensor) -> Gradient:
        try:
            graph = joined_in_place(self._record(theta, x, y))
            made = as_products(graph) if theta.is_cuda else called_directly(graph)
            made(theta, x, y)  # what does not run is not kept
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # whatever stops recording, calling it shows the real error if there is one
            return self._alone
        return made

    def _recorded_step(self, theta: Tensor, x: Tensor, y: Tensor) -> Step:
        if theta.device.type != "cpu" or theta.ndim != 2 or not theta.is_contiguous():
            return self._step_after_gradient
        try:
            made = stepping(self._record(theta, x, y))
            if made is None:
                return self._step_after_gradient
            made = called_directly(made)
            made(theta.clone(), x, y, theta, 0.5, 0.0)  # what does not run is not kept
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            return self._step_after_gradient
        return made

    def _recorded_first_layer(self, theta: Tensor, x: Tensor, y: Tensor) -> FirstLayer | Literal["none"]:
        if theta.device.type != "cpu" or theta.ndim != 2 or not theta.is_contiguous():
            return "none"
        try:
            made = first_layer(self._record(theta, x, y))
            if made is not None:
                made.steps(theta.clone(), x, y, theta, 0.5, 0.0, 2)  # what does not run is not kept
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            return "none"
        return made or "none"

    def _record(self, theta: Tensor, x: Tensor, y: Tensor) -> fx.GraphModule:
        def record(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # a signature that make_fx can read
            return self._function(theta, x, y)

        graph = without_idle(make_fx(record)(theta, x, y))
        return shortened(graph) if theta.device.type == "cpu" else graph

    def _alone(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with ONE_AT_A_TIME:
            return self._function(theta, x, y)

    def _step_after_gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor | None, pull: float, lr: float
    ) -> tuple[Tensor, Tensor]:
        g, loss = self(theta, x, y)
        return after_gradient(theta, g, w, pull, lr), loss


def after_gradient(theta: Tensor, g: Tensor, w: Tensor | None, pull: float, lr: float) -> Tensor:
    """Return ``theta + pull (w - theta) - lr g``, or ``theta - lr g`` in the memory of ``g``, which is given up."""
    return torch.add(theta, g, alpha=-lr, out=g) if w is None else torch.lerp(theta, w, pull).sub_(g, alpha=lr)


def _kind(*tensors: Tensor) -> tuple[object, ...]:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors)


def _keep(known: OrderedDict[tuple[object, ...], Kept], kind: tuple[object, ...], made: Kept) -> None:
    known[kind] = made
    if len(known) > RECORDINGS:
        known.popitem(last=False)
