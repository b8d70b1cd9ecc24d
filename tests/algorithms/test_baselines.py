"""The baselines: what each adds to plain local SGD, against small loops in float64."""

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import FedAvg, FedAvgSAR, Local, PerFedAvg
from tdpfed.core.draws import Subsets
from tdpfed.core.layout import Layout
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import Turn
from tdpfed.engine.simulation import Simulation
from tdpfed.server.participation import Participation


def test_local_is_sgd_on_ones_own_data_across_rounds() -> None:
    simulation = small.train(Local(**small.COMMON, eta=0.1), rounds=3)
    for client in range(5):
        theta = simulation.objective.initial().double()
        for round_ in (1, 2, 3):
            batches = simulation.runner.batches(Turn(0, round_, torch.tensor(client)))
            for t in range(3):
                theta = theta - 0.1 * simulation.objective.gradient(theta, batches(t))[0]
        torch.testing.assert_close(simulation.private["theta"][client], theta, rtol=1e-10, atol=1e-11)
    assert simulation.server == {}
    assert simulation.global_model() is None
    assert (simulation.ledger.uplink, simulation.ledger.downlink, simulation.compression_rate) == (0, 0, None)


def test_fedavg_averages_by_samples() -> None:
    simulation = small.train(FedAvg(**small.COMMON, eta=0.1), rounds=1)
    sizes = simulation.federation.train_size.double()
    mean = (sizes / sizes.sum()) @ simulation.private["theta"]
    torch.testing.assert_close(simulation.server["w"], mean, rtol=1e-12, atol=1e-13)


def test_perfedavg_differentiates_the_adaptation_step() -> None:
    """Hessian-free with a small delta is the true gradient of f(w - alpha grad f(w)), here by autograd."""
    alpha, eta = 0.3, 0.2
    settings = {"tau": 1, "batch_size": 40, "alpha": alpha, "eta": eta}  # one batch: a client's whole data
    data = small.federation()
    size = int(data.train_size[0])
    simulation = Simulation(
        small.mlp(),
        data,
        PerFedAvg(**{**settings, "batch_size": size}, variant="hessian-free", delta=1e-4),  # type: ignore[arg-type]
    )
    objective, w = simulation.objective, simulation.objective.initial().double()
    x, y, _, _ = data.client(0)

    def loss(theta: Tensor) -> Tensor:
        return nn.functional.cross_entropy(objective.outputs(theta, x), y)

    start = w.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(start), start, create_graph=True)
    adapted = start - alpha * inner
    (at_adapted,) = torch.autograd.grad(loss(adapted), adapted, retain_graph=True)
    (through,) = torch.autograd.grad(loss(adapted), start)
    turn = Turn(0, 1, torch.tensor([0]))
    rows = {"theta": simulation.private["theta"][:1]}
    for variant, expected in (("hessian-free", through), ("first-order", at_adapted)):
        algorithm = PerFedAvg(**{**settings, "batch_size": size}, variant=variant, delta=1e-4)  # type: ignore[arg-type]
        outcome = Simulation(small.mlp(), data, algorithm, runner="loop").runner.run({"w": w}, rows, turn)
        moved = outcome.upload["w"][0]
        torch.testing.assert_close((w - moved) / eta, expected, rtol=1e-5, atol=1e-7)
        after = moved - alpha * objective.gradient(moved, (x, y))[0]
        torch.testing.assert_close(outcome.private["theta"][0], after, rtol=1e-10, atol=1e-11)
    assert float((through - at_adapted).norm()) > 1e-3


def test_perfedavg_takes_fresh_minibatches_for_each_purpose() -> None:
    algorithm = PerFedAvg(tau=2, batch_size=3, variant="hessian-free")
    simulation = Simulation(small.mlp(), small.federation(), algorithm)
    asked: list[int] = []
    turn = Turn(0, 1, torch.tensor(1))
    batches = simulation.runner.batches(turn)

    def spy(step: int) -> tuple[Tensor, Tensor]:
        asked.append(step)
        return batches(step)

    local = PlainLocal(turn, algorithm.tau, spy, simulation.objective.gradient)
    simulation.algorithm.update({"w": simulation.server["w"]}, {"theta": simulation.server["w"]}, local)
    assert sorted(asked) == list(range(algorithm.draws))


def test_sar_subsets_have_the_right_size_and_are_drawn_afresh() -> None:
    sent = FedAvgSAR(compression=4.0).bind(Layout.of({"w": (1001,)}), 6).subsets
    subset = sent.of(Turn(0, 1, torch.arange(6)))
    assert subset.shape == (6, 250)
    assert all(len(row.unique()) == 250 for row in subset)
    assert len({tuple(row.tolist()) for row in subset}) == 6
    assert torch.equal(sent.of(Turn(0, 1, torch.tensor(3))), subset[3])
    for other in (Turn(0, 2, torch.arange(6)), Turn(1, 1, torch.arange(6))):
        assert not torch.equal(sent.of(other), subset)
    few = Subsets(40, 10)
    drawn = [few.of(Turn(0, n, torch.arange(20))) for n in range(99)]
    share = torch.stack([torch.bincount(chosen.reshape(-1), minlength=40) for chosen in drawn]).sum(0)
    assert share.min() > 380  # 495 expected, deviation 19
    assert share.max() < 610


def test_sar_keeps_what_does_not_travel() -> None:
    """Against sets and dicts: every coordinate of every client by hand."""
    algorithm = FedAvgSAR(**small.COMMON, compression=3.0, eta=0.1)
    participation = Participation(clients=3)
    simulation = Simulation(small.mlp(), small.federation(), algorithm, participation=participation)
    assert isinstance(simulation.algorithm, FedAvgSAR)
    for _ in range(3):
        w, own = simulation.server["w"].clone(), simulation.private["theta"].clone()
        simulation.step()
        chosen, _ = simulation.participation.draw(simulation.seed, simulation.round, simulation.federation.clients)
        sums: dict[int, float] = {}
        counts: dict[int, float] = {}
        for client in chosen.tolist():
            turn = Turn(0, simulation.round, torch.tensor(client))
            travels = simulation.algorithm.subsets.of(turn)
            theta = own[client].clone()
            theta[travels] = w[travels]
            batches = simulation.runner.batches(turn)
            for t in range(3):
                theta = theta - 0.1 * simulation.objective.gradient(theta, batches(t))[0]
            torch.testing.assert_close(simulation.private["theta"][client], theta, rtol=1e-10, atol=1e-11)
            weight = float(simulation.federation.train_size[client])
            for i in travels.tolist():
                sums[i] = sums.get(i, 0.0) + weight * float(theta[i])
                counts[i] = counts.get(i, 0.0) + weight
        expected = torch.tensor([sums[i] / counts[i] if i in sums else float(w[i]) for i in range(len(w))]).double()
        torch.testing.assert_close(simulation.server["w"], expected, rtol=1e-6, atol=1e-7)
        assert 0 < len(sums) < len(w)
    unchosen = set(range(5)) - set(chosen.tolist())
    assert all(torch.equal(simulation.private["theta"][k], own[k]) for k in unchosen)


@pytest.mark.parametrize("compression", [1.0, 2.0, 7.5])
def test_sar_bytes(compression: float) -> None:
    simulation = small.train(FedAvgSAR(**small.COMMON, compression=compression), rounds=2)
    values = round(simulation.objective.layout.size / compression)
    assert small.carries(simulation.ledger.uplink, 2 * 5, values)
    assert small.carries(simulation.ledger.downlink, 2 * 5, values)
