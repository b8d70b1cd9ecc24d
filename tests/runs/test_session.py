"""Runs that are stopped in any way and go on: the same numbers as a run that was not."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kill_cli
import small
from tdpfed.cli import app
from tdpfed.config.loading import load_config
from tdpfed.errors import TDPFedError
from tdpfed.files import ctrl_c_waits
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.session import Session, run_together

QUICK = ["run.rounds=9", "run.evaluate_every=2", "checkpoint.every=2", "data.clients=6", "participation.clients=3"]


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


def settings(algorithm: str) -> list[str]:
    few = ["algorithm.tau=2", *(["algorithm.s_prime=2"] if algorithm == "tdpfed" else [])]
    return [*QUICK, f"algorithm.name={algorithm}", *few]


def whole(path: Path, algorithm: str) -> Path:
    Session.begin(load_config("digits", settings(algorithm)), path, None).run(silent)
    return path


def metrics(path: Path) -> list[dict[str, Any]]:
    return small.lines(path / "metrics.jsonl", "seconds")


def assert_same(left: Path, right: Path) -> None:
    assert metrics(left) == metrics(right)
    one, other = (Checkpoints(path / "checkpoints").load() for path in (left, right))
    assert one is not None
    assert other is not None
    assert one[0].round == other[0].round == 9
    everybody = torch.arange(one[0].private.clients)
    rows = [found[0].private.rows(everybody) for found in (one, other)]
    for mine, theirs in ((one[0].server, other[0].server), (rows[0], rows[1])):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert {**one[0].meta, "files": 0} == {**other[0].meta, "files": 0}  # records hold seconds


@pytest.mark.hostile
@pytest.mark.parametrize(
    "algorithm",
    [pytest.param(name, marks=pytest.mark.slow if name != "tdpfed" else ()) for name in kill_cli.ALGORITHMS],
)
def test_killed_at_random_instants_a_run_goes_on_to_the_same_bits(algorithm: str, tmp_path: Path) -> None:
    """The short form of ``tests/kill_cli.py``; one thread, for tests share the cores."""
    hit = kill_cli.trial(tmp_path, algorithm, 60, ("start", "save"), Random(algorithm), threads=1)
    assert hit.total() == 2


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 8])
def test_stopped_after_any_round_a_run_goes_on_to_the_same_bits(stop_after: int, tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", "tdpfed")

    @contextmanager
    def stopping(simulation: Any, rounds: int, records: Any) -> Any:
        def on_round(current: Any) -> None:
            if current.round == stop_after:
                raise KeyboardInterrupt

        yield on_round

    session = Session.begin(load_config("digits", settings("tdpfed")), tmp_path / "run", None)
    assert session.run(stopping)["status"] == "interrupted"
    resumed = Session.resume(tmp_path / "run", None)
    assert resumed.simulation.round == stop_after // 2 * 2
    assert resumed.run(silent)["status"] == "finished"
    assert_same(expected, tmp_path / "run")


def test_ctrl_c_between_a_line_and_its_record_waits_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session.begin(load_config("digits", settings("fedavg")), tmp_path / "run", None)
    append = session.folder.append

    def struck(record: Any) -> None:
        append(record)
        if record.round == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(session.folder, "append", struck)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        summary = session.run(silent)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    last = metrics(tmp_path / "run")[-1]
    assert (summary["status"], summary["rounds"], last["round"]) == ("interrupted", 4, 4)
    assert summary["personalized_accuracy"] == last["personalized_accuracy"]
    assert summary["best_personalized_accuracy"] == max(r["personalized_accuracy"] for r in metrics(tmp_path / "run"))


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def pressed_in(session: Session, round_: int, times: int = 1) -> None:
    """Press Ctrl-C so many times in the middle of a round, after its clients have trained."""
    count = session.simulation._count

    def struck(*arguments: Any) -> None:
        if session.simulation.round == round_ - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        count(*arguments)

    session.simulation._count = struck  # type: ignore[assignment, method-assign]


@pytest.mark.usefixtures("python_handles_ctrl_c")
@pytest.mark.parametrize("round_", [1, 5, 9])
def test_the_first_ctrl_c_ends_a_run_after_its_round_with_a_checkpoint(tmp_path: Path, round_: int) -> None:
    expected, said = whole(tmp_path / "whole", "fedavg"), list[int]()
    config = load_config("digits", [*settings("fedavg"), "checkpoint.every=100"])
    session = Session.begin(config, tmp_path / "run", None)
    pressed_in(session, round_)
    summary = session.run(silent, lambda: said.append(session.simulation.round))
    assert said == [round_ - 1]  # at once, in the middle of the round
    assert (summary["status"], summary["rounds"]) == ("finished" if round_ == 9 else "interrupted", round_)
    resumed = Session.resume(tmp_path / "run", None)
    assert resumed.simulation.round == round_
    assert resumed.warnings == []
    resumed.run(silent)
    assert metrics(tmp_path / "run") == metrics(expected)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_the_second_ctrl_c_ends_a_run_at_once_without_one(tmp_path: Path) -> None:
    config = load_config("digits", settings("fedavg"))
    session = Session.begin(config, tmp_path / "run", None)
    pressed_in(session, 4, times=2)
    summary = session.run(silent, lambda: None)
    assert (summary["status"], summary["rounds"]) == ("interrupted", 3)
    assert Session.resume(tmp_path / "run", None).simulation.round == 2  # checkpoint.every = 2


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_without_checkpoints_ctrl_c_writes_none(tmp_path: Path) -> None:
    config = load_config("digits", [*settings("fedavg"), "checkpoint.every=0"])
    session = Session.begin(config, tmp_path / "run", None)
    pressed_in(session, 4)
    assert session.run(silent, lambda: None)["rounds"] == 4
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_runs_together_are_all_saved_at_the_first_ctrl_c(tmp_path: Path) -> None:
    configs = [load_config("digits", [*settings("fedavg"), "checkpoint.every=100", f"run.seed={n}"]) for n in (0, 1)]
    sessions = [Session.begin(config, tmp_path / str(config.run.seed), None) for config in configs]
    pressed_in(sessions[0], 3)
    with pytest.raises(KeyboardInterrupt):
        run_together(sessions, lambda _: None, lambda: None)
    assert [session.summary["status"] for session in sessions] == ["interrupted"] * 2
    assert [Session.resume(tmp_path / name, None).simulation.round for name in ("0", "1")] == [3, 3]


def test_where_ctrl_c_is_ignored_or_out_of_reach_nothing_is_changed() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with ctrl_c_waits():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.signal(signal.SIGINT, signal.default_int_handler)
        seen: list[Any] = []

        def elsewhere() -> None:
            with ctrl_c_waits():
                seen.append(signal.getsignal(signal.SIGINT))

        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen == [signal.default_int_handler]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run = whole(tmp_path / "run", "fedavg")
    before = metrics(run)
    done = CliRunner().invoke(app, ["run", "--resume", str(run), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.output)["rounds"] == 9
    assert metrics(run) == before


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", "fedavg")
    run = whole(tmp_path / "run", "fedavg")
    newest = sorted((run / "checkpoints").glob("*-server.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    session = Session.resume(run, None)
    assert newest.name in session.warnings[0]
    assert session.simulation.round == 8
    session.run(silent)
    assert metrics(run) == metrics(expected)


def test_a_line_cut_off_in_the_middle_is_written_anew(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole", "fedavg")
    run = whole(tmp_path / "run", "fedavg")
    file = run / "metrics.jsonl"
    file.write_text(file.read_text()[:-40])
    newest = max(path.stem for path in (run / "checkpoints").glob("*.json"))
    for part in list((run / "checkpoints").glob(f"{newest}*")):  # as if killed before the last save
        part.unlink()
    Session.resume(run, None).run(silent)
    assert metrics(run) == metrics(expected)


def test_without_checkpoints_a_run_starts_again(tmp_path: Path) -> None:
    config = load_config("digits", [*settings("fedavg"), "checkpoint.every=0"])
    Session.begin(config, tmp_path / "run", None).run(silent)
    assert not (tmp_path / "run" / "checkpoints").exists()
    before = metrics(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()  # as one that was killed
    session = Session.resume(tmp_path / "run", None)
    assert session.simulation.round == 0
    session.run(silent)
    assert metrics(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "nowhere"], "must be a run folder"),
        (["mnist", "--resume", "."], "no preset"),
        (["--resume", ".", "--out", "x"], "no --out"),
    ],
)
def test_what_cannot_be_resumed(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["run", *arguments])
    assert isinstance(done.exception, TDPFedError)
    assert words in str(done.exception)


@pytest.mark.parametrize("text", ["rounds = ", "[run]\nrounds = 0\n", "[algorithm]\nname = 'x'\n"])
def test_a_damaged_configuration_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(TDPFedError, match=r"config\.toml"):
        Session.resume(tmp_path, None)
