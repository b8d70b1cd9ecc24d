"""What the user provides: a model and each node's data, such as a module with the functions ``model`` and ``load``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tdpfed.core.objective import Objective
from tdpfed.errors import TDPFedError
from tdpfed.models import seeded

Values = Tensor | NDArray[Any]


class Samples(NamedTuple):
    """The data of one node, scaled as the model expects; the test part may be empty."""

    x_train: Values  # (n, ...) floating
    y_train: Values  # (n,) class numbers
    x_test: Values
    y_test: Values


class Task(Protocol):
    """A model, and how a node loads its data; a function ``loss(outputs, targets)`` is optional."""

    def model(self) -> nn.Module:
        """Return a new model; it is called with the run's seed, so that the model is the same on every machine."""

    def load(self, node_config: Mapping[str, Any]) -> tuple[Values, Values, Values, Values]:
        """Return a node's samples: x_train, y_train, x_test, y_test."""


@dataclass(frozen=True)
class NodeData:
    """A node's samples as checked tensors on its device."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def objective_of(task: Task, seed: int) -> Objective:
    """Return the objective of the task's model."""
    loss = getattr(task, "loss", nn.functional.cross_entropy)
    try:
        with seeded(seed):
            model = task.model()
    except Exception as error:  # the user's own code may raise anything
        raise TDPFedError(f"task.model: failed ({type(error).__name__}: {error})") from error
    if not isinstance(model, nn.Module):
        raise TDPFedError(f"task.model: returned a {type(model).__name__}, must return a torch.nn.Module")
    return Objective.of(model.float(), loss)


def data_of(task: Task, node_config: Mapping[str, Any], device: torch.device) -> NodeData:
    """Return the node's data, checked."""
    try:
        given = tuple(task.load(dict(node_config)))
    except Exception as error:  # the user's own code may raise anything
        raise TDPFedError(f"task.load: failed ({type(error).__name__}: {error})") from error
    if len(given) != 4:
        raise TDPFedError(f"task.load: {len(given)} values returned, must be x_train, y_train, x_test, y_test")
    x, y, x_test, y_test = (_tensor(name, value) for name, value in zip(Samples._fields, given, strict=True))
    for part, inputs, labels in (("train", x, y), ("test", x_test, y_test)):
        if labels.ndim != 1 or len(inputs) != len(labels):
            shapes = f"x_{part} {tuple(inputs.shape)} and y_{part} {tuple(labels.shape)}"
            raise TDPFedError(f"task.load: {shapes} returned, must be one label for each sample")
        if not bool(inputs.isfinite().all()):
            raise TDPFedError(f"task.load: x_{part} holds NaN or infinite values, must be finite")
    if len(x_test) and x_test.shape[1:] != x.shape[1:]:
        shapes = f"x_train {tuple(x.shape)} and x_test {tuple(x_test.shape)}"
        raise TDPFedError(f"task.load: {shapes} returned, must be samples of the same shape")
    if not len(x):
        raise TDPFedError("task.load: no training samples returned, must be at least 1")
    y, y_test = (labels if labels.is_floating_point() else labels.long() for labels in (y, y_test))
    return NodeData(x.float().to(device), y.to(device), x_test.float().to(device), y_test.to(device))


def client_id(node_config: Mapping[str, Any], nodes: int) -> int:
    """Return the client number of a node."""
    given = node_config.get("partition-id")
    if type(given) is not int or not 0 <= given < nodes:
        raise TDPFedError(
            f"partition-id: {given!r} in the node's configuration, must be a whole number from 0 to {nodes - 1}, "
            "different for each node (tdpfed flower supernode --node-config 'partition-id=0')"
        )
    return given


def _tensor(name: str, value: object) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    raise TDPFedError(f"task.load: {name} is a {type(value).__name__}, must be a tensor or an array of numbers")
