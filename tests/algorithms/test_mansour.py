"""The three methods of Mansour et al. (2020) against their equations in loops, and where they are FedAvg."""

from typing import Any

import pytest
import torch
from torch import Tensor

import small
from by_hand import (
    CLIENTS,
    ROUNDS,
    Model,
    close,
    cut,
    flat,
    gradient,
    loss_of,
    mean,
    minibatches,
    opposed,
    sgd,
    start,
    step,
)
from tdpfed.algorithms import Algorithm, Dapper, FedAvg, HypCluster, Mapper
from tdpfed.core.draws import HeldOut, Stream, batch_indices, held_out_sizes, key, own_indices
from tdpfed.core.permutation import permute
from tdpfed.core.state import Turn
from tdpfed.data import Federation
from tdpfed.errors import TDPFedError
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule


def mixture(lam: float, v: Model, w: Model) -> Model:
    return {name: lam * v[name] + (1 - lam) * w[name] for name in w}


# HypCluster


@pytest.mark.parametrize("kind", ["conv", "dense"])
def test_hypcluster_by_hand(kind: str) -> None:
    algorithm = HypCluster(tau=3, batch_size=5, eta=0.2, clusters=3, choice_batches=2)
    simulation, module, first, data, sizes = start(algorithm, kind, data=opposed())
    size, choices = simulation.objective.layout.size, list[list[int]]()
    models = [cut(simulation.server["models"][n * size : (n + 1) * size], first) for n in range(3)]
    close(flat(models[0]), flat(first))
    for other in models[1:]:  # the same values in another order
        assert not torch.equal(flat(other), flat(first))
        assert all(torch.equal(other[n].flatten().sort().values, first[n].flatten().sort().values) for n in first)
    for round_ in range(1, ROUNDS + 1):
        changes: list[list[tuple[int, Model]]] = [[], [], []]
        trained: list[Model] = []
        choices.append([])
        for client in range(CLIENTS):
            batches = minibatches(data, client, round_, 5, 5)
            losses = [sum(float(loss_of(module, w, batch)) for batch in batches[3:]) for w in models]
            number = min(range(3), key=losses.__getitem__)
            if round_ == 1:  # drawn
                number = int(permute(torch.tensor(client), torch.tensor(CLIENTS), key(0, Stream.CLUSTER))) % 3
            own = sgd(module, models[number], batches[:3], 0.2)
            changes[number].append((sizes[client], {n: own[n] - models[number][n] for n in own}))
            trained.append(own)
            choices[-1].append(number)
        for number, found in enumerate(changes):
            if found:
                change = mean([one for _, one in found], [n for n, _ in found])
                models[number] = {n: models[number][n] + change[n] for n in change}
        simulation.step()
        close(simulation.server["models"], torch.cat([flat(model) for model in models]))
        close(simulation.personalized(), torch.stack([flat(model) for model in trained]))
        assert simulation.private["choice"].argmax(-1).tolist() == choices[-1]
    assert choices[0] != choices[-1]
    assert len(set(choices[-1])) > 1


def equals_fedavg(algorithm: Algorithm, **options: Any) -> None:
    for kind in small.MODELS:
        ours, fedavg = (small.train(a, 3, model=kind, **options) for a in (algorithm, FedAvg(**small.COMMON)))
        close(ours.global_model(), fedavg.server["w"])
        close(ours.personalized(), fedavg.personalized())
        assert ours.minibatch_loss == pytest.approx(fedavg.minibatch_loss, rel=1e-9)


@pytest.mark.parametrize("rule", [Rule(), Rule("median"), Rule(clip=0.05)], ids=lambda rule: f"{rule.name} {rule.clip}")
def test_one_cluster_is_fedavg(rule: Rule) -> None:
    equals_fedavg(HypCluster(**small.COMMON, clusters=1), rule=rule)
    equals_fedavg(HypCluster(**small.COMMON, clusters=1), participation=Participation(3, dropout=0.3), rule=rule)


def test_all_models_are_counted() -> None:
    simulation = small.train(HypCluster(**small.COMMON, clusters=4), 2)
    size = simulation.objective.layout.size
    assert small.carries(simulation.ledger.downlink, 10, 4 * size)
    assert small.carries(simulation.ledger.uplink, 10, size)


