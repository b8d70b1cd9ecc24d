"""The command line: what goes to which stream, and with which status it ends."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tdpfed
from tdpfed import cli
from tdpfed.errors import TDPFedError

TABLE_I = {
    ("dnn", "1.5"): [59, 6],
    ("dnn", "2"): [44, 5],
    ("vgg8", "1.5"): [14, 120, 248, 504, 759, 85, 85, 6],
    ("vgg8", "2"): [11, 90, 186, 378, 569, 64, 64, 5],
}


def plan_json(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def check_schema(answer: dict[str, Any]) -> None:
    assert list(answer) == ["model", "compression", "layers", "total"]
    assert isinstance(answer["compression"], float)
    assert list(answer["total"]) == ["dense", "factored", "rate"]
    for layer in answer["layers"]:
        assert list(layer) == ["name", "shape", "rank", "dense", "factored", "rate"]
        assert [type(value) for value in layer.values()][:2] == [str, list]
        assert layer["rank"] is None or type(layer["rank"]) is int
        assert type(layer["dense"]) is type(layer["factored"]) is int
        assert layer["rate"] == layer["dense"] / layer["factored"]
    for key in ("dense", "factored"):
        assert answer["total"][key] == sum(layer[key] for layer in answer["layers"])
    assert answer["total"]["rate"] == answer["total"]["dense"] / answer["total"]["factored"]


@pytest.mark.parametrize(("model", "compression"), TABLE_I)
def test_plan_gives_table_1(model: str, compression: str) -> None:
    answer = plan_json(model, "--compression", compression)
    check_schema(answer)
    assert answer["model"] == model
    assert answer["compression"] == float(compression)
    ranks = [layer["rank"] for layer in answer["layers"] if layer["name"].endswith("weight")]
    assert ranks == TABLE_I[model, compression]
    assert all(layer["rank"] is None for layer in answer["layers"] if layer["name"].endswith("bias"))


def test_plan_takes_patterns_shapes_and_classes() -> None:
    answer = plan_json(
        "lenet", "--rank", "conv*.weight=3", "--exclude", "fc2*", "--input-shape", "3,32,32", "--classes", "7"
    )
    check_schema(answer)
    layers = {layer["name"]: layer for layer in answer["layers"]}
    assert layers["conv1.weight"]["rank"] == layers["conv2.weight"]["rank"] == 3
    assert layers["conv1.weight"]["shape"][1] == 3
    assert layers["fc2.weight"]["rank"] is None
    assert layers["fc3.bias"]["shape"] == [7]
    only = plan_json("lenet", "--include", "fc1.*")
    assert [layer["name"] for layer in only["layers"] if layer["rank"]] == ["fc1.weight"]


@pytest.mark.parametrize("model", ["dnn", "resnet18"])
def test_plan_prints_a_table(model: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["plan", model])
    assert result.exit_code == 0
    assert result.stderr == ""
    answer = plan_json(model)
    for layer in answer["layers"]:
        line = next(line for line in result.stdout.splitlines() if f" {layer['name']} " in line)
        assert f" {layer['dense']:,} " in line
        assert f" {layer['rank'] or '-'} " in line
    assert f" {answer['total']['factored']:,} " in result.stdout


OWN_MODELS = """
from torch import nn

