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

pytestmark = pytest.mark.hostile

SETTINGS = [
    "run.rounds=5", "checkpoint.every=2", "data.clients=4", "data.max_samples=40", "data.per_client=5",
    "model.name=logistic", "algorithm.name=fedavg", "algorithm.tau=1", "algorithm.weights=uniform",
    "privacy.clip=1", "privacy.noise=2", "participation.clients=3", "participation.sampling=poisson",
]  # fmt: skip


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


@contextmanager
def stopping(simulation: Any, rounds: int, records: Any) -> Any:
    def on_round(current: Any) -> None:
        if current.round == 4:
            raise KeyboardInterrupt

    yield on_round


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with privacy."""
    path = tmp_path_factory.mktemp("finished") / "run"
    Session.begin(load_config("digits", SETTINGS), path, None).run(silent)
    return path


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with privacy that was stopped after four of five rounds."""
    path = tmp_path_factory.mktemp("interrupted") / "run"
    Session.begin(load_config("digits", SETTINGS), path, None).run(stopping)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


Read = Callable[[Path], tuple[dict[str, Any], list[str]]]


def privacy_reported(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a report says about privacy, and its notes."""
    found = read_run(path)
    figures = {key: found.figures[key] for key in ("epsilon", "delta", "rounds")}
    series = {key: list(found.series[key]) for key in ("round", "epsilon")}
    settings = {key: found.setting(f"privacy.{key}") for key in ("clip", "noise", "delta", "epsilon")}
    return {**figures, "series": series, "settings": settings, "status": found.status}, list(found.notes)


def privacy_resumed(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What a resumed run says about privacy in the end, and its warnings."""
    session = Session.resume(path, None)
    try:
        warnings = list(session.warnings)
        summary = session.run(silent)
    finally:
        session.folder.release()
    figures = {key: summary[key] for key in ("epsilon", "delta", "rounds", "status")}
    return {**figures, "series": {record.round: record.epsilon for record in session.records}}, warnings


def noticed(path: Path, read: Read, expected: dict[str, Any]) -> bool:
    """Whether a changed folder says the same about privacy, or that something is wrong.

    A run whose summary is gone has not ended, for all that anybody can know; what it has spent must be the same. The
    number of rounds may be edited: a resumed run then has other rounds, and says what all of them spend.
    """
    try:
        said, notes = read(path)
    except TDPFedError:
        return True
    if said["status"] == IN_PROGRESS:
        said |= {key: expected[key] for key in ("status", "delta")}
    if read is privacy_resumed and said["rounds"] != expected["rounds"]:
        common = said["series"].keys() & expected["series"].keys()
        same = all(said["series"][at] == expected["series"][at] for at in common)
        return bool(notes) or (same and len(common) > 1 and said["delta"] == expected["delta"])
    return bool(notes) or said == expected


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


STATES = ["finished", "interrupted", "killed"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("count", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_no_file_can_be_edited_so_that_the_privacy_report_changes_unnoticed(
    finished: Path, interrupted: Path, tmp_path: Path, count: int, state: str
) -> None:
    original = shutil.copytree(finished if state == "finished" else interrupted, tmp_path / "original")
    if state == "killed":
        (original / "summary.json").unlink()
    reads: list[Read] = [privacy_reported, privacy_resumed]
    expected = {read: read(shutil.copytree(original, tmp_path / read.__name__)) for read in reads}
    assert not any(notes for _, notes in expected.values())
    names = sorted(str(path.relative_to(original)) for path in original.rglob("*") if path.is_file())
    assert len(names) == 10 - (state == "killed")  # configuration, data, records, summary; two checkpoints of three
    random, tried = Random(0), 0
    for name in names:
        content = (original / name).read_bytes()
        made = [*edits(content, random, count), *forgeries(name, content, random, 3 * count)]
        for other in [None, *(made if count > 1 else random.sample(made, 4))]:
            for read, (said, _) in expected.items():
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                path = shutil.copytree(original, tmp_path / "run")
                if other is None:
                    (path / name).unlink()
                else:
                    (path / name).write_bytes(other)
                assert noticed(path, read, said), (name, read.__name__, other)
                tried += 1
    assert tried >= 10 * len(names)


def forgeries(name: str, content: bytes, random: Random, count: int) -> list[bytes]:
    """The content with other values, and its own checksums computed again: what an edit by somebody who knows them is.

    Files without checksums have none to compute: for these see :func:`edits`.
    """
    if name.endswith((".toml", ".safetensors")):
        return []
    rows = [json.loads(line) for line in (content.splitlines() if name.endswith(".jsonl") else [content])]
    made = []
    for place in random.sample(places_in(rows), min(count, len(places_in(rows)))):
        changed = json.loads(json.dumps(rows))
        *path, last = place
        inner = changed
        for key in path:
            inner = inner[key]
        inner[last] = random.choice([0, 1, 2, 0.125, 1e-9, "finished", None])
        made.append(changed)
    if len(rows) > 1:
        made += [rows[:-1], rows[1:], [row | {"epsilon": 0.125} for row in rows]]
    return [summed(name, changed) for changed in made]


def places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the places of all numbers, texts and null in JSON, but for checksums of their own, which come last."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = [
        place
        for key, one in items
        if len(path) > 1 or key not in ("sha256", "previous")
        for place in places_in(one, (*path, key))
    ]
    return inner if isinstance(value, dict | list) else [path]


def summed(name: str, rows: list[dict[str, Any]]) -> bytes:
    """Return rows as the content of a file, with checksums that fit."""
    plain = [{key: value for key, value in row.items() if key not in ("sha256", "previous")} for row in rows]
    if not name.endswith(".jsonl"):
        return sealed(json.dumps(plain[0])).encode()
    lines, tail = [], Tail()
    for row in plain:
        line, tail = linked(row, tail)
        lines.append(line + "\n")
    return "".join(lines).encode()


@pytest.mark.parametrize("state", ["finished", "interrupted"])
@pytest.mark.parametrize(
    ("key", "value"), [("epsilon", 0.125), ("epsilon", 99.0), ("epsilon", None), ("delta", 1e-9), ("delta", None)]
)
def test_a_summary_that_is_edited_and_sealed_again_contradicts_another_file(
    finished: Path, interrupted: Path, tmp_path: Path, state: str, key: str, value: float | None
) -> None:
    path = shutil.copytree(finished if state == "finished" else interrupted, tmp_path / "run")
    assert read_run(path).notes == []
    (path / "summary.json").write_bytes(
        summed("summary.json", [json.loads((path / "summary.json").read_text()) | {key: value}])
    )
    assert any(f"{key} {value}" in note for note in read_run(path).notes)


@pytest.mark.parametrize("summary", [True, False])
def test_records_of_a_run_that_goes_on_are_those_its_checkpoint_knows(
    interrupted: Path, tmp_path: Path, summary: bool
) -> None:
    """Also if they are edited with all their sums, or if the last ones are cut off."""
    path = shutil.copytree(interrupted, tmp_path / "run")
    if not summary:
        (path / "summary.json").unlink()
    file = path / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for changed in ([row | {"epsilon": 0.125, "seconds": 1.0} for row in rows], rows[:-1], rows[1:]):
        file.write_bytes(summed(file.name, changed))
        assert any("metrics.jsonl was changed" in note for note in read_run(path).notes)


def test_a_configuration_edited_while_the_run_goes_on_contradicts_its_checkpoint(
    interrupted: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(interrupted, tmp_path / "run")
    (path / "summary.json").unlink()
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("noise = 2.0", "noise = 40.0"))
    assert any("privacy.noise = 40.0" in note for note in read_run(path).notes)
    (path / "config.toml").write_text(text.replace("rounds = 5", "rounds = 50"))  # this may differ
    assert read_run(path).notes == []


def test_a_checkpoint_of_another_round_than_its_name_says_is_not_resumed_from(run: Path) -> None:
    file = max((run / "checkpoints").glob("*.json"))
    values = json.loads(file.read_text())
    values["meta"]["privacy"]["epsilon"] = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["epsilon"]
    file.write_bytes(summed(file.name, [values | {"round": 2}]))
    session = Session.resume(run, None)
    assert session.simulation.round == 4
    assert any("it is of round 2" in warning for warning in session.warnings)


def test_the_summary_of_a_stopped_run_is_gone_once_it_goes_on(interrupted: Path, tmp_path: Path) -> None:
    """So that a report never takes it for one that was changed."""
    path = shutil.copytree(interrupted, tmp_path / "run")
    assert read_run(path).status == "interrupted"
    session = Session.resume(path, None)
    assert (read_run(path).status, read_run(path).notes) == (IN_PROGRESS, [])
    session.run(silent)
    assert (read_run(path).status, read_run(path).notes) == ("finished", [])


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
