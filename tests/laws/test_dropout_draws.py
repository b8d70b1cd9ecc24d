"""Dropout drops by key: the same values wherever and whenever a client is computed, others for every draw.

The reference is a plain loop in which a model of one's own multiplies by masks that are made here, number by number.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_reference import flat, load, mean_of, minibatches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import small
import work_cases as cases
from tdpfed import FedAvg, simulate
from tdpfed.core.draws import Stream, key
from tdpfed.core.dropout import Drops, kept
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.simulation import Simulation
from tdpfed.runs.simulate import Result

METHOD = FedAvg(**small.COMMON)


def seeded(*layers: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return nn.Sequential(*(layer() for layer in layers))


def dense() -> nn.Module:
    return seeded(
        nn.Flatten, lambda: nn.Linear(36, 12), nn.ReLU, lambda: nn.Dropout(0.4), lambda: nn.Linear(12, 8), nn.Tanh,
        lambda: nn.Dropout(0.2), lambda: nn.Linear(8, small.CLASSES),
    )  # fmt: skip


def conv() -> nn.Module:
    return seeded(
        lambda: nn.Conv2d(1, 5, 3), lambda: nn.Dropout2d(0.3), nn.ReLU, nn.Flatten, lambda: nn.Linear(80, small.CLASSES)
    )


def encoder() -> nn.Module:
    """PyTorch's own encoder layer, which drops inside of its attention too."""
    return seeded(
        lambda: nn.Flatten(1, 2), lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True),
        nn.Flatten, lambda: nn.Linear(36, small.CLASSES),
    )  # fmt: skip


def recurrent() -> nn.Module:
    return seeded(
        lambda: nn.Flatten(1, 2), lambda: nn.LSTM(6, 5, batch_first=True), cases.Last, lambda: nn.Dropout(0.3),
        lambda: nn.Linear(5, small.CLASSES),
    )  # fmt: skip


MODELS = {"dense": dense, "channels": conv, "attention": encoder, "LSTM": recurrent}


def run(model: str, rounds: int = 2, **options: Any) -> Simulation:
    data = small.federation(5, dtype=options.pop("dtype", torch.float64))
    simulation = Simulation(MODELS[model](), data, options.pop("method", METHOD), **options)
    for _ in range(rounds):
        simulation.step()
    return simulation


