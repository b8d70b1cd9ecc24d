"""FedAvg, FedProx, Ditto, pFedMe and TDPFed as a researcher would write them: autograd and ``torch.optim``.

The baseline of ``engine.py``. A module per client, straightforward and not slowed down on purpose: minibatches are
slices of tensors that are already in memory, optimizers are made once per round, and nothing is computed that the
method does not need.
"""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tdpfed.cp.plan import FactorPlan
from tdpfed.data import Federation

TAU, BATCH, S, S_PRIME = 23, 20, 5, 17
LAM, ETA, ETA_P, ETA_FACTORS, MOMENTUM = 12.0, 0.05, 0.08, 8e-4, 0.5
MU, DITTO_LAM = 0.1, 1.0


def minibatches(federation: Federation, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y, _, _ = federation.client(client)
    order = torch.randperm(len(x))
    for start in itertools.islice(itertools.cycle(range(0, len(x) - BATCH + 1, BATCH)), TAU):
        index = order[start : start + BATCH]
        yield x[index], y[index]


def average(models: list[nn.Module], sizes: Tensor) -> dict[str, Tensor]:
    shares = (sizes / sizes.sum()).tolist()
    states = [model.state_dict() for model in models]
    return {name: sum(share * state[name] for share, state in zip(shares, states, strict=True)) for name in states[0]}


def fedavg_round(model: nn.Module, federation: Federation) -> None:
    locals_ = []
    for client in range(federation.clients):
        local = copy.deepcopy(model)
        optimizer = torch.optim.SGD(local.parameters(), lr=ETA)
        for x, y in minibatches(federation, client):
            optimizer.zero_grad()
            cross_entropy(local(x), y).backward()
            optimizer.step()
        locals_.append(local)
    model.load_state_dict(average(locals_, federation.train_size))


def descend(local: nn.Module, anchor: nn.Module, pull: float, federation: Federation, client: int) -> None:
    """Take a client's SGD steps on its loss and ``pull / 2`` times the squared distance to the anchor, in place."""
    optimizer = torch.optim.SGD(local.parameters(), lr=ETA)
    for x, y in minibatches(federation, client):
        optimizer.zero_grad()
        cross_entropy(local(x), y).backward()
        if pull:
            for p, w in zip(local.parameters(), anchor.parameters(), strict=True):
                assert p.grad is not None
                p.grad.add_(p.detach() - w.detach(), alpha=pull)
        optimizer.step()


def fedprox_round(model: nn.Module, federation: Federation) -> None:
    locals_ = [copy.deepcopy(model) for _ in range(federation.clients)]
    for client, local in enumerate(locals_):
        descend(local, model, MU, federation, client)
    model.load_state_dict(average(locals_, federation.train_size))


def ditto_round(model: nn.Module, own: list[nn.Module], federation: Federation) -> None:
    """Run one round; ``own`` are the clients' personal models, which are changed in place."""
    locals_ = [copy.deepcopy(model) for _ in range(federation.clients)]
    for client, local in enumerate(locals_):
        descend(local, model, 0, federation, client)
        descend(own[client], model, DITTO_LAM, federation, client)
    model.load_state_dict(average(locals_, federation.train_size))


def pfedme_round(model: nn.Module, federation: Federation) -> None:
    locals_ = []
    for client in range(federation.clients):
        local, theta = copy.deepcopy(model), copy.deepcopy(model)
        optimizer = torch.optim.SGD(theta.parameters(), lr=ETA_P)
        for x, y in minibatches(federation, client):
            for _ in range(S):
                optimizer.zero_grad()
                cross_entropy(theta(x), y).backward()
                for p, w in zip(theta.parameters(), local.parameters(), strict=True):
                    assert p.grad is not None
                    p.grad.add_(p.detach() - w.detach(), alpha=LAM)
                optimizer.step()
            with torch.no_grad():
                for p, w in zip(theta.parameters(), local.parameters(), strict=True):
                    w.sub_(ETA * LAM * (w - p))
        locals_.append(local)
    model.load_state_dict(average(locals_, federation.train_size))


def tdpfed_round(factors: list[list[Tensor]], model: nn.Module, federation: Federation) -> list[list[Tensor]]:
    """Run one round; ``factors`` has one list per parameter: its factor matrices, or the dense parameter itself."""
    uploads = []
    for client in range(federation.clients):
        mine = [[factor.clone().requires_grad_() for factor in group] for group in factors]
        theta = copy.deepcopy(model)
        with torch.no_grad():
            for p, group in zip(theta.parameters(), mine, strict=True):
                p.copy_(composed(group))
        adam = torch.optim.Adam([factor for group in mine for factor in group], lr=ETA_FACTORS)
        for x, y in minibatches(federation, client):
            anchors = [composed(group).detach() for group in mine]
            optimizer = torch.optim.SGD(theta.parameters(), lr=ETA_P, momentum=MOMENTUM, nesterov=MOMENTUM > 0)
            for _ in range(S):
                optimizer.zero_grad()
                cross_entropy(theta(x), y).backward()
                for p, w in zip(theta.parameters(), anchors, strict=True):
                    assert p.grad is not None
                    p.grad.add_(p.detach() - w, alpha=LAM)
                optimizer.step()
            fixed = [p.detach() for p in theta.parameters()]
            for _ in range(S_PRIME):
                adam.zero_grad()
                gaps = [(p - composed(group)).square().sum() for p, group in zip(fixed, mine, strict=True)]
                (LAM / 2 * torch.stack(gaps).sum()).backward()
                adam.step()
        uploads.append([[factor.detach() for factor in group] for group in mine])
    shares = (federation.train_size / federation.train_size.sum()).tolist()
    return [
        [
            torch.stack([share * upload[i][j] for share, upload in zip(shares, uploads, strict=True)]).sum(0)
            for j in range(len(group))
        ]
        for i, group in enumerate(factors)
    ]


def composed(group: list[Tensor]) -> Tensor:
    first, *rest = group
    if not rest:
        return first
    columns = rest[0]
    for other in rest[1:]:  # the Khatri-Rao product, as tensor libraries compose a CP tensor
        columns = (columns[:, None] * other[None]).flatten(0, 1)
    return (first @ columns.T).reshape([len(factor) for factor in group])


def initial_factors(model: nn.Module, compression: float) -> list[list[Tensor]]:
    plan = FactorPlan.of(model, compression)
    theta = plan.dense.flatten({name: p.detach() for name, p in model.named_parameters()})
    flat = iter(plan.factors.split(plan.init(theta, torch.Generator().manual_seed(0))))
    counts = [1 if rank is None else len(shape) for shape, rank in zip(plan.dense.shapes, plan.ranks, strict=True)]
    return [[next(flat) for _ in range(count)] for count in counts]
