"""What comes out of a run folder is what the run computed, and takes the inputs that its owner has."""

import sys
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

import small
from tdpfed import FedAvg, Federation, Local, Participation, TDPFed, load_run, simulate
from tdpfed.algorithms import FedPer
from tdpfed.errors import TDPFedError
from tdpfed.runs.simulate import Result
from tdpfed.runs.trained import TrainedRun

NAMES = ("hospital-10", "hospital-2", "praxis ä", "ward/3")


def raw_data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Samples far from mean 0 and variance 1, which a model without normalization would get wrong."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (160,), generator=generator)
    x = 50 + 20 * torch.randn(160, 1, 6, 6, generator=generator) + 15 * y[:, None, None, None]
    return x, y, [NAMES[k % 4] for k in range(160)]


def federation(normalize: str = "feature") -> Federation:
    x, y, ids = raw_data()
    return Federation.from_tensors(x, y, ids, normalize=normalize, class_names=("cat", "dog", "owl"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedRun, Result]:
    out = tmp_path_factory.mktemp("trained") / "run"
    result = simulate("dnn", federation(), TDPFed(tau=2, s=2, s_prime=2, eta=0.01), 3, out=out)
    return load_run(out), result


def test_models_take_raw_inputs_with_the_bits_of_training(run: tuple[TrainedRun, Result]) -> None:
    found, result = run
    x, _, owners = raw_data()
    data = result.simulation.federation
    thetas = result.simulation.personalized()
    for client in found.ids:
        mine = [k for k, owner in enumerate(owners) if owner == client]
        expected = result.simulation.objective.outputs(thetas[data.position(client)], data.normalization.apply(x[mine]))
        assert torch.equal(found.personalized(client)(x[mine]), expected)
    theta = result.simulation.global_model()
    assert theta is not None
    expected = result.simulation.objective.outputs(theta, data.normalization.apply(x))
    assert torch.equal(found.global_model()(x), expected)


def test_models_take_arrays_of_numpy_as_well(run: tuple[TrainedRun, Result]) -> None:
    found, _ = run
    x, _, _ = raw_data()
    model = found.personalized(NAMES[0])
    assert torch.equal(model(x.numpy()), model(x))
    assert torch.equal(model(x.double().numpy()), model(x.double()))


def test_their_accuracy_on_raw_data_is_the_recorded_one(run: tuple[TrainedRun, Result]) -> None:
    """Counted by hand on what the owner has: the samples as given, found by their normalized twins."""
    found, result = run
    x, y, _ = raw_data()
    data = result.simulation.federation
    seen = data.normalization.apply(x).flatten(1)
    for number, client in enumerate(found.ids):
        place = (data.client(client)[2].flatten(1)[:, None] == seen).all(-1).int().argmax(1)
        right = (found.personalized(client)(x[place]).argmax(1) == y[place]).float().mean()
        assert float(right) == pytest.approx(result.final.client_accuracy[number])
        assert found.clients()["accuracy"][client] == pytest.approx(float(right))


def test_a_model_is_a_copy_that_does_not_change_the_run(run: tuple[TrainedRun, Result]) -> None:
    found, _ = run
    one = found.personalized(NAMES[0])
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert any(bool(parameter.any()) for parameter in found.personalized(NAMES[0]).parameters())
    assert not one.training


def test_records_settings_and_ids_are_those_of_the_run(run: tuple[TrainedRun, Result]) -> None:
    found, result = run
    table = found.metrics()
    assert list(table.index) == [1, 2, 3]
    assert list(table["personalized_accuracy"]) == [record.personalized_accuracy for record in result.records]
    assert found.config["algorithm"]["tau"] == 2
    assert (found.summary["status"], found.round) == ("finished", 3)
    assert found.ids == NAMES
    assert found.class_names == ("cat", "dog", "owl")
    assert list(found.clients()["train_samples"]) == result.simulation.federation.train_size.tolist()


def test_the_figure_shows_the_recorded_curves(run: tuple[TrainedRun, Result]) -> None:
    found, result = run
    left, right = found.plot().axes
    curves = {str(line.get_label()): line for line in left.get_lines()}
    assert set(curves) == {"personalized", "local", "global"}
    accuracies = [record.personalized_accuracy or 0 for record in result.records]
    assert list(curves["personalized"].get_ydata()) == pytest.approx(accuracies)  # type: ignore[arg-type]
    sent = [record.uplink_bytes / 1e6 for record in result.records]
    assert list(right.get_lines()[0].get_xdata()) == pytest.approx(sent)  # type: ignore[arg-type]


@pytest.mark.parametrize("package", ["pandas", "matplotlib"])
def test_a_missing_package_is_named(
    package: str, run: tuple[TrainedRun, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.pyplot", None)
    with pytest.raises(TDPFedError, match="pip install") as error:
        run[0].metrics() if package == "pandas" else run[0].plot()
    assert error.value.field == package


def test_clients_are_asked_for_by_their_ids(run: tuple[TrainedRun, Result]) -> None:
    with pytest.raises(TDPFedError, match="did you mean 'hospital-10'") as error:
        run[0].personalized("hospital10")
    assert error.value.field == "client"


def test_a_client_that_never_trained_has_no_model(tmp_path: Path) -> None:
    simulate("dnn", federation(), FedAvg(tau=1), 1, participation=Participation(clients=1), out=tmp_path / "run")
    found = load_run(tmp_path / "run")
    trained = [name for name, was in zip(NAMES, found.snapshot.private.touched.tolist(), strict=True) if was]
    assert len(trained) == 1
    found.personalized(trained[0])
    with pytest.raises(TDPFedError, match="not chosen for training") as error:
        found.personalized(next(name for name in NAMES if name not in trained))
    assert error.value.allowed == trained


@pytest.mark.parametrize("method", [Local(tau=1), FedPer(tau=1)])
def test_a_method_without_a_global_model_says_so(method: FedAvg, tmp_path: Path) -> None:
    simulate("dnn", federation(), method, 1, out=tmp_path / "run")
    with pytest.raises(TDPFedError, match="no global model") as error:
        load_run(tmp_path / "run").global_model()
    assert error.value.field == "global"


def test_a_model_given_as_an_object_comes_with_its_frozen_values(tmp_path: Path) -> None:
    """The module that is given to load_run needs only the architecture: here all its values differ."""

    def net(seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            body, head = nn.Linear(36, 8), nn.Linear(8, 3)
        body.register_buffer("shift", torch.full((1,), float(seed)))
        return nn.Sequential(nn.Flatten(), body.requires_grad_(False), nn.Tanh(), head)

    result = simulate(net(1), federation(), FedAvg(tau=2), 2, out=tmp_path / "run")
    with pytest.raises(TDPFedError, match="load_run") as error:
        load_run(tmp_path / "run").global_model()
    assert error.value.field == "model.name"
    given = net(2)
    found = load_run(tmp_path / "run", model=given).personalized(NAMES[1]).model.state_dict()
    expected = result.personalized()[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert torch.equal(given[1].shift, torch.full((1,), 2.0))  # type: ignore[index]
    with pytest.raises(TDPFedError, match="own model"):
        load_run(tmp_path / "run", model=small.mlp()).global_model()


def test_own_code_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\ndef net(shape, k):\n    return nn.Sequential(nn.Flatten(), nn.Linear(36, k))\n"
    (tmp_path / "nets_of_this_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    simulate("nets_of_this_test:net", federation(), FedAvg(tau=1), 1, out=tmp_path / "run")
    load_run(tmp_path / "run").global_model()
    monkeypatch.undo()
    sys.modules.pop("nets_of_this_test")
    with pytest.raises(TDPFedError, match=r"nets_of_this_test.*working directory") as error:
        load_run(tmp_path / "run").global_model()
    assert error.value.field == "model.name"


def test_bad_folders_are_refused(tmp_path: Path, run: tuple[TrainedRun, Result]) -> None:
    with pytest.raises(TDPFedError, match="must be a run folder"):
        load_run(tmp_path)
    simulate("dnn", federation(), FedAvg(tau=1), 1, out=tmp_path / "run")
    (tmp_path / "run/frozen.safetensors").write_bytes(b"?")
    with pytest.raises(TDPFedError, match="damaged") as error:
        load_run(tmp_path / "run").global_model()
    assert error.value.field == "RUN"
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    with pytest.raises(TDPFedError, match="no checkpoint"):
        _ = load_run(tmp_path / "run").snapshot


def test_models_of_several_inputs_take_them_raw_by_name(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(6, (60, 4), generator=generator)
    ages = 40 + 20 * torch.rand(60, 2, generator=generator)
    data = Federation.from_tensors({"words": words, "ages": ages}, torch.arange(60) % 3, torch.arange(60) % 3)
    simulate(Both(), data, FedAvg(tau=1), 1, out=tmp_path / "run")
    run = load_run(tmp_path / "run", model=Both())
    model = run.personalized("1")
    order = data.inputs.pack({"words": words, "ages": ages})
    rows = data.normalization.apply(order)
    inner = data.inputs.unpack(rows)
    assert isinstance(inner, dict)
    assert torch.equal(model(words=words, ages=ages), model.model(**inner))
    assert torch.equal(model(words, ages), model.model(**inner))
    made = run.personalize({"words": words[:20], "ages": ages[:20]}, torch.arange(20) % 3, rounds=1)
    assert made.model(words=words, ages=ages).shape == (60, 3)
    for bad in ({"words": words[:20]}, ages[:20], {"words": words[:20], "ages": ages[:20, :1]}):
        with pytest.raises(TDPFedError) as error:
            run.personalize(bad, torch.arange(20) % 3)
        assert error.value.field == "x"
    file = run.export(tmp_path / "both.onnx", client="1", format="onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"words": words.numpy(), "ages": ages.numpy()})
    assert torch.allclose(torch.from_numpy(outputs), model(words=words, ages=ages), atol=1e-5)


def test_a_run_with_another_metric_shows_that_one(tmp_path: Path) -> None:
    x, _, owners = raw_data()
    target = x.flatten(1)[:, :1] / 50
    data = Federation.from_tensors(x, target, owners)
    simulate("dnn", data, FedAvg(tau=2, eta=0.01), 2, out=tmp_path / "run")
    run = load_run(tmp_path / "run")
    assert run.plot().axes[0].get_ylabel() == "mse"
    assert "metrics.r2.personalized" in run.metrics().columns
    assert list(run.clients()["mse"]) == list(run.records[-1].main.clients)
    made = run.personalize(x[:40], target[:40], rounds=1)
    assert made.metric == "mse"
    assert made.before is not None


class Both(nn.Module):
    """Tokens and numbers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(6, 3)

    def forward(self, words: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(torch.cat([self.embed(words).mean(1), ages], 1))
        return outputs
