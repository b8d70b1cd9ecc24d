"""Exported files compute what the run computed: ONNX on raw inputs, safetensors by what they say about themselves."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner

from tdpfed import FedAvg, Federation, load_run, simulate
from tdpfed.cli import app
from tdpfed.data.normalization import Normalization
from tdpfed.errors import TDPFedError
from tdpfed.models import MODELS, build
from tdpfed.runs.export import INPUT, OUTPUT

CLASSES = ("cat", "dog", "owl")
QUICK = ("dnn", "lenet")


def trained(out: Path, model: str = "dnn", normalize: str = "standard") -> tuple[Path, torch.Tensor]:
    """Train a little on raw samples far from normal; return the run and new raw samples."""
    generator = torch.Generator().manual_seed(1)
    shape = (3, 32, 32) if model.startswith("vgg") else (3, 8, 8)
    if model in MODELS and MODELS[model].tokens:
        text = torch.randint(5, (31, 9), generator=generator)
        data = Federation.from_tensors(text[:24, :-1], text[:24, 1:], [f"hospital-{k % 2}" for k in range(24)])
        simulate(model, data, FedAvg(tau=1, batch_size=4), 1, out=out)
        return out, text[24:, :-1]
    x = (255 * torch.rand(24, *shape, generator=generator)).byte()
    data = Federation.from_tensors(
        x, torch.arange(24) % 3, [f"hospital-{k % 2}" for k in range(24)], normalize=normalize, class_names=CLASSES
    )
    simulate(model, data, FedAvg(tau=1, batch_size=4), 1, out=out)
    return out, (255 * torch.rand(7, *shape, generator=generator)).floor()


@pytest.mark.filterwarnings("ignore:clients are computed one after another")  # models that are recurrent
@pytest.mark.parametrize("normalize", ["feature", "unit", "none"])
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
)
def test_onnx_equals_the_model_on_raw_inputs(model: str, normalize: str, tmp_path: Path) -> None:
    if model != "dnn" and normalize != "feature":
        pytest.skip("every normalization with one model, every model with one normalization")
    run, raw = trained(tmp_path / "run", model, normalize)
    found = load_run(run)
    file = found.export(tmp_path / "model.onnx", client="hospital-1", format="onnx")
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch in (raw, raw[:1]):
        (outputs,) = session.run([OUTPUT], {INPUT: batch.numpy()})
        expected = found.personalized("hospital-1")(batch).detach()
        assert np.abs(np.asarray(outputs) - expected.numpy()).max() <= 1e-5 * max(1.0, float(expected.abs().max()))
    about = session.get_modelmeta().custom_metadata_map
    assert (about["architecture"], about["client"], about["model"]) == (model, "hospital-1", "personalized")
    assert json.loads(about["class_names"]) == list(found.class_names)


def test_safetensors_can_be_used_by_what_they_say(tmp_path: Path) -> None:
    run, raw = trained(tmp_path / "run", normalize="feature")
    for client in ("hospital-0", None):
        file = load_run(run).export(tmp_path / "model.safetensors", client=client)
        with safe_open(file, framework="pt") as opened:
            about = opened.metadata()
        model = build(about["architecture"], json.loads(about["input_shape"]), json.loads(about["classes"]))
        model.load_state_dict(load_file(file))
        inputs = Normalization.from_dict(json.loads(about["normalization"])).apply(raw)
        source = load_run(run)
        expected = source.global_model() if client is None else source.personalized(client)
        assert torch.equal(model(inputs), expected(raw))
        assert about.get("client") == client
        assert about["model"] == ("global" if client is None else "personalized")
        assert json.loads(about["class_names"]) == list(CLASSES)


def call(*arguments: str) -> dict[str, object]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    if done.exception is not None:
        raise done.exception
    values: dict[str, object] = json.loads(done.stdout)
    return values


def test_the_command_names_files_by_what_is_in_them(tmp_path: Path) -> None:
    run, _ = trained(tmp_path / "run")
    assert call("export", str(run), "--client", "hospital-1")["file"] == str(run / "client-hospital-1.safetensors")
    assert call("export", str(run), "--global")["file"] == str(run / "global.safetensors")
    assert call("export", str(run), "--global", "--out", str(tmp_path / "a b"))["file"] == str(tmp_path / "a b")
    one, other = load_file(tmp_path / "a b"), load_file(run / "global.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_bad_wishes_are_refused_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained(tmp_path / "run")
    before = sorted(run.iterdir())
    for arguments, field in (
        ((), "tdpfed export"),
        (("--global", "--client", "hospital-1"), "tdpfed export"),
        (("--client", "hospital-7"), "client"),
        (("--global", "--format", "pt"), "--format"),
        (("--global", "--out", str(tmp_path / "no/such/folder/model")), "--out"),
    ):
        with pytest.raises(TDPFedError) as error:
            call("export", str(run), *arguments)
        assert error.value.field == field
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(TDPFedError, match=r"pip install 'tdpfed\[onnx\]'"):
        call("export", str(run), "--global", "--format", "onnx")
    assert sorted(run.iterdir()) == before


def test_what_onnx_cannot_express_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.fc = nn.Linear(192, 3)\n    def forward(self, x):\n"
        "        return self.fc(torch.special.bessel_j0(x.flatten(1)))\n"
    )
    (tmp_path / "bessel_of_this_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run, _ = trained(tmp_path / "run", "bessel_of_this_test:Net")
    with pytest.raises(TDPFedError, match="cannot export") as error:
        load_run(run).export(tmp_path / "model.onnx", format="onnx")
    assert error.value.field == "format"
    assert not list(tmp_path.glob("model.onnx*"))
