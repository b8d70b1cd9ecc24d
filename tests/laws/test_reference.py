"""Algorithm 1 and its neighbors written out by hand, as a researcher would: modules, autograd, ``torch.optim``, loops.

Only the minibatches and the initial factors are taken from the package, so that both sides see the same numbers.
"""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import small
from tdpfed.algorithms import FedAvg, PFedMe, TDPFed
from tdpfed.core.draws import batch_indices
from tdpfed.data import Federation
from tdpfed.engine.simulation import Simulation
from tdpfed.server.participation import Participation

ROUNDS, CLIENTS = 3, 4
SPECS = {2: "ar,br->ab", 4: "ar,br,cr,dr->abcd"}
Factors = dict[str, list[Tensor]]  # of a weight: A1..AN; of a bias: itself


def minibatches(data: Federation, client: int, round_: int, tau: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    one = torch.tensor([client])
    index = batch_indices(0, round_, one, data.train_start[one], data.train_size[one], tau, size)[0]
    for rows in index:
        yield data.x[rows], data.y[rows]


def composed(factors: Factors) -> dict[str, Tensor]:
    return {
        name: group[0] if len(group) == 1 else torch.einsum(SPECS[len(group)], *group)
        for name, group in factors.items()
    }


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])


def flat_factors(factors: Factors) -> Tensor:
    return torch.cat([factor.detach().reshape(-1) for group in factors.values() for factor in group])


def mean_of(states: list[dict[str, Tensor]], sizes: list[int]) -> dict[str, Tensor]:
    return {
        name: sum((n * state[name] for n, state in zip(sizes, states, strict=True)), torch.zeros(())) / sum(sizes)
        for name in states[0]
    }


