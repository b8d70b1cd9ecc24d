"""The keys of the configuration as a person looks them up: all of them, with what each may be; and the presets."""

import json
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tdpfed.algorithms import ALGORITHMS
from tdpfed.cli import app, display
from tdpfed.config import load_config, presets
from tdpfed.config.keys import describe
from tdpfed.errors import TDPFedError


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_key_is_listed_once_with_its_default_and_meaning(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    resolved = load_config(str(tmp_path / "empty.toml"), [f"algorithm.name={name}"]).as_dict()
    found = {key.name: key for key in describe(name)}
    assert set(found) == {f"{section}.{key}" for section, table in resolved.items() for key in table}
    assert len(found) == len(describe(name))
    for full, key in found.items():
        section, _, short = full.partition(".")
        assert key.allowed, full
        assert key.meaning, full
        assert key.default == resolved[section][short], full


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("data.partition", "iid, classes, classes-in-turn, classes-in-groups, dirichlet, natural"),
        ("data.test_fraction", "number > 0, < 1"),
        ("run.rounds", "whole number ≥ 1"),
        ("robust.clip", "number > 0 or median"),
        ("algorithm.tau", "whole number ≥ 1, ≤ 1,000,000"),
        ("algorithm.momentum", "number ≥ 0, ≤ 1"),
        ("algorithm.keep_theta", "true, false"),
        ("algorithm.exclude", "list of text"),
    ],
)
def test_ranges_are_said(key: str, allowed: str) -> None:
    assert next(one.allowed for one in describe("tdpfed") if one.name == key) == allowed
    listed = json.loads(CliRunner().invoke(app, ["keys", "--json"]).stdout)
    assert listed[key]["allowed"] == allowed


@pytest.mark.parametrize("columns", ["40", "220"])
def test_keys_prints_a_line_for_each_key_however_narrow_the_screen(columns: str) -> None:
    lines = CliRunner(env={"COLUMNS": columns}).invoke(app, ["keys"]).stdout.splitlines()
    found = describe("tdpfed")
    assert [line.split()[0] for line in lines] == [key.name for key in found]
    for line, key in zip(lines, found, strict=True):
        default = "not set" if key.default is None else json.dumps(key.default)
        assert all(f"{word} " in f"{line} " for word in (default, key.meaning, f"[{key.allowed}]")), line


def test_on_a_terminal_a_long_line_continues_below_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "Console", lambda: Console(force_terminal=True, width=100))
    lines = CliRunner().invoke(app, ["keys"]).stdout.splitlines()
    indent = lines[0].index("communication rounds")
    assert max(map(len, lines)) <= 100
    assert len([line for line in lines if not line.startswith(" ")]) == len(describe("tdpfed"))
    assert all(line[:indent].strip() == "" and line[indent] != " " for line in lines if line.startswith(" "))


def test_keys_of_a_method_are_its_own() -> None:
    assert "algorithm.s_prime" not in CliRunner().invoke(app, ["keys", "fedavg"]).output
    with pytest.raises(TDPFedError, match="did you mean 'fedavg'"):
        describe("fedvg")


@pytest.mark.parametrize("name", presets())
def test_a_printed_preset_is_that_preset(name: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["preset", name])
    assert done.exit_code == 0
    file = tmp_path / "own.toml"
    file.write_text(done.stdout, encoding="utf-8")
    assert load_config(str(file)) == load_config(name)
    assert json.loads(CliRunner().invoke(app, ["preset", name, "--json"]).stdout) == tomllib.loads(done.stdout)


def test_presets_are_listed_with_what_they_are() -> None:
    text = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["preset"]).stdout  # a pipe has no width
    about = json.loads(CliRunner().invoke(app, ["preset", "--json"]).stdout)
    assert list(about) == presets()
    assert all(name in text and words in text and words for name, words in about.items())
    missing = CliRunner().invoke(app, ["preset", "digit"])
    assert isinstance(missing.exception, TDPFedError)
    assert "did you mean 'digits'" in str(missing.exception)
