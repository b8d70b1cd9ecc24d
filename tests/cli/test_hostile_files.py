"""The command line and files that are none, or that were made to do harm: one line for each error, and status 2."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import small
from tdpfed import cli

TINY = [
    "run.rounds=2", "data.clients=4", "data.max_samples=40", "data.per_client=5", "algorithm.tau=1",
    "model.name=logistic", "algorithm.name=fedavg",
]  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, and an alarm for whoever waits for a pipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def ring(*_: Any) -> None:
        raise AssertionError("waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(300)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Run the console script's function; return its status and what it says on standard error."""

    def invoke(*arguments: str, settings: list[str] | None = None) -> tuple[int, str]:
        options = [part for setting in settings or [] for part in ("--set", setting)]
        monkeypatch.setattr(sys, "argv", ["tdpfed", *arguments, *options])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().err

    return invoke


def none(path: Path, kind: str) -> None:
    """Make something that is no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to(kind)


KINDS = ["pipe", "folder", "/dev/zero", "loop"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["run", "compare"])
def test_a_configuration_that_is_no_file(call: Any, command: str, kind: str) -> None:
    none(Path("own.toml"), kind)
    status, err = call(command, "own.toml")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("error: configuration: cannot read 'own.toml'")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["npz", "parquet"])
def test_data_that_are_no_file(call: Any, kind: str, ending: str) -> None:
    none(Path(f"own.{ending}"), kind)
    status, err = call("run", settings=[f"data.name=own.{ending}"])
    assert (status, err.count("\n")) == (2, 1)
    assert f"own.{ending}" in err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "summary.json", "refusals.jsonl", "seeds.toml"])
def test_a_file_of_a_run_that_is_none(call: Any, name: str, kind: str) -> None:
    assert call("run", "--out", "run", settings=TINY) == (0, "")
    none(Path("run", name), kind)
    for arguments in (
        ["run", "--resume", "run"], ["report", "run", "--out", "page.html"],
        ["run", "--out", "run", "--set", "run.seeds=2"],
    ):  # fmt: skip
        status, err = call(*arguments)
        assert status in (0, 2), err
        assert "Traceback" not in err
        if status == 2:
            assert err.startswith("error: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_that_is_no_file(call: Any, kind: str) -> None:
    assert call("run", "--out", "run", settings=[*TINY, "checkpoint.every=1"])[0] == 0
    for path in small.newest(Path("run")):
        none(path, kind)
    status, err = call("run", "--resume", "run")
    assert status in (0, 2), err
    assert "Traceback" not in err
    assert "checkpoint" in err


@pytest.mark.parametrize(
    "setting",
    [
        "data.size_skew=-0.0", "algorithm.compression=1e-308", "algorithm.lam=1e308", "run.rounds=" + "9" * 5000,
        "run.rounds=0x" + "f" * 5000, "run.rounds=" + "[" * 5000, "data.options=" + "{a = " * 500 + "1" + "}" * 500,
        "algorithm.name=0x" + "f" * 5000, "model.name=\udcff", "data.options=2020-01-01",
    ],
)  # fmt: skip
def test_a_setting_made_to_do_harm(call: Any, setting: str) -> None:
    status, err = call("run", "--out", "run", settings=[*TINY[:-1], setting])
    assert "Traceback" not in err
    if setting == "data.size_skew=-0.0":
        assert (status, err) == (0, "")
    else:
        assert (status, err.count("\n")) == (2, 1)
        assert len(err) < 3000
        assert not Path("run").exists()


@pytest.mark.parametrize("rate", ["1e-308", "1e-7", "0", "-1", "nan", "inf"])
def test_a_rate_that_is_none(call: Any, rate: str) -> None:
    status, err = call("plan", "dnn", "--compression", rate)
    assert (status, err.count("\n")) == (2, 1)


def test_an_encrypted_and_an_absurd_array(call: Any) -> None:
    np.savez("own.npz", x=np.zeros((9, 3), np.float32), y=np.arange(9) % 3)
    whole = Path("own.npz").read_bytes()
    for old, new in (
        (b"'shape': (9, 3)", b"'shape': (99**"),
        (b"(9, 3), }     ", b"(9000000000,)}"),
        (b"\x50\x4b\x03\x04", b"1234"),
    ):
        Path("own.npz").write_bytes(whole.replace(old, new))
        status, err = call("run", settings=["data.name=own.npz"])
        assert (status, err.count("\n")) == (2, 1)
        assert "own.npz" in err
