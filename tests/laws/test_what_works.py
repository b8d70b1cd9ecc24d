"""Every layer, loss and kind of input trains as in a plain loop of PyTorch; what does not work is refused in words.

The table of docs/what-works.md names these tests.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from test_reference import flat, load, mean_of, minibatches
from torch import Tensor, nn
from torch.nn import functional

import small
import work_cases as cases
from tdpfed import FedAvg, Federation
from tdpfed.algorithms import ALGORITHMS
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError

ETA, TAU, BATCH, ROUNDS = 0.1, 3, 5, 2
METHOD = FedAvg(tau=TAU, batch_size=BATCH, eta=ETA)


def plain_loop(model: nn.Module, data: Federation, value: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Return FedAvg's global model after the rounds, written with modules, autograd and ``torch.optim``."""
    shared = {name: value.clone() for name, value in model.state_dict().items()}
    for round_ in range(1, ROUNDS + 1):
        trained = []
        for client in range(data.clients):
            module = load(model, shared)
            optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], ETA)
            for x, y in minibatches(data, client, round_, TAU, BATCH):
                optimizer.zero_grad()
                value(x, y).backward()
                optimizer.step()
            trained.append({name: value.clone() for name, value in module.state_dict().items()})
        shared = mean_of(trained, data.train_size.tolist())
    load(model, shared)
    return flat({name: value for name, value in model.named_parameters() if value.requires_grad})


def trained(model: nn.Module, data: Federation, **options: Any) -> Simulation:
    simulation = Simulation(model, data, METHOD, **options)
    for _ in range(ROUNDS):
        simulation.step()
    return simulation


def agree(model: nn.Module, data: Federation, value: Callable[[Any, Tensor], Tensor], **options: Any) -> Simulation:
    simulation = trained(model, data, **options)
    found = simulation.global_model()
    before = flat({name: value for name, value in model.named_parameters() if value.requires_grad}).clone()
    torch.testing.assert_close(found, plain_loop(model, data, value), rtol=1e-9, atol=1e-9)
    assert found is not None
    assert not torch.allclose(found, before, atol=1e-4)
    return simulation


# -- layers


@pytest.mark.parametrize("name", cases.LAYERS)
def test_a_layer_trains_as_in_a_plain_loop(name: str) -> None:
    case, model = cases.LAYERS[name], cases.network(name)
    found = agree(model, cases.classes(case.shape), lambda x, y: functional.cross_entropy(model(x), y))
    notes = [note for note in found.notes if "one after another" in note]
    assert (len(notes), found.objective.alone) == ((1, True) if case.alone else (0, False))
    assert found.record(0.0).personalized_accuracy is not None


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, cases.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(x)
        return found if found.sum() > 0 else -found


def test_a_branch_on_values_is_computed_one_client_after_another() -> None:
    model = Branches().double()
    found = agree(model, cases.classes(cases.FLAT), lambda x, y: functional.cross_entropy(model(x), y))
    assert any("one after another" in note for note in found.notes)


def test_frozen_parameters_stay_and_buffers_are_constants() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, cases.CLASSES)).double()
    model.get_parameter("0.weight").requires_grad_(False)
    model.register_buffer("constant", torch.ones(2))
    kept = model.get_parameter("0.weight").clone()
    found = agree(model, cases.classes(cases.FLAT), lambda x, y: functional.cross_entropy(model(x), y))
    assert found.objective.layout.size == 5 + 5 * cases.CLASSES + cases.CLASSES
    assert torch.equal(found.objective.model.get_parameter("0.weight"), kept)


def test_tied_weights_are_one_parameter() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False)).double()
    model[2].weight = model[0].weight
    found = agree(model, cases.classes(cases.FLAT), lambda x, y: functional.cross_entropy(model(x), y))
    assert found.objective.layout.size == 36


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "BatchNorm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), "running statistics"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), "lazy module has no shape"),
    "AlphaDropout": (lambda: nn.Sequential(nn.AlphaDropout(0.1), nn.Linear(6, 3)), "does more than drop"),
    "dropout inside an LSTM": (lambda: nn.LSTM(6, 3, 2, dropout=0.1), "drops between its own layers"),
    "random draws": (lambda: Noisy(6, 3), "draws random numbers"),
    "several outputs": (lambda: nn.LSTM(6, 3), "returns a tuple"),
    "too few outputs": (lambda: nn.Linear(6, 2), "at least the data's 3 classes"),
    "another shape": (lambda: nn.Linear(9, 3), r"cannot take inputs of shape \(6,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused_in_words(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(TDPFedError, match=words):
        Simulation(make().double(), cases.classes(cases.FLAT), METHOD)


def test_a_lazy_module_works_once_it_has_been_called() -> None:
    model = nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)).double()
    model(torch.zeros(1, 6, dtype=torch.float64))
    agree(model, cases.classes(cases.FLAT), lambda x, y: functional.cross_entropy(model(x), y))


