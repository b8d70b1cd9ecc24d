"""Per-FedAvg in loops: with the exact Hessian by double backward passes, and both of the paper's approximations."""

from typing import Literal, get_args

import pytest
import torch

import small
from by_hand import (
    CLIENTS,
    ROUNDS,
    Model,
    Pair,
    close,
    flat,
    gradient,
    gradients,
    loss_of,
    mean,
    minibatches,
    start,
    step,
)
from tdpfed.algorithms import FedAvg, PerFedAvg

ALPHA, ETA, DELTA = 0.3, 0.2, 0.05
Variant = Literal["first-order", "hessian-free", "exact"]


def hessian_times(module: torch.nn.Module, w: Model, batch: Pair, v: Model) -> Model:
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    first = torch.autograd.grad(loss_of(module, leaves, batch), list(leaves.values()), create_graph=True)
    along = sum(((g * v[name]).sum() for name, g in zip(leaves, first, strict=True)), torch.zeros(()).double())
    return dict(zip(leaves, torch.autograd.grad(along, list(leaves.values())), strict=True))


def second_part(variant: Variant, module: torch.nn.Module, w: Model, batch: Pair, g: Model) -> Model:
    """Return the product of Hessian and gradient as a variant has it."""
    if variant == "exact":
        return hessian_times(module, w, batch, g)
    if variant == "first-order":
        return {name: torch.zeros_like(value) for name, value in g.items()}
    ahead, behind = (gradient(module, step(w, g, rate), batch) for rate in (-DELTA, DELTA))
    return {name: (ahead[name] - behind[name]) / (2 * DELTA) for name in g}


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("kind", ["conv", "dense"])
@pytest.mark.parametrize("variant", get_args(Variant))
def test_three_rounds_by_hand(variant: Variant, kind: str, runner: str) -> None:
    algorithm = PerFedAvg(tau=2, batch_size=5, alpha=ALPHA, eta=ETA, variant=variant, delta=DELTA)
    simulation, module, w, data, sizes = start(algorithm, kind, runner=runner)
    for round_ in range(1, ROUNDS + 1):
        uploads, thetas = [], []
        for client in range(CLIENTS):
            batches, own = minibatches(data, client, round_, 7, 5), w
            for t in range(2):
                adapted = step(own, gradient(module, own, batches[2 + t]), ALPHA)
                g = gradient(module, adapted, batches[t])
                product = second_part(variant, module, own, batches[4 + t], g)
                own = step(own, {name: g[name] - ALPHA * product[name] for name in g}, ETA)
            uploads.append(own)
            thetas.append(flat(step(own, gradient(module, own, batches[6]), ALPHA)))
        w = mean(uploads, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack(thetas))


def test_with_one_batch_it_is_the_gradient_of_the_adapted_loss() -> None:
    """``grad f(w - alpha grad f(w))`` by autograd through the adaptation, where all three minibatches are the same."""
    data = small.federation(1)
    size = int(data.train_size[0])
    run = small.train(PerFedAvg(tau=1, batch_size=size, alpha=ALPHA, eta=ETA, variant="exact"), 1, data=data)
    module = small.mlp().double()
    w = {name: value.detach() for name, value in module.named_parameters()}
    x, y, _, _ = data.client(0)

    def adapted_loss(at: Model) -> torch.Tensor:
        inner = torch.autograd.grad(loss_of(module, at, (x, y)), list(at.values()), create_graph=True)
        moved = {name: value - ALPHA * g for (name, value), g in zip(at.items(), inner, strict=True)}
        return loss_of(module, moved, (x, y))

    g, _ = gradients(adapted_loss, w)
    close(run.server["w"], flat(step(w, g, ETA)))


def test_without_adaptation_it_is_fedavg() -> None:
    for kind in small.MODELS:
        exact = small.train(PerFedAvg(**small.COMMON, alpha=0.0, variant="exact"), 2, model=kind)
        close(exact.server["w"], small.train(FedAvg(**small.COMMON), 2, model=kind).server["w"])
