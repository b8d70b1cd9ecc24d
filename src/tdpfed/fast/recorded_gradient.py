"""A gradient recorded once as a graph of tensor operators, rewritten for speed, and replayed.

Recording strips the overhead of the function transforms, which for small models costs as much as the arithmetic.
:mod:`tdpfed.fast.graph_rewrites` rewrites the graph; on a GPU, convolutions become matrix products.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, fx

from tdpfed.core.inner import Inner
from tdpfed.core.layout import Ranges
from tdpfed.fast.convolution import as_products
from tdpfed.fast.first_layer import FirstLayer, first_layer
from tdpfed.fast.graph_rewrites import (
    InPlace,
    called_directly,
    joined_in_place,
    simplified,
    stepping,
    without_unit_products,
)
from tdpfed.fast.optim import after_gradient
from tdpfed.fast.pooling import with_channels_last
from tdpfed.fast.tracing import recorded

Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Step = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, float], tuple[Tensor, Tensor]]

Kept = TypeVar("Kept")

RECORDINGS = 64
"""Maximum number of recordings, one per kind of input: the number of clients may vary from call to call."""

ONE_AT_A_TIME = threading.RLock()
"""Held while a model's ``forward`` runs: functional calls and recording modify the module temporarily."""


class Replayed:
    """A gradient, recorded once per kind of input and replayed: the same operations, and so the same bits.

    A function that cannot be recorded (its control flow depends on values) is called directly. Side effects of a
    model's ``forward`` happen only during recording. The ``RECORDINGS`` latest kinds are kept. With ``only``, steps
    move these ranges of the parameters, and compute no more of the gradient than that needs.
    """

    def __init__(self, function: Gradient, only: Ranges | None = None) -> None:
        self._function, self._only = function, only
        self._gradients = _Recordings(self._recorded_gradient)
        self._steps = _Recordings(self._recorded_step)
        self._first_layers = _Recordings(self._recorded_first_layer)

    def __call__(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return gradient and loss."""
        return self._gradients.of(theta, x, y)(theta, x, y)

    def step_(
        self, theta: Tensor, x: Tensor, y: Tensor, anchor: Tensor | None, pull: float, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Return ``theta + pull (anchor - theta) - lr g`` (``theta - lr g`` without an anchor), and the loss."""
        return self._steps.of(theta, x, y)(theta, x, y, anchor, pull, lr)

    def mover(self, theta: Tensor, x: Tensor, y: Tensor, anchor: Tensor | None, pull: float, lr: float) -> "Mover":
        """Return an object that takes such steps in the memory of ``theta``, on minibatches of this kind."""
        step = self._steps.of(theta, x, y)
        return Mover(theta, anchor, pull, lr, step, step.make_views(theta) if isinstance(step, InPlace) else ())

    def steps_(
        self, theta: Tensor, x: Tensor, y: Tensor, anchor: Tensor, pull: float, lr: float, count: int
    ) -> tuple[Tensor, Tensor]:
        """Take ``count`` such steps on one minibatch; return the parameters and the loss before the last step."""
        step = self._steps.of(theta, x, y)
        if isinstance(step, InPlace):
            views = step.make_views(theta)
            for _ in range(count - 1):
                step.move_only(x, y, anchor, pull, lr, *views)
            return theta, step.move(x, y, anchor, pull, lr, *views)
        for _ in range(count):
            theta, loss = step(theta, x, y, anchor, pull, lr)
        return theta, loss

    def first_layer(self, theta: Tensor, x: Tensor, y: Tensor) -> FirstLayer | None:
        """Return the gradient cut at its first layer, if this saves work in several steps on one minibatch."""
        return self._first_layers.of(theta, x, y)

    def _recorded_gradient(self, theta: Tensor, x: Tensor, y: Tensor) -> Gradient:
        def make() -> Gradient:
            graph = joined_in_place(self._record(theta, x, y))
            made = as_products(graph) if theta.is_cuda else called_directly(graph)
            made(theta, x, y)  # checks that it runs
            return made

        return _tried(make) or self._unrecorded

    def _recorded_step(self, theta: Tensor, x: Tensor, y: Tensor) -> Step:
        def make() -> Step | None:
            made = stepping(self._record(theta, x, y), self._only) if _steps_in_place(theta) else None
            if made is not None:
                own = theta.clone()
                made(own, x, y, theta, 0.5, 0.0)
                made.move_only(x, y, None, 0.0, 0.0, *made.make_views(own))
                if not _views_share_memory(made, own):
                    return None
            return made

        return _tried(make) or self._step_after_gradient

    def _recorded_first_layer(self, theta: Tensor, x: Tensor, y: Tensor) -> FirstLayer | None:
        def make() -> FirstLayer | None:
            made = first_layer(self._record(theta, x, y)) if theta.ndim == 2 and _steps_in_place(theta) else None
            if made is not None:
                if not _views_share_memory(made.step, theta):
                    return None
                made.steps(theta.clone(), x, y, theta, 0.5, 0.0, 2)
                made.steps_with_momentum(theta.clone(), x, y, Inner(theta, 0.5, 0.0, 0.5), 2)
            return made

        return _tried(make)

    def _record(self, theta: Tensor, x: Tensor, y: Tensor) -> fx.GraphModule:
        def record(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # make_fx needs this signature
            return self._function(theta, x, y)

        graph = without_unit_products(recorded(record, theta, x, y))
        return with_channels_last(simplified(graph)) if theta.device.type == "cpu" else graph

    def _unrecorded(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with ONE_AT_A_TIME:
            return self._function(theta, x, y)

    def _step_after_gradient(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor | None, pull: float, lr: float
    ) -> tuple[Tensor, Tensor]:
        g, loss = self(theta, x, y)
        return after_gradient(theta, g, w, pull, lr, self._only), loss


@dataclass(frozen=True)
class Mover:
    """Takes steps ``theta + pull (anchor - theta) - lr g`` in the memory of one theta."""

    theta: Tensor
    anchor: Tensor | None
    pull: float
    lr: float
    step: Step
    views: tuple[Tensor, ...]  # of theta, for a step in place

    def move(self, x: Tensor, y: Tensor) -> None:
        """Take a step on a minibatch."""
        if isinstance(self.step, InPlace):
            self.step.move_only(x, y, self.anchor, self.pull, self.lr, *self.views)
        else:
            self.move_and_report(x, y)

    def move_and_report(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step on a minibatch, and return the loss before it."""
        if isinstance(self.step, InPlace):
            loss: Tensor = self.step.move(x, y, self.anchor, self.pull, self.lr, *self.views)
            return loss
        moved, loss = self.step(self.theta, x, y, self.anchor, self.pull, self.lr)
        self.theta.copy_(moved)
        return loss


class _Recordings(Generic[Kept]):
    """The results of ``make`` for the latest ``RECORDINGS`` kinds of input."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Kept]) -> None:
        self._make = make
        self._known: OrderedDict[tuple[object, ...], tuple[Kept]] = OrderedDict()

    def of(self, theta: Tensor, x: Tensor, y: Tensor) -> Kept:
        """Return the result for inputs of this kind."""
        kind = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (theta, x, y))
        found = self._known.get(kind)
        if found is None:
            with ONE_AT_A_TIME:
                found = self._known.get(kind) or (self._make(theta, x, y),)
                self._known[kind] = found
                if len(self._known) > RECORDINGS:
                    self._known.popitem(last=False)
        return found[0]


def _tried(make: Callable[[], Kept | None]) -> Kept | None:
    """Return the result of ``make``, or None on an error; calling the function directly will raise it."""
    try:
        return make()
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:
        return None


def _views_share_memory(step: InPlace, theta: Tensor) -> bool:
    """Whether a step's views share the memory of theta; a copy would not change with it."""
    here = theta.untyped_storage().data_ptr()
    return all(view.untyped_storage().data_ptr() == here for view in step.make_views(theta))


def _steps_in_place(theta: Tensor) -> bool:
    separate = theta.ndim < 2 or theta.stride(0) >= theta.shape[-1]  # expanded rows share memory: no in-place step
    return theta.device.type == "cpu" and theta.stride(-1) == 1 and separate