class ByHand(nn.Module):
    """The dense model with masks of its own instead of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = dense()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        masks = iter(self.masks)
        for layer in self.inside.children():
            x = x * next(masks) if isinstance(layer, nn.Dropout) else layer(x)
        return x


def mask(bits: int, call: int, shape: tuple[int, int], p: float) -> Tensor:
    """Return what is left of a value, by whole numbers of Python: a hash of key, number of the call and place."""

    def mix(h: int) -> int:
        h = (h ^ (h >> 16)) * 0x7FEB352D % 2**32
        h = (h ^ (h >> 15)) * 0x846CA68B % 2**32
        return h ^ (h >> 16)

    start = mix(bits ^ (call * 0x9E3779B1 % 2**32))
    drawn = [mix(start ^ mix(place)) for place in range(shape[0] * shape[1])]
    return torch.tensor([float(one >= int(p * 2**32)) / (1 - p) for one in drawn], dtype=torch.float64).reshape(shape)


@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_it_trains_as_a_plain_loop_with_masks_made_by_hand(runner: Any) -> None:
    found, data = run("dense", runner=runner), small.federation(5)
    shared = {name: value.clone() for name, value in dense().double().state_dict().items()}
    for round_ in (1, 2):
        trained = []
        for client in range(data.clients):
            module = ByHand().double()
            load(module.inside, shared)
            optimizer = torch.optim.SGD(module.parameters(), METHOD.eta)
            batches = minibatches(data, client, round_, METHOD.tau, METHOD.batch_size)
            for step, (x, y) in enumerate(batches):
                bits = int(key(0, Stream.DROPOUT, round_, client, step))
                module.masks = [mask(bits, 1, (len(x), 12), 0.4), mask(bits, 2, (len(x), 8), 0.2)]
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            trained.append({name: value.detach().clone() for name, value in module.inside.state_dict().items()})
        shared = mean_of(trained, data.train_size.tolist())
    torch.testing.assert_close(found.global_model(), flat(shared), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_batched_equals_loop_and_is_not_training_without(model: str) -> None:
    batched, loop = run(model), run(model, runner="loop")
    small.assert_close(batched, loop, 1e-9)
    without = Simulation(MODELS[model]().eval(), small.federation(5), METHOD)
    for _ in range(2):
        without.step()
    assert not torch.allclose(without.private["theta"], batched.private["theta"], atol=1e-4)


@pytest.mark.parametrize("model", MODELS)
def test_any_chunking_equals_none_bit_for_bit(model: str) -> None:
    whole = run(model, dtype=torch.float32)
    for chunk in (1, 2, 4):
        assert small.equal(whole, run(model, dtype=torch.float32, chunk=chunk)), chunk


def test_epochs_drop_as_well() -> None:
    method = FedAvg(epochs=1.5, batch_size=4)
    batched, loop = run("dense", method=method), run("dense", method=method, runner="loop")
    small.assert_close(batched, loop, 1e-9)


def test_seeds_together_equal_seeds_alone() -> None:
    def begin(seed: int) -> Simulation:
        return Simulation(dense(), small.federation(seed=seed), METHOD, seed=seed)

    together, alone = Ensemble([begin(0), begin(1)]), [begin(0), begin(1)]
    for _ in range(2):
        together.step()
        for one in alone:
            one.step()
    assert all(small.equal(*pair) for pair in zip(together.simulations, alone, strict=True))


@pytest.mark.filterwarnings("ignore:clients are computed one after another")
@pytest.mark.parametrize("model", MODELS)
def test_a_resumed_run_has_the_bits_of_a_whole_one(model: str, tmp_path: Path) -> None:
    def begin(folder: str, rounds: int, **more: Any) -> Result:
        data = small.federation(5, dtype=torch.float32)
        return simulate(MODELS[model](), data, METHOD, rounds, out=tmp_path / folder, **more)

    whole = begin("whole", 4)
    begin("stopped", 4, callbacks=[lambda record, _: record.round == 2])
    resumed = begin("stopped", 4, resume=True)
    assert small.equal(whole.simulation, resumed.simulation)


def test_evaluation_drops_nothing() -> None:
    found = run("dense")
    x, y = found.federation.x[:7], found.federation.y[:7]
    theta = found.global_model()
    assert theta is not None
    model = load(dense().double(), found.objective.state_dict(theta)).eval()
    torch.testing.assert_close(found.objective.outputs(theta, x), model(x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(found.objective.outputs(theta, x), model.train()(x))
    torch.testing.assert_close(found.objective.value(theta, x, y), cross_entropy(model.eval()(x), y))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_each_value_is_kept_with_its_probability_and_by_itself(p: float) -> None:
    """The share, and correlations between neighbors, calls, steps and clients, within five standard errors."""
    bits = key(0, Stream.DROPOUT, 1, torch.arange(40)[:, None], torch.arange(5))
    one = torch.stack([kept(bit, (500,), p, 1) for bit in bits.flatten()]).double()
    other = torch.stack([kept(bit, (500,), p, 2) for bit in bits.flatten()]).double()
    error = 5 / np.sqrt(one.numel())
    assert abs(float(one.mean()) - (1 - p)) < error * np.sqrt(p * (1 - p))

    def related(a: Tensor, b: Tensor) -> float:
        return float(((a - (1 - p)) * (b - (1 - p))).mean() / (p * (1 - p)))

    for a, b in ((one[:, 1:], one[:, :-1]), (one, other), (one[1:], one[:-1]), (one[5:], one[:-5])):
        assert abs(related(a, b)) < error


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float"])
def test_attention_written_out_is_pytorchs(causal: bool, masked: str | None) -> None:
    if causal and masked:
        return
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    given: Any = None if masked is None else torch.randn(5, 5, generator=generator, dtype=torch.float64)
    if masked == "bool":
        given = (given > -1) | torch.eye(5, dtype=torch.bool)
    attention = nn.functional.scaled_dot_product_attention
    for groups in (1, 2):
        arguments: Any = (q, k[:, ::groups], v[:, ::groups], given)
        options: Any = {"is_causal": causal, "scale": 0.3, "enable_gqa": groups > 1}
        expected = attention(*arguments, **options)
        with Drops(None):
            torch.testing.assert_close(attention(*arguments, **options), expected, rtol=1e-12, atol=1e-12)