# -- targets and losses


def pinball(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that the package does not have."""
    error = targets.reshape(outputs.shape) - outputs
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def tokens(seed: int = 1) -> Tensor:
    """Next tokens, short sequences ended by -100."""
    found = torch.randint(cases.TOKENS, (len(cases.owners()), 5), generator=torch.Generator().manual_seed(seed))
    found[::3, 3:] = -100
    return found


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(len(cases.owners()), *shape, generator=generator, dtype=torch.float64)


def labels() -> Tensor:
    return (numbers(4) > 0).long()


def binary() -> Tensor:
    return (numbers() > 0).long()


def text() -> nn.Module:
    return nn.Sequential(nn.Embedding(cases.TOKENS, 4), nn.Linear(4, cases.TOKENS))


Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any], Loss]] = {
    "classes": (lambda: nn.Linear(6, 2), binary, {}, functional.cross_entropy),
    "classes, one output": (
        lambda: nn.Linear(6, 1), binary, {"loss": "bce"},
        lambda o, y: functional.binary_cross_entropy_with_logits(o.squeeze(1), y.double()),
    ),
    "labels": (
        lambda: nn.Linear(6, 4), labels, {}, lambda o, y: functional.binary_cross_entropy_with_logits(o, y.double())
    ),
    "numbers": (lambda: nn.Linear(6, 1), numbers, {}, lambda o, y: functional.mse_loss(o.squeeze(1), y)),
    "several numbers": (lambda: nn.Linear(6, 2), lambda: numbers(2), {}, functional.mse_loss),
    "numbers, huber": (
        lambda: nn.Linear(6, 1), numbers, {"loss": "huber"}, lambda o, y: functional.huber_loss(o.squeeze(1), y)
    ),
    "tokens": (text, tokens, {}, lambda o, y: functional.cross_entropy(o.flatten(0, 1), y.flatten())),
    "a loss of one's own": (lambda: nn.Linear(6, 1), numbers, {"loss": pinball}, pinball),
}  # fmt: skip


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_trains_as_in_a_plain_loop(name: str, runner: Any) -> None:
    make, targets, options, loss = LOSSES[name]
    model = make().double()
    x = cases.samples(cases.TEXT if name == "tokens" else cases.FLAT)
    data = cases.federation(x, targets())
    found = agree(model, data, lambda x, y: loss(model(x), y), runner=runner, **options)
    held_out = torch.cat(
        [torch.arange(int(s), int(s + n)) for s, n in zip(data.test_start, data.test_size, strict=True)]
    )
    with torch.no_grad():
        load(model, found.objective.state_dict(found.global_model()))  # type: ignore[arg-type]
        expected = loss(model(data.x[held_out]), data.y[held_out])
    assert found.record(0.0).global_loss == pytest.approx(float(expected), rel=1e-9)


def wrong_pairs() -> Mapping[str, tuple[int, Callable[[], Tensor], dict[str, Any], str]]:
    return {
        "one output without a binary loss": (1, binary, {}, "task.loss = 'bce'"),
        "one output with a loss of one's own": (
            1, binary, {"loss": functional.binary_cross_entropy_with_logits}, "which class one value means"
        ),
        "two outputs with a binary loss": (2, binary, {"loss": "bce"}, r"must be \(\) or \(1,\)"),
        "a loss for other targets": (1, numbers, {"loss": "cross_entropy"}, "'mse' or 'huber'"),
        "a metric for other targets": (1, numbers, {"metrics": ["accuracy"]}, "mse, r2"),
        "too many outputs": (3, lambda: numbers(2), {}, "as a sample's targets"),
        "an unknown loss": (2, binary, {"loss": "hinge"}, "hinge"),
    }  # fmt: skip


@pytest.mark.parametrize("name", wrong_pairs())
def test_outputs_that_do_not_fit_the_task_are_refused(name: str) -> None:
    outputs, targets, options, words = wrong_pairs()[name]
    with pytest.raises(TDPFedError, match=words):
        Simulation(
            nn.Linear(6, outputs).double(), cases.federation(cases.samples(cases.FLAT), targets()), METHOD, **options
        )


def test_one_output_counts_as_two_classes() -> None:
    """The largest of one output is always the first: its sign decides, or most of the accuracy would be missed."""
    x, y = cases.samples(cases.FLAT), binary()
    model = nn.Linear(6, 1).double()
    found = trained(model, cases.federation(x, y), loss="bce")
    right, total = 0, 0
    for client in range(cases.CLIENTS):
        _, _, x_test, y_test = found.federation.client(client)
        theta = found.personalized()[client]
        load(model, found.objective.state_dict(theta))
        right += int(((model(x_test).squeeze(1) > 0).long() == y_test).sum())
        total += len(y_test)
    assert found.record(0.0).personalized_accuracy == pytest.approx(right / total)


# -- inputs


class Both(nn.Module):
    """Takes numbers and token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(cases.TOKENS, 2), nn.Linear(16, cases.CLASSES)

    def forward(self, measured: Tensor, words: Tensor) -> Tensor:
        found: Tensor = self.fc(torch.cat([measured, self.embedding(words).flatten(1)], 1))
        return found


def apart(rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[:, :6], rows[:, 6:].long()


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_several_inputs_reach_the_model_by_name_or_position(kind: str) -> None:
    measured, words = cases.samples(cases.FLAT), cases.samples(cases.TEXT)
    y = torch.arange(len(words)) % cases.CLASSES
    x: Any = {"words": words, "measured": measured} if kind == "dict" else (measured, words)
    data = cases.federation(x, y)
    model = Both().double()

    def loss(rows: Tensor, y: Tensor) -> Tensor:
        ids, values = (rows[:, :5].long(), rows[:, 5:]) if kind == "dict" else apart(rows)[::-1]
        return functional.cross_entropy(model(values, ids), y)

    agree(model, data, loss)
    inputs = data.inputs.unpack(data.x)
    found = inputs["measured"] if isinstance(inputs, dict) else inputs[0]
    first = found[: int(data.train_size.sum())]
    torch.testing.assert_close(first.mean(0), torch.zeros(6).double(), rtol=0, atol=1e-6)  # normalized, ids are not
    ids = inputs["words"] if isinstance(inputs, dict) else inputs[1]
    assert ids.dtype == torch.int64
    assert sorted(map(tuple, ids.tolist())) == sorted(map(tuple, words.tolist()))


@pytest.mark.parametrize(
    ("kind", "normalize"), [(torch.uint8, "unit"), (torch.uint8, "standard"), (torch.float32, "feature")]
)
def test_images_of_bytes_or_floats_are_normalized(kind: torch.dtype, normalize: str) -> None:
    raw = (255 * torch.rand(len(cases.owners()), *cases.IMAGE, generator=torch.Generator().manual_seed(4))).to(kind)
    data = cases.federation(raw, torch.arange(len(raw)) % cases.CLASSES, normalize=normalize)
    assert data.x.dtype == torch.float64
    assert float(data.x.abs().max()) < 10
    model = nn.Sequential(*cases.head(72)).double()
    agree(model, data, lambda x, y: functional.cross_entropy(model(x), y))


# -- methods


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("fedavg", "ditto", "fedper", "tdpfed") else pytest.mark.slow)
        for name in sorted(small.variants())
    ],
)
@pytest.mark.parametrize("what", ["numbers", "LSTM"])
def test_methods_train_any_task_and_models_that_cannot_be_batched(name: str, what: str) -> None:
    """The fast path and the loop agree; of an LSTM both are the loop, so that it learns is what is looked at."""
    method = small.variants()[name]
    if what == "numbers":
        data = cases.federation(cases.samples(cases.FLAT), numbers())
        model: nn.Module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        runs = [Simulation(model, data, method, runner=runner) for runner in ("batched", "loop")]
        for run in runs:
            run.step()
        small.assert_close(runs[0], runs[1], 1e-9)
        return
    simulation = Simulation(cases.network("LSTM"), cases.classes(cases.SEQUENCE), method)
    simulation.step()
    assert simulation.record(0.0).personalized_accuracy is not None
    assert all(bool(value.isfinite().all()) for value in small.states(simulation).values() if value.is_floating_point())


@pytest.mark.parametrize("name", sorted(name for name, method in ALGORITHMS.items() if method.own_loss))
def test_a_method_with_a_loss_of_its_own_refuses_other_tasks(name: str) -> None:
    data = cases.federation(cases.samples(cases.FLAT), numbers())
    with pytest.raises(TDPFedError, match=re.escape("a loss of its own, for classes")):
        Simulation(nn.Linear(6, 1).double(), data, ALGORITHMS[name]())
