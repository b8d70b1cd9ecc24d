"""A checkpoint belongs to a configuration, to data and to the privacy that was spent: nothing else resumes from it."""

import json
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import small
from tdpfed.cli import app
from tdpfed.config import load_config
from tdpfed.config.resume import MAY_DIFFER, settings_by_key
from tdpfed.data import Federation
from tdpfed.errors import TDPFedError, each
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.session import Session
from tdpfed.runs.snapshot import restore, snapshot_of

QUICK = [
    "run.rounds=4", "checkpoint.every=2", "data.clients=5", "data.max_samples=40", "data.per_client=5",
    "model.name=logistic", "algorithm.name=fedavg", "algorithm.tau=1", "algorithm.weights=uniform",
]  # fmt: skip
PRIVATE = ["privacy.clip=1", "privacy.noise=2", "participation.clients=3", "participation.sampling=poisson"]

OTHER: dict[str, str] = {
    "run.seed": "1", "run.evaluate_clients": "3", "run.precision": "bf16", "run.runner": "loop",
    "data.per_client": "6", "data.max_samples": "41", "data.normalize": "unit", "data.seed": "7", "data.clients": "6",
    "data.test_fraction": "0.3", "data.partition": "iid", "model.name": "dnn",
    "algorithm.eta": "0.2", "algorithm.tau": "2", "algorithm.batch_size": "3", "algorithm.name": "pfedme",
    "participation.clients": "4", "participation.dropout": "0.1", "participation.train": "all",
    "wire.codec": "int8", "privacy.noise": "40.0", "privacy.clip": "2.0",
    "privacy.delta": "0.001", "privacy.epsilon": "1000.0", "data.validation": "0.2",
}  # fmt: skip
"""Keys of which each makes another run, with another value than in the run of these tests."""


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with privacy."""
    path = tmp_path_factory.mktemp("finished") / "run"
    Session.begin(load_config("digits", [*QUICK, *PRIVATE]), path, None).run(silent)
    return path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit(path: Path, key: str, value: str) -> None:
    """Change a key in a resolved configuration, as an editor would."""
    section, _, name = key.partition(".")
    lines = path.read_text().splitlines()
    place = lines.index(f"[{section}]")
    end = next(n for n in range(place + 1, len(lines)) if not lines[n])
    kept = [line for line in lines[place + 1 : end] if not line.startswith(f"{name} = ")]
    quoted = value if value[0].isdigit() else json.dumps(value)
    path.write_text("\n".join([*lines[: place + 1], *kept, f"{name} = {quoted}", *lines[end:]]))


@pytest.mark.parametrize("key", OTHER)
def test_an_edited_key_is_named_with_both_values_and_nothing_is_touched(run: Path, key: str) -> None:
    saved = settings_by_key(load_config(str(run / "config.toml")))
    edit(run / "config.toml", key, OTHER[key])
    before = content(run)
    with pytest.raises(TDPFedError) as error:
        Session.resume(run, None)
    (named,) = [one for one in each(error.value) if one.field == key]
    assert repr(saved.get(key)) in str(named)
    assert OTHER[key] in str(named)
    assert content(run) == before


def test_the_list_of_what_may_differ_is_of_keys_that_exist() -> None:
    assert set(MAY_DIFFER) < set(settings_by_key(load_config("digits")))
    assert not set(MAY_DIFFER) & set(OTHER)


def test_every_key_is_either_compared_or_on_the_list(run: Path) -> None:
    """Whatever a checkpoint says of a key that is not listed, it is compared."""
    config = load_config(str(run / "config.toml"))
    checkpoints = Checkpoints(run / "checkpoints")
    found = checkpoints.load()
    assert found is not None
    snapshot = found[0]
    assert snapshot.meta["configuration"] == settings_by_key(config)
    for key in snapshot.meta["configuration"]:
        other = snapshot.meta["configuration"] | {key: "another value"}
        checkpoints.save(replace(snapshot, meta=snapshot.meta | {"configuration": other}), None)
        if key in MAY_DIFFER:
            Session.resume(run, None).folder.release()
        else:
            with pytest.raises(TDPFedError, match="must be 'another value'") as error:
                Session.resume(run, None)
            assert error.value.field == key


@pytest.mark.parametrize(
    "setting", ["run.evaluate_every=2", "checkpoint.every=1", "checkpoint.keep=3", "run.chunk=2", "engine.state=mmap"]
)
def test_what_may_differ_changes_no_number(finished: Path, run: Path, setting: str) -> None:
    for part in small.newest(run):  # as if killed before the last save
        part.unlink()
    session = Session.resume(run, None, overrides=[setting])
    assert session.simulation.round == 2
    session.run(silent)
    last = [small.lines(path / "metrics.jsonl", "seconds")[-1] for path in (finished, run)]
    assert last[0] == last[1]
    assert setting.partition("=")[2] in (run / "config.toml").read_text()


def test_a_run_is_extended_to_the_numbers_of_a_longer_run(finished: Path, run: Path, tmp_path: Path) -> None:
    Session.begin(load_config("digits", [*QUICK, *PRIVATE, "run.rounds=6"]), tmp_path / "long", None).run(silent)
    done = CliRunner().invoke(app, ["run", "--resume", str(run), "--set", "run.rounds=6", "--json"])
    assert done.exit_code == 0, done.output
    metrics = [small.lines(path / "metrics.jsonl", "seconds") for path in (run, tmp_path / "long")]
    assert metrics[0] == metrics[1]
    summaries = [small.summary(path / "summary.json") for path in (run, tmp_path / "long")]
    assert {**summaries[0], "seconds": 0} == {**summaries[1], "seconds": 0}
    assert (run / "config.toml").read_text() == (tmp_path / "long" / "config.toml").read_text()
    states = [Checkpoints(path / "checkpoints").load() for path in (run, tmp_path / "long")]
    assert states[0] is not None
    assert states[1] is not None
    assert all(torch.equal(value, states[1][0].server[name]) for name, value in states[0][0].server.items())
    assert metrics[0][-1]["epsilon"] == summaries[0]["epsilon"] > small.summary(finished / "summary.json")["epsilon"]


@pytest.mark.parametrize(
    ("setting", "field"),
    [("run.rounds=3", "run.rounds"), ("run.seed=3", "run.seed"), ("privacy.noise=40", "privacy.noise")],
)
def test_an_override_that_makes_another_run_is_refused(run: Path, setting: str, field: str) -> None:
    before = content(run)
    done = CliRunner().invoke(app, ["run", "--resume", str(run), "--set", setting])
    assert isinstance(done.exception, TDPFedError)
    assert done.exception.field == field
    assert content(run) == before


def test_an_extension_that_is_killed_at_once_is_still_a_run(run: Path) -> None:
    Session.resume(run, None, overrides=["run.rounds=6"]).folder.release()
    session = Session.resume(run, None)
    assert (session.simulation.round, session.config.run.rounds, session.left) == (4, 6, 2)


def test_checkpoints_of_another_run_are_refused(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    Session.begin(load_config("digits", [*QUICK, *PRIVATE, "algorithm.eta=0.02"]), other, None).run(silent)
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other / "checkpoints", run / "checkpoints")
    with pytest.raises(TDPFedError, match="as in the checkpoint") as error:
        Session.resume(run, None)
    assert error.value.field == "algorithm.eta"


def test_checkpoints_that_do_not_say_of_which_configuration_are_refused(run: Path) -> None:
    checkpoints = Checkpoints(run / "checkpoints")
    found = checkpoints.load()
    assert found is not None
    for wrong in ({}, {"configuration": None}, {"configuration": "[run]"}):
        meta = {key: value for key, value in found[0].meta.items() if key != "configuration"} | wrong
        checkpoints.save(replace(found[0], meta=meta), None)
        with pytest.raises(TDPFedError, match=r"^configuration: none saved"):
            Session.resume(run, None)


def own_data(path: Path, change: str = "") -> None:
    rng = np.random.default_rng(0)
    x, y, ids = rng.normal(size=(60, 5)).astype(np.float32), np.arange(60) % 3, np.arange(60) // 12
    if change == "one value":
        x[17, 3] += 1e-6
    elif change == "one label":
        y[17] = (y[17] + 1) % 3
    elif change == "one owner":
        ids[17] = 0
    elif change == "order":
        x[[0, 3]] = x[[3, 0]]
    np.savez(path, x=x, y=y, client_ids=ids)


@pytest.mark.parametrize("change", ["one value", "one label", "one owner", "order"])
def test_other_data_in_the_same_file_are_refused(tmp_path: Path, change: str) -> None:
    own_data(tmp_path / "own.npz")
    settings = ["run.rounds=2", f"data.name={tmp_path}/own.npz", "model.name=logistic", "algorithm.name=fedavg"]
    Session.begin(load_config("digits", settings), tmp_path / "run", None).run(silent)
    Session.resume(tmp_path / "run", None).folder.release()
    own_data(tmp_path / "own.npz", change)
    with pytest.raises(TDPFedError, match=r"^checkpoint: data with checksum"):
        Session.resume(tmp_path / "run", None)


def test_the_digest_is_of_samples_labels_and_distribution_and_of_nothing_else() -> None:
    x, y, ids = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3, torch.arange(12) // 4

    def digest(x: Any = x, y: Any = y, ids: Any = ids, **options: Any) -> str:
        return Federation.from_tensors(x, y, ids, **options).digest

    first = digest()
    assert len(first) == 64
    same = [digest(normalize="feature"), digest(dtype=torch.float64), digest(name="other"), digest(x.clone(), y.int())]
    assert same == [first] * 4
    other = [
        digest(x.double()), digest(x + 1), digest(y=(y + 1) % 3), digest(ids=ids.flip(0)), digest(seed=1),
        digest(test_fraction=0.5), digest(x.reshape(12, 2, 1)), digest(x.flip(0), y.flip(0), ids.flip(0)),
    ]  # fmt: skip
    assert len({first, *other}) == 9
    made = Federation.from_tensors(x, y, ids)
    assert made.only(torch.tensor([0])).digest == made.to("cpu", torch.float64).digest == first


# What was spent stays spent


def private(noise: float = 2.0, clip: float = 1.0, delta: float = 1e-5, clients: int = 3) -> Any:
    from tdpfed import FedAvg, Participation
    from tdpfed.server.privacy import Privacy

    method = FedAvg(**small.COMMON, weights="uniform")
    takes_part = Participation(clients, sampling="poisson")
    return small.train(method, 0, privacy=Privacy(clip, noise, delta), participation=takes_part)


def test_epsilon_that_other_settings_give_is_refused() -> None:
    spent = private()
    for _ in range(3):
        spent.step()
    snapshot = snapshot_of(spent)
    assert snapshot.meta["privacy"]["epsilon"] == spent.epsilon
    fresh = private()
    restore(fresh, snapshot)
    assert fresh.epsilon == spent.epsilon
    for other in (private(noise=40.0), private(clip=2.0), private(delta=1e-3), private(clients=2)):
        with pytest.raises(TDPFedError, match=r"^checkpoint: privacy"):
            restore(other, snapshot)
        assert other.round == 0
    open_ = small.train(private().algorithm, 0)
    with pytest.raises(TDPFedError, match=r"^checkpoint: privacy"):
        restore(open_, snapshot)
    with pytest.raises(TDPFedError, match=r"^checkpoint: privacy"):
        restore(private(), replace(snapshot, meta=snapshot.meta | {"privacy": None}))
