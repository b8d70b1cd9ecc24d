"""Methods of the literature from their papers' equations: plain loops over clients, minibatches and parameters.

Nothing of the package is used but the minibatches and who takes part. Everything is float64.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import small
from tdpfed.algorithms import APFL, Algorithm, Ditto, FedBABU, FedPer, FedProx, FedRep, LGFedAvg, Scaffold
from tdpfed.core.draws import batch_indices
from tdpfed.engine.simulation import Simulation
from tdpfed.server.participation import Participation

ROUNDS, CLIENTS, SIZE = 4, 4, 5
HEAD = ("fc2.weight", "fc2.bias")
Model = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]
After = Iterator[tuple[Model | None, list[Model]]]
"""After each round: the global model, if there is one, and the clients' personalized models."""


@dataclass
class Case:
    """A network, its initial values, and the clients' samples."""

    net: nn.Module
    simulation: Simulation

    @property
    def start(self) -> Model:
        return {name: value.detach().clone() for name, value in self.net.named_parameters()}

    @property
    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        """The rounds, and who takes part in each."""
        for number in range(1, ROUNDS + 1):
            yield number, self.simulation.participation.draw(0, number, CLIENTS)[0].tolist()

    @property
    def samples(self) -> list[int]:
        return self.simulation.federation.train_size.tolist()

    def batches(self, client: int, round_: int, first: int, count: int) -> list[Batch]:
        data, one = self.simulation.federation, torch.tensor([client])
        starts, sizes = data.train_start[one], data.train_size[one]
        index = batch_indices(0, round_, one, starts, sizes, first + count, SIZE)[0]
        return [(data.x[rows], data.y[rows]) for rows in index[first:]]

    def gradient(self, at: Model, batch: Batch) -> Model:
        """The gradient of the mean cross-entropy."""
        values = {name: value.clone().requires_grad_() for name, value in at.items()}
        loss = nn.functional.cross_entropy(functional_call(self.net, values, (batch[0],)), batch[1])
        return dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))


def mean(models: dict[int, Model], weights: list[int] | None = None) -> Model:
    """The mean of the clients' models, by weight or of equal weights."""
    weight = {k: 1 if weights is None else weights[k] for k in models}
    total = sum(weight.values())
    names = next(iter(models.values()))
    return {name: sum((weight[k] * models[k][name] for k in models), torch.zeros(())) / total for name in names}


def fedprox(case: Case, eta: float, tau: int, mu: float) -> After:
    w, own = case.start, [case.start] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            y = w
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(y, batch)
                y = {n: y[n] - eta * (g[n] + mu * (y[n] - w[n])) for n in y}
            trained[k] = own[k] = y
        w = mean(trained, case.samples)
        yield w, own


def scaffold(case: Case, eta: float, tau: int, eta_g: float) -> After:
    w, own = case.start, [case.start] * CLIENTS
    c = {n: torch.zeros_like(value) for n, value in w.items()}
    of_client = [c] * CLIENTS
    for number, heard in case.rounds:
        moved, changed = {}, {}
        for k in heard:
            y = w
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(y, batch)
                y = {n: y[n] - eta * (g[n] - of_client[k][n] + c[n]) for n in y}
            new = {n: of_client[k][n] - c[n] + (w[n] - y[n]) / (tau * eta) for n in y}
            moved[k] = {n: y[n] - w[n] for n in y}
            changed[k] = {n: new[n] - of_client[k][n] for n in y}
            of_client[k], own[k] = new, y
        step, change = mean(moved), mean(changed)
        w = {n: w[n] + eta_g * step[n] for n in w}
        c = {n: c[n] + len(heard) / CLIENTS * change[n] for n in c}
        yield w, own


def ditto(case: Case, eta: float, tau: int, lam: float) -> After:
    w, own = case.start, [case.start] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            y, v = w, own[k]
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(y, batch)
                y = {n: y[n] - eta * g[n] for n in y}
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(v, batch)
                v = {n: v[n] - eta * (g[n] + lam * (v[n] - w[n])) for n in v}
            trained[k], own[k] = y, v
        w = mean(trained, case.samples)
        yield w, own


def apfl(case: Case, eta: float, tau: int, alpha: float, adaptive: bool) -> After:
    w, own = case.start, [case.start] * CLIENTS
    v, alphas = [case.start] * CLIENTS, [alpha] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            y, u, a = w, v[k], alphas[k]
            for batch in case.batches(k, number, 0, tau):
                mixed = {n: a * u[n] + (1 - a) * y[n] for n in y}
                of_y, of_mixed = case.gradient(y, batch), case.gradient(mixed, batch)
                slope = sum(float(((u[n] - y[n]) * of_mixed[n]).sum()) for n in y)
                y = {n: y[n] - eta * of_y[n] for n in y}
                u = {n: u[n] - eta * a * of_mixed[n] for n in u}  # by the chain rule of m = a u + (1 - a) y
                a = min(1.0, max(0.0, a - eta * slope)) if adaptive else a
            trained[k], v[k], alphas[k] = y, u, a
            own[k] = {n: a * u[n] + (1 - a) * y[n] for n in y}
        w = mean(trained, case.samples)
        yield w, own


