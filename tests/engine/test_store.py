"""What clients keep: any place gives the same bits, and only those who have trained take room."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed import Participation
from tdpfed.config.loading import load_config
from tdpfed.engine import store as module
from tdpfed.engine.processes import Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Store, existing, free_memory
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.session import Session
from tdpfed.runs.snapshot import restore, snapshot_of

START = {"theta": torch.arange(3.0), "seen": torch.zeros(1, dtype=torch.int16), "none": torch.zeros(0)}


def rows(count: int, value: float) -> dict[str, Tensor]:
    return {
        "theta": torch.full((count, 3), value), "seen": torch.ones(count, 1, dtype=torch.int16),
        "none": torch.zeros(count, 0),
    }  # fmt: skip


def twin(clients: int, puts: list[tuple[list[int], float]]) -> Tensor:
    """The slow way: every row written at the start."""
    theta = START["theta"].expand(clients, 3).clone()
    for ids, value in puts:
        theta[ids] = value
    return theta


@pytest.mark.parametrize("place", ["ram", "mmap", "auto"])
def test_rows_are_the_start_until_they_are_put(place: Any, tmp_path: Path) -> None:
    store = Store(START, 7, place, tmp_path / "not" / "there")
    puts: list[tuple[list[int], float]] = []
    for ids, value in (([5, 2], 1.5), ([2], 2.5), ([0, 6, 5], -1.0)):
        everybody = store.rows(torch.arange(7))
        assert torch.equal(everybody["theta"], twin(7, puts))
        store.put(torch.tensor(ids), rows(len(ids), value))
        puts.append((ids, value))
        some = torch.tensor([6, 1, 5])
        assert torch.equal(store.rows(some)["theta"], twin(7, puts)[some])
        assert store.rows(some)["none"].shape == (3, 0)
    assert store.touched.nonzero().flatten().tolist() == [0, 2, 5, 6]
    assert store.rows(torch.arange(7))["seen"].flatten().tolist() == [1, 0, 1, 0, 0, 1, 1]
    assert torch.equal(store.whole()["theta"], twin(7, puts))
    store.whole()["theta"].fill_(9)  # its own tensors
    assert torch.equal(store.rows(torch.tensor([1, 2]))["theta"], torch.full((2, 3), 9.0))
    assert not list(tmp_path.iterdir())
    assert store.spec == {"theta": "float32 (7, 3)", "seen": "int16 (7, 1)", "none": "float32 (7, 0)"}


@pytest.mark.parametrize("rank", range(2))
def test_rows_may_be_written_in_parts(rank: int) -> None:
    whole, parts = (Store(START, 9, "ram", None, Ranks(rank, 2)) for _ in range(2))
    ids, given, written = torch.tensor([7, 0, 3, 8, 5, 2]), rows(3, 1.0), list[slice]()
    given["theta"] += torch.arange(3)[:, None]

    def spread(count: int, task: Callable[[slice], None]) -> None:
        written.extend(slice(row, row + 2) for row in range(0, count, 2))
        for part in written:
            task(part)

    whole.put(ids, given)
    parts.put(ids, given, spread)
    assert len(written) == 2
    for name, value in whole.rows(torch.arange(9)).items():
        assert torch.equal(value, parts.rows(torch.arange(9))[name])


def test_ctrl_c_waits_until_all_rows_are_written() -> None:
    store, before = Store(START, 4, "ram"), signal.signal(signal.SIGINT, signal.default_int_handler)

    def spread(count: int, task: Callable[[slice], None]) -> None:
        task(slice(1))
        signal.raise_signal(signal.SIGINT)
        task(slice(1, count))

    try:
        with pytest.raises(KeyboardInterrupt):
            store.put(torch.tensor([3, 1]), rows(2, 5.0), spread)
    finally:
        signal.signal(signal.SIGINT, before)
    assert store.touched.tolist() == [False, True, False, True]
    assert torch.equal(store.rows(torch.tensor([1, 3]))["theta"], torch.full((2, 3), 5.0))


def test_each_rank_holds_its_own() -> None:
    stores = [Store(START, 8, "ram", None, Ranks(rank, 3)) for rank in range(3)]
    ids = torch.tensor([1, 4, 5, 6])
    for rank, store in enumerate(stores):
        own = ids[ids % 3 == rank]
        store.put(ids, {name: value[: len(own)] + rank for name, value in rows(4, 1.0).items()})
        assert store.touched.nonzero().flatten().tolist() == [1, 4, 5, 6]
        assert len(store.whole()["theta"]) == (3, 3, 2)[rank]
        assert torch.equal(store.rows(ids)["theta"], torch.full((len(own), 3), 1.0 + rank))
    assert torch.equal(stores[0].rows(torch.tensor([0, 6]))["theta"], torch.tensor([[0.0, 1, 2], [1, 1, 1]]))


def test_it_chooses_memory_where_half_of_it_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed = 7 * sum(value.nbytes for value in START.values())
    for free, place in ((2 * needed, "ram"), (2 * needed - 2, "mmap")):
        monkeypatch.setattr(module, "free_memory", lambda device, free=free: free)
        assert Store(START, 7, "auto", tmp_path).place == place
    with pytest.raises(TDPFedError, match=r"engine\.state: unknown 'disk'; Allowed: auto, mmap, ram"):
        Store(START, 7, "disk")  # type: ignore[arg-type]


def test_free_memory_is_what_the_machine_says_or_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free_memory(torch.device("cpu")) <= whole
    text = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:  7 kB\n", "/sys/fs/cgroup/memory.max": "5000\n"}
    text["/sys/fs/cgroup/memory.current"] = "1000"
    monkeypatch.setattr(Path, "read_text", lambda self: text[str(self)])
    assert free_memory(torch.device("cpu")) == 4000
    text["/sys/fs/cgroup/memory.max"] = "max"
    assert free_memory(torch.device("cpu")) == 7 * 1024
    text["/proc/meminfo"] = "nothing: 1"
    assert free_memory(torch.device("cpu")) == whole


def test_a_disk_without_room_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        TDPFedError, match=r"engine\.state: 'mmap' needs 84 bytes for theta in .*No space left"
    ) as error:
        Store(START, 7, "mmap", tmp_path).reserve()
    assert "allowed: ram" in str(error.value)
    assert existing(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(
    ("name", "participation"),
    [("local", Participation(2, dropout=0.2)), ("tdpfed alternating", Participation(2, "all"))],
    ids=str,
)
def test_a_run_is_the_same_in_any_place(name: str, participation: Participation, tmp_path: Path) -> None:
    runs = [
        small.train(small.variants()[name], 4, state=state, state_folder=tmp_path, participation=participation)
        for state in ("ram", "mmap")
    ]
    assert [run.store.place for run in runs] == ["ram", "mmap"]
    assert small.equal(*runs)


def test_a_round_reads_and_writes_the_rows_of_its_clients_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = small.train(small.variants()["pfedme"], 0, data=small.federation(30), participation=Participation(3))
    seen: list[tuple[str, list[int]]] = []
    for method in ("rows", "put"):
        inner = getattr(Store, method)

        def spy(self: Store, clients: Tensor, *rest: Any, inner: Any = inner, method: str = method) -> Any:
            seen.append((method, clients.tolist()))
            return inner(self, clients, *rest)

        monkeypatch.setattr(Store, method, spy)
    simulation.step()
    clients = simulation.trained.tolist()
    assert seen == [("rows", clients), ("put", clients)]
    assert len(clients) == 3


# Checkpoints hold those who have trained


def saves(folder: Path, clients: int, rounds: int) -> Iterator[tuple[Simulation, int]]:
    """Yield a run after each of its rounds, and the bytes that its checkpoint wrote."""
    simulation = small.train(
        small.variants()["fedavg"], 0, data=small.federation(clients), participation=Participation(3), seed=2
    )
    checkpoints, written = Checkpoints(folder), 0
    write = os.write

    def counted(descriptor: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        return write(descriptor, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", counted)
        for _ in range(rounds):
            simulation.step()
            written = 0
            checkpoints.save(snapshot_of(simulation), simulation.trained)
            yield simulation, written


def test_a_save_costs_what_took_part_from_the_first_on(tmp_path: Path) -> None:
    costs = [[written for _, written in saves(tmp_path / str(clients), clients, 6)] for clients in (30, 120)]
    row = 8 * sum(value.numel() for value in small.mlp().parameters())
    for few, many in zip(*costs, strict=True):
        assert many < few + 3 * row + 2000
        assert many < (3 * 6 + 2) * row + 4000


def test_what_never_trained_comes_back_as_the_start(tmp_path: Path) -> None:
    for simulation, _ in saves(tmp_path, 20, 5):
        found = Checkpoints(tmp_path).load()
        assert found is not None
        assert torch.equal(found[0].private.touched, simulation.store.touched)
        assert int(found[0].private.touched.sum()) < 20
        fresh = small.train(
            small.variants()["fedavg"], 0, data=small.federation(20), participation=Participation(3), seed=2
        )
        restore(fresh, found[0])
        assert small.equal(fresh, simulation)


def test_large_layers_are_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [simulation for simulation, _ in saves(tmp_path / "one", 12, 9)][-1]
    row = 8 * sum(value.numel() for value in small.mlp().parameters())
    monkeypatch.setattr("tdpfed.runs.snapshot.FILE_BYTES", 2 * row)
    for simulation, _ in saves(tmp_path / "many", 12, 9):
        found = Checkpoints(tmp_path / "many").load()
        assert found is not None
        assert not found[1]
        fresh = small.train(small.variants()["fedavg"], 0, data=small.federation(12), seed=2)
        restore(fresh, found[0])
        assert small.equal(fresh, simulation)
    assert small.equal(simulation, whole)
    assert len(list((tmp_path / "many").glob("*-private*.safetensors"))) > 4
    assert not list((tmp_path / "many").glob("*.part"))
    for path in (tmp_path / "many").glob("*-private-1.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TDPFedError, match=r"none in .* is good; .*-private-1\.safetensors"):
        Checkpoints(tmp_path / "many").load()


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


def test_a_run_in_a_file_is_resumed_and_leaves_none(tmp_path: Path) -> None:
    settings = [
        "run.rounds=4", "checkpoint.every=2", "participation.clients=3", "algorithm.tau=1", "algorithm.name=local",
        "run.evaluate_clients=4",
    ]  # fmt: skip
    for place in ("ram", "mmap"):
        config = load_config("digits", [*settings, f"engine.state={place}"])
        Session.begin(config, tmp_path / place, None).run(silent)
        session = Session.resume(tmp_path / place, None)
        assert session.simulation.store.place == place
        assert session.simulation.round == 4
        session.folder.release()
    lines = [(tmp_path / place / "metrics.jsonl").read_text().count("null") for place in ("ram", "mmap")]
    assert lines[0] == lines[1] >= 2 * 6
    one, other = (Session.resume(tmp_path / place, None).simulation for place in ("ram", "mmap"))
    assert small.equal(one, other)
    assert {path.name for path in (tmp_path / "mmap").iterdir()} == {
        "config.toml", "federation.json", "metrics.jsonl", "summary.json", "checkpoints"
    }  # fmt: skip


@pytest.mark.parametrize("ids", [[0, 1, 2, 3], [1, 2], [2, 1], [0, 2], [3], []])
def test_rows_to_read_are_those_that_are_copied(ids: list[int]) -> None:
    for trained in ([1, 2], [0, 1, 2, 3]):  # some clients, all of them
        store = Store(START, 4)
        values = rows(len(trained), 1.0)
        values["theta"] += torch.arange(len(trained))[:, None]
        store.put(torch.tensor(trained), values)
        clients = torch.tensor(ids, dtype=torch.int64)
        seen, copied = store.view(clients), store.rows(clients)
        assert seen.keys() == copied.keys()
        assert all(torch.equal(seen[name], copied[name]) for name in seen)
