"""What a run writes while it advances: the same for a simulation and for a deployment."""

from pathlib import Path
from typing import Any

import pytest

import small
from tdpfed import FedAvg
from tdpfed.config.loading import load_config
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.journal import Journal
from tdpfed.runs.summary import Facts, facts_of, summarize
from tdpfed.server.records import Ledger, Record, due
from tdpfed.wire import Rejected


def simulation(rounds: int = 0) -> Simulation:
    made = Simulation(small.mlp(), small.federation(), FedAvg(**small.COMMON))
    for _ in range(rounds):
        made.step()
    return made


def journal(path: Path, *settings: str) -> Journal:
    return Journal(load_config("digits", list(settings)), RunFolder.create(path, ""))


def lines(path: Path) -> list[dict[str, Any]]:
    return small.lines(path)


def test_due_every_so_many_rounds_and_after_the_last() -> None:
    assert [n for n in range(1, 8) if due(n, 3, n == 7)] == [3, 6, 7]
    assert [n for n in range(1, 4) if due(n, 1, n == 3)] == [1, 2, 3]
    assert not [n for n in range(1, 4) if due(n, 0, n == 3)]


def test_each_round_writes_its_record_then_its_refusals_then_its_checkpoint(tmp_path: Path) -> None:
    written, run, events = journal(tmp_path, "checkpoint.every=2"), simulation(), []

    def seen(what: str) -> None:
        files = (len(lines(tmp_path / name)) for name in ("metrics.jsonl", "refusals.jsonl"))
        events.append((what, run.round, *files))

    def record() -> Record:
        seen("record")
        return run.record(written.seconds)

    for _ in range(5):
        run.step()
        written.after_round(
            run.round,
            last=run.round == 5,
            record=record if run.round % 2 else None,
            refused=[Rejected("nan", "no", client=run.round)],
            save=lambda: seen("save"),
        )
    assert events == [
        ("record", 1, 0, 0), ("save", 2, 1, 2), ("record", 3, 1, 2), ("save", 4, 2, 4), ("record", 5, 2, 4),
        ("save", 5, 3, 5),
    ]  # fmt: skip
    assert [record.as_dict() for record in written.records] == lines(tmp_path / "metrics.jsonl")
    assert [line["client"] for line in lines(tmp_path / "refusals.jsonl")] == [1, 2, 3, 4, 5]


def test_a_record_that_cannot_be_written_is_not_kept_and_nothing_is_saved(tmp_path: Path) -> None:
    written, run, saved = journal(tmp_path), simulation(1), []
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TDPFedError, match="--out: cannot write to"):
        written.after_round(1, last=True, record=lambda: run.record(0.0), refused=(), save=lambda: saved.append(1))
    assert (written.records, saved) == ([], [])


def test_the_end_writes_the_summary_with_more_and_the_refusals_of_a_round_that_did_not_count(tmp_path: Path) -> None:
    written, run = journal(tmp_path), simulation(2)
    facts = facts_of(run, "mlp")
    summary = written.end(facts, "failed", refused=[Rejected("nan", "no", client=1)], seconds=7.0, error="x")
    assert summary == {**summarize(facts, [], "failed"), "seconds": 7.0, "error": "x"} == written.summary
    assert list(summary) == [*summarize(facts, [], "failed"), "error"]
    assert small.summary(tmp_path / "summary.json") == summary
    assert [line["round"] for line in lines(tmp_path / "refusals.jsonl")] == [3]


def test_the_clock_continues_from_the_last_record(tmp_path: Path) -> None:
    written, run = journal(tmp_path), simulation(1)
    written.after_round(1, last=False, record=lambda: run.record(100.0), refused=(), save=lambda: None)
    assert written.seconds < 100
    resumed = Journal(written.config, RunFolder(tmp_path))
    resumed.rewind(1)
    assert resumed.records == written.records
    assert 100 <= resumed.seconds < 200
    resumed.rewind(0)
    assert (resumed.records, lines(tmp_path / "metrics.jsonl")) == ([], [])
    assert resumed.seconds < 100


def test_a_deployment_does_not_say_how_many_clients_have_trained() -> None:
    run = simulation(1)
    known = facts_of(run, "mlp")
    layout = run.objective.layout
    facts = Facts("fedavg", "custom", "mlp", 1, 0, known.clients, layout, Ledger(), "Flower server")
    simulated, deployed = (summarize(one, [run.record(1.0)], "finished") for one in (known, facts))
    assert simulated.keys() - deployed.keys() == {"clients_trained"}
    assert not deployed.keys() - simulated.keys()
    assert deployed["worst_decile_accuracy"] == simulated["worst_decile_accuracy"]


def test_a_simulation_continues_from_a_state_it_is_given() -> None:
    expected, other = simulation(3), simulation(2)
    resumed = simulation()
    resumed.resume_from(2, dict(other.server), other.store, Ledger(**vars(other.ledger)))
    assert (resumed.round, len(resumed.trained)) == (2, 0)
    resumed.step()
    assert resumed.record(0.0) == expected.record(0.0)
