"""Packed runs: unpacking restores what was packed, the same runs give the same bytes, and nothing is lost silently."""

import gzip
import json
from pathlib import Path

import pack
import pytest
from typer.testing import CliRunner

from tdpfed.cli import app
from tdpfed.report.read import read_run

SETTINGS = [
    "--set",
    "run.rounds=2",
    "--set",
    "run.evaluate_every=1",
    "--set",
    "algorithm.tau=1",
    "--set",
    "checkpoint.every=0",
]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(path: Path, *more: str) -> None:
    done = CliRunner().invoke(app, ["run", *SETTINGS, *more, "--out", str(path)])
    assert done.exit_code == 0, done.output


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three runs below one folder: a finished one, one with refused uploads, and one that was stopped."""
    folder = tmp_path / "study"
    run(folder / "runs" / "plain")
    run(folder / "runs" / "attacked", "--set", "robust.attack=gauge", "--set", "robust.gauge=1")
    run(folder / "stopped")
    (folder / "stopped" / "summary.json").unlink()
    (folder / "README.md").write_text("# A page\n")
    return folder


def test_unpacking_restores_what_was_packed(study: Path, tmp_path: Path) -> None:
    runs = {path.name: path for path in pack.find(study)}
    before = {name: files(path) for name, path in runs.items()}
    assert "refusals.jsonl" in before["attacked"]
    read = {name: read_run(path) for name, path in runs.items()}
    packed = pack.pack(study)
    assert set(files(study)) == {"README.md", packed.name}
    restored = {path.name: path for path in pack.unpack(packed, tmp_path / "restored")}
    assert {name: files(path) for name, path in restored.items()} == before
    for name, path in restored.items():
        again, was = read_run(path), read[name]
        assert (again.config, again.series, again.figures) == (was.config, was.series, was.figures)


def test_the_same_runs_give_the_same_bytes(study: Path, tmp_path: Path) -> None:
    first = pack.pack(study).read_bytes()
    pack.unpack(study / pack.PACKED, tmp_path / "restored")
    assert pack.pack(tmp_path / "restored").read_bytes() == first


def test_a_report_reads_restored_runs(study: Path, tmp_path: Path) -> None:
    pack.unpack(pack.pack(study), tmp_path / "restored")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "restored"), "--out", str(tmp_path / "page.html")])
    assert done.exit_code == 0, done.output
    assert "attacked" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_packed_file_is_read_without_this_package(study: Path) -> None:
    with gzip.open(pack.pack(study), "rt", encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    assert [one["name"] for one in found] == ["attacked", "plain", "stopped"]
    assert [len(one["records"]) for one in found] == [2, 2, 2]
    assert [one["summary"] is None for one in found] == [False, False, True]


def test_packing_again_keeps_what_was_packed(study: Path) -> None:
    pack.pack(study)
    run(study / "runs" / "later")
    pack.pack(study)
    assert set(pack.read(study / pack.PACKED)) == {"attacked", "later", "plain", "stopped"}


def test_nothing_is_lost_silently(study: Path, tmp_path: Path) -> None:
    (study / "stopped" / "checkpoints").mkdir()
    with pytest.raises(SystemExit, match="checkpoints"):
        pack.pack(study)
    (study / "stopped").rename(study / "plain")
    with pytest.raises(SystemExit, match="plain"):
        pack.pack(study, drop_checkpoints=True)
    (study / "plain").rename(study / "stopped")
    packed = pack.pack(study, drop_checkpoints=True)
    pack.unpack(packed, tmp_path)
    with pytest.raises(SystemExit, match="already exists"):
        pack.unpack(packed, tmp_path)
    with pytest.raises(SystemExit, match="no run folder"):
        pack.pack(study)


@pytest.mark.parametrize("name", ["..", "a/b", "/tmp/a", ""])
def test_a_run_cannot_leave_the_folder(name: str, tmp_path: Path) -> None:
    pack.write(tmp_path / pack.PACKED, [{"name": name, "config": "", "records": [], "summary": None}])
    with pytest.raises(SystemExit, match="not the name of a folder"):
        pack.unpack(tmp_path / pack.PACKED, tmp_path / "runs")
