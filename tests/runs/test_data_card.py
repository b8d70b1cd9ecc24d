"""``federation.json``: the clients' ids, the classes and what was applied to the samples stay with a run."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tdpfed.config.loading import load_config
from tdpfed.errors import TDPFedError
from tdpfed.report.read import read_run
from tdpfed.runs.data_card import DataCard
from tdpfed.runs.progress import no_progress
from tdpfed.runs.session import Session

SETTINGS = ["run.rounds=2", "model.name=logistic", "algorithm.name=fedavg", "algorithm.tau=1", "checkpoint.every=1"]


def write_data(names: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(5, 3, (60, 4)).astype(np.float32), np.arange(60) % 2
    np.savez("wards.npz", x=x, y=y, client_ids=np.array(names).repeat(20), class_names=np.array(["ill", "well"]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_data(("a", "b", "c"))
    config = load_config("digits", [*SETTINGS, "data.name=wards.npz"])
    Session.begin(config, Path("run"), None).run(no_progress)
    return Path("run")


def resume(run: Path, *overrides: str) -> Session:
    session = Session.resume(run, None, overrides=overrides)
    session.run(no_progress)
    return session


def test_it_has_the_ids_the_classes_and_what_was_applied(run: Path) -> None:
    card = DataCard.read(run)
    assert (card.ids, card.class_names, card.classes) == (("a", "b", "c"), ("ill", "well"), 2)
    assert (card.train_size, card.test_size, card.input_shape) == ((15,) * 3, (5,) * 3, (4,))
    federation = Session.resume(run, None).simulation.federation
    assert card.digest == federation.digest
    raw = torch.from_numpy(np.load("wards.npz")["x"])
    rows = {tuple(row) for row in card.normalization.apply(raw).tolist()}
    assert rows == {tuple(row) for row in federation.x.tolist()}
    known = json.loads((run / "summary.json").read_text())["files"]["federation.json"]["sha256"]
    assert known == hashlib.sha256((run / "federation.json").read_bytes()).hexdigest()
    assert read_run(run).notes == []


def test_a_resumed_run_keeps_it_and_renews_one_that_is_missing_or_damaged(run: Path) -> None:
    file = run / "federation.json"
    before = file.read_bytes()
    assert resume(run, "run.rounds=3").warnings == []
    assert file.read_bytes() == before
    file.unlink()
    assert resume(run, "run.rounds=4").warnings == []
    assert file.read_bytes() == before
    file.write_bytes(before.replace(b'"ids": ["a"', b'"ids": ["x"'))
    with pytest.raises(TDPFedError, match=r"RUN: .*federation\.json' is damaged"):
        DataCard.read(run)
    (warning,) = resume(run, "run.rounds=5").warnings
    assert "damaged" in warning
    assert file.read_bytes() == before


def test_clients_with_other_names_are_refused(run: Path) -> None:
    write_data(("a", "b", "d"))  # the same samples, so the checkpoint sees no difference
    with pytest.raises(TDPFedError, match=r"federation\.json: .*other names"):
        resume(run, "run.rounds=3")