@pytest.mark.parametrize("seed", range(4))
def test_clients_of_two_kinds_find_each_other(seed: int) -> None:
    """No model serves both kinds. Without the first draw all clients stay with one model for most seeds."""
    algorithm = HypCluster(tau=5, batch_size=8, eta=0.1, clusters=2)
    choice = small.train(algorithm, 6, data=opposed(8), seed=seed).private["choice"].argmax(-1)
    assert len(choice[::2].unique()) == len(choice[1::2].unique()) == 1
    assert choice[0] != choice[1]


@pytest.mark.parametrize("clusters", [6, 100])
def test_more_clusters_than_clients_are_refused(clusters: int) -> None:
    with pytest.raises(TDPFedError, match=rf"^algorithm\.clusters: {clusters} given, must be at most 5"):
        small.train(HypCluster(clusters=clusters), 0)
    small.train(HypCluster(**small.COMMON, clusters=5), 1)


# Mapper


def split(data: Federation, client: int, round_: int, share: float, counts: tuple[int, int]) -> tuple[Any, Any]:
    """Return training and validation minibatches of five samples: the samples in an order of their own, cut once."""
    one, size = torch.tensor([client]), int(data.train_size[client])
    order = permute(torch.arange(size), torch.tensor(size), key(0, Stream.HOLD_OUT, one)) + data.train_start[client]
    held = max(1, int(share * size))
    parts, found = (order[: size - held], order[size - held :]), []
    for rows, count, stream in zip(parts, counts, (Stream.BATCH, Stream.VALIDATION), strict=True):
        places = batch_indices(0, round_, one, torch.tensor([0]), torch.tensor([len(rows)]), count, 5, stream)[0]
        found.append([(data.x[rows[place]], data.y[rows[place]]) for place in places])
    return found[0], found[1]


@pytest.mark.parametrize(("kind", "mixes"), [("conv", (0.0, 0.3, 1.0)), ("dense", (0.0, 0.5, 0.7))])
def test_mapper_by_hand(kind: str, mixes: tuple[float, ...]) -> None:
    algorithm = Mapper(tau=3, batch_size=5, eta=0.2, mixes=mixes, validation=0.25, choice_batches=2)
    simulation, module, w, data, sizes = start(algorithm, kind, data=opposed())
    own, chosen = [w] * CLIENTS, list[float]()
    for round_ in range(1, ROUNDS + 1):
        uploads, thetas = [], []
        for client in range(CLIENTS):
            batches, validation = split(data, client, round_, 0.25, (6, 2))
            fitted = []
            for lam in mixes:
                v = own[client]
                for batch in batches[3:]:
                    v = step(v, gradient(module, mixture(lam, v, w), batch), 0.2 * lam)
                fitted.append(v)
            losses = [
                sum(float(loss_of(module, mixture(lam, v, w), batch)) for batch in validation)
                for lam, v in zip(mixes, fitted, strict=True)
            ]
            best = min(range(3), key=losses.__getitem__)
            lam, own[client] = mixes[best], fitted[best]
            shared = w
            for batch in batches[:3]:
                shared = step(shared, gradient(module, mixture(lam, own[client], shared), batch), 0.2 * (1 - lam))
            uploads.append(shared)
            thetas.append(flat(mixture(lam, own[client], shared)))
            chosen.append(lam)
        w = mean(uploads, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack(thetas))
        close(simulation.private["own"], torch.stack([flat(v) for v in own]))
        assert simulation.private["lam"].flatten().tolist() == chosen[-CLIENTS:]
    assert len(set(chosen)) > (kind == "conv")


def test_mapper_at_lambda_0_is_fedavg() -> None:
    equals_fedavg(Mapper(**small.COMMON, mixes=(0.0,)))


def test_mapper_at_lambda_1_leaves_the_global_model() -> None:
    run = small.train(Mapper(**small.COMMON, mixes=(1.0,)), 2)
    close(run.server["w"], run.objective.initial())
    assert float((run.personalized() - run.server["w"]).norm()) > 0.1


def test_held_out_samples_are_never_trained_on_and_no_test_sample_is_seen() -> None:
    data = small.federation(5)
    run = small.train(Mapper(tau=40, batch_size=4, validation=0.3), 0, data=data)
    drawn, held = [set[int]() for _ in range(5)], [set[int]() for _ in range(5)]
    for client in range(5):
        for round_ in (1, 2):
            local = run.runner.local(
                *(lambda t: (t, run.runner.batches(t), run.runner.extras(t)))(turn(client, round_))
            )
            for t in range(50):
                drawn[client] |= rows_of(local.batch(t)[0], data)
                held[client] |= rows_of(local.validation(t)[0], data)
        begin, size = int(data.train_start[client]), int(data.train_size[client])
        assert not drawn[client] & held[client]
        assert drawn[client] | held[client] == set(range(begin, begin + size))
        assert len(held[client]) == int(0.3 * size)


