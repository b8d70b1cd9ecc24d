"""What the references of methods share: minibatches as a client draws them, models as dicts, means, SGD by autograd.

Nothing here uses the package's local work: a loss is PyTorch's own, a gradient that of ``torch.autograd``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import small
from tdpfed.algorithms import Algorithm
from tdpfed.core.draws import batch_indices
from tdpfed.data import Federation
from tdpfed.engine.simulation import Simulation

Model = dict[str, Tensor]
Pair = tuple[Tensor, Tensor]

ROUNDS, CLIENTS = 3, 4


def minibatches(data: Federation, client: int, round_: int, count: int, size: int) -> list[Pair]:
    """Return a client's first minibatches of a round."""
    one = torch.tensor([client])
    index = batch_indices(0, round_, one, data.train_start[one], data.train_size[one], count, size)[0]
    return [(data.x[rows], data.y[rows]) for rows in index]


def loss_of(module: nn.Module, model: Mapping[str, Tensor], batch: Pair) -> Tensor:
    """Return the loss of a model, differentiable in its tensors."""
    outputs: Tensor = functional_call(module, dict(model), (batch[0],))
    return cross_entropy(outputs, batch[1])


def gradients(function: Callable[[Model], Tensor], at: Mapping[str, Tensor]) -> tuple[Model, float]:
    """Return the gradient of a function of named tensors, and its value."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in at.items()}
    value = function(leaves)
    found = torch.autograd.grad(value, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), float(value.detach())


def gradient(module: nn.Module, model: Mapping[str, Tensor], batch: Pair) -> Model:
    """Return the gradient of the loss at a model."""
    return gradients(lambda m: loss_of(module, m, batch), model)[0]


def step(model: Mapping[str, Tensor], g: Mapping[str, Tensor], rate: float) -> Model:
    """Return ``model - rate g``."""
    return {name: value - rate * g[name] for name, value in model.items()}


def sgd(module: nn.Module, model: Mapping[str, Tensor], batches: Sequence[Pair], rate: float) -> Model:
    """Return the model after a gradient step on each minibatch."""
    model = dict(model)
    for batch in batches:
        model = step(model, gradient(module, model, batch), rate)
    return model


def flat(model: Mapping[str, Tensor]) -> Tensor:
    """Return a model's values as one vector."""
    return torch.cat([value.detach().reshape(-1) for value in model.values()])


def cut(vector: Tensor, like: Mapping[str, Tensor]) -> Model:
    """Return the model whose values are a vector; inverts :func:`flat`."""
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.reshape(value.shape) for part, (name, value) in zip(parts, like.items(), strict=True)}


def mean(models: Sequence[Mapping[str, Tensor]], sizes: Sequence[float]) -> Model:
    """Return the mean of models, weighted."""
    total = sum(sizes)
    return {
        name: torch.stack([n / total * m[name] for n, m in zip(sizes, models, strict=True)]).sum(0)
        for name in models[0]
    }


def opposed(clients: int = CLIENTS) -> Federation:
    """Return a federation in which every other client gives other labels to the same inputs."""
    data = small.federation(clients)
    y = data.y.clone()
    for k in range(1, clients, 2):
        for first, count in ((data.train_start, data.train_size), (data.test_start, data.test_size)):
            rows = slice(int(first[k]), int(first[k] + count[k]))
            y[rows] = (y[rows] + 1) % small.CLASSES
    return replace(data, y=y)


def start(
    algorithm: Algorithm, kind: str = "conv", **options: Any
) -> tuple[Simulation, nn.Module, Model, Federation, list[int]]:
    """Return a simulation in float64, its module and initial model, and the clients' data and sizes."""
    data = options.pop("data", None) or small.federation(CLIENTS)
    module = MODULES[kind]().double()
    simulation = Simulation(MODULES[kind]().double(), data, algorithm, **options)
    model = {name: value.detach().clone() for name, value in module.named_parameters()}
    return simulation, module, model, data, data.train_size.tolist()


def linear(seed: int = 0) -> nn.Module:
    """One linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, small.CLASSES))


MODULES: dict[str, Callable[[], nn.Module]] = {**small.MODELS, "linear": linear}


def close(got: Tensor | None, expected: Tensor) -> None:
    """Hold ours against a reference."""
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def moved(simulation: Simulation) -> float:
    """Return how far the clients' models are from where they started."""
    return float((simulation.personalized() - simulation.store.start["theta"]).norm())
