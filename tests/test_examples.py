"""Every example runs as its docstring says, in small, and shows what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from tdpfed.cli import app

FOLDER = Path(__file__).parents[1] / "examples"
TRIED = {"own_model_own_data", "tensorize_a_trained_network", "compare_methods", "results_into_pandas", "own_method"}
TRIED |= {"predict_numbers", "several_labels"}
TRIED |= {"own_federation"}  # in tests/flower/test_flower_services.py, as it starts processes


def run(name: str, *arguments: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tried_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == TRIED


@pytest.mark.parametrize("name", sorted(TRIED))
def test_an_example_is_short_and_says_how_it_is_run(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 85
    assert f"python examples/{name}.py" in text.split('"""')[1]


def test_own_model_on_own_data_learns() -> None:
    text = run("own_model_own_data", "--rounds", "8")
    found = re.findall(r"^(\w+) +personalized ([\d.]+)%, global (\S+), ([\d.]+) MB", text, re.MULTILINE)
    assert [name for name, *_ in found] == ["tdpfed", "fedavg", "local"]
    assert all(float(accuracy) > 60 for _, accuracy, _, _ in found)  # a third by chance
    sent = [float(megabytes) for *_, megabytes in found]
    assert 0 < sent[0] < sent[1]
    assert sent[2] == 0
    assert "0.weight" in text


def test_a_tensorized_network_is_smaller_and_still_good() -> None:
    text = run("tensorize_a_trained_network", "--epochs", "4")
    dense = re.search(r"dense: ([\d,]+) parameters, ([\d.]+) %", text)
    assert dense is not None
    assert float(dense[2]) > 85
    size = int(dense[1].replace(",", ""))
    rates = re.findall(r"rate (\d): ([\d,]+) parameters, [\d.]+ %, tuned ([\d.]+) %", text)
    assert [rate for rate, *_ in rates] == ["2", "4", "8"]
    for rate, parameters, accuracy in rates:
        assert int(parameters.replace(",", "")) < 1.2 * size / int(rate)  # what stays dense counts
        assert float(accuracy) > float(dense[2]) - 10
    difference = re.search(r"largest difference (\S+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-3


def test_methods_are_compared() -> None:
    text = run("compare_methods", "--rounds", "3", "--seeds", "2")
    lines = {line.split()[0]: line for line in text.splitlines()[1:]}
    assert list(lines) == ["tdpfed", "pfedme", "fedavg", "local"]
    assert all("±" in line for line in lines.values())
    assert lines["local"].split()[-2:] == ["-", "0.00"]
    assert float(lines["tdpfed"].split()[-1]) < float(lines["fedavg"].split()[-1])


def test_methods_of_one_s_own_run_beside_the_package_s() -> None:
    text = run("own_method", "--rounds", "3")
    found = re.findall(r"^(\w+) +personalized ([\d.]+) %, ([\d.]+) MB uploaded$", text, re.MULTILINE)
    assert len(found) == len(text.splitlines()) == 4
    assert [name for name, *_ in found] == ["ditto", "fedper", "fedavg", "local"]
    assert all(float(accuracy) > 40 for _, accuracy, _ in found)  # a tenth by chance
    ditto, fedper, fedavg, local = (float(megabytes) for *_, megabytes in found)
    assert ditto == fedavg
    assert 0 == local < fedper < fedavg


def test_numbers_are_predicted_better_than_by_their_mean() -> None:
    text = run("predict_numbers", "--rounds", "12")
    found = re.findall(r"^(\w+) +squared error ([\d.]+), R2 ([-\d.]+)$", text, re.MULTILINE)
    assert [name for name, *_ in found] == ["fedavg", "local"]
    assert all(float(error) < 1 and float(explained) > 0 for _, error, explained in found)  # 1 and 0 for the mean
    groups = re.findall(r"^ +(\S.*, sex [12]) +[\d.]+$", text, re.MULTILINE)
    assert len(groups) == len(set(groups)) == 10


def test_several_labels_are_learned_with_small_uploads_too() -> None:
    text = run("several_labels", "--rounds", "8")
    found = re.findall(
        r"^(\w+) +global model: f1 ([\d.]+), auc ([\d.]+), accuracy [\d.]+; ([\d.]+) MB", text, re.MULTILINE
    )
    assert [name for name, *_ in found] == ["dense", "factors"]
    assert all(float(area) > 0.75 for _, _, area, _ in found)  # a half by chance
    assert 0 < 10 * float(found[1][3]) < float(found[0][3])
    labels = re.findall(r"^ +(\S.*?) +(?:yes|no) +\(true: (?:yes|no)\)$", text, re.MULTILINE)
    assert labels == ["even", "prime", "five or more", "closed loop"]


def test_results_are_read_into_pandas(tmp_path: Path) -> None:
    settings = ("run.rounds=3", "data.clients=4", "data.per_client=5", "algorithm.tau=2", "run.evaluate_every=1")
    options = [part for setting in settings for part in ("--set", setting)]
    arguments = ["--algorithms", "fedavg,local", "--seeds", "2", *options, "--out", str(tmp_path / "grid")]
    assert CliRunner().invoke(app, ["compare", *arguments]).exit_code == 0
    runs = sorted((tmp_path / "grid").glob("*-seed*"))
    text = run("results_into_pandas", *map(str, runs), "--csv", str(tmp_path / "all.csv"))
    records = pd.read_csv(tmp_path / "all.csv")
    assert len(records) == 2 * 2 * 3
    means = records[records["round"] == 3].groupby("algorithm")["personalized_accuracy"].mean()
    for name, mean in means.items():
        assert re.search(rf"^{name} +{mean:.4f}".rstrip("0"), text, re.MULTILINE)
    assert "count" in text
