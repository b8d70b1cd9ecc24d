"""Several processes as one run: the same bits as one process, in any number, stopped and resumed in any other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

import small
from hub import together
from tdpfed import Local, Participation
from tdpfed.cli import app
from tdpfed.config.loading import load_config
from tdpfed.engine.attacks import Attack
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.processes import ALONE, LARGE, LATEST, Ranks, _wait_until_released, joined
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import RankError, TDPFedError
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.session import Session
from tdpfed.server.robust import Rule
from tdpfed.server.step import ServerStep
from tdpfed.wire import Wire

SETTINGS = [
    "run.rounds=6", "run.evaluate_every=1", "run.threads=1", "checkpoint.every=2", "participation.clients=3",
    "algorithm.tau=2", "algorithm.s_prime=2",
]  # fmt: skip


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


def lines(folder: Path) -> list[dict[str, Any]]:
    return small.lines(folder / "metrics.jsonl", "seconds")


# Rows find their way


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_gathered_rows_are_everybodys_in_order(world: int) -> None:
    clients = torch.tensor([7, 2, 3, 9, 4, 12])
    rows = {"a": torch.randn(6, 3, dtype=torch.float64), "b": torch.arange(6), "c": torch.rand(6, 2, 2) > 0.5}
    rows["d"] = torch.randn(6, 5).to(torch.bfloat16)

    def work(ranks: Ranks) -> dict[str, Tensor]:
        mine = ranks.part(rows, clients)
        mine = dict(sorted(mine.items(), reverse=ranks.rank % 2 == 1))  # each has its own order
        assert len(mine["b"]) == len(ranks.own(clients))
        return ranks.gather(mine, clients)

    for result in together(world, work):
        assert isinstance(result, dict), result
        assert all(result[name].dtype == value.dtype for name, value in rows.items())
        assert all(torch.equal(result[name], value) for name, value in rows.items())


def test_bytes_reach_everybody() -> None:
    def work(ranks: Ranks) -> list[bytes]:
        return [ranks.broadcast(f"from {ranks.rank}".encode() if full else b"", 1) for full in (True, False)]

    assert together(3, work) == [[b"from 1", b""]] * 3
    assert ALONE.broadcast(b"x") == b"x"


def test_what_stops_one_stops_all_and_the_first_says_why() -> None:
    def work(ranks: Ranks, bad: set[int]) -> str:
        with ranks.agreement():
            if ranks.rank in bad:
                raise TDPFedError(f"no data on {ranks.rank}")
        return "went on"

    assert together(3, lambda ranks: work(ranks, set())) == ["went on"] * 3
    for bad, words in (({2}, "rank 2: no data on 2"), ({0, 1}, "no data on 0")):
        first, *others = together(3, lambda ranks, bad=bad: work(ranks, bad))  # type: ignore[misc]
        assert isinstance(first, TDPFedError)
        assert str(first) == words
        assert all(isinstance(other, SystemExit) and other.code == 2 for other in others)
    with pytest.raises(TDPFedError, match="no data on 0"):
        work(ALONE, {0})


# A simulation in several processes is the simulation


@pytest.mark.parametrize("name", small.variants())
def test_any_number_of_ranks_equals_one(name: str) -> None:
    def work(ranks: Ranks) -> tuple[list[Any], dict[str, Tensor], Simulation]:
        simulation = Simulation(
            small.mlp(), small.federation(7, dtype=torch.float32), small.variants()[name], seed=3,
            participation=Participation(3, dropout=0.2), evaluate_clients=5, ranks=ranks,
        )  # fmt: skip
        records = [record.as_dict() | {"seconds": 0} for record in simulation.run(5)]
        return records, simulation.server, simulation

    records, server, whole = work(ALONE)
    for world in (2, 4):
        for rank, result in enumerate(together(world, work)):
            assert isinstance(result, tuple), result
            assert result[0] == records
            assert all(torch.equal(value, server[name]) for name, value in result[1].items())
            for key, value in result[2].private.items():
                assert torch.equal(value, whole.private[key][rank::world])
            assert len(result[2].federation.y) < len(whole.federation.y)


WIRES = {
    "factors": Wire(update="factors", terms=2, kernels="tensor"),
    "factors both ways": Wire(update="factors", codec="float32", terms=1, down="factors", down_terms=1),
    "top-k": Wire(update="top-k", share=0.1), "int4": Wire(codec="int4"),
}  # fmt: skip


@pytest.mark.parametrize("form", WIRES)
@pytest.mark.parametrize("name", ["fedavg", "pfedme"])
def test_any_number_of_ranks_equals_one_in_every_form(name: str, form: str) -> None:
    """Also what clients keep of their changes, and the server of its own."""

    def work(ranks: Ranks) -> tuple[list[Any], dict[str, Tensor], dict[str, Tensor]]:
        simulation = Simulation(
            small.convnet(), small.federation(7, dtype=torch.float32), small.variants()[name], seed=3,
            wire=WIRES[form], participation=Participation(4, "all", dropout=0.3), attack=Attack("scale", 0.3, 1e7),
            server_step=ServerStep(optimizer="adam", rate=0.01, momentum=0.5), ranks=ranks,
        )  # fmt: skip
        records, refused = [], []
        for record in simulation.run(4):
            records.append(record.as_dict() | {"seconds": 0})
            refused.append([str(one) for one in simulation.refused])
        assert any(refused)
        return [records, refused], simulation.server, simulation.private

    expected, server, private = work(ALONE)
    for world in (2, 5):
        for rank, result in enumerate(together(world, work)):
            assert isinstance(result, tuple), result
            assert result[0] == expected
            assert result[1].keys() == server.keys()
            assert all(torch.equal(value, server[entry]) for entry, value in result[1].items())
            assert all(torch.equal(value, private[entry][rank::world]) for entry, value in result[2].items())


def test_attacks_codecs_and_robust_rules_see_all_uploads() -> None:
    def work(ranks: Ranks) -> tuple[list[Any], list[str]]:
        simulation = Simulation(
            small.mlp(), small.federation(8, dtype=torch.float32), small.variants()["tdpfed"], wire=Wire(codec="int8"),
            rule=Rule("trimmed-mean", gauge=0.8), attack=Attack("alie", 0.25), ranks=ranks,
        )  # fmt: skip
        records, refused = [], []
        for _ in range(3):
            records += [record.as_dict() | {"seconds": 0} for record in simulation.run(1)]
            refused += [str(one) for one in simulation.refused]
        return records, refused

    expected = work(ALONE)
    assert together(3, work) == [expected] * 3


def test_a_run_that_diverges_says_so_everywhere() -> None:
    def work(ranks: Ranks) -> None:
        simulation = Simulation(small.mlp(), small.federation(dtype=torch.float32), Local(tau=1), ranks=ranks)
        simulation.step()
        if ranks.rank == 3 % ranks.world:  # nobody else sees it
            simulation.private["theta"][3 // ranks.world] = torch.nan
        simulation.step()

    with pytest.raises(TDPFedError, match="round 2: loss or parameters of client 3 are not finite") as error:
        work(ALONE)
    assert [str(result) for result in together(2, work)] == [str(error.value)] * 2


def test_what_several_processes_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TDPFedError, match="torchrun: 6 processes given, must be at most 5, the number of clients"):
        small.train(small.variants()["fedavg"], ranks=Ranks(0, 6))
    with pytest.raises(TDPFedError, match=r"run\.diagnostics_every: must be 0 in several processes"):
        small.train(small.variants()["tdpfed"], ranks=Ranks(0, 2), diagnostics=Diagnostics())
    with pytest.raises(TDPFedError, match="torchrun: 2 processes given, must be 1 for several seeds"):
        Ranks(0, 2).alone("several seeds")
    ALONE.alone("anything")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    ALONE.check_devices()
    with pytest.raises(TDPFedError, match="--nproc-per-node 2 given, must be at most 1, the GPUs of this machine"):
        Ranks(0, 2).check_devices()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = CliRunner().invoke(app, ["compare"])
    assert "must be 'run'" in str(done.exception)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TDPFedError, match="torchrun: the processes cannot reach each other"), joined():
        pass


# Sessions: one writes, and a checkpoint does not know how many there were


def session(path: Path, ranks: Ranks, stop: int | None = None, every: int = 2, more: Sequence[str] = ()) -> str:
    """Begin or resume a run, to its end or until a round after which the process is gone."""
    begun = (path / "config.toml").exists() if ranks.leads else None
    if ranks.broadcast(b"1" if begun else b"") == b"1":
        made = Session.resume(path, None, ranks)
    else:
        made = Session.begin(load_config("digits", [*SETTINGS, f"checkpoint.every={every}", *more]), path, None, ranks)

    @contextmanager
    def until(simulation: Any, rounds: int, records: Any) -> Any:
        def on_round(current: Any) -> None:
            if current.round == stop and ranks.rank == ranks.world - 1:
                raise MemoryError("gone")

        yield on_round

    summary: dict[str, Any] = made.run(until)
    return str(summary["status"])


@pytest.mark.parametrize("more", [(), ("algorithm.keep_theta=true", "algorithm.optimizer_state=run")])
def test_stopped_and_resumed_in_other_numbers_it_is_the_same_run(tmp_path: Path, more: Sequence[str]) -> None:
    assert session(tmp_path / "one", ALONE, more=more) == "finished"
    for number, (first, second) in enumerate([(2, 1), (1, 3), (3, 2)]):
        folder = tmp_path / str(number)
        *others, last = together(first, lambda ranks, folder=folder: session(folder, ranks, stop=5, more=more))  # type: ignore[misc]
        assert isinstance(last, MemoryError)
        assert all(isinstance(error, RankError) and "resume with --resume" in str(error) for error in others)
        ended = together(second, lambda ranks, folder=folder: session(folder, ranks))  # type: ignore[misc]
        assert ended == ["finished"] * second
        assert lines(folder) == lines(tmp_path / "one")
        left, right = (Checkpoints(path / "checkpoints").load() for path in (tmp_path / "one", folder))
        assert left is not None
        assert right is not None
        rows = [found[0].private.rows(torch.arange(10)) for found in (left, right)]
        assert all(torch.equal(value, rows[1][name]) for name, value in rows[0].items())
        assert all(torch.equal(value, right[0].server[name]) for name, value in left[0].server.items())


def test_a_damaged_checkpoint_is_passed_over_by_all(tmp_path: Path) -> None:
    assert together(2, lambda ranks: session(tmp_path, ranks)) == ["finished"] * 2
    whole = lines(tmp_path)
    for path in [path for path in small.newest(tmp_path) if "private" in path.name]:
        path.write_bytes(path.read_bytes()[:-1])
    assert together(2, lambda ranks: session(tmp_path, ranks)) == ["finished"] * 2
    assert lines(tmp_path) == whole
    for path in (tmp_path / "checkpoints").glob("*-server*"):
        path.write_bytes(b"")
    first, second = together(2, lambda ranks: session(tmp_path, ranks))
    assert "none in" in str(first)
    assert isinstance(second, SystemExit)


def test_a_run_without_checkpoints_starts_again_on_all(tmp_path: Path) -> None:
    assert together(2, lambda ranks: session(tmp_path, ranks, every=0)) == ["finished"] * 2
    whole = lines(tmp_path)
    first, second = together(2, lambda ranks: session(tmp_path, ranks))
    assert "is finished, and has no checkpoint" in str(first)
    assert isinstance(second, SystemExit)
    (tmp_path / "summary.json").unlink()
    assert together(2, lambda ranks: session(tmp_path, ranks)) == ["finished"] * 2
    assert lines(tmp_path) == whole


def test_a_folder_in_use_and_a_full_disk_end_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("x")
    first, second = together(2, lambda ranks: session(tmp_path / "used", ranks))
    assert "not empty" in str(first)
    assert isinstance(second, SystemExit)

    def full(self: Checkpoints, *_: Any) -> None:
        raise TDPFedError("checkpoint: cannot write")

    monkeypatch.setattr(Checkpoints, "save", full)
    first, second = together(2, lambda ranks: session(tmp_path / "full", ranks))
    assert str(first) == "checkpoint: cannot write"
    assert isinstance(second, SystemExit)


# In earnest: torchrun


@contextmanager
def torchrun(arguments: list[str], processes: int = 2) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    process = subprocess.Popen(
        [*command, "-m", "tdpfed", "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def alone(folder: Path, rounds: int) -> list[str]:
    """Run in this process; return the options that make torchrun do the same."""
    chosen = [*SETTINGS, f"run.rounds={rounds}"]
    Session.begin(load_config("digits", chosen), folder, None).run(silent)
    return [word for setting in chosen for word in ("--set", setting)]


def test_torchrun_gives_the_same_metrics(tmp_path: Path) -> None:
    settings = alone(tmp_path / "one", 8)
    with torchrun(["digits", *settings, "--out", str(tmp_path / "two"), "--json"]) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["rounds"] == 8  # one object from one rank
    assert lines(tmp_path / "two") == lines(tmp_path / "one")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_one_of_whose_ranks_is_killed_is_resumed(tmp_path: Path) -> None:
    settings, killed = alone(tmp_path / "one", 24), tmp_path / "killed"
    with torchrun(["digits", *settings, "--out", str(killed), "--json"]) as process:
        deadline = time.monotonic() + 120
        while not list(killed.glob("checkpoints/*.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        ranks = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _is_rank(path, killed)]
        os.kill(max(ranks), signal.SIGKILL)
        _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "error: torchrun: " in err
    assert "resume with --resume" in err
    assert len(lines(killed)) < 24
    done = CliRunner().invoke(app, ["run", "--resume", str(killed), "--json"])
    assert done.exit_code == 0, done.output
    assert lines(killed) == lines(tmp_path / "one")


def _is_rank(process: Path, folder: Path) -> bool:
    try:
        words = (process / "cmdline").read_text().split("\0")
    except OSError:
        return False
    return str(folder) in words and "torch.distributed.run" not in words


def test_a_process_that_is_told_to_end_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What :func:`joined` does around a run, with a group of one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def run(action: Callable[[], None]) -> Ranks:
        with joined() as ranks:
            action()
        return ranks

    def fail(error: Exception) -> None:
        raise error

    def told() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    for rank, error, expected in (
        (0, TDPFedError("x"), TDPFedError), (1, TDPFedError("x"), SystemExit), (1, RankError("x"), RankError),
    ):  # fmt: skip
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        with pytest.raises(expected):
            run(partial(fail, error))
        assert run(lambda: None) == Ranks(rank, 2)
    with pytest.raises(RankError, match="terminated"):
        run(told)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_a_run_waits_until_no_thread_holds_what_was_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    latest = deque([torch.zeros(1), torch.ones(2)], maxlen=LATEST)
    began = time.monotonic()
    _wait_until_released(latest)
    assert time.monotonic() - began < 0.5  # nobody else holds them
    held = list(latest)

    def let_go() -> None:
        time.sleep(0.3)
        held.clear()

    thread = threading.Thread(target=let_go)
    thread.start()
    _wait_until_released(latest)
    assert not held
    thread.join()
    held += latest
    monkeypatch.setattr("tdpfed.engine.processes.PATIENCE", 0.1)
    _wait_until_released(latest)  # and not for ever
    assert held


def test_only_small_broadcasts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "broadcast", lambda *_: None)
    ranks = Ranks(0, 2)
    for _ in range(LATEST):
        assert ranks.broadcast(b"text") == b"text"
    ranks.broadcast(bytes(LARGE))
    assert len(ranks.latest) == LATEST
    assert max(tensor.numel() for tensor in ranks.latest) < LARGE
