"""FedPara and pFedPara against their equations in loops; what products of low rank can represent; what travels."""

import math

import pytest
import torch
from torch import Tensor

import small
from by_hand import CLIENTS, ROUNDS, close, flat, gradients, loss_of, mean, minibatches, moved, start, step
from tdpfed.algorithms import FedPara, PFedPara
from tdpfed.core.layout import Layout
from tdpfed.cp.hadamard import HadamardPlan, factor_shapes, pulled, rank_for
from tdpfed.errors import TDPFedError

FACTORIZED = {"conv.weight": 1, "fc1.weight": 2}
"""Ranks for the references."""


def low_rank(factors: dict[str, Tensor], name: str, number: int) -> Tensor:
    """Compose a product by sums over ranks."""
    x, y = factors[f"{name}.X{number}"], factors[f"{name}.Y{number}"]
    core = factors.get(f"{name}.T{number}")
    if core is None:
        return sum((torch.outer(x[:, r], y[:, r]) for r in range(x.shape[1])), torch.zeros(len(x), len(y)).double())
    total = torch.zeros(len(x), len(y), core.shape[-1], dtype=torch.float64)
    for r in range(x.shape[1]):
        for s in range(y.shape[1]):
            total = total + x[:, r, None, None] * y[None, :, s, None] * core[r, s]
    return total


def composed(factors: dict[str, Tensor], shapes: dict[str, torch.Size], constant: float) -> dict[str, Tensor]:
    found = {}
    for name, shape in shapes.items():
        if name in factors:
            found[name] = factors[name]
        else:
            product = low_rank(factors, name, 1) * (low_rank(factors, name, 2) + constant)
            found[name] = product.reshape(shape)
    return found


