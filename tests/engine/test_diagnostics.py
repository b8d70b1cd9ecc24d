"""The convergence quantities on clients whose loss is quadratic: everything has a closed form there.

The model's output is its one matrix W; the loss of sample i is 1/2 ||W - T_i||^2, so that f_k is, up to a constant,
1/2 ||W - c_k||^2 with c_k the mean target of the client, and F_k(A) = lam / (2 (1 + lam)) ||[[A]] - c_k||^2 + constant.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import FedAvg, PFedMe, TDPFed
from tdpfed.core.state import Turn
from tdpfed.data import Federation
from tdpfed.engine.diagnostics import Diagnostics, diagnose, envelope
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError

SHAPE, PER_CLIENT, CLIENTS, LAM = (4, 5), 6, 3, 3.0
TARGETS = torch.randn(CLIENTS * PER_CLIENT, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Constant(nn.Module):
    """Answers its own matrix, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(SHAPE, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.flatten().expand(len(x), -1)


def quadratic(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - TARGETS.flatten(1)[targets]).square().sum(-1).mean() / 2


def federation() -> Federation:
    """Labels are numbers of targets; client k holds 4 + k of its six for training."""
    count = CLIENTS * PER_CLIENT
    place = torch.arange(count) % PER_CLIENT
    owner = torch.arange(count) // PER_CLIENT
    return Federation.from_tensors(
        torch.zeros(count, 1), torch.arange(count), owner, test_mask=place >= 3 + owner, normalize="none",
        dtype=torch.float64,
    )  # fmt: skip


def make(algorithm: Any = None, **options: Any) -> Simulation:
    settings: dict[str, Any] = {
        "ranks": {"weight": 2}, "lam": LAM, "eta_p": 0.1, "eta": 0.01, "batch_size": 60, "tau": 2, "s": 3, "s_prime": 2,
    }  # fmt: skip
    algorithm = algorithm or TDPFed(**{**settings, **options.pop("settings", {})})
    return Simulation(Constant(), federation(), algorithm, loss=quadratic, **options)


def centres(simulation: Simulation) -> Tensor:
    rows = [simulation.federation.client(k)[1] for k in range(CLIENTS)]
    assert [len(row) for row in rows] == [3, 4, 5]
    return torch.stack([TARGETS.flatten(1)[row].mean(0) for row in rows])


def compose(a: Tensor) -> Tensor:
    first, second = a[: SHAPE[0] * 2].reshape(SHAPE[0], 2), a[SHAPE[0] * 2 :].reshape(SHAPE[1], 2)
    return (first @ second.T).flatten()


def value(a: Tensor, c: Tensor) -> float:
    """F_k(A) by the closed form, without its constant."""
    return float(LAM / (2 * (1 + LAM)) * (compose(a) - c).square().sum())


def finite_differences(a: Tensor, c: Tensor, step: float = 1e-5) -> Tensor:
    gradient = torch.zeros_like(a)
    for i in range(len(a)):
        shift = torch.zeros_like(a)
        shift[i] = step
        gradient[i] = (value(a + shift, c) - value(a - shift, c)) / (2 * step)
    return gradient


TURN = Turn(0, 1, torch.arange(CLIENTS))


@pytest.mark.parametrize("name", ["tdpfed", "pfedme"])
def test_many_steps_reach_the_closed_form(name: str) -> None:
    """A client's theta is (c_k + lam w) / (1 + lam); with minibatches that go evenly through its data."""
    if name == "tdpfed":
        simulation = make(settings={"s": 300, "tau": 1, "momentum": 0.5})
        w = compose(simulation.server["factors"])
    else:
        simulation = make(PFedMe(lam=LAM, s=300, tau=1, batch_size=60, eta_p=0.1))
        w = simulation.server["w"].clone()
    c = centres(simulation)
    simulation.step()
    torch.testing.assert_close(simulation.personalized(), (c + LAM * w) / (1 + LAM), rtol=1e-9, atol=1e-10)
    assert float((simulation.personalized() - w).norm()) > 0.1


def test_envelope_solves_the_inner_problem_and_gives_the_gradient_of_f() -> None:
    simulation = make()
    a = simulation.server["factors"]
    c = centres(simulation)
    solved, gradients = envelope(simulation.runner, a.expand(CLIENTS, -1), TURN, Diagnostics(steps=500, tol=1e-12))
    torch.testing.assert_close(solved, (c + LAM * compose(a)) / (1 + LAM), rtol=1e-9, atol=1e-10)
    for k in range(CLIENTS):
        torch.testing.assert_close(gradients[k], finite_differences(a, c[k]), rtol=1e-6, atol=1e-7)
    assert float(gradients.norm()) > 0.1


def test_envelope_halves_a_step_that_is_too_long() -> None:
    """A rate of 0.6 is above 2 / (1 + lam): plain gradient descent would diverge."""
    simulation = make(settings={"eta_p": 0.6})
    a, c = simulation.server["factors"], centres(simulation)
    solved, _ = envelope(simulation.runner, a.expand(CLIENTS, -1), TURN, Diagnostics(steps=500, tol=1e-12))
    torch.testing.assert_close(solved, (c + LAM * compose(a)) / (1 + LAM), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_the_quantities_agree_with_finite_differences_and_a_plain_loop(weights: Any) -> None:
    simulation = make(settings={"weights": weights, "optimizer": "gd", "momentum": 0.0})
    simulation.step()
    a, c = simulation.server["factors"], centres(simulation)
    share = (
        torch.tensor([3.0, 4.0, 5.0]).double() / 12
        if weights == "samples"
        else torch.full((3,), 1 / 3, dtype=torch.float64)
    )
    sizes = simulation.federation.train_size.double() if weights == "samples" else torch.ones(3).double()
    got = diagnose(
        simulation.runner, simulation.server, simulation.private, TURN, sizes, Diagnostics(steps=500, tol=1e-13)
    )

    gradients = torch.stack([finite_differences(a, c[k]) for k in range(CLIENTS)])
    mean = share @ gradients
    assert got["gradient_norm"] == pytest.approx(float(mean.square().sum()), rel=1e-6)
    diversity = sum(float(share[k] * (gradients[k] - mean).square().sum()) for k in range(CLIENTS))
    assert got["diversity"] == pytest.approx(diversity, rel=1e-6)

    # Batches of 60 go through the 3, 4 or 5 samples 20, 15 and 12 times: the gradient is that of the whole data.
    distance = drift = 0.0
    for k in range(CLIENTS):
        factors, theta = a, compose(a)
        for _ in range(2):
            w = compose(factors)
            for _ in range(3):
                theta = theta - 0.1 * ((theta - c[k]) + LAM * (theta - w))
            error = (w - theta).reshape(SHAPE)
            for step in range(2):
                first, second = factors[:8].reshape(4, 2), factors[8:].reshape(5, 2)
                residual = first @ second.T - theta.reshape(SHAPE)
                g = LAM * torch.cat([(residual @ second).flatten(), (residual.T @ first).flatten()])
                if step == 0:
                    torch.testing.assert_close(residual, error)
                    drift += float(share[k] * (g - gradients[k]).square().sum()) / 2
                factors = factors - 0.01 * g
        distance += float(share[k] * (theta - compose(a)).square().sum())
    assert got["distance"] == pytest.approx(distance, rel=1e-9)
    assert got["drift"] == pytest.approx(drift, rel=1e-5)
    assert min(got.values()) > 1e-3


def test_exact_clients_do_not_drift_in_their_first_local_round() -> None:
    simulation = make(settings={"s": 400, "tau": 1, "momentum": 0.0})
    weights = torch.ones(3).double()
    got = diagnose(
        simulation.runner, simulation.server, simulation.private, TURN, weights, Diagnostics(steps=500, tol=1e-13)
    )
    assert got["drift"] < 1e-12
    assert got["gradient_norm"] > 1e-3
    moved = make(settings={"s": 400, "tau": 5, "momentum": 0.0})
    assert diagnose(moved.runner, moved.server, moved.private, TURN, weights, Diagnostics(steps=500))["drift"] > 1e-6


def test_records_hold_them_when_asked() -> None:
    simulation = make(diagnostics=Diagnostics(every=3, steps=20))
    records = list(simulation.run(7, evaluate_every=2))
    assert [record.round for record in records] == [2, 3, 4, 6, 7]
    with_numbers = {record.round: record.diagnostics for record in records if record.diagnostics is not None}
    assert set(with_numbers) == {3, 6}
    assert set(with_numbers[3]) == {"gradient_norm", "distance", "diversity", "drift"}
    assert all(record.diagnostics is None for record in make().run(2))


def test_bad_settings() -> None:
    for option in ({"every": 0}, {"steps": 0}, {"tol": -1.0}):
        with pytest.raises(TDPFedError, match=rf"diagnostics\.{next(iter(option))}"):
            Diagnostics(**option)
    with pytest.raises(TDPFedError, match="the convergence quantities are not defined for 'fedavg'"):
        Simulation(small.mlp(), small.federation(), FedAvg(), diagnostics=Diagnostics())
