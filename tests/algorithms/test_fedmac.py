"""FedMac against its equations by autograd; its bound; where it is pFedMe."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from by_hand import CLIENTS, ROUNDS, Model, close, flat, gradients, loss_of, mean, minibatches, moved, start, step
from tdpfed.algorithms import FedMac
from tdpfed.errors import TDPFedError


@pytest.mark.parametrize(("gamma", "rho", "beta"), [(6.0, 0.7, 1.0), (0.3, 0.2, 0.8)])
def test_three_rounds_by_hand(gamma: float, rho: float, beta: float) -> None:
    lam, eta, eta_p = 3.0, 0.04, 0.05
    algorithm = FedMac(
        tau=3, batch_size=5, s=3, lam=lam, gamma=gamma, rho=rho, eta=eta, eta_p=eta_p, beta=beta
    )  # fmt: skip
    simulation, module, w, data, sizes = start(algorithm)
    reached = False

    def objective(theta: Model, own: Model, batch: Any) -> Tensor:
        total = loss_of(module, theta, batch)
        for name, value in theta.items():
            total = total - lam * (value * own[name]).sum() + gamma * (rho * torch.cosh(value / rho).log()).sum()
        return total

    for round_ in range(1, ROUNDS + 1):
        thetas, uploads = [], []
        for client in range(CLIENTS):
            own = {name: value.clamp(-gamma / lam, gamma / lam) for name, value in w.items()}
            theta = dict(own)
            for batch in minibatches(data, client, round_, 3, 5):
                for _ in range(3):
                    g, _ = gradients(lambda t, own=own, b=batch: objective(t, own, b), theta)  # type: ignore[misc]
                    theta = step(theta, g, eta_p)
                own = {n: (own[n] - eta * lam * (own[n] - theta[n])).clamp(-gamma / lam, gamma / lam) for n in own}
            thetas.append(flat(theta))
            uploads.append(own)
            reached |= bool((flat(own).abs() == gamma / lam).any())
        average = mean(uploads, sizes)
        w = {name: (1 - beta) * w[name] + beta * average[name] for name in w}
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack(thetas))
    assert moved(simulation) > 0.1
    assert reached == (gamma < 1)  # the second case meets the bound


def test_the_objective_has_a_lower_bound_where_models_may_be() -> None:
    """``gamma rho log cosh(t / rho) - lam w t`` is at least ``-gamma rho log 2`` for ``lam |w| <= gamma``."""
    lam, gamma, rho = 2.0, 0.5, 0.3
    run = small.train(FedMac(tau=20, batch_size=4, lam=lam, gamma=gamma, rho=rho, eta=0.5, eta_p=0.1), 15)
    w, theta = run.server["w"], run.personalized()
    assert float(w.abs().max()) == pytest.approx(gamma / lam)
    value = gamma * rho * (theta / rho).cosh().log() - lam * w * theta
    assert float(value.min()) >= -gamma * rho * math.log(2)
    assert bool(theta.isfinite().all())
    assert float(theta.abs().max()) < 100


def test_a_smaller_width_makes_sparser_models() -> None:
    shares = []
    for rho in (2.0, 0.05):
        run = small.train(FedMac(tau=20, batch_size=4, lam=0.1, gamma=0.1, rho=rho, eta_p=0.1), 10)
        shares.append(float((run.personalized().abs() < 1e-2).double().mean()))
    assert shares[1] > 2 * shares[0]


def test_without_sparsity_there_is_no_bound() -> None:
    with pytest.raises(TDPFedError, match=r"^gamma: 0 given, must be above 0"):
        FedMac(gamma=0)
    FedMac(gamma=0, lam=0)
