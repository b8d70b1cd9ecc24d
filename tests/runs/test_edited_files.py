"""Files of a run that were lost, damaged or edited: a resumption and a report notice, and say which."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import small
from tdpfed.cli import app
from tdpfed.config import load_config
from tdpfed.errors import TDPFedError
from tdpfed.report import read_run
from tdpfed.report.read import IN_PROGRESS
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.seals import Chain, Tail, is_sealed, lines_of, link_of, linked, sealed
from tdpfed.runs.session import Session

SETTINGS = [
    "run.rounds=5", "checkpoint.every=2", "data.clients=4", "data.max_samples=40", "data.per_client=5",
    "model.name=logistic", "algorithm.name=fedavg", "algorithm.tau=1", "algorithm.weights=uniform",
    "privacy.clip=1", "privacy.noise=2", "participation.clients=3", "participation.sampling=poisson",
]  # fmt: skip


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with privacy."""
    path = tmp_path_factory.mktemp("finished") / "run"
    Session.begin(load_config("digits", SETTINGS), path, None).run(silent)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def privacy_reported(path: Path) -> tuple[Any, list[str]]:
    """What a report says about privacy, and its notes."""
    found = read_run(path)
    settings = [found.setting(f"privacy.{key}") for key in ("clip", "noise", "delta", "epsilon")]
    said = [found.figures["epsilon"], found.figures["delta"], found.status, found.series["epsilon"], settings]
    return [*said, found.series["round"], found.figures["rounds"]], list(found.notes)


def privacy_resumed(path: Path) -> tuple[Any, list[str]]:
    """What a resumed run says about privacy in the end, and its warnings."""
    session = Session.resume(path, None)
    try:
        warnings = list(session.warnings)
        summary = session.run(silent)
    finally:
        session.folder.release()
    said = [summary["epsilon"], summary["delta"], summary["status"], summary["rounds"]]
    return [*said, [record.epsilon for record in session.records]], warnings


def noticed(path: Path, read: Callable[[Path], tuple[Any, list[str]]], expected: Any) -> bool:
    """Whether a changed folder says the same about privacy, that something is wrong, or that it has not ended."""
    try:
        said, notes = read(path)
    except TDPFedError:
        return True
    return bool(notes) or said == expected or IN_PROGRESS in said


def edits(content: bytes, random: Random, count: int) -> list[bytes]:
    """The content with a bit flipped, cut, with a number changed, a line removed, doubled, swapped; empty; reversed."""
    made = [b"", content[:-1], content[: len(content) // 2], content[::-1], content + content]
    for _ in range(count):
        place = random.randrange(len(content))
        made.append(content[:place] + bytes([content[place] ^ 1 << random.randrange(8)]) + content[place + 1 :])
    numbers = list(re.finditer(rb"\d+(\.\d+)?(e-?\d+)?", content))
    for match in random.sample(numbers, min(count, len(numbers))):
        other = random.choice([b"0", b"1", b"7", b"0.125", match[0] + b"1", match[0][:-1]])
        made.append(content[: match.start()] + other + content[match.end() :])
    lines = content.splitlines(keepends=True)
    for _ in range(min(count, len(lines))):
        i, j = random.randrange(len(lines)), random.randrange(len(lines))
        swapped = lines[:]
        swapped[i], swapped[j] = swapped[j], swapped[i]
        made += [b"".join(lines[:i] + lines[i + 1 :]), b"".join([*lines[:i], lines[i], *lines[i:]]), b"".join(swapped)]
    return [other for other in made if other != content]


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_no_file_can_be_edited_so_that_the_privacy_report_changes_unnoticed(
    finished: Path, tmp_path: Path, count: int
) -> None:
    expected = {
        read: read(shutil.copytree(finished, tmp_path / read.__name__)) for read in (privacy_reported, privacy_resumed)
    }
    assert not any(notes for _, notes in expected.values())
    names = sorted(str(path.relative_to(finished)) for path in finished.rglob("*") if path.is_file())
    assert len(names) >= 9  # configuration, records, summary, and two checkpoints of three files
    random, tried = Random(0), 0
    for name in names:
        content = (finished / name).read_bytes()
        for other in [None, *edits(content, random, count)]:
            for read, (said, _) in expected.items():
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                path = shutil.copytree(finished, tmp_path / "run")
                if other is None:
                    (path / name).unlink()
                else:
                    (path / name).write_bytes(other)
                assert noticed(path, read, said), (name, read.__name__, other)
                tried += 1
    assert tried > 20 * count


def test_an_epsilon_that_is_edited_and_sealed_again_still_contradicts_the_records(run: Path) -> None:
    values = json.loads((run / "summary.json").read_text())
    del values["sha256"]
    (run / "summary.json").write_text(sealed(json.dumps(values | {"epsilon": 0.125}, indent=2)))
    assert any("epsilon 0.125" in note for note in read_run(run).notes)


def test_sums_taken_off_one_file_are_missed_by_the_other(run: Path, finished: Path) -> None:
    values = small.summary(run / "summary.json")
    (run / "summary.json").write_text(json.dumps(values | {"epsilon": 0.125}))
    assert any("has no checksums" in note for note in read_run(run).notes)
    shutil.copy(finished / "summary.json", run)
    plain = [json.dumps(line | {"epsilon": 0.125}) for line in small.lines(run / "metrics.jsonl")]
    (run / "metrics.jsonl").write_text("\n".join(plain) + "\n")
    assert any("metrics.jsonl was changed" in note for note in read_run(run).notes)


# Records


def change(path: Path, edit: Callable[[list[str]], list[str]]) -> None:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in edit(lines)))


