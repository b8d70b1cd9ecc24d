"""One writer per folder: a second process is refused with status 2, and nothing of the first is touched."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

from tdpfed.cli import main
from tdpfed.errors import TDPFedError
from tdpfed.files import lock_folder

pytestmark = pytest.mark.hostile

MAIN = [sys.executable, "-c", "from tdpfed.cli import main; main()"]
TINY = ["data.clients=4", "data.max_samples=40", "data.per_client=5", "algorithm.tau=1", "model.name=logistic"]
LONG = ["run.rounds=100000", "checkpoint.every=3", "run.evaluate_every=2"]


def command(*arguments: str, settings: list[str]) -> list[str]:
    return [*MAIN, *arguments, *(part for setting in settings for part in ("--set", setting))]


def second(*arguments: str, settings: list[str] | None = None) -> tuple[int, str, str]:
    """Return status, output and errors of a command in this process, which is not the one that holds the lock."""
    parts = command(*arguments, settings=settings or [])[len(MAIN) :]
    with (
        redirect_stdout(StringIO()) as out,
        redirect_stderr(StringIO()) as err,
        patch.object(sys, "argv", ["", *parts]),
    ):
        try:
            main()
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


class Long:
    """A long run in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, metrics: str) -> None:
        self.metrics = folder / metrics
        self.process = subprocess.Popen(
            command(*arguments, "--out", str(folder), settings=[*TINY, *LONG]), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,  # noqa: PLW1509
        )  # fmt: skip
        self.wait_for(3)

    def lines(self) -> int:
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def wait_for(self, count: int) -> None:
        """Wait until the run has written so many lines."""
        end = time.monotonic() + 120
        while self.lines() < count:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < end
            time.sleep(0.02)


@pytest.fixture
def long(tmp_path: Path) -> Iterator[Long]:
    made = Long(tmp_path / "run", "run", metrics="metrics.jsonl")
    yield made
    made.process.kill()
    made.process.communicate()


def test_a_second_process_is_refused_and_the_first_goes_on(long: Long, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    config = (tmp_path / "run" / "config.toml").read_bytes()
    for arguments, settings in (
        (["run", "--resume", run], []),
        (["run", "--resume", run], ["run.rounds=5"]),
        (["run", "--out", run], TINY),
        (["compare", "--algorithms", "fedavg", "--seeds", "1", "--out", run], TINY),
        (["reproduce", "mnist", "--table", "1", "--out", run], []),
    ):
        before = long.lines()
        status, out, errors = second(*arguments, settings=settings)
        assert (status, out) == (2, ""), arguments
        assert errors.startswith("error: ")
        assert "Traceback" not in errors
        long.wait_for(before + 2)
    assert (tmp_path / "run" / "config.toml").read_bytes() == config
    assert not (tmp_path / "run" / "summary.json").exists()
    long.process.send_signal(signal.SIGKILL)  # the lock ends with its process, however that ends
    long.process.wait()
    lock_folder(tmp_path / "run", field="--out").release()


def test_the_cell_of_a_running_comparison_cannot_be_resumed_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    long = Long(folder, "compare", "--algorithms", "fedavg", "--seeds", "1", metrics="fedavg-seed0/metrics.jsonl")
    try:
        twin = second("compare", "--algorithms", "fedavg", "--seeds", "1", "--out", str(folder), settings=TINY + LONG)
        alone = second("run", "--resume", str(folder / "fedavg-seed0"))
        for status, _, errors in (twin, alone):
            assert status == 2, errors
            assert "another process" in errors
        assert {path.name for path in folder.iterdir()} == {"fedavg-seed0"}
        long.process.send_signal(signal.SIGINT)
        long.process.communicate(timeout=60)
        assert long.process.returncode == 130
        lock_folder(folder, field="--out").release()
    finally:
        long.process.kill()
        long.process.wait()


def test_of_two_that_begin_at_once_one_is_refused(tmp_path: Path) -> None:
    """Both see no folder; the first to create it has it."""
    settings = [*TINY, "run.rounds=60"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    racing = [
        subprocess.Popen(
            command("run", "--out", str(tmp_path / "run"), settings=settings), stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env=environment,
        )
        for _ in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=120)[1] for process in racing]
    assert sorted(process.returncode for process in racing) == [0, 2], errors
    assert sorted(bool(error) for error in errors) == [False, True]


def test_a_lock_is_of_the_folder_and_leaves_nothing(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "a" / "b", field="--out") as lock:
        assert not list(lock.path.iterdir())
        with pytest.raises(TDPFedError, match=r"^--resume: .*another process"):
            lock_folder(tmp_path / "a" / "b", field="--resume")
        lock_folder(tmp_path / "a", field="--out").release()
    lock_folder(tmp_path / "a" / "b", field="--out").release()
    began = time.monotonic()
    with lock_folder(tmp_path / "a", field="x"), pytest.raises(TDPFedError):
        lock_folder(tmp_path / "a", field="x", wait=0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_a_folder_removed_while_it_was_locked_is_made_again(tmp_path: Path) -> None:
    first = lock_folder(tmp_path / "run", field="--out")
    (tmp_path / "run").rmdir()
    again = lock_folder(tmp_path / "run", field="--out")
    assert (tmp_path / "run").is_dir()
    first.release()
    with pytest.raises(TDPFedError):
        lock_folder(tmp_path / "run", field="--out")
    again.release()
