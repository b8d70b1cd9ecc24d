"""A client that was not in training: what the method's own functions make of it, by independent references."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from tdpfed import FedAvg, Federation, Local, Optimizer, load_run, simulate
from tdpfed.algorithms import ALGORITHMS, Algorithm, Dapper, Ditto, FedPer, Mocha
from tdpfed.cli import app
from tdpfed.errors import TDPFedError
from tdpfed.runs.trained import TrainedRun

RATE, STEPS, SAMPLES = 0.1, 3, 24


def samples(seed: int, count: int = 40, scale: float = 30.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=generator)
    return 100 + scale * torch.randn(count, 6, generator=generator) + 20 * y[:, None], y


def federation() -> Federation:
    x, y = samples(0, 160)
    return Federation.from_tensors(x, y, [f"site {k % 4}" for k in range(160)], class_names=("a", "b", "c"))


def trained(out: Path, method: Algorithm, **more: Any) -> TrainedRun:
    simulate("logistic", federation(), method, 2, out=out, **more)
    return load_run(out)


def newcomer() -> tuple[Tensor, Tensor, Tensor]:
    """Samples of a new client, with a mask of those that it holds out; its statistics differ from the run's."""
    x, y = samples(9, scale=80.0)
    return x, y, torch.arange(len(y)) >= SAMPLES


