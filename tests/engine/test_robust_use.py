"""What users bring along: frozen layers, buffers, tied weights, half precision, odd models."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed import FedAvg, Federation, TDPFed, TDPFedError, simulate
from tdpfed.engine.simulation import Simulation

FAST: dict[str, Any] = {"tau": 2, "batch_size": 4}


class Tied(nn.Module):
    """Two layers with one weight, a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 36)
        self.again = nn.Linear(36, 36)
        self.again.weight = self.inner.weight
        self.head = nn.Linear(36, 3)
        self.head.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.inner(x.flatten(1)) * self.scale)
        return self.head(self.again(hidden))  # type: ignore[no-any-return]


@pytest.mark.parametrize("algorithm", [FedAvg(**FAST), TDPFed(**FAST, s_prime=2)])
def test_frozen_parameters_neither_move_nor_travel_and_results_load_into_the_model(algorithm: Any) -> None:
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = simulate(model, small.federation(), algorithm, 2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # the caller's stays
    assert "head.weight" not in result.simulation.objective.layout.names
    state = result.personalized()[1]
    model.double().load_state_dict(state)
    assert torch.equal(state["head.weight"], before["head.weight"].double())
    assert torch.equal(state["inner.weight"], state["again.weight"])
    assert not torch.equal(state["inner.weight"], before["inner.weight"].double())
    shipped = result.global_model()
    assert shipped is not None
    assert shipped.keys() == state.keys()
    x, _y, _, _ = small.federation().client(1)
    theta = result.simulation.personalized()[1]
    torch.testing.assert_close(model(x), result.simulation.objective.outputs(theta, x))


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = small.mlp().requires_grad_(False)
    with pytest.raises(TDPFedError, match="no parameter requires a gradient"):
        Simulation(model, small.federation(), FedAvg())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_are_exact_in_half_precision(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(2).repeat_interleave(70_000)
    x = torch.randn(len(owner), 2, generator=generator)
    data = Federation.from_tensors(x, (x[:, 0] > 0).long(), owner, dtype=dtype)
    final = simulate(nn.Linear(2, 2), data, FedAvg(tau=2), 1)
    shipped = final.global_model()
    assert shipped is not None
    mean = torch.stack([state["weight"] for state in final.personalized()]).float().mean(0)
    torch.testing.assert_close(shipped["weight"].float(), mean, rtol=1e-2, atol=1e-3)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x.flatten(1)), 0.5)


class Pair(Dropping):
    def forward(self, x: Tensor) -> Any:
        return self.fc(x.flatten(1)), x


class Asserting(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("only squares")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Dropping, "draws random numbers"), (Pair, "returns a tuple"), (Asserting, "only squares"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_simulated_are_told_in_words(model: Any, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Simulation(model(), small.federation(), FedAvg())


def test_dropout_in_evaluation_mode_is_allowed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(36, 3)).eval()
    assert simulate(model, small.federation(), FedAvg(**FAST), 1).final.minibatch_loss is not None


def test_inputs_that_carry_a_graph_are_cut_off() -> None:
    x = torch.randn(40, 3, requires_grad=True)
    data = Federation.from_tensors(x, torch.arange(40) % 2, torch.arange(40) % 4)
    assert not data.x.requires_grad


def test_labels_that_are_codes_are_refused() -> None:
    with pytest.raises(TDPFedError, match="labels up to 999999"):
        Federation.from_tensors(torch.randn(8, 3), torch.tensor([0, 999_999] * 4), torch.arange(8) % 2)


@pytest.mark.parametrize("rounds", [0, 1.5, -3])
def test_rounds_are_whole(rounds: Any) -> None:
    with pytest.raises(TDPFedError, match="whole number"):
        simulate(small.mlp(), small.federation(), FedAvg(), rounds)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(TDPFedError, match="seed: -1"):
        Simulation(small.mlp(), small.federation(), FedAvg(), seed=-1)
