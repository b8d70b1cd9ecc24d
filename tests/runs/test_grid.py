"""Grids: what is finished stays, what was stopped goes on to the same numbers, what fails stops no other."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import small
from spy import Spy
from tdpfed.config import Config, load_config
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs import grid
from tdpfed.runs.grid import Cell, CellResult, run_cells
from tdpfed.runs.session import Session

TINY = (
    "run.device=cpu", "run.rounds=4", "data.clients=4", "data.max_samples=40", "data.per_client=5", "algorithm.tau=2",
    "checkpoint.every=2",
)  # fmt: skip


def cell(name: str, *settings: str) -> Cell:
    return Cell(name, load_config("digits", [*TINY, "algorithm.name=fedavg", *settings]))


def seeds(count: int) -> list[Cell]:
    return [cell(f"fedavg-{seed}", f"run.seed={seed}") for seed in range(count)]


def run(cells: Sequence[Cell], folder: Path, stop_at: tuple[str, int] | None = None) -> list[CellResult]:
    def on_round(session: Session) -> None:
        if (session.folder.path.name, session.simulation.round) == stop_at:
            raise KeyboardInterrupt

    return run_cells(cells, folder, None, on_start=lambda _: None, on_round=on_round, on_end=lambda _: None)


def metrics(path: Path) -> list[dict[str, Any]]:
    return small.lines(path / "metrics.jsonl", "seconds")


def status(path: Path) -> str:
    return str(json.loads((path / "summary.json").read_text())["status"])


@contextmanager
def silent(simulation: Simulation, rounds: int, records: Any) -> Iterator[Any]:
    yield lambda _: None


def test_a_cell_is_the_run_that_it_would_be_alone(tmp_path: Path) -> None:
    outcomes = run(seeds(2), tmp_path / "grid")
    for outcome in outcomes:
        assert (outcome.error, outcome.kept, status(outcome.path)) == (None, False, "finished")
        alone = tmp_path / f"alone-{outcome.cell.name}"
        Session.begin(outcome.cell.config, alone, None).run(silent)
        assert metrics(outcome.path) == metrics(alone)
    assert metrics(outcomes[0].path) != metrics(outcomes[1].path)


def test_what_is_finished_is_not_run_again_and_new_cells_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(seeds(2), tmp_path)
    before = [metrics(tmp_path / f"fedavg-{seed}") for seed in (0, 1)]
    spy = Spy(monkeypatch)
    outcomes = run(seeds(3), tmp_path)
    assert (spy.begun, spy.resumed, spy.rounds) == (["fedavg-2"], [], 4)
    assert [outcome.kept for outcome in outcomes] == [True, True, False]
    assert [metrics(tmp_path / f"fedavg-{seed}") for seed in (0, 1)] == before


def test_an_interrupted_grid_goes_on_to_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [metrics(outcome.path) for outcome in run(seeds(3), tmp_path / "whole")]
    with pytest.raises(KeyboardInterrupt):
        run(seeds(3), tmp_path / "grid", stop_at=("fedavg-1", 3))
    assert status(tmp_path / "grid" / "fedavg-1") == "interrupted"
    assert not (tmp_path / "grid" / "fedavg-2").exists()
    spy = Spy(monkeypatch)
    outcomes = run(seeds(3), tmp_path / "grid")
    assert (spy.resumed, spy.begun) == (["fedavg-1"], ["fedavg-2"])
    assert spy.rounds == 2 + 4  # from the checkpoint after round 2
    assert [metrics(outcome.path) for outcome in outcomes] == expected


def test_a_cell_that_diverges_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    cells = [cell("good"), cell("bad", "algorithm.eta=1e30"), cell("after", "run.seed=1")]
    good, bad, after = run(cells, tmp_path)
    assert (good.error, after.error) == (None, None)
    assert "diverges" in (bad.error or "")
    assert [status(one.path) for one in (good, bad, after)] == ["finished", "failed", "finished"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't\nallocate"), "RuntimeError: can't allocate"),
        (MemoryError(), "MemoryError"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_a_cell_that_runs_out_of_memory_is_told_and_the_others_go_on(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Simulation.record

    def full(simulation: Simulation, seconds: float) -> Any:
        if simulation.seed == 0:
            raise error
        return record(simulation, seconds)

    monkeypatch.setattr(Simulation, "record", full)
    bad, good = run(seeds(2), tmp_path)
    assert (bad.error, good.error) == (said, None)
    assert status(bad.path) == "failed"


def test_a_cell_that_cannot_begin_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    bad, good = run([cell("bad", "participation.clients=50"), cell("good")], tmp_path)
    assert "participation.clients" in (bad.error or "")
    assert not bad.path.exists()
    assert good.error is None


def test_a_folder_of_another_experiment_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(seeds(1), tmp_path)
    spy = Spy(monkeypatch)
    other = [cell("first"), cell("fedavg-0", "algorithm.eta=0.2")]
    with pytest.raises(TDPFedError, match=r"--out: .*fedavg-0.*holds another run \(algorithm\.eta = 0\.05, not 0\.2\)"):
        run(other, tmp_path)
    (tmp_path / "fedavg-0" / "config.toml").write_text("[run")
    with pytest.raises(TDPFedError, match=r"--out: .*config\.toml.* is damaged"):
        run(seeds(1), tmp_path)

    (tmp_path / "first").write_text("a file")
    with pytest.raises(TDPFedError, match="is a file"):
        run([cell("first")], tmp_path)
    with pytest.raises(TDPFedError, match="cells: 2 given"):
        run([cell("same"), cell("same")], tmp_path)
    with pytest.raises(TDPFedError, match=r"--out: cannot write to"):
        run(seeds(1), tmp_path / "first")
    assert (spy.begun, spy.resumed) == ([], [])


def test_a_default_that_an_older_version_spelled_out_is_the_same_run(tmp_path: Path) -> None:
    run(seeds(1), tmp_path)
    file = tmp_path / "fedavg-0" / "config.toml"
    text = file.read_text()
    assert "\ncodec" not in text
    file.write_text(text.replace("[wire]", '[wire]\ncodec = "float32"'))
    assert run(seeds(1), tmp_path)[0].kept
    grid.check_cells([cell("fedavg-0", "run.rounds=6")], tmp_path)  # and with more rounds
    file.write_text(text.replace("[wire]", '[wire]\ncodec = "int8"'))
    with pytest.raises(TDPFedError, match=r"wire\.codec = 'int8', not 'float32'"):
        run(seeds(1), tmp_path)


def test_a_run_killed_before_it_wrote_anything_begins(tmp_path: Path) -> None:
    (tmp_path / "fedavg-0").mkdir()
    assert run(seeds(1), tmp_path)[0].error is None
    assert status(tmp_path / "fedavg-0") == "finished"


def test_a_run_killed_before_its_summary_gets_one_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run(seeds(1), tmp_path)[0].path
    before, summary = metrics(path), json.loads((path / "summary.json").read_text())
    (path / "summary.json").unlink()
    spy = Spy(monkeypatch)
    assert run(seeds(1), tmp_path)[0].kept is False
    assert spy.rounds == 0
    assert metrics(path) == before
    assert json.loads((path / "summary.json").read_text()) == summary


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    cells = [cell("fedavg-0", "checkpoint.every=1")]
    with pytest.raises(KeyboardInterrupt):
        run(cells, tmp_path, stop_at=("fedavg-0", 3))
    newest = sorted((tmp_path / "fedavg-0" / "checkpoints").glob("*-server.safetensors"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    (outcome,) = run(cells, tmp_path)
    assert outcome.error is None
    assert any(newest.name in warning for warning in outcome.warnings)


def test_a_small_cell_leaves_the_next_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [7]
    monkeypatch.setattr(torch, "get_num_threads", lambda: now[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: now.__setitem__(0, count))
    taken = []
    run_cells(
        seeds(2),
        tmp_path,
        None,
        on_start=lambda _: taken.append(now[0]),
        on_round=lambda _: None,
        on_end=lambda _: None,
    )
    assert taken == [7, 7]
    assert now == [7]


def test_on_a_gpu_seeds_of_one_configuration_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [*seeds(3), cell("other", "algorithm.eta=0.2"), cell("late", "run.seed=9")]
    assert [len(group) for group in grid._groups(cells)] == [1, 1, 1, 1, 1]
    monkeypatch.setattr(Config, "device", lambda _: torch.device("cuda"))
    groups = [[one.name for one in group] for group in grid._groups(cells)]
    assert groups == [["fedavg-0", "fedavg-1", "fedavg-2", "late"], ["other"]]


def test_a_run_with_several_seeds_is_the_runs_of_each(tmp_path: Path) -> None:
    config = load_config("digits", [*TINY, "algorithm.name=fedavg", "run.seed=3", "run.seeds=2"])
    folder = grid.begin_seeds(config, tmp_path / "both")
    assert grid.has_seeds(folder)
    cells = grid.seeds_in(folder)
    assert [(one.name, one.config.run.seed, one.config.run.seeds) for one in cells] == [
        ("seed3", 3, 1),
        ("seed4", 4, 1),
    ]
    run(cells, folder)
    run([cell("alone", "run.seed=4")], tmp_path)
    assert metrics(folder / "seed4") == metrics(tmp_path / "alone")
    assert grid.begin_seeds(config, folder) == folder  # the same again goes on
    other = load_config("digits", [*TINY, "algorithm.name=fedavg", "run.seeds=3"])
    with pytest.raises(TDPFedError, match="holds another run"):
        grid.begin_seeds(other, folder)
    (folder / "seeds.toml").write_text("[run")
    with pytest.raises(TDPFedError, match=r"seeds.toml.* is damaged"):
        grid.seeds_in(folder)
    with pytest.raises(TDPFedError, match="--out"):
        grid.begin_seeds(config, tmp_path / "alone")


def test_more_rounds_extend_finished_runs_to_the_bits_of_longer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = [cell(f"fedavg-{seed}", f"run.seed={seed}", "run.rounds=6") for seed in range(2)]
    run(longer, tmp_path / "whole")
    run(seeds(2), tmp_path / "grid")
    spy = Spy(monkeypatch)
    extended = run(longer, tmp_path / "grid")
    assert (spy.begun, spy.rounds) == ([], 4)  # two more rounds each
    assert [(one.error, one.kept, status(one.path)) for one in extended] == [(None, False, "finished")] * 2
    for one in longer:
        assert metrics(tmp_path / "grid" / one.name) == metrics(tmp_path / "whole" / one.name)
        texts = {(tmp_path / place / one.name / "config.toml").read_text() for place in ("grid", "whole")}
        assert len(texts) == 1
    assert all(one.kept for one in run(longer, tmp_path / "grid"))


def test_an_interrupted_extension_goes_on(tmp_path: Path) -> None:
    longer = [cell("fedavg-0", "run.rounds=8")]
    run([cell("fedavg-0")], tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(longer, tmp_path, stop_at=("fedavg-0", 7))
    run(longer, tmp_path)
    assert [line["round"] for line in metrics(tmp_path / "fedavg-0")] == [2, 4, 6, 8]
    assert status(tmp_path / "fedavg-0") == "finished"


@pytest.mark.parametrize(
    ("before", "after", "field"),
    [
        (("optimizer.schedule=cosine",), ("optimizer.schedule=cosine", "run.rounds=6"), "run.rounds"),
        ((), ("algorithm.eta=0.2", "run.rounds=6"), "algorithm.eta"),
        (("run.rounds=6",), (), None),
    ],
    ids=["the rates depend on the rounds", "other settings too", "fewer rounds"],
)
def test_other_changes_are_refused(
    before: tuple[str, ...], after: tuple[str, ...], field: str | None, tmp_path: Path
) -> None:
    run([cell("fedavg-0", *before)], tmp_path)
    with pytest.raises(TDPFedError) as error:
        run([cell("fedavg-0", *after)], tmp_path)
    assert error.value.field == field
    assert status(tmp_path / "fedavg-0") == "finished"
