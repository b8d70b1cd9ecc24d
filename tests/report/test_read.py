"""Run folders, whole and damaged: what is there is read, what is not is said, and nothing is guessed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import folders
from tdpfed.engine.attacks import attackers
from tdpfed.errors import TDPFedError
from tdpfed.report import parse, read_run, read_runs
from tdpfed.report.parse import FIELDS, FIGURES
from tdpfed.runs.folder import RunFolder
from tdpfed.server.records import Record


def test_what_the_writer_wrote_is_what_is_read(tmp_path: Path) -> None:
    run = read_run(folders.make(tmp_path / "run", rounds=7))
    written = [folders.record(t).as_dict() for t in range(1, 8)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert run.series == {field: [line.get(field) for line in written] for field in FIELDS}
    assert run.clients == written[-1]["client_accuracy"]
    assert run.figures == {key: summary.get(key) for key in FIGURES}
    assert run.versions == folders.VERSIONS
    assert (run.status, run.rounds, run.name, run.dataset, run.algorithm) == ("finished", 7, "run", "digits", "tdpfed")
    assert run.notes == []


def test_without_a_summary_the_records_give_the_same_figures(tmp_path: Path) -> None:
    ended = read_run(folders.make(tmp_path / "ended"))
    going = read_run(folders.make(tmp_path / "going", status=None))
    assert going.status == "in progress"
    only_at_the_end = {"compression_rate"}
    assert {k: v for k, v in ended.figures.items() if k not in only_at_the_end} == {
        k: v for k, v in going.figures.items() if k not in only_at_the_end
    }


def test_a_summary_of_an_earlier_sitting_does_not_end_a_resumed_run(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=5, status="interrupted")
    assert read_run(path).status == "interrupted"
    RunFolder(path).append(folders.record(6))
    resumed = read_run(path)
    assert (resumed.status, resumed.rounds, resumed.figures["rounds"]) == ("in progress", 6, 6)


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_file_cut_off_in_a_line_is_read_up_to_there_and_said(tmp_path: Path, cut: int) -> None:
    path = folders.make(tmp_path / "run", rounds=6, status=None)
    metrics = path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[: -cut - 1])
    run = read_run(path)
    assert run.series["round"] == [1, 2, 3, 4, 5]
    assert run.figures["rounds"] == 5
    (note,) = run.notes
    assert all(word in note for word in ("metrics.jsonl", "line 6", "round 5"))


def test_a_finished_run_keeps_its_summary_when_its_metrics_are_damaged(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=6)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]))
    run = read_run(path)
    assert (run.rounds, run.figures["rounds"], run.status) == (3, 6, "finished")
    assert "line 4" in run.notes[0]
    (path / "metrics.jsonl").write_text("\n".join(lines[:3]))
    notes = read_run(path).notes
    assert any("ends at round 3 of 6" in note for note in notes)
    assert any("3 lines, summary.json was written with 6" in note for note in notes)


BAD_LINES = {
    "a list": "[1]",
    "a word": '"round"',
    "no round": '{"loss": 1}',
    "round a word": '{"round": "9"}',
    "round true": '{"round": true}',
    "round zero": '{"round": 0}',
    "round again": '{"round": 3}',
    "loss a word": '{"round": 9, "loss": "low"}',
    "loss true": '{"round": 9, "loss": true}',
    "NaN": '{"round": 9, "loss": NaN}',
    "infinite": '{"round": 9, "loss": 1e999}',
    "too large": '{"round": 9, "uplink_bytes": 1' + 400 * "0" + "}",
    "clients a word": '{"round": 9, "client_accuracy": "all"}',
    "a client a word": '{"round": 9, "client_accuracy": ["good"]}',
    "diagnostics a list": '{"round": 9, "diagnostics": [1]}',
    "deep": '{"round": ' + 100_000 * "[" + "}",
    "empty": "",
    "not text": "\x00\x01\ufffd",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_line_that_is_no_record_ends_the_reading(tmp_path: Path, line: str) -> None:
    path = folders.make(tmp_path / "run", rounds=3, status=None)
    with (path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(line + "\n" + json.dumps(folders.record(10).as_dict()) + "\n")
    run = read_run(path)
    assert run.series["round"] == [1, 2, 3]
    assert len(run.notes) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "x"]), inner, max_size=3),
)


@given(
    st.dictionaries(st.sampled_from([*FIELDS, "client_accuracy", "diagnostics", "rule", "versions", "status"]), JSON)
)
def test_any_json_is_read_or_refused_but_nothing_else(values: dict[str, Any]) -> None:
    text = json.dumps(values)
    for read in (parse.record, parse.refusal, parse.summary):
        try:
            found: Any = read(text)
        except ValueError:
            continue
        if read is parse.record:
            numbers = [found[field] for field in FIELDS] + found["client_accuracy"]
            assert all(one is None or type(one) in (int, float) for one in numbers)


def test_a_damaged_summary_or_configuration_is_left_out_and_said(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=4)
    (path / "summary.json").write_text('{"status": "finished", "rounds": "four"}')
    (path / "config.toml").write_text("[run\nrounds = ")
    run = read_run(path)
    assert (run.status, run.config, run.figures["rounds"]) == ("in progress", {}, 4)
    assert len(run.notes) == 2
    assert all(str(path) in note for note in run.notes)
    (path / "config.toml").write_text("run = 3\ndata = []\n")
    strange = read_run(path)
    assert (strange.setting("run.seed"), strange.dataset, strange.algorithm) == (None, "unknown data", "unknown method")


def test_refusals_are_read_up_to_damage(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=2)
    good = '{"round": 1, "client": 5, "rule": "gauge", "tensor": "a", "reason": "far"}\n'
    (path / "refusals.jsonl").write_text(good + good + '{"round": 2, "client": nu')
    run = read_run(path)
    assert [(one.round, one.client, one.rule, one.reason) for one in run.refusals] == 2 * [(1, 5, "gauge", "far")]
    assert "refusals.jsonl" in run.notes[0]


def test_records_of_other_versions_are_read(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=1, status=None)
    old = {"round": 2, "personalized_accuracy": 0.5}
    new = {**Record.as_dict(folders.record(3)), "epsilon": 1.5, "unheard_of": {"a": 1}}
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(old) + "\n" + json.dumps(new) + "\n")
    run = read_run(path)
    assert run.series["epsilon"] == [None, None, 1.5]
    assert run.series["minibatch_loss"][1] is None
    assert not run.notes


def test_an_attack_s_clients_do_not_count_before_the_summary_either(tmp_path: Path) -> None:
    bad = attackers(3, 10, 0.3).tolist()
    every = {"client_accuracy": [0.1 if hostile else 0.9 for hostile in bad]}
    settings = ("robust.attack=noise", "robust.attack_fraction=0.3")
    going = read_run(folders.make(tmp_path / "a", *settings, seed=3, status=None, every=every))
    assert going.figures["worst_decile_accuracy"] == 0.9
    path = folders.make(tmp_path / "b", *settings, seed=3, status=None, every=every)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("attack_fraction = 0.3", 'attack_fraction = "many"'))
    assert read_run(path).figures["worst_decile_accuracy"] == 0.1


def test_what_is_no_run_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    only_config = tmp_path / "only"
    only_config.mkdir()
    (only_config / "config.toml").write_text("")
    for path in (tmp_path / "empty", tmp_path / "file", tmp_path / "nowhere", only_config):
        with pytest.raises(TDPFedError, match=f"^RUN: '{path}' given, must be a run folder"):
            read_run(path)
        with pytest.raises(TDPFedError, match=f"^RUN: '{path}' given, must be a run folder"):
            read_runs([path])


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = folders.make(tmp_path / "run", rounds=2)
    (path / "summary.json").unlink()
    (path / "summary.json").mkdir()
    with pytest.raises(TDPFedError, match=r"^RUN: cannot read '.*summary.json' \("):
        read_run(path)


def test_the_same_run_twice_is_shown_once_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folders.make(tmp_path / "run", rounds=2)
    monkeypatch.chdir(tmp_path)
    runs, notes = read_runs([path, Path("run"), path / ".." / "run"])
    assert len(runs) == 1
    assert len(notes) == 2
    assert all("more than once" in note for note in notes)