def fedper(case: Case, eta: float, tau: int, shared: Callable[[str], bool]) -> After:
    common = {n: value for n, value in case.start.items() if shared(n)}
    own = [case.start] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            y = {**own[k], **common}
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(y, batch)
                y = {n: y[n] - eta * g[n] for n in y}
            own[k], trained[k] = y, {n: y[n] for n in common}
        common = mean(trained, case.samples)
        yield None, own


def fedrep(case: Case, eta: float, tau: int, head_steps: int) -> After:
    body = {n: value for n, value in case.start.items() if n not in HEAD}
    own = [case.start] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            phi, h = body, {n: own[k][n] for n in HEAD}
            for batch in case.batches(k, number, 0, head_steps):
                g = case.gradient({n: {**phi, **h}[n] for n in own[k]}, batch)
                h = {n: h[n] - eta * g[n] for n in h}
            for batch in case.batches(k, number, head_steps, tau):
                g = case.gradient({n: {**phi, **h}[n] for n in own[k]}, batch)
                phi = {n: phi[n] - eta * g[n] for n in phi}
            trained[k], own[k] = phi, {n: {**phi, **h}[n] for n in own[k]}
        body = mean(trained, case.samples)
        yield None, own


def fedbabu(case: Case, eta: float, tau: int, fine_tune: int) -> After:
    w, own = case.start, [case.start] * CLIENTS
    for number, heard in case.rounds:
        trained = {}
        for k in heard:
            y = tuned = w
            for batch in case.batches(k, number, 0, tau):
                g = case.gradient(y, batch)
                y = {n: y[n] if n in HEAD else y[n] - eta * g[n] for n in y}
            for batch in case.batches(k, number, 0, fine_tune):
                g = case.gradient(tuned, batch)
                tuned = {n: tuned[n] - eta * g[n] for n in tuned}
            trained[k], own[k] = y, tuned
        w = mean(trained, case.samples)
        yield w, own


def is_head(name: str) -> bool:
    return name in HEAD


SAME: dict[str, Any] = {"tau": 3, "batch_size": SIZE, "eta": 0.1}
GIVEN: dict[str, Any] = {"tau": 3, "eta": 0.1}
METHODS: dict[str, tuple[Algorithm, Callable[[Case], After]]] = {
    "fedprox": (FedProx(**SAME, mu=1.5), lambda case: fedprox(case, **GIVEN, mu=1.5)),
    "scaffold": (Scaffold(**SAME, eta_g=0.7), lambda case: scaffold(case, **GIVEN, eta_g=0.7)),
    "ditto": (Ditto(**SAME, lam=0.8), lambda case: ditto(case, **GIVEN, lam=0.8)),
    "apfl": (APFL(**SAME, alpha=0.3), lambda case: apfl(case, **GIVEN, alpha=0.3, adaptive=True)),
    "apfl fixed": (
        APFL(**SAME, alpha=0.6, adaptive=False), lambda case: apfl(case, **GIVEN, alpha=0.6, adaptive=False),
    ),
    "apfl at its limit": (APFL(**SAME, alpha=1.0), lambda case: apfl(case, **GIVEN, alpha=1.0, adaptive=True)),
    "fedper": (FedPer(**SAME), lambda case: fedper(case, **GIVEN, shared=lambda name: not is_head(name))),
    "lgfedavg": (LGFedAvg(**SAME), lambda case: fedper(case, **GIVEN, shared=is_head)),
    "fedrep": (FedRep(**SAME, head_steps=2), lambda case: fedrep(case, **GIVEN, head_steps=2)),
    "fedbabu": (FedBABU(**SAME, fine_tune=4), lambda case: fedbabu(case, **GIVEN, fine_tune=4)),
}  # fmt: skip


def flat(model: Model) -> Tensor:
    return torch.cat([value.reshape(-1) for value in model.values()])


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("clients", [None, 2])
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_its_paper_s(name: str, model: str, clients: int | None, runner: Any) -> None:
    algorithm, reference = METHODS[name]
    net = small.MODELS[model]().double()
    data = small.federation(CLIENTS)
    simulation = Simulation(net, data, algorithm, runner=runner, participation=Participation(clients))
    case = Case(net, simulation)
    rounds = 0
    for shared, own in reference(case):
        simulation.step()
        torch.testing.assert_close(simulation.personalized(), torch.stack(list(map(flat, own))), rtol=1e-9, atol=1e-12)
        common = simulation.global_model()
        assert (common is None) == (shared is None)
        if common is not None and shared is not None:
            torch.testing.assert_close(common, flat(shared), rtol=1e-9, atol=1e-12)
        rounds += 1
    assert rounds == ROUNDS
    moved = (simulation.personalized() - flat(case.start)).norm(dim=-1)
    assert int((moved > 0.1).sum()) == (CLIENTS if clients is None else len(moved.nonzero()))


def test_alpha_is_learned_and_stays_between_its_limits() -> None:
    """Otherwise the cases above would not tell whether it is."""
    ends = []
    for name in ("apfl", "apfl at its limit"):
        simulation = small.train(METHODS[name][0], ROUNDS, data=small.federation(CLIENTS))
        ends.append(simulation.private["alpha"].flatten())
    assert all(abs(float(alpha) - 0.3) > 1e-3 for alpha in ends[0])
    assert all(0 <= float(alpha) <= 1 for alpha in torch.cat(ends))