DAMAGE: dict[str, Callable[[list[str]], list[str]]] = {
    "first removed": lambda lines: lines[1:],
    "one removed": lambda lines: lines[:2] + lines[3:],
    "last removed": lambda lines: lines[:-1],
    "all removed": lambda lines: [],
    "number changed": lambda lines: [
        *lines[:2],
        re.sub(r'"epsilon": [\d.]+', '"epsilon": 0.125', lines[2]),
        *lines[3:],
    ],
    "last number changed": lambda lines: [*lines[:-1], re.sub(r'"seconds": ', '"seconds": 1', lines[-1])],
    "cut": lambda lines: [*lines[:2], lines[2][:50], *lines[3:]],
    "swapped": lambda lines: [lines[1], lines[0], *lines[2:]],
    "doubled": lambda lines: [*lines[:2], lines[1], *lines[2:]],
    "sums removed": lambda lines: [re.sub(r', "previous.*', "}", line) for line in lines],
    "blank line": lambda lines: [*lines[:2], "", *lines[2:]],
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_records_are_named_by_a_resumption_and_by_every_later_report(run: Path, how: str) -> None:
    change(run, DAMAGE[how])
    assert any("metrics.jsonl" in note for note in read_run(run).notes)
    session = Session.resume(run, None, overrides=["run.rounds=7"])
    assert any("metrics.jsonl" in warning for warning in session.warnings)
    session.run(silent)
    if how != "blank line":  # what is gone stays gone, and whoever reads the run later is told as well
        assert any("metrics.jsonl" in note for note in read_run(run).notes)
        session = Session.resume(run, None)
        assert session.warnings
    assert [record.round for record in session.records][-2:] == [6, 7]


def test_the_command_line_names_damaged_records(run: Path) -> None:
    change(run, DAMAGE["one removed"])
    for arguments in (["report", str(run), "--out", str(run.parent / "page.html")], ["run", "--resume", str(run)]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "metrics.jsonl" in done.stderr


def test_undamaged_records_are_not_named(run: Path) -> None:
    for part in small.newest(run):  # as if killed before the last save
        part.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"round": 6, "lo')
    session = Session.resume(run, None)
    assert session.warnings == []
    session.run(silent)
    assert read_run(run).notes == []


def test_damaged_refusals_are_named(tmp_path: Path) -> None:
    settings = ["run.rounds=3", "checkpoint.every=1", "robust.attack=gauge", "robust.gauge=0.5", "algorithm.tau=1"]
    path = tmp_path / "run"
    Session.begin(load_config("digits", settings), path, None).run(silent)
    lines = (path / "refusals.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) > 3
    for damaged in (lines[:-1], lines[1:], []):
        (path / "refusals.jsonl").write_text("".join(damaged))
        assert any("refusals.jsonl" in note for note in read_run(path).notes)
    session = Session.resume(path, None)
    assert any("refusals.jsonl" in warning for warning in session.warnings)


# Seals


VALUES = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    min_size=1,
    max_size=4,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_what_was_sealed_is_sealed_and_reads_the_same(values: dict[str, Any], indent: int | None) -> None:
    values = {key: value for key, value in values.items() if key != "sha256"} or {"": 0}
    text = sealed(json.dumps(values, indent=indent))
    assert is_sealed(text) is True
    found = json.loads(text)
    assert len(found.pop("sha256")) == 64
    assert found == values
    assert is_sealed(json.dumps(values, indent=indent)) is None


@given(st.lists(VALUES, min_size=2, max_size=6), st.data())
def test_no_change_of_linked_lines_keeps_their_end(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    lines, tail = [], Tail()
    for row in rows:
        line, tail = linked(row, tail)
        lines.append(line)
    place = data.draw(st.integers(0, len(lines) - 1))
    other = data.draw(st.integers(0, len(lines[place]) - 1))
    assert end_of(lines) == (tail, True)
    flipped = lines[place][:other] + chr(ord(lines[place][other]) ^ 1) + lines[place][other + 1 :]
    for changed in ([*lines[:place], *lines[place + 1 :]], [*lines[:place], flipped, *lines[place + 1 :]]):
        found, sound = end_of(changed)
        assert found != tail or not sound


def end_of(lines: list[str]) -> tuple[Tail, bool]:
    """The end of lines, and whether each is sealed and follows the one before."""
    chain, sound = Chain(), True
    for line in lines:
        sound = sound and is_sealed(line) is True and chain.gap(line) is None
    return chain.tail, sound


def test_lines_follow_those_of_an_earlier_process(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a = 1\n").append_lines("refusals.jsonl", [{"round": 1}, {"round": 2}])
    again = RunFolder(tmp_path)
    again.append_lines("refusals.jsonl", [{"round": 3}])
    lines = [line for _, line in lines_of((tmp_path / "refusals.jsonl").read_text())]
    tail, sound = end_of(lines)
    assert (tail.lines, sound) == (3, True)
    assert again.sums["refusals.jsonl"] == {"lines": 3, "sha256": link_of(lines[-1])[1]}
