"""``tdpfed data show``: who has which samples, in a table and as JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tdpfed import cli
from tdpfed.config import load_config
from tdpfed.runs.prepare import federation_of

WORDS = "\033[1m[b]ward[/b] one"


@pytest.fixture
def wards(tmp_path: Path) -> Path:
    """Three clients: the first has two classes, the second one, the third 25."""
    y = np.array([0] * 6 + [1] * 2 + [1] * 5 + [*range(25)])
    ids = np.array([WORDS] * 8 + ["b"] * 5 + ["c"] * 25)
    np.savez(tmp_path / "wards.npz", x=np.random.default_rng(0).normal(size=(len(y), 4)), y=y, client_ids=ids)
    return tmp_path / "wards.npz"


def show(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["data", "show", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_json_has_every_client_of_the_federation_that_a_run_would_have() -> None:
    settings = ("data.partition=dirichlet", "data.clients=7", "run.seed=3")
    found: dict[str, Any] = json.loads(show(*(part for one in settings for part in ("--set", one)), "--json"))
    federation = federation_of(load_config("digits", settings))
    assert (found["name"], found["shape"], found["classes"]) == ("digits", [1, 8, 8], [str(c) for c in range(10)])
    assert [one["id"] for one in found["clients"]] == [str(k) for k in range(7)]
    for k, one in enumerate(found["clients"]):
        _, train, _, test = federation.client(k)
        assert (one["train"], one["test"]) == (len(train), len(test))
        assert one["classes"] == [int((train == c).sum() + (test == c).sum()) for c in range(10)]


def test_few_classes_have_a_column_each(tmp_path: Path) -> None:
    text = show("--set", "data.clients=3", "--set", "data.per_client=4")
    table = rows(text)
    assert table[1] == ["client", "train", "test", *map(str, range(10))]
    body = [[0 if cell == "-" else int(cell) for cell in line] for line in table[3:6]]
    assert all(sum(line[1:3]) == sum(line[3:]) == 50 for line in body)
    totals = [int(cell) for cell in table[6][1:]]
    assert totals == [sum(column) for column in zip(*(line[1:] for line in body), strict=True)]


def test_many_classes_are_counted_and_the_most_frequent_named(wards: Path) -> None:
    text = show("--set", f"data.name={wards}", "--set", "data.normalize=none")
    one, two, three = rows(text)[3:6]
    assert " ".join(one).endswith("[b]ward[/b] one 6 2 2 0: 6, 1: 2")
    assert " ".join(two) == "b 4 1 1 1: 5"
    assert " ".join(three[:4]) == "c 19 6 25"
    assert three[-1] == "..."
    assert "\033" not in text


def test_bad_input_names_the_key() -> None:
    result = CliRunner().invoke(cli.app, ["data", "show", "--set", "data.clients=5000"])
    assert "data.clients: 5000; allowed: " in str(result.exception)
