"""Checkpoints: what is loaded was saved, to the bit, whatever happened to the process, the disk or the files."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed import FedAvg, Local, Participation, PFedMe, TDPFed
from tdpfed.core.state import State
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Store
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.seals import sealed
from tdpfed.runs.snapshot import Snapshot, restore, snapshot_of
from tdpfed.server.step import ServerStep
from tdpfed.wire import Wire

CALLS = ("write", "fsync", "replace", "unlink")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here can tell a flushed file from another; that and when it is asked for has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def history(clients: int = 12, few: int = 2, width: int = 3, seed: int = 0) -> Iterator[tuple[Snapshot, Tensor]]:
    """Yield states in each of which ``few`` clients differ from the one before, and who they are."""
    random = torch.Generator().manual_seed(seed)
    theta = torch.randn(clients, width, generator=random)
    for number in range(1, 10**6):
        changed = torch.randperm(clients, generator=random)[:few]
        theta[changed] = torch.randn(few, width, generator=random)
        server = {"w": torch.randn(2, generator=random), "count": torch.tensor(number)}
        meta = {"text": "a = 1\n", "seconds": number / 7}
        yield Snapshot(number, server, small.store({"theta": theta.clone()}), meta), changed


def states(count: int, **options: int) -> list[tuple[Snapshot, Tensor]]:
    return [pair for pair, _ in zip(history(**options), range(count), strict=False)]


def same(left: Snapshot, right: Snapshot) -> bool:
    """Whether two states agree in every bit, dtype and shape."""
    rows = [one.private.rows(torch.arange(one.private.clients)) for one in (left, right)]
    for a, b in ((left.server, right.server), (rows[0], rows[1])):
        if a.keys() != b.keys() or any(_bits(value) != _bits(b[name]) for name, value in a.items()):
            return False
    return (left.round, left.meta) == (right.round, right.meta)


def _bits(value: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    raw = value.contiguous().flatten().view(torch.uint8) if value.numel() else value.flatten()
    return value.dtype, value.shape, raw.tolist()


def loaded(folder: Path, warnings: int = 0) -> Snapshot:
    found = Checkpoints(folder).load()
    assert found is not None
    assert len(found[1]) == warnings, found[1]
    return found[0]


def sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


def needs(folder: Path, round_: int) -> set[str]:
    """The names of all files of a checkpoint."""
    body = json.loads((folder / f"checkpoint-{round_:06}.json").read_text())
    return {f"checkpoint-{round_:06}.json", body["server"]["name"], *(entry["name"] for entry in body["private"])}


def round_of(name: str) -> int:
    return int(name.removeprefix("checkpoint-").partition(".")[0])


# What is saved is what is loaded


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def test_every_dtype_and_shape_survives_whole_and_by_rows(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "a" / "b")
    seed = torch.arange(120).reshape(12, 5, 2)
    server: dict[str, Tensor] = {str(dtype): seed.to(dtype) for dtype in DTYPES}
    server |= {
        "scalar": torch.tensor(1.5),
        "nothing": torch.zeros(0),
        "negative zero": torch.tensor([-0.0, 0.0, 1e-45]),
    }
    server |= {"view": seed[1], "same view": seed[1], "turned": seed.transpose(0, 2)}
    private = {str(dtype): seed.to(dtype) for dtype in DTYPES}
    private |= {"one each": torch.arange(12.0), "none each": torch.zeros(12, 0), "turned": seed.transpose(1, 2)}
    meta = {"ledger": {"up": 2**70}, "text": "é\n\ud800", "epsilon": 0.1 + 0.2, "none": None, "list": [1, [2.5]]}
    files = set()
    for number in range(1, 7):
        ids = torch.tensor([number % 3, 4])
        private = {name: value.clone() for name, value in private.items()}
        for value in private.values():
            value[ids[0]], value[ids[1]] = value[5].clone(), value[ids[0]].clone()
        snapshot = Snapshot(number, server, small.store(private), meta)
        checkpoints.save(snapshot, ids)
        assert same(loaded(tmp_path / "a" / "b"), snapshot)
        files.add(len(needs(tmp_path / "a" / "b", number)))
    assert files == {3, 4}  # rows came from one file and from two


@pytest.mark.parametrize("private", [{}, {"theta": torch.zeros(0, 3)}, {"theta": torch.ones(1)}])
def test_few_or_no_clients_and_an_empty_server(tmp_path: Path, private: dict[str, Tensor]) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(5):
        snapshot = Snapshot(number, {}, small.store(private), {})
        checkpoints.save(snapshot, torch.arange(0))
        assert same(loaded(tmp_path), snapshot)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("few", [0, 1, 3, 12])
def test_rows_pile_up_and_every_state_is_whole(tmp_path: Path, keep: int, few: int) -> None:
    checkpoints = Checkpoints(tmp_path, keep)
    past: list[Snapshot] = []
    heights = set()
    for number, (snapshot, changed) in enumerate(states(40, few=few)):
        if number % 17 == 16:  # another process goes on
            checkpoints = Checkpoints(tmp_path, keep)
            assert checkpoints.load() is not None
        checkpoints.save(snapshot, changed if number % 11 else None)
        past.append(snapshot)
        newest = max(path.name for path in tmp_path.glob("*.json"))
        heights.add(len(needs(tmp_path, round_of(newest))) - 2)
        assert same(loaded(tmp_path), snapshot)
    assert len(list(tmp_path.glob("*.json"))) == keep
    assert max(heights) <= 4
    assert (max(heights) > 1) == (few in (1, 3)), heights
    for back in range(1, keep):  # the others are whole too, and each stands alone
        (tmp_path / max(path.name for path in tmp_path.glob("*.json"))).unlink()
        assert same(loaded(tmp_path, warnings=back), past[-1 - back])


def test_what_changes_shape_is_written_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number, clients in enumerate((4, 4, 6, 6, 5)):
        for one, _ in states(2, clients=clients):
            snapshot = replace(one, round=2 * number + one.round)
            checkpoints.save(snapshot, torch.arange(0))
            assert same(loaded(tmp_path), snapshot) or clients == 4


def test_one_more_of_the_same_round_is_the_newer(tmp_path: Path) -> None:
    """As after a damaged one, which keeps its name until it is removed."""
    first, second, third = (replace(one, round=40) for one, _ in states(3))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(first, None)
    checkpoints.save(second, None)
    assert sorted(path.name for path in tmp_path.glob("*.json")) == [
        "checkpoint-000040.1.json", "checkpoint-000040.json",
    ]  # fmt: skip
    assert same(loaded(tmp_path), second)
    (tmp_path / "checkpoint-000040.1-server.safetensors").write_bytes(b"?")
    resumed = Checkpoints(tmp_path)
    assert resumed.load() is not None
    resumed.save(third, None)
    assert same(loaded(tmp_path), third)


def test_names_of_older_versions_are_read_and_give_way_to_new_ones(tmp_path: Path) -> None:
    past = states(3)
    Checkpoints(tmp_path).save(*past[1])
    for path in tmp_path.iterdir():
        text = path.read_bytes()
        if path.suffix == ".json":
            body = {name: value for name, value in json.loads(text).items() if name != "sha256"}
            renamed = json.dumps(body).replace("checkpoint-000002", "00000007")
            text = sealed(renamed).encode()
        path.unlink()
        (tmp_path / path.name.replace("checkpoint-000002", "00000007")).write_bytes(text)
    checkpoints = Checkpoints(tmp_path, keep=1)
    found = checkpoints.load()
    assert found is not None
    assert same(found[0], past[1][0])
    checkpoints.save(*past[2])
    assert same(loaded(tmp_path), past[2][0])
    assert [path.name for path in tmp_path.glob("*.json")] == ["checkpoint-000003.json"]


def test_nothing_there(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path / "none").load() is None
    assert Checkpoints(tmp_path).load() is None
    (tmp_path / "notes.json").write_text("mine")
    assert Checkpoints(tmp_path).load() is None


# A resumed run is the run


@pytest.mark.parametrize("name", small.variants())
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    def begin() -> Simulation:
        options = {"seed": 5, "participation": Participation(2, dropout=0.2)}
        return Simulation(small.mlp(), small.federation(9), small.variants()[name], **options)  # type: ignore[arg-type]

    whole = begin()
    expected = [replace(record, seconds=0) for record in whole.run(14)]
    parted, records = begin(), []
    checkpoints = Checkpoints(tmp_path)
    for number in range(1, 15):
        records += [replace(record, seconds=0) for record in parted.run(1)]
        checkpoints.save(snapshot_of(parted, spent=0.5), parted.trained)
        if number in (1, 6, 7, 12):
            parted, checkpoints = begin(), Checkpoints(tmp_path)
            found = checkpoints.load()
            assert found is not None
            assert found[0].meta["spent"] == 0.5
            restore(parted, found[0])
    assert records == expected
    assert small.equal(parted, whole)
    assert parted.ledger == whole.ledger


WIRES = {
    "factors both ways": (Wire(update="factors", terms=2, down="factors", down_terms=1), ServerStep()),
    "factors and momentum": (
        Wire(update="factors", codec="float32", kernels="tensor"), ServerStep(optimizer="sgd", momentum=0.9),
    ),
    "top-k and adam": (Wire(update="top-k", share=0.1), ServerStep(optimizer="adam", rate=0.01)),
    "int4": (Wire(codec="int4"), ServerStep()),
}  # fmt: skip


@pytest.mark.parametrize("form", WIRES)
def test_a_resumed_run_equals_an_uninterrupted_one_in_every_form(tmp_path: Path, form: str) -> None:
    """Also what clients keep of their changes, and what the server knows that they know."""

    def begin() -> Simulation:
        wire, step = WIRES[form]
        return Simulation(
            small.convnet(), small.federation(9, dtype=torch.float32), FedAvg(**small.COMMON), seed=5, wire=wire,
            server_step=step, participation=Participation(3, "all", dropout=0.2),
        )  # fmt: skip

    whole = begin()
    expected = [replace(record, seconds=0) for record in whole.run(8)]
    parted, records, checkpoints = begin(), [], Checkpoints(tmp_path)
    for number in range(1, 9):
        records += [replace(record, seconds=0) for record in parted.run(1)]
        checkpoints.save(snapshot_of(parted), parted.trained)
        if number in (1, 4, 5):
            parted, checkpoints = begin(), Checkpoints(tmp_path)
            found = checkpoints.load()
            assert found is not None
            restore(parted, found[0])
    assert records == expected
    assert small.equal(parted, whole)
    assert parted.ledger == whole.ledger


@pytest.mark.parametrize(
    ("saved", "mine", "words"),
    [
        (Wire(), Wire(update="factors"), "wire.update: 'factors' given, must be 'dense' as in"),
        (Wire(update="factors"), Wire(), "wire.update: 'dense' given, must be 'factors' as in"),
        (Wire(update="factors", terms=2), Wire(update="factors", terms=3), "wire.terms: 3 given, must be 2 as in"),
        (Wire(update="factors"), Wire(update="factors", sweeps=5), "wire.sweeps: 5 given, must be 2 as in"),
        (Wire(update="top-k"), Wire(update="top-k", share=0.5), "wire.share: 0.5 given, must be 0.01 as in"),
        (Wire(codec="int8"), Wire(codec="int8", feedback=True), "wire.feedback: True given, must be None as in"),
        (Wire(), Wire(down="factors"), "wire.down: 'factors' given, must be 'dense' as in"),
        (ServerStep(), ServerStep(optimizer="adam"), "server.optimizer: 'adam' given, must be 'average' as in"),
        (ServerStep(optimizer="sgd"), ServerStep(optimizer="sgd", rate=0.5), "server.rate: 0.5 given, must be 1.0 as"),
    ],
    ids=lambda value: "",
)
def test_a_state_of_another_form_is_refused_with_that_reason(
    tmp_path: Path, saved: Wire | ServerStep, mine: Wire | ServerStep, words: str
) -> None:
    """Although entries and shapes may be the same."""

    def begin(settings: Wire | ServerStep, rounds: int) -> Simulation:
        options: dict[str, Any] = {"wire" if isinstance(settings, Wire) else "server_step": settings}
        return small.train(FedAvg(**small.COMMON), rounds, **options)

    run = begin(saved, 1)
    Checkpoints(tmp_path).save(snapshot_of(run), None)
    fresh = begin(mine, 0)
    with pytest.raises(TDPFedError) as error:
        restore(fresh, loaded(tmp_path))
    assert str(error.value).startswith(words)
    assert f"{error.value.field}: {error.value.value!r} given, must be {error.value.allowed}" == str(error.value)
    assert small.equal(fresh, begin(mine, 0))
    restore(begin(saved, 0), loaded(tmp_path))


def test_a_checkpoint_from_before_there_were_forms_is_one_of_dense_uploads(tmp_path: Path) -> None:
    run = small.train(FedAvg(**small.COMMON), 2)
    found = snapshot_of(run)
    meta = {key: value for key, value in found.meta.items() if key not in ("wire", "server")}
    Checkpoints(tmp_path).save(replace(found, meta=meta), None)
    resumed = small.train(FedAvg(**small.COMMON), 0)
    restore(resumed, loaded(tmp_path))
    assert small.equal(resumed, run)
    with pytest.raises(TDPFedError, match=r"wire\.update: 'top-k' given, must be 'dense' as in"):
        restore(small.train(FedAvg(**small.COMMON), 0, wire=Wire(update="top-k")), loaded(tmp_path))


def test_restored_runs_share_nothing(tmp_path: Path) -> None:
    one = small.train(PFedMe(**small.COMMON), 1)
    two = small.train(PFedMe(**small.COMMON), 0)
    snapshot = snapshot_of(one)
    restore(two, snapshot)
    two.step()
    assert one.round == 1
    assert small.equal(one, small.train(PFedMe(**small.COMMON), 1))
    assert small.equal(two, small.train(PFedMe(**small.COMMON), 2))


def changed(snapshot: Snapshot, change: Callable[[State], State]) -> Store:
    return small.store(change(snapshot.private.rows(torch.arange(snapshot.private.clients))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: replace(s, meta=s.meta | {"seed": 8}), ["seed 8", "must be 0"]),
        (lambda s: replace(s, meta={}), ["algorithm None", "'fedavg'"]),
        (lambda s: replace(s, meta=s.meta | {"ledger": {"up": 1}}), ["ledger {'up': 1}"]),
        (lambda s: replace(s, meta={n: v for n, v in s.meta.items() if n != "ledger"}), ["ledger None"]),
        (lambda s: replace(s, server={}), ["server", "float64"]),
        (lambda s: replace(s, server={n: v.float() for n, v in s.server.items()}), ["server", "float32", "float64"]),
        (lambda s: replace(s, private=changed(s, lambda rows: {n: v[:3] for n, v in rows.items()})), ["(3, ", "(5, "]),
        (lambda s: replace(s, private=changed(s, lambda rows: {**rows, "more": torch.zeros(5)})), ["private", "more"]),
    ],
)
def test_a_state_of_another_run_is_refused(change: Callable[[Snapshot], Snapshot], words: list[str]) -> None:
    fresh = small.train(FedAvg(**small.COMMON), 0)
    with pytest.raises(TDPFedError) as error:
        restore(fresh, change(snapshot_of(small.train(FedAvg(**small.COMMON), 2))))
    assert str(error.value).startswith("checkpoint: ")
    assert all(word in str(error.value) for word in words), str(error.value)
    assert small.equal(fresh, small.train(FedAvg(**small.COMMON), 0))
    assert fresh.round == 0


def test_a_state_of_another_method_is_refused() -> None:
    with pytest.raises(TDPFedError, match="algorithm 'local' saved, must be 'tdpfed'"):
        restore(small.train(TDPFed(**small.TDPFED), 0), snapshot_of(small.train(Local(**small.COMMON), 1)))


# Damage is seen, and costs one checkpoint


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Snapshot, Snapshot, set[str]]:
    """A folder with two checkpoints of several files each, the two states, and the files of the newer."""
    checkpoints, past = Checkpoints(tmp_path), states(6, few=1, clients=9, width=2)
    for snapshot, changed in past:
        checkpoints.save(snapshot, changed)
    newer, older = needs(tmp_path, 6), needs(tmp_path, 5)
    assert len(newer) >= 4
    assert newer | older == sizes(tmp_path).keys()
    assert not newer & older
    return tmp_path, past[-2][0], past[-1][0], newer


def expect(folder: Path, damaged: str, pair: tuple[Path, Snapshot, Snapshot, set[str]]) -> None:
    """Hold what loads against the damage: the older state and a warning that names the file, or the newer state."""
    _, older, newer, files = pair
    found = Checkpoints(folder).load()
    assert found is not None
    snapshot, warnings = found
    assert same(snapshot, older if damaged in files else newer), damaged
    assert [damaged in warning for warning in warnings] == ([True] if damaged in files else []), warnings


@pytest.mark.parametrize("every", small.EVERY)
def test_every_truncation_is_seen(pair: tuple[Path, Snapshot, Snapshot, set[str]], every: bool) -> None:
    for name, size in sizes(pair[0]).items():
        whole = (pair[0] / name).read_bytes()
        for length in reversed(small.places(size, every)):
            os.truncate(pair[0] / name, length)
            expect(pair[0], name, pair)
        (pair[0] / name).write_bytes(whole + b"\0")
        expect(pair[0], name, pair)
        (pair[0] / name).write_bytes(whole)


@pytest.mark.hostile
@pytest.mark.parametrize("flips", [200, pytest.param(2000, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_seen(pair: tuple[Path, Snapshot, Snapshot, set[str]], flips: int) -> None:
    random = Random(0)
    names, weights = zip(*sizes(pair[0]).items(), strict=True)
    for name in random.choices(names, weights, k=flips):
        with (pair[0] / name).open("r+b", buffering=0) as file:  # in place, which is quicker than writing anew
            data = file.read()
            place, bit = random.randrange(len(data)), 1 << random.randrange(8)
            os.pwrite(file.fileno(), bytes([data[place] ^ bit]), place)
            expect(pair[0], name, pair)
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert same(loaded(pair[0]), pair[2])


def test_every_deletion_is_seen(pair: tuple[Path, Snapshot, Snapshot, set[str]]) -> None:
    for name in sizes(pair[0]):
        whole = (pair[0] / name).read_bytes()
        (pair[0] / name).unlink()
        expect(pair[0], name, pair)
        (pair[0] / name).mkdir()
        expect(pair[0], name, pair)
        found = Checkpoints(pair[0]).load()
        assert found is not None
        assert all("is no file" in warning for warning in found[1])
        (pair[0] / name).rmdir()
        (pair[0] / name).write_bytes(whole)


def test_where_none_is_good_the_error_names_the_files(pair: tuple[Path, Snapshot, Snapshot, set[str]]) -> None:
    folder, _, _, newer = pair
    for one in newer:
        for other in sizes(folder).keys() - newer:
            kept = {name: (folder / name).read_bytes() for name in (one, other)}
            (folder / one).write_bytes(b"")
            (folder / other).unlink()
            with pytest.raises(TDPFedError) as error:
                Checkpoints(folder).load()
            assert one in str(error.value)
            assert other in str(error.value)
            for name, data in kept.items():
                (folder / name).write_bytes(data)


def test_a_run_goes_on_from_the_older_one_and_drops_the_damaged(
    pair: tuple[Path, Snapshot, Snapshot, set[str]],
) -> None:
    folder, older, _, files = pair
    for name in files:
        (folder / name).write_bytes(b"?")
    checkpoints = Checkpoints(folder)
    assert checkpoints.load() is not None
    checkpoints.save(replace(older, round=77), torch.arange(0))
    assert same(loaded(folder), replace(older, round=77))
    newest = max(path.name for path in folder.glob("*.json"))
    (folder / newest).write_bytes(b"?")
    assert same(loaded(folder, warnings=1), older)  # it was not pushed out by the damaged one


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints, past = Checkpoints(tmp_path, 3), states(5)
    for snapshot, _ in past[:3]:
        checkpoints.save(snapshot, None)
    (tmp_path / "checkpoint-000003-server.safetensors").unlink()
    resumed = Checkpoints(tmp_path, 3)
    assert resumed.load() is not None
    resumed.save(past[3][0], None)
    assert sorted(round_of(path.name) for path in tmp_path.glob("*.json")) == [1, 2, 4]
    assert same(loaded(tmp_path), past[3][0])
    (tmp_path / "checkpoint-000004.json").unlink()
    assert same(loaded(tmp_path, warnings=1), past[1][0])


def test_a_wrong_size_is_told_before_the_file_is_read(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(*states(1)[0])
    for path in tmp_path.glob("*.safetensors"):
        size = path.stat().st_size
        os.truncate(path, 10**9)  # sparse
        with pytest.raises(TDPFedError, match=f"{path.name}' has 1000000000 bytes, must have {size}"):
            Checkpoints(tmp_path).load()
        os.truncate(path, size)


def test_rows_that_vanish_while_the_run_goes_on_are_written_again(tmp_path: Path) -> None:
    checkpoints, past = Checkpoints(tmp_path), states(4, few=1)
    for snapshot, changed in past[:2]:
        checkpoints.save(snapshot, changed)
    (tmp_path / "checkpoint-000001-private.safetensors").unlink()
    checkpoints.save(*past[2])
    assert same(loaded(tmp_path), past[2][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 3}, "has format 3, this version reads 2"),
        ({"server": {"name": "../secret", "size": 1, "sha256": ""}}, "'../secret' is no file of a checkpoint"),
        ({"server": {"name": ["x"], "size": 1, "sha256": ""}}, "does not fit"),
        ({"server": 3}, "does not fit"),
        ({"private": None}, "does not fit"),
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(*states(1)[0])
    manifest = tmp_path / "checkpoint-000001.json"
    body = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "sha256"}
    manifest.write_bytes(sealed(json.dumps(body | change)).encode())
    with pytest.raises(TDPFedError) as error:
        checkpoints.load()
    assert words in str(error.value)


# The process dies, the disk is full


class Killed(BaseException):
    """The process is gone: nothing after this instant happens."""


def fail_at(patch: pytest.MonkeyPatch, number: int, error: BaseException) -> list[str]:
    """Let the ``number``-th call that changes the disk raise, and every later one if it is a kill; return the calls."""
    calls: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            if len(calls) == number:
                if name == "write":
                    real(args[0], bytes(args[1][: len(args[1]) // 2]))  # half of it arrives
                raise error
            return real(*args)

        return call

    for name in CALLS:
        patch.setattr(os, name, wrapped(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize("before", [0, 1, 5])
def test_killed_at_every_instant_of_a_save(tmp_path: Path, before: int) -> None:
    """What loads is the state before or the new one, without a warning; the next save leaves no trace of it."""
    past = states(before + 2, few=1)
    seen, number = set(), 0
    while True:
        number += 1
        folder = tmp_path / str(number)
        checkpoints = Checkpoints(folder)
        for snapshot, changed in past[:before]:
            checkpoints.save(snapshot, changed)
        with pytest.MonkeyPatch.context() as patch:
            calls = fail_at(patch, number, Killed())
            try:
                checkpoints.save(*past[before])
                break
            except Killed:
                seen.add(calls[-1])
        resumed = Checkpoints(folder)
        found = resumed.load()
        assert found is not None or before == 0
        if found is not None:
            assert not found[1]
            assert found[0].round in (before, before + 1)
            assert same(found[0], past[found[0].round - 1][0])
        resumed.save(past[before + 1][0], None)
        assert same(loaded(folder), past[before + 1][0])
        wanted = set().union(*(needs(folder, round_of(path.name)) for path in folder.glob("*.json")))
        assert sizes(folder).keys() == wanted
        assert len(list(folder.glob("*.json"))) == min(2, 1 + (found is not None))
    assert seen == set(CALLS) - (set() if before == 5 else {"unlink"})


def kill(checkpoints: Checkpoints, snapshot: Snapshot, number: int) -> bool:
    """Save until the ``number``-th call; return whether there was one."""
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, number, Killed())
        try:
            checkpoints.save(snapshot, None)
        except Killed:
            return True
    return False


def test_killed_while_it_clears_up_after_a_killed_first_save(tmp_path: Path) -> None:
    """There never was a checkpoint, and none is missed."""
    past = states(2)
    for first in range(1, 13):  # up to the manifest's rename
        second, going = 0, True
        while going:
            second += 1
            folder = tmp_path / f"{first} {second}"
            assert kill(Checkpoints(folder), past[0][0], first)
            assert Checkpoints(folder).load() is None
            going = kill(Checkpoints(folder), past[1][0], second)
            found = Checkpoints(folder).load()
            assert found is not None or going
            assert found is None or (same(found[0], past[1][0]) and not found[1])


def test_killed_while_it_drops_a_damaged_one(tmp_path: Path) -> None:
    """The file that is named stays the one that was damaged."""
    past, number, going = states(3), 0, True
    while going:
        number += 1
        checkpoints = Checkpoints(tmp_path / str(number))
        for snapshot, _ in past[:2]:
            checkpoints.save(snapshot, None)
        (tmp_path / str(number) / "checkpoint-000002-server.safetensors").write_bytes(b"?")
        assert checkpoints.load() is not None
        going = kill(checkpoints, past[2][0], number)
        found = Checkpoints(tmp_path / str(number)).load()
        assert found is not None
        assert same(found[0], past[0][0]) or same(found[0], past[2][0])
        assert all("checkpoint-000002-server.safetensors" in warning for warning in found[1]), found[1]
    assert number > 12


def test_leftovers_make_room_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / "checkpoint-000007-private.safetensors.part"
    left.write_bytes(b"much")
    write, there = os.write, []

    def watched(descriptor: int, data: bytes) -> int:
        there.append(left.exists())
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", watched)
    Checkpoints(tmp_path).save(*states(1)[0])
    assert there == [False] * 3


@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only")])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_full_or_read_only_disk_is_an_error_and_costs_nothing(
    tmp_path: Path, before: int, number: int, words: str
) -> None:
    past = states(before + 2, few=1)
    at = 0
    while True:
        at += 1
        folder = tmp_path / str(at)
        checkpoints = Checkpoints(folder)
        for snapshot, changed in past[:before]:
            checkpoints.save(snapshot, changed)
        with pytest.MonkeyPatch.context() as patch:
            fail_at(patch, at, OSError(number, os.strerror(number)))
            told = ""
            try:
                checkpoints.save(*past[before])
            except TDPFedError as error:
                told = str(error)
        if not told:
            break
        assert f"checkpoint: cannot write to {str(folder)!r} ({words}" in told
        found = Checkpoints(folder).load()
        assert found is not None or before == 0
        if found is not None:
            assert not found[1]
            assert same(found[0], past[found[0].round - 1][0])
        assert not list(folder.glob("*.part"))
        checkpoints.save(*past[before + 1])  # what the failed save was told has not been forgotten
        assert same(loaded(folder), past[before + 1][0])
    assert at > 6


def test_everything_is_flushed_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file before its rename, the folder before and after that of the manifest."""
    events: list[str] = []
    replace_, checkpoints = os.replace, Checkpoints(tmp_path / "new")
    monkeypatch.setattr(os, "fsync", lambda number: events.append(Path(os.readlink(f"/proc/self/fd/{number}")).name))

    def move(source: Path, target: Path) -> None:
        events.append(f"-> {target.name}")
        replace_(source, target)

    monkeypatch.setattr(os, "replace", move)
    checkpoints.save(*states(1)[0])
    files = ["checkpoint-000001-server.safetensors", "checkpoint-000001-private.safetensors"]
    parts = [f"{name}.part" for name in (*files, "checkpoint-000001.json")]
    moves = [f"-> {name}" for name in files]
    assert events == [tmp_path.name, *parts, "new", *moves, "new", "-> checkpoint-000001.json", "new"]


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tdpfed/checkpoints")):
        with pytest.raises(TDPFedError, match=r"checkpoint: cannot write to '.*' \(.+\)"):
            Checkpoints(folder).save(*states(1)[0])
    with pytest.raises(TDPFedError, match=r"checkpoint: cannot read '.*' \(Not a directory\)"):
        Checkpoints(tmp_path / "file").load()
    assert (tmp_path / "file").read_text() == "mine"


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(TDPFedError, match=r"checkpoint\.keep: 0 given, must be at least 1"):
        Checkpoints(tmp_path, 0)
    snapshot = states(1)[0][0]
    for changed in (torch.tensor([12]), torch.tensor([0, -1]), torch.ones(12, dtype=torch.bool)):
        with pytest.raises(TDPFedError, match="must be ids below 12"):
            Checkpoints(tmp_path).save(snapshot, changed)
    assert not sizes(tmp_path)