def cut(vector: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Cut a factor vector by hand."""
    found, at = {}, 0
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        found[name] = vector[at : at + math.prod(shape)].reshape(shape)
        at += math.prod(shape)
    assert at == len(vector)
    return found


@pytest.mark.parametrize("kind", ["conv", "dense"])
def test_fedpara_by_hand(kind: str) -> None:
    algorithm = FedPara(tau=3, batch_size=5, eta=0.2, gamma=0.6)
    simulation, module, model, data, sizes = start(algorithm, kind)
    shapes = {name: value.shape for name, value in model.items()}
    bound = simulation.algorithm
    assert isinstance(bound, FedPara)
    factors = cut(simulation.server["factors"], bound.factors)
    assert {name.rpartition(".")[0] for name in factors} > {"fc1.weight"}
    assert (kind == "conv") == ("conv.weight.T1" in factors)
    for round_ in range(1, ROUNDS + 1):
        uploads = []
        for client in range(CLIENTS):
            own = dict(factors)
            for batch in minibatches(data, client, round_, 3, 5):
                g, _ = gradients(lambda f, b=batch: loss_of(module, composed(f, shapes, 0), b), own)  # type: ignore[misc]
                own = step(own, g, 0.2)
            uploads.append(own)
        factors = mean(uploads, sizes)
        simulation.step()
        close(simulation.server["factors"], flat(factors))
        close(simulation.global_model(), flat(composed(factors, shapes, 0)))
        close(simulation.personalized(), torch.stack([flat(composed(own, shapes, 0)) for own in uploads]))
    assert moved(simulation) > 0.1


@pytest.mark.parametrize("kind", ["conv", "dense"])
def test_pfedpara_by_hand(kind: str) -> None:
    algorithm = PFedPara(tau=3, batch_size=5, eta=0.2, gamma=0.6)
    simulation, module, model, data, sizes = start(algorithm, kind)
    shapes = {name: value.shape for name, value in model.items()}
    bound = simulation.algorithm
    assert isinstance(bound, PFedPara)
    shared = cut(simulation.server["factors"], bound.hadamard.first)
    private = [cut(row, bound.hadamard.second) for row in simulation.private["own"]]
    close(simulation.global_model(), flat(composed({**shared, **private[0]}, shapes, 1)))  # W2 is 0 at first
    for round_ in range(1, ROUNDS + 1):
        uploads = []
        for client in range(CLIENTS):
            own = {**shared, **private[client]}
            for batch in minibatches(data, client, round_, 3, 5):
                g, _ = gradients(lambda f, b=batch: loss_of(module, composed(f, shapes, 1), b), own)  # type: ignore[misc]
                own = step(own, g, 0.2)
            uploads.append({name: own[name] for name in shared})
            private[client] = {name: own[name] for name in private[client]}
        thetas = [flat(composed({**u, **p}, shapes, 1)) for u, p in zip(uploads, private, strict=True)]
        shared = mean(uploads, sizes)
        simulation.step()
        close(simulation.server["factors"], flat(shared))
        close(simulation.private["own"], torch.stack([flat(own) for own in private]))
        close(simulation.personalized(), torch.stack(thetas))
    assert len({tuple(flat(own).tolist()) for own in private}) == CLIENTS


def test_the_private_product_never_travels() -> None:
    simulation = small.train(PFedPara(**small.COMMON), 2)
    bound = simulation.algorithm
    assert isinstance(bound, PFedPara)
    first, second = bound.hadamard.first.size, bound.hadamard.second.size
    assert second > 100
    assert small.carries(simulation.ledger.uplink, 10, first)
    assert small.carries(simulation.ledger.downlink, 10, first)
    names = [name for entries in (bound.up(), bound.down()) for layout in entries.values() for name in layout.names]  # type: ignore[union-attr]
    assert not [name for name in names if name.endswith(("X2", "Y2", "T2"))]


def test_any_matrix_at_full_rank() -> None:
    """X2 Y2^T can be all ones; X1 Y1^T is any matrix of rank min(m, n)."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    plan = HadamardPlan.of(Layout.of({"w": (6, 5)}), 0, rank=5)
    u, s, v = torch.linalg.svd(w, full_matrices=False)
    ones = [torch.zeros(size, 5, dtype=torch.float64).index_fill(1, torch.tensor([0]), 1.0) for size in (6, 5)]
    got = plan.compose(plan.first.join([u * s, v.mT]), plan.second.join(ones))
    torch.testing.assert_close(got, w.reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("shape", "rank"), [((8, 8), 3), ((6, 4, 3), 3)])
def test_the_root_of_the_full_rank_reaches_it(shape: tuple[int, ...], rank: int) -> None:
    """Two factors of rank 3 have a product of rank 8, where one alone has rank 3; so has a kernel's unfolding."""
    generator = torch.Generator().manual_seed(1)
    plan = HadamardPlan.of(Layout.of({"w": shape}), 0, rank=rank)
    vectors = [
        torch.randn(layout.size, generator=generator, dtype=torch.float64) for layout in (plan.first, plan.second)
    ]
    w = plan.compose(*vectors).reshape(shape[0], -1)
    assert int(torch.linalg.matrix_rank(w)) == min(w.shape)


def test_ranks() -> None:
    """The least reaches full rank, the most saves values, and a share lies between."""
    assert (rank_for((256, 256), 0), rank_for((256, 256), 1), rank_for((256, 256), 0.5)) == (16, 64, 40)
    for shape in ((100, 784), (64, 32, 3, 3), (512, 512, 3, 3)):
        most = rank_for(shape, 1.0)
        assert most is not None
        values = [2 * sum(map(math.prod, factor_shapes(shape, rank))) for rank in (most, most + 1)]
        assert values[0] <= math.prod(shape) < values[1]
    assert rank_for((3, 12), 0.5) is None  # no rank has fewer values


@pytest.mark.parametrize("shape", [(7, 5), (6, 4, 3, 2)])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_chain_rule_is_autograds(shape: tuple[int, ...], lead: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    group = [
        torch.randn(*lead, *one, generator=generator, dtype=torch.float64, requires_grad=True)
        for one in factor_shapes(shape, 3)
    ]
    x, y, *core = group
    whole = x @ y.mT if not core else torch.einsum("...or,...rsk,...is->...oik", x, core[0], y)
    g = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
    for ours, theirs in zip(pulled(group, g), torch.autograd.grad(whole, group, g), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", [FedPara, PFedPara])
def test_the_initial_weights_have_the_models_variance_and_train(method: type[FedPara]) -> None:
    simulation = small.train(method(tau=10, batch_size=8), 0, model="conv")
    theta, shipped = simulation.objective.initial(), simulation.global_model()
    assert shipped is not None
    for name, where in simulation.objective.layout.slices.items():
        if name == "fc1.weight":
            assert 0.5 < float(shipped[where].std() / theta[where].std()) < 2
    losses = [float(simulation.record(0.0).personalized_loss or 0)]
    for _ in range(15):
        simulation.step()
    losses.append(float(simulation.record(0.0).personalized_loss or 0))
    assert losses[1] < 0.6 * losses[0]


def test_a_model_without_anything_to_factorize_is_refused() -> None:
    with pytest.raises(TDPFedError, match=r"algorithm\.name: no parameter"):
        small.train(FedPara(exclude=("*",)), 0)
    with pytest.raises(TDPFedError, match=r"^algorithm\.exclude: .*matches no parameter"):
        small.train(FedPara(exclude=("head",)), 0)
