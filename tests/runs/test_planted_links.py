"""Links that someone planted in an output folder lead nowhere: they are replaced or refused, never followed."""

import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import small
from tdpfed.config import load_config
from tdpfed.errors import TDPFedError
from tdpfed.report import read_run
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.grid import Cell, begin_seeds, run_cells
from tdpfed.runs.progress import no_progress
from tdpfed.runs.session import Session

pytestmark = pytest.mark.hostile

QUICK = [
    "run.rounds=4", "checkpoint.every=2", "data.clients=4", "data.max_samples=40", "data.per_client=5",
    "model.name=logistic", "algorithm.name=fedavg", "algorithm.tau=1",
]  # fmt: skip
MINE = b"somebody's own content\n"
FILES = [
    "config.toml", "config.toml.part", "metrics.jsonl", "metrics.jsonl.part", "summary.json", "summary.json.part",
    "refusals.jsonl", "refusals.jsonl.part",
    "checkpoints/checkpoint-000002.json", "checkpoints/checkpoint-000002.json.part",
    "checkpoints/checkpoint-000002-server.safetensors", "checkpoints/checkpoint-000002-server.safetensors.part",
    "checkpoints/checkpoint-000004-private.safetensors.part",
]  # fmt: skip
"""Names that a run writes, with their temporary ones."""


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of somebody else, which a link may point to."""
    path = tmp_path / "victim"
    path.write_bytes(MINE)
    return path


def run(path: Path, *more: str) -> Any:
    return Session.begin(load_config("digits", [*QUICK, *more]), path, None).run(silent)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", ["config.toml.part", "seeds.toml.part", "metrics.jsonl", "metrics.jsonl.part"])
def test_a_link_in_an_empty_folder(tmp_path: Path, victim: Path, name: str, dangling: bool) -> None:
    if dangling or name == "metrics.jsonl":
        victim.write_bytes(b"")  # so that it would pass for a file that a killed start left
    before = victim.read_bytes()
    if dangling:
        victim.unlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim)
    with suppress(TDPFedError):
        run(tmp_path / "run")
    assert victim.exists() is not dangling
    assert dangling or victim.read_bytes() == before


def test_a_hard_link_in_an_empty_folder(tmp_path: Path, victim: Path) -> None:
    victim.write_bytes(b"")
    (tmp_path / "run").mkdir()
    os.link(victim, tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(TDPFedError, match="not empty"):
        run(tmp_path / "run")
    assert victim.read_bytes() == b""


@pytest.mark.parametrize("kind", ["link", "dangling", "hard link"])
@pytest.mark.parametrize("name", FILES)
def test_a_link_in_a_run_that_is_resumed(tmp_path: Path, victim: Path, name: str, kind: str) -> None:
    path, place = tmp_path / "run", tmp_path / "run" / name
    run(path, "robust.clip=1")
    place.unlink(missing_ok=True)
    if kind == "dangling":
        victim.unlink()
    os.link(victim, place) if kind == "hard link" else place.symlink_to(victim)
    with suppress(TDPFedError):
        Session.resume(path, None, overrides=["run.rounds=6"]).run(silent)
    assert victim.exists() is (kind != "dangling")
    assert kind == "dangling" or victim.read_bytes() == MINE


@pytest.mark.parametrize("name", ["metrics.jsonl", "refusals.jsonl"])
@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "folder"])
def test_a_line_is_added_to_a_file_of_this_run_alone(tmp_path: Path, victim: Path, name: str, kind: str) -> None:
    folder = RunFolder.create(tmp_path / "run", "a = 1\n")
    folder.append_lines(name, [{"round": 1}])
    place = folder.path / name
    place.unlink()
    if kind == "link":
        place.symlink_to(victim)
    elif kind == "hard link":
        os.link(victim, place)
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        place.mkdir()
    with pytest.raises(TDPFedError, match=r"^--out: cannot write to"):
        folder.append_lines(name, [{"round": 2}])
    assert victim.read_bytes() == MINE


@pytest.mark.parametrize("resumed", [False, True])
def test_a_folder_of_checkpoints_elsewhere_is_refused_and_nothing_there_is_removed(
    tmp_path: Path, resumed: bool
) -> None:
    run(tmp_path / "other")
    there = tmp_path / "other" / "checkpoints"
    before = {path.name: path.read_bytes() for path in there.iterdir()}
    if resumed:
        run(tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        (tmp_path / "run" / "checkpoints").symlink_to(there)
        with pytest.raises(TDPFedError, match="symbolic link"):
            Session.resume(tmp_path / "run", None)
    else:
        session = Session.begin(load_config("digits", QUICK), tmp_path / "run", None)
        (tmp_path / "run" / "checkpoints").symlink_to(there)
        with pytest.raises(TDPFedError, match="symbolic link"):
            session.run(silent)
        with pytest.raises(TDPFedError, match="symbolic link"):
            Checkpoints(tmp_path / "run" / "checkpoints").load()
    assert {path.name: path.read_bytes() for path in there.iterdir()} == before


def test_the_folder_of_a_cell_and_the_seeds_of_a_run(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "one").symlink_to(tmp_path / "elsewhere")
    quiet: dict[str, Any] = {name: lambda _: None for name in ("on_start", "on_round", "on_end")}
    with pytest.raises(TDPFedError, match="symbolic link"):
        run_cells([Cell("one", load_config("digits", QUICK))], tmp_path / "grid", None, **quiet)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "seeds.toml.part").symlink_to(victim)
    begin_seeds(load_config("digits", [*QUICK, "run.seeds=2"]), tmp_path / "seeds")
    assert victim.read_bytes() == MINE
    assert not (tmp_path / "seeds" / "seeds.toml").is_symlink()


def test_a_link_for_the_output_folder_itself_is_the_users_own_and_used(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "large disk")
    run(tmp_path / "runs" / "run")
    assert read_run(tmp_path / "large disk" / "run").notes == []
    assert small.lines(tmp_path / "large disk" / "run" / "metrics.jsonl")


def test_a_linked_file_of_records_is_refused_and_the_summary_stays(tmp_path: Path) -> None:
    settings = ["run.rounds=2", "data.clients=4", "data.max_samples=40", "model.name=logistic", "algorithm.tau=1"]
    path = tmp_path / "run"
    Session.begin(load_config("digits", [*settings, "algorithm.name=fedavg"]), path, None).run(no_progress)
    (path / "metrics.jsonl").rename(tmp_path / "elsewhere")
    (path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    before = (path / "summary.json").read_bytes(), (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(TDPFedError, match=r"--resume: '.*metrics\.jsonl' is a symbolic link"):
        Session.resume(path, None, overrides=["run.rounds=3"])
    assert ((path / "summary.json").read_bytes(), (tmp_path / "elsewhere").read_bytes()) == before