def load(module: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    module.load_state_dict({name: value.detach() for name, value in values.items()})
    return module


def near_steps(
    module: nn.Module, anchor: dict[str, Tensor], batch: tuple[Tensor, Tensor], s: int, lam: float, sgd: dict[str, Any]
) -> None:
    """Take s steps on f(theta) + lam/2 ||theta - anchor||^2 with one minibatch."""
    optimizer = torch.optim.SGD(module.parameters(), **sgd)
    for _ in range(s):
        optimizer.zero_grad()
        loss = cross_entropy(module(batch[0]), batch[1])
        for name, parameter in module.named_parameters():
            loss = loss + lam / 2 * (parameter - anchor[name].detach()).square().sum()
        loss.backward()
        optimizer.step()


def tdpfed_client(
    model: nn.Module, received: Factors, batches: Iterator[tuple[Tensor, Tensor]], h: TDPFed
) -> tuple[dict[str, Tensor], Factors]:
    """ClientUpdate of Algorithm 1: theta_k and the client's factors."""
    own = {name: [nn.Parameter(factor.clone()) for factor in group] for name, group in received.items()}
    module = load(copy.deepcopy(model), composed({name: list(group) for name, group in received.items()}))
    adam = torch.optim.Adam([factor for group in own.values() for factor in group], lr=h.eta)
    for batch in batches:
        anchor = composed({name: list(group) for name, group in own.items()})
        near_steps(module, anchor, batch, h.s, h.lam, {"lr": h.eta_p, "momentum": h.momentum, "nesterov": True})
        theta = {name: parameter.detach() for name, parameter in module.named_parameters()}
        for _ in range(h.s_prime):
            adam.zero_grad()
            near = composed({name: list(group) for name, group in own.items()})
            distance = sum(((theta[name] - near[name]).square().sum() for name in theta), torch.zeros(()))
            (h.lam / 2 * distance).backward()
            adam.step()
    theta = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return theta, {name: [factor.detach() for factor in group] for name, group in own.items()}


def initial_factors(simulation: Simulation) -> Factors:
    """The server's initial vector cut by hand: weights in order of the model, each as (I_1, R), ..., (I_N, R)."""
    algorithm = simulation.algorithm
    assert isinstance(algorithm, TDPFed)
    values, factors = simulation.server["factors"], {}
    for (name, parameter), rank in zip(
        simulation.objective.model.named_parameters(), algorithm.plan.ranks, strict=True
    ):
        shapes = [tuple(parameter.shape)] if rank is None else [(size, rank) for size in parameter.shape]
        group = []
        for shape in shapes:
            count = int(torch.Size(shape).numel())
            group.append(values[:count].reshape(shape))
            values = values[count:]
        factors[name] = group
    assert len(values) == 0
    return factors


def make(algorithm: Any, **options: Any) -> tuple[Simulation, nn.Module, Federation, list[int]]:
    data = small.federation(CLIENTS)
    model = small.convnet().double()
    simulation = Simulation(copy.deepcopy(model), data, algorithm, **options)
    return simulation, model, data, data.train_size.tolist()


def close(got: Tensor | None, expected: Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize(("beta", "selected"), [(1.0, None), (0.7, None), (1.4, 2)])
def test_tdpfed_is_algorithm_1(runner: Any, beta: float, selected: int | None) -> None:
    algorithm = TDPFed(
        tau=3, s=3, s_prime=4, batch_size=5, lam=6.0, eta=0.004, eta_p=0.05, momentum=0.5, compression=1.5, beta=beta
    )
    simulation, model, data, sizes = make(algorithm, runner=runner, participation=Participation(selected, "all"))
    factors = initial_factors(simulation)
    assert [len(group) for group in factors.values()] == [4, 1, 2, 1, 2, 1]  # conv, fc1 and fc2 are factorized
    for round_ in range(1, ROUNDS + 1):
        thetas, uploads = [], []
        for client in range(CLIENTS):
            theta, own = tdpfed_client(model, factors, minibatches(data, client, round_, 3, 5), algorithm)
            thetas.append(flat(theta))
            uploads.append(own)
        heard = simulation.participation.draw(simulation.seed, round_, simulation.federation.clients)[0].tolist()
        assert len(heard) == (selected or CLIENTS)
        total = sum(sizes[k] for k in heard)
        factors = {
            name: [
                (1 - beta) * old + beta * sum(sizes[k] * uploads[k][name][n] for k in heard) / total
                for n, old in enumerate(group)
            ]
            for name, group in factors.items()
        }
        simulation.step()
        close(simulation.server["factors"], flat_factors(factors))
        close(simulation.personalized(), torch.stack(thetas))
        close(simulation.global_model(), flat(composed(factors)))
    assert float((flat_factors(factors) - flat_factors(initial_factors(make(algorithm)[0]))).norm()) > 0.1


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_act_averages_composed_tensors(beta: float) -> None:
    """One round: the averaged tensor by hand; the factors fitted to it come closer than those before."""
    algorithm = TDPFed(**small.TDPFED, aggregation="act", beta=beta)
    simulation, model, data, sizes = make(algorithm)
    factors = initial_factors(simulation)
    tensors = []
    for client in range(CLIENTS):
        _, own = tdpfed_client(model, factors, minibatches(data, client, 1, algorithm.tau, 4), algorithm)
        tensors.append(composed(own))
    old, mean = composed(factors), mean_of(tensors, sizes)
    expected = flat({name: (1 - beta) * old[name] + beta * mean[name] for name in old})
    simulation.step()
    close(simulation.server["theta"], expected)
    bound = simulation.algorithm
    assert isinstance(bound, TDPFed)
    fitted = bound.plan.compose(simulation.server["factors"])
    assert float((fitted - expected).norm()) < 0.9 * float((flat(old) - expected).norm())


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_pfedme(momentum: float) -> None:
    algorithm = PFedMe(tau=3, s=3, batch_size=5, lam=6.0, eta=0.03, eta_p=0.05, momentum=momentum, beta=0.9)
    sgd: dict[str, Any] = {"lr": 0.05, "momentum": momentum, "nesterov": momentum > 0}
    simulation, model, data, sizes = make(algorithm)
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for round_ in range(1, ROUNDS + 1):
        thetas, locals_ = [], []
        for client in range(CLIENTS):
            module, own = load(copy.deepcopy(model), w), dict(w)
            for batch in minibatches(data, client, round_, 3, 5):
                near_steps(module, own, batch, algorithm.s, algorithm.lam, sgd)
                theta = dict(module.named_parameters())
                own = {name: own[name] - 0.03 * 6.0 * (own[name] - theta[name].detach()) for name in own}
            thetas.append(flat(dict(module.named_parameters())))
            locals_.append(own)
        mean = mean_of(locals_, sizes)
        w = {name: 0.1 * w[name] + 0.9 * mean[name] for name in w}
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack(thetas))


def test_fedavg() -> None:
    simulation, model, data, sizes = make(FedAvg(tau=4, batch_size=5, eta=0.1))
    w = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for round_ in range(1, ROUNDS + 1):
        trained = []
        for client in range(CLIENTS):
            module = load(copy.deepcopy(model), w)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            for x, y in minibatches(data, client, round_, 4, 5):
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            trained.append({name: parameter.detach() for name, parameter in module.named_parameters()})
        w = mean_of(trained, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack([flat(theta) for theta in trained]))