def fine(): return nn.Linear(40, 30)
def normed(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
def broken(): raise RuntimeError("two\\nlines")
"""


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the console script's function in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["tdpfed", *arguments])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


BAD = {
    "unknown model": (["vgg9"], ["model", "'vgg9'", "vgg8"]),
    "rate zero": (["dnn", "--compression", "0"], ["compression", "0", "above 0"]),
    "rate negative": (["dnn", "--compression", "-2"], ["compression", "-2", "above 0"]),
    "rate nan": (["dnn", "--compression", "nan"], ["compression", "nan", "finite"]),
    "rate infinite": (["dnn", "--compression", "inf"], ["compression", "inf", "finite"]),
    "rank zero": (["dnn", "--rank", "fc1.weight=0"], ["fc1.weight", "0", "at least 1"]),
    "rank of nothing": (["dnn", "--rank", "conv*=4"], ["ranks", "conv*", "fc1.weight"]),
    "rank of a vector": (["dnn", "--rank", "*=4"], ["ranks", "fc1.bias", "two dimensions"]),
    "rank without number": (["dnn", "--rank", "fc1.weight=many"], ["--rank", "'many'", "whole number"]),
    "rank without pattern": (["dnn", "--rank", "4"], ["--rank", "'4'", "PATTERN=R"]),
    "include nothing": (["dnn", "--include", "conv*"], ["include", "conv*", "fc1.weight"]),
    "exclude nothing": (["dnn", "--exclude", "conv*"], ["exclude", "conv*", "fc1.weight"]),
    "shape no numbers": (["vgg8", "--input-shape", "a,b"], ["--input-shape", "'a'", "whole number"]),
    "shape too small": (["vgg8", "--input-shape", "3,8,8"], ["input_shape", "8", "at least 32"]),
    "shape negative": (["dnn", "--input-shape", "-5"], ["input_shape", "-5", "at least 1"]),
    "no class": (["dnn", "--classes", "0"], ["classes", "0", "at least 1"]),
    "batch norm": (["own_models:normed"], ["'1'", "BatchNorm2d", "GroupNorm"]),
    "own code fails": (["own_models:broken"], ["own_models:broken", "two lines", "Allowed"]),
    "no such module": (["no_such_module:make"], ["no_such_module:make", "Allowed"]),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("json_", [True, False])
def test_bad_input_is_one_line_and_status_2(
    case: str, json_: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    arguments, words = BAD[case]
    assert call(["plan", *arguments, *(["--json"] if json_ else [])], monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err


def test_a_model_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)
    assert call(["plan", "own_models:fine", "--json"], monkeypatch) == 0
    answer = json.loads(capsys.readouterr().out)
    check_schema(answer)
    assert [layer["shape"] for layer in answer["layers"]] == [[30, 40], [30]]


def test_a_mistake_in_our_own_code_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tdpfed.models.from_spec", broken)
    monkeypatch.setattr(sys, "argv", ["tdpfed", "plan", "dnn"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_errors_of_usage_and_help() -> None:
    runner = CliRunner()
    for arguments in (["plan"], ["plan", "dnn", "--compression", "much"], ["plan", "dnn", "--no-such-option"], ["no"]):
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    assert "--compression" in runner.invoke(cli.app, ["plan", "--help"]).stdout
    assert runner.invoke(cli.app, ["--version"]).stdout == f"tdpfed {tdpfed.__version__}\n"


def test_bad_input_is_the_one_error_class() -> None:
    result = CliRunner().invoke(cli.app, ["plan", "vgg9"])
    assert isinstance(result.exception, TDPFedError)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, "-c", "from tdpfed.cli import main; main()"]
    installed = Path(sys.executable).with_name("tdpfed")
    return subprocess.run(
        [*([str(installed)] if installed.exists() else script), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_installed_command(tmp_path: Path) -> None:
    good = run("plan", "vgg8", "--compression", "2", "--json", cwd=tmp_path)
    assert (good.returncode, good.stderr) == (0, "")
    check_schema(json.loads(good.stdout))
    (tmp_path / "own_models.py").write_text(OWN_MODELS)
    bad = run("plan", "own_models:normed", "--json", cwd=tmp_path)
    assert (bad.returncode, bad.stdout, bad.stderr.count("\n")) == (2, "", 1)
    assert "BatchNorm2d" in bad.stderr


def test_every_mistake_in_a_configuration_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["run", "--set", "run.rounds=0", "--set", "data.clients=0", "--json"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(":")[:2] for line in err.splitlines()] == [["error", " run.rounds"], ["error", " data.clients"]]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_package_is_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['keys']"
    code = f"{path}; from tdpfed.cli import main; main()"
    # A shell that runs the tests in the background has them ignore SIGINT, and children inherit that.
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (130, b"")