def turn(client: int, round_: int) -> Turn:
    return Turn(0, round_, torch.tensor(client))


def rows_of(x: Tensor, data: Federation) -> set[int]:
    return {int((data.x == one).flatten(1).all(-1).nonzero()[0]) for one in x}


def test_sizes_of_what_is_held_out() -> None:
    size = torch.tensor([2, 3, 5, 10, 1000])
    assert held_out_sizes(size, 0.2).tolist() == [1, 1, 1, 2, 200]
    assert held_out_sizes(size, 0.999).tolist() == [1, 2, 4, 9, 999]
    assert held_out_sizes(size, 0.0).tolist() == [0] * 5
    clients, start = torch.arange(5), size.cumsum(0) - size
    whole = own_indices(3, 1, clients, start, size, 4, 3, HeldOut())
    assert torch.equal(whole, batch_indices(3, 1, clients, start, size, 4, 3))


def test_a_client_with_one_sample_has_none_to_hold_out() -> None:
    x, owner = torch.randn(7, *small.SHAPE), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    mask = torch.tensor([False, False, True, False, False, True, False])
    data = Federation.from_tensors(x, torch.arange(7) % 3, owner, test_mask=mask, dtype=torch.float64)
    with pytest.raises(TDPFedError, match=r"^algorithm\.validation: 0\.2 given, must be .* client 2 has 1"):
        small.train(Mapper(), 0, data=data)
    small.train(Mapper(**small.COMMON, mixes=(0.5,)), 1, data=data)  # nothing to choose, nothing held out


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"mixes": ()}, "mixes"), ({"mixes": (0.5, 1.5)}, "mixes"), ({"mixes": (-0.1,)}, "mixes"),
     ({"validation": 0}, "validation"), ({"validation": 1.0}, "validation")],
)  # fmt: skip
def test_bad_settings_of_mapper(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(TDPFedError, match=f"^{field}: .* given, must be "):
        Mapper(**settings)


# Dapper


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_dapper_by_hand(lam: float) -> None:
    algorithm = Dapper(tau=3, batch_size=5, eta=0.2, lam=lam, public=9)
    simulation, module, w, data, sizes = start(algorithm)
    public = permute(torch.arange(9), data.train_size.sum(), key(0, Stream.PUBLIC))
    assert len(public.unique()) == 9
    assert int(public.max()) < int(data.train_size.sum())  # training samples come first
    for round_ in range(1, ROUNDS + 1):
        trained = []
        for client in range(CLIENTS):
            one, model = torch.tensor([client]), w
            drawn = batch_indices(0, round_, one, torch.tensor([0]), torch.tensor([9]), 3, 5, Stream.PUBLIC)[0]
            for rows, batch in zip(drawn, minibatches(data, client, round_, 3, 5), strict=True):
                mine = gradient(module, model, batch)
                common = gradient(module, model, (data.x[public[rows]], data.y[public[rows]]))
                model = step(model, {n: lam * mine[n] + (1 - lam) * common[n] for n in mine}, 0.2)
            trained.append(model)
        w = mean(trained, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack([flat(model) for model in trained]))


def test_dapper_on_own_samples_alone_is_fedavg() -> None:
    equals_fedavg(Dapper(**small.COMMON, lam=1.0, public=5))


def test_the_public_sample_is_counted_once() -> None:
    for rounds in (1, 3):
        own, fedavg = (small.train(a, rounds) for a in (Dapper(**small.COMMON, public=11), FedAvg(**small.COMMON)))
        sample = 11 * (36 + 1) * 4  # 36 inputs and a label
        assert own.ledger.uplink - fedavg.ledger.uplink == sample
        assert own.ledger.downlink - fedavg.ledger.downlink == 5 * sample


def test_more_public_samples_than_there_are_are_refused() -> None:
    total = int(small.federation().train_size.sum())
    small.train(Dapper(**small.COMMON, public=total), 1)
    with pytest.raises(TDPFedError, match=rf"^algorithm\.public: {total + 1} given, must be at most {total}"):
        small.train(Dapper(public=total + 1), 0)
