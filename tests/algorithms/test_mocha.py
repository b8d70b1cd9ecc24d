"""MOCHA against its equations in loops over samples and classes; its duality gap; the relations it finds."""

from typing import Any

import pytest
import torch
from torch import Tensor

import by_hand
import small
from by_hand import CLIENTS, ROUNDS, close, start
from tdpfed.algorithms import FedAvg, Mocha
from tdpfed.core.draws import batch_indices
from tdpfed.data import Federation
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.server.participation import Participation
from tdpfed.server.step import ServerStep

LAM = 0.2


def by_rows(simulation: Simulation, client: int) -> tuple[Tensor, Tensor]:
    """Return a client's samples with a 1 for the bias, and 1 or -1 for each class."""
    x, y, _, _ = simulation.federation.client(client)
    rows = torch.cat([x.flatten(1), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    return rows, 2 * torch.nn.functional.one_hot(y, small.CLASSES).double() - 1


def as_model(matrix: Tensor) -> Tensor:
    return torch.cat([matrix[:, :-1].reshape(-1), matrix[:, -1]])


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("batch_size", [5, 20])  # 20: more than a client has, so that samples repeat in a minibatch
def test_three_rounds_by_hand(every: int, batch_size: int) -> None:
    algorithm = Mocha(tau=2, batch_size=batch_size, lam=LAM, relation_every=every, ridge=0.3)
    simulation, _, _, data, _ = start(algorithm, "linear")
    samples = [by_rows(simulation, k) for k in range(CLIENTS)]
    alpha = [torch.zeros(len(x), small.CLASSES, dtype=torch.float64) for x, _ in samples]
    relation = torch.eye(CLIENTS, dtype=torch.float64) / CLIENTS
    w = [torch.zeros(small.CLASSES, 37, dtype=torch.float64) for _ in range(CLIENTS)]
    for round_ in range(1, ROUNDS + 1):
        sigma = max(float(relation[k].abs().sum() / relation[k, k]) for k in range(CLIENTS))
        thetas = []
        for k, (x, sign) in enumerate(samples):
            one = torch.tensor([k])
            drawn = batch_indices(0, round_, one, torch.tensor([0]), data.train_size[one], 2, batch_size)[0]
            theta = torch.zeros_like(w[k])
            for c in range(small.CLASSES):
                moved = torch.zeros(37, dtype=torch.float64)
                for i in drawn.flatten().tolist():
                    at = w[k][c] + sigma * relation[k, k] / LAM * moved
                    curvature = sigma * relation[k, k] / LAM * (x[i] @ x[i])
                    new = float((alpha[k][i, c] + (1 - sign[i, c] * (at @ x[i])) / curvature).clamp(0, 1))
                    moved = moved + (new - alpha[k][i, c]) * sign[i, c] * x[i]
                    alpha[k][i, c] = new
                theta[c] = w[k][c] + relation[k, k] / LAM * moved
            thetas.append(as_model(theta))
        images = [(a * sign).T @ x for a, (x, sign) in zip(alpha, samples, strict=True)]
        w = [sum((relation[k, j] * images[j] for j in range(CLIENTS)), 0 * images[0]) / LAM for k in range(CLIENTS)]
        if round_ % every == 0:
            columns = torch.stack([one.flatten() for one in w], 1)
            _, s, v = torch.linalg.svd(columns, full_matrices=False)
            root = v.T @ torch.diag(s) @ v  # (W^T W)^(1/2)
            relation = 0.7 * root / root.trace() + 0.3 * torch.eye(CLIENTS).double() / CLIENTS
            w = [sum((relation[k, j] * images[j] for j in range(CLIENTS)), 0 * images[0]) / LAM for k in range(CLIENTS)]
        simulation.step()
        close(simulation.server["image"], torch.stack([as_model(one) for one in images]))
        close(simulation.server["relation"], relation)
        close(simulation.server["w"], torch.stack([as_model(one) for one in w]))
        close(simulation.personalized(), torch.stack(thetas))


def test_the_duality_gap_closes() -> None:
    """Primal ``sum hinge + lam/2 tr(W Sigma^-1 W^T)``, by autograd free of our steps, against the dual, Sigma fixed."""
    algorithm = Mocha(tau=20, batch_size=5, lam=LAM, relation_every=10**6)
    simulation, _, _, _, _ = start(algorithm, "linear")

    def gap() -> tuple[float, float]:
        w = simulation.server["w"]
        matrices = [torch.cat([row[:108].reshape(3, 36), row[108:, None]], 1) for row in w]
        samples = [by_rows(simulation, k) for k in range(CLIENTS)]
        hinge = sum(float((1 - s * (x @ m.T)).clamp_min(0).sum()) for (x, s), m in zip(samples, matrices, strict=True))
        penalty = (
            float(LAM / 2 * (w.T @ torch.linalg.inv(simulation.server["relation"]) @ w.T.T).diagonal().sum())
            if False
            else float(LAM / 2 * torch.einsum("kp,kj,jp->", w, torch.linalg.inv(simulation.server["relation"]), w))
        )
        dual = float(simulation.private["alpha"].sum()) - penalty
        return hinge + penalty - dual, abs(dual)

    simulation.step()
    before, _ = gap()
    for _ in range(80):
        simulation.step()
    after, dual = gap()
    assert before > 0.05 * dual
    assert -1e-9 < after < 1e-3 * dual


def test_related_clients_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    x, owner = torch.randn(6 * 40, *small.SHAPE, generator=generator), torch.arange(6).repeat_interleave(40)
    side = x.flatten(1)[:, :6].sum(-1) > 0
    data = Federation.from_tensors(x, (side ^ (owner >= 3)).long(), owner, classes=3, dtype=torch.float64)
    run = Simulation(by_hand.linear().double(), data, Mocha(tau=5, batch_size=10, lam=0.5, ridge=0.01))
    for _ in range(5):
        run.step()
    relation = run.server["relation"]
    assert float(relation[:3, :3].min()) > 0 > float(relation[:3, 3:].max())


def test_it_learns() -> None:
    run = Simulation(by_hand.linear().double(), small.federation(), Mocha(tau=10, batch_size=4))
    first = run.record(0.0).personalized_accuracy
    for _ in range(10):
        run.step()
    last = run.record(0.0).personalized_accuracy
    assert first is not None
    assert last is not None
    assert last > first + 0.2


def test_a_lost_upload_is_made_good() -> None:
    """What the server lacks comes with the next upload, which is the whole image."""
    run = Simulation(
        by_hand.linear().double(), small.federation(), Mocha(tau=5, batch_size=4, lam=LAM),
        participation=Participation(2, "all"),
    )  # fmt: skip
    for _ in range(6):
        run.step()
        for k in run.next_turn()[0].clients.tolist():
            x, sign = by_rows(run, k)
            alpha = run.private["alpha"][k][: len(x)]
            close(run.private["image"][k], as_model((alpha * sign).T @ x))


@pytest.mark.parametrize("kind", ["dense", "conv"])
def test_another_model_is_refused(kind: str) -> None:
    with pytest.raises(
        TDPFedError, match=r"^algorithm\.name: 'mocha' given, must be another, or model\.name 'logistic'"
    ):
        small.train(Mocha(), 0, model=kind)


def test_a_server_optimizer_is_refused() -> None:
    options: Any = {"server_step": ServerStep(optimizer="sgd")}
    with pytest.raises(TDPFedError, match=r"^server\.optimizer: "):
        Simulation(by_hand.linear().double(), small.federation(), Mocha(), **options)
    Simulation(by_hand.linear().double(), small.federation(), FedAvg(), **options)
