"""FedALA against its equations in loops, and where it is FedAvg."""

import pytest
import torch

import small
from by_hand import CLIENTS, ROUNDS, Model, close, flat, gradient, mean, minibatches, sgd, start
from tdpfed.algorithms import FedALA, FedAvg
from tdpfed.errors import TDPFedError


def between(v: Model, w: Model, share: Model) -> Model:
    """Where a client starts."""
    return {name: v[name] + (w[name] - v[name]) * share[name] if name in share else w[name] for name in w}


@pytest.mark.parametrize("adaptive", [("last",), ("conv*", "fc2.bias"), ("*",)])
def test_three_rounds_by_hand(adaptive: tuple[str, ...]) -> None:
    algorithm = FedALA(tau=3, batch_size=5, eta=0.1, weight_rate=3.0, weight_steps=4, adaptive=adaptive)
    simulation, module, w, data, sizes = start(algorithm)
    mixed = {"last": ["fc2.weight", "fc2.bias"], "*": list(w)}.get(
        adaptive[0], ["conv.weight", "conv.bias", "fc2.bias"]
    )
    own = [dict(w) for _ in range(CLIENTS)]
    weights = [{name: torch.ones_like(w[name]) for name in mixed} for _ in range(CLIENTS)]
    for round_ in range(1, ROUNDS + 1):
        for client in range(CLIENTS):
            batches = minibatches(data, client, round_, 7, 5)
            v, share = own[client], weights[client]
            for batch in batches[3:]:
                g = gradient(module, between(v, w, share), batch)
                for name in mixed:
                    share[name] = (share[name] - 3.0 * g[name] * (w[name] - v[name])).clamp(0, 1)
            own[client] = sgd(module, between(v, w, share), batches[:3], 0.1)
        w = mean(own, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack([flat(model) for model in own]))
        close(simulation.private["mix"], torch.stack([flat(share) for share in weights]))
    assert len({tuple(flat(share).tolist()) for share in weights}) == CLIENTS  # each client has its own
    assert 0 < float((flat(weights[0]) < 1).double().mean()) <= 1


def test_weights_that_stay_1_are_fedavg_to_the_bit() -> None:
    ala = small.train(FedALA(**small.COMMON, weight_rate=0.0), 3)
    fedavg = small.train(FedAvg(**small.COMMON), 3)
    assert torch.equal(ala.server["w"], fedavg.server["w"])
    assert torch.equal(ala.personalized(), fedavg.personalized())


def test_weights_stay_between_0_and_1() -> None:
    mix = small.train(FedALA(**small.COMMON, weight_rate=1e6, eta=0.3), 4).private["mix"]
    assert float(mix.min()) == 0
    assert float(mix.max()) == 1


def test_only_the_model_travels() -> None:
    simulation = small.train(FedALA(**small.COMMON), 2)
    size = simulation.objective.layout.size
    assert small.carries(simulation.ledger.uplink, 10, size)
    assert small.carries(simulation.ledger.downlink, 10, size)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(TDPFedError, match=r"^algorithm\.adaptive: .*'head\*' matches no parameter"):
        small.train(FedALA(adaptive=("head*",)), 0)
    with pytest.raises(TDPFedError, match=r"^algorithm\.adaptive: \(\) given, must be at least one pattern"):
        small.train(FedALA(adaptive=()), 0)
