"""Fine-tuning against loops; what a record says about each client."""

import pytest
import torch

import small
from by_hand import CLIENTS, ROUNDS, close, flat, gradient, mean, minibatches, opposed, sgd, start
from tdpfed.algorithms import FedAvg, FineTune
from tdpfed.errors import TDPFedError


@pytest.mark.parametrize("layers", [("*",), ("last",), ("conv.*", "fc1.bias")])
def test_three_rounds_by_hand(layers: tuple[str, ...]) -> None:
    algorithm = FineTune(tau=3, batch_size=5, eta=0.2, tune_rate=0.1, tune_steps=4, layers=layers)
    simulation, module, w, data, sizes = start(algorithm)
    tuned = {"*": list(w), "last": ["fc2.weight", "fc2.bias"]}.get(layers[0], ["conv.weight", "conv.bias", "fc1.bias"])
    for round_ in range(1, ROUNDS + 1):
        thetas, uploads = [], []
        for client in range(CLIENTS):
            batches = minibatches(data, client, round_, 7, 5)
            uploads.append(sgd(module, w, batches[:3], 0.2))
            theta = dict(w)
            for batch in batches[3:]:
                g = gradient(module, theta, batch)
                theta |= {name: theta[name] - 0.1 * g[name] for name in tuned}
            thetas.append(flat(theta))
        w = mean(uploads, sizes)
        simulation.step()
        close(simulation.server["w"], flat(w))
        close(simulation.personalized(), torch.stack(thetas))


def test_the_federation_is_fedavg() -> None:
    tuned, fedavg = small.train(FineTune(**small.COMMON, tune_steps=2), 3), small.train(FedAvg(**small.COMMON), 3)
    close(tuned.server["w"], fedavg.server["w"])


def test_the_change_of_each_client_is_recorded() -> None:
    run = small.train(
        FineTune(tau=5, batch_size=8, tune_steps=30, tune_rate=0.2), 3, data=opposed(5), evaluate_clients=4
    )
    record, data = run.record(0.0), run.federation
    assert record.client_change is not None
    changes = []
    for client, (change, accuracy) in enumerate(zip(record.client_change, record.client_accuracy, strict=True)):
        if accuracy is None:
            assert change is None
            continue
        _, _, x, y = data.client(client)
        before = float((run.objective.outputs(run.server["w"], x).argmax(-1) == y).double().mean())
        assert change == pytest.approx(accuracy - before)
        changes.append(change)
    assert len(changes) == 4
    assert any(changes)
    assert small.train(FedAvg(**small.COMMON), 1).record(0.0).client_change is None


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(TDPFedError, match=r"^algorithm\.layers: .*'head' matches no parameter"):
        small.train(FineTune(layers=("head",)), 1)