# What it costs


def test_a_save_costs_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 clients of 400 bytes, five change: a save writes the rows of the last two, the pile grows by logarithms."""
    written = [0]
    write = os.write

    def counted(descriptor: int, data: bytes) -> int:
        written[-1] += len(data)
        return write(descriptor, data)

    checkpoints, past = Checkpoints(tmp_path), states(82, clients=1000, few=5, width=100)
    monkeypatch.setattr(os, "write", counted)
    for snapshot, changed in past:
        checkpoints.save(snapshot, changed)
        written.append(0)
    whole, rows, fixed = 1000 * 408, 10 * 408, 3000  # rows and ids; server, headers and manifest
    assert all(whole < cost < whole + fixed for cost in written[:2])
    assert rows < written[2] < rows + fixed
    assert rows < min(written[2:-1]) < rows + fixed
    assert sum(written[2:-1]) < 80 * (6 * rows + fixed) < 0.4 * 80 * whole
    assert same(loaded(tmp_path), past[-1][0])


@pytest.mark.parametrize("few", [1, 15])
def test_the_folder_does_not_grow(tmp_path: Path, few: int) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "00000001.txt").write_text("mine")
    whole = 40 * 50 * 4
    for snapshot, changed in states(200, clients=40, few=few, width=50):
        checkpoints.save(snapshot, changed)
        found = sizes(tmp_path)
        assert len(found) <= 2 + 2 * 8
        assert sum(found.values()) < 2 * (2 * whole + 6000)
    assert {"notes.txt", "00000001.txt", "checkpoint-000199.json", "checkpoint-000200.json"} <= found.keys()
    assert len(list(tmp_path.glob("*.json"))) == 2