def descended(
    model: nn.Module, x: Tensor, y: Tensor, steps: int, near: nn.Module | None = None, lam: float = 0
) -> None:
    """Take steps on all samples by torch.optim, pulled towards another model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        for own, other in zip(model.parameters(), (near or model).parameters(), strict=True):
            loss = loss + lam / 2 * (own - other.detach()).square().sum()
        loss.backward()
        optimizer.step()


def close(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["fedavg", "ditto", "local"])
def test_a_newcomer_trains_as_the_method_says(kind: str, tmp_path: Path) -> None:
    """Minibatches of all its samples make the references plain full-batch descent."""
    how = {"eta": RATE, "tau": STEPS, "batch_size": SAMPLES}
    method = {"fedavg": FedAvg(**how), "ditto": Ditto(**how, lam=0.7), "local": Local(**how)}[kind]  # type: ignore[arg-type]
    run = trained(tmp_path / "run", method)
    x, y, held_out = newcomer()
    made = run.personalize(x, y, test_mask=held_out, rounds=4)
    inputs = run.card.normalization.apply(x)
    start = run.as_model(run.objective.initial()) if kind == "local" else run.global_model()
    expected = copy.deepcopy(start.model)
    train, targets = inputs[~held_out], y[~held_out]
    if kind == "fedavg":
        descended(expected, train, targets, STEPS)  # every round starts from the same global model
    elif kind == "ditto":
        descended(expected, train, targets, 4 * STEPS, near=start.model, lam=0.7)
    else:
        descended(expected, train, targets, 4 * STEPS)
    assert close(made.model.model, expected)
    assert not close(made.model.model, start.model)
    for accuracy, model in ((made.before, start.model), (made.after, expected)):
        assert accuracy == pytest.approx(float((model(inputs[held_out]).argmax(1) == y[held_out]).float().mean()))
    assert made.start == ("initial" if kind == "local" else "global")
    assert (made.train_samples, made.test_samples, made.rounds) == (SAMPLES, len(y) - SAMPLES, 4)


def test_a_shared_body_gets_a_head_of_the_newcomer(tmp_path: Path) -> None:
    x, y = samples(0, 160)
    data = Federation.from_tensors(x, y, torch.arange(160) % 4)
    simulate("dnn", data, FedPer(tau=2), 2, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    made = run.personalize(*samples(9), rounds=1, tau=1, eta=1e-12)
    body = run.snapshot.server["shared"]
    found = torch.cat([value.flatten() for name, value in made.model.model.named_parameters() if "fc1" in name])
    assert torch.allclose(found, body, atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"mocha", "dapper"}))
def test_every_method_serves_a_newcomer_or_says_why_not(name: str, tmp_path: Path) -> None:
    ranks: dict[str, Any] = (
        {"rank": 2} if name in ("fedpara", "pfedpara") else {}
    )  # the layers are too small for the default
    simulate("dnn", federation(), ALGORITHMS[name](tau=1, **ranks), 1, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    made = run.personalize(*samples(9), rounds=1)
    outputs = made.model(samples(9)[0])
    assert outputs.shape == (40, 3)
    assert outputs.isfinite().all()


@pytest.mark.parametrize(
    ("method", "why"), [(Mocha(tau=1), "state for each client"), (Dapper(tau=1, public=5), "public sample")]
)
def test_methods_that_cannot_serve_a_newcomer_say_why(method: Algorithm, why: str, tmp_path: Path) -> None:
    with pytest.raises(TDPFedError, match=why) as error:
        trained(tmp_path / "run", method).personalize(*samples(9))
    assert error.value.field == "algorithm.name"


def test_the_rate_is_full_after_the_run_has_lowered_it(tmp_path: Path) -> None:
    """A cosine ends at 0: at that rate a newcomer would not train at all."""
    method = FedAvg(eta=RATE, tau=STEPS, batch_size=SAMPLES)
    run = trained(tmp_path / "run", method, optimizer=Optimizer(schedule="cosine"))
    x, y, held_out = newcomer()
    expected = copy.deepcopy(run.global_model().model)
    descended(expected, run.card.normalization.apply(x)[~held_out], y[~held_out], STEPS)
    assert close(run.personalize(x, y, test_mask=held_out, rounds=1).model.model, expected)


def test_nothing_of_the_run_changes(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", Ditto(tau=1))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    first = run.personalize(*samples(9), rounds=2)
    again = run.personalize(*samples(9), rounds=2)
    assert close(first.model, again.model)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": torch.zeros(40, 5)}, "x"),
        ({"y": torch.full((40,), 7)}, "y"),
        ({"rounds": 0}, "rounds"),
        ({"test_fraction": 1.5}, "test_fraction"),
        ({"etaa": 0.1}, "algorithm.etaa"),
        ({"eta": -1.0}, "algorithm.eta"),
        ({"eta": "fast"}, "algorithm.eta"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], field: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", FedAvg(tau=1))
    x, y = samples(9)
    with pytest.raises(TDPFedError) as error:
        run.personalize(**{"x": x, "y": y, **change})
    assert error.value.field == field


def test_the_command_writes_the_model_and_reports_both_accuracies(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", FedAvg(tau=2))
    x, y, held_out = newcomer()
    file = tmp_path / "new ward.npz"
    np.savez(file, x=x.numpy(), y=y.numpy(), test_mask=held_out.numpy())
    arguments = ["personalize", str(tmp_path / "run"), str(file), "--rounds", "3", "--set", "algorithm.tau=4", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    expected = run.personalize(x, y, test_mask=held_out, rounds=3, tau=4)
    assert (shown["before"], shown["after"]) == (expected.before, expected.after)
    written = tmp_path / "run/new-new_ward.safetensors"
    assert shown["file"] == str(written)
    from safetensors import safe_open

    with safe_open(written, framework="pt") as opened:
        assert opened.metadata()["client"] == "new ward"
        assert torch.equal(opened.get_tensor("fc1.weight"), expected.model.model.state_dict()["fc1.weight"])
    assert "accuracy after" in CliRunner().invoke(app, arguments[:-1]).stdout


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"client_ids": np.arange(40) % 2}, "DATA"),
        ({"class_names": np.array(["a", "b", "d"])}, "class_names"),
    ],
)
def test_data_of_others_are_refused(content: dict[str, Any], field: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", FedAvg(tau=1))
    x, y = samples(9)
    np.savez(tmp_path / "new.npz", x=x.numpy(), y=y.numpy(), **content)
    done = CliRunner().invoke(app, ["personalize", str(tmp_path / "run"), str(tmp_path / "new.npz")])
    assert isinstance(done.exception, TDPFedError)
    assert done.exception.field == field
