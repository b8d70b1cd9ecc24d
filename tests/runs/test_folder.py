"""The run folder: written whole, never over another run; and the summary."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import small
import tdpfed
from tdpfed import Local, TDPFed
from tdpfed.config.loading import load_config
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.progress import progress
from tdpfed.runs.seals import Tail, link_of, linked
from tdpfed.runs.session import Session
from tdpfed.runs.summary import device_name, facts_of, summarize
from tdpfed.server.records import worst_decile

KEYS = {
    "algorithm", "dataset", "model", "rounds", "seed", "clients", "personalized_accuracy", "global_accuracy",
    "best_personalized_accuracy", "uplink_bytes", "downlink_bytes", "bytes_per_client_round", "compression_rate",
    "seconds", "device", "versions",
}  # fmt: skip


def run(algorithm: Any = None, rounds: int = 3, **options: Any) -> tuple[Simulation, dict[str, Any], list[Any]]:
    simulation = Simulation(small.mlp(), small.federation(), algorithm or TDPFed(**small.TDPFED), **options)
    records = list(simulation.run(rounds)) if rounds else []
    return simulation, summarize(facts_of(simulation, "mine"), records, "finished"), records


def test_a_folder_from_beginning_to_end(tmp_path: Path) -> None:
    _, summary, records = run()
    folder = RunFolder.create(tmp_path / "deep" / "run", "# größer\n")
    assert sorted(os.listdir(folder.path)) == ["config.toml", "metrics.jsonl"]
    assert (folder.path / "config.toml").read_text(encoding="utf-8") == "# größer\n"
    for count, record in enumerate(records, start=1):
        folder.append(record)
        lines = small.lines(folder.path / "metrics.jsonl")
        assert [line["round"] for line in lines] == list(range(1, count + 1))
    assert lines == [record.as_dict() for record in records]
    folder.finish(summary)
    assert small.summary(folder.path / "summary.json") == summary
    assert sorted(os.listdir(folder.path)) == ["config.toml", "metrics.jsonl", "summary.json"]


def test_an_empty_folder_is_taken_and_another_run_is_not(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a = 1\n")
    with pytest.raises(TDPFedError, match=r"--out: .*not empty"):
        RunFolder.create(tmp_path, "a = 2\n")
    assert (tmp_path / "config.toml").read_text() == "a = 1\n"
    (tmp_path / "file").write_text("kept")
    with pytest.raises(TDPFedError, match=r"--out: .* is a file"):
        RunFolder.create(tmp_path / "file", "")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TDPFedError, match=r"--out: cannot write to .*Not a directory"):
        RunFolder.create(tmp_path / "file" / "run", "")
    folder = RunFolder.create(tmp_path / "run", "")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(TDPFedError, match=r"--out: cannot write to"):
        folder.append(run(rounds=1)[2][0])


def test_a_summary_is_whole_or_not_there(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "")
    with pytest.raises(TypeError):
        folder.finish({"fine": 1, "not json": object()})
    assert not (tmp_path / "summary.json").exists()


def test_the_summary_says_what_the_run_came_to() -> None:
    simulation, summary, records = run(rounds=4, seed=5)
    assert set(summary) >= KEYS
    json.dumps(summary, allow_nan=False)
    last = records[-1]
    assert (summary["algorithm"], summary["dataset"], summary["model"]) == ("tdpfed", "custom", "mine")
    assert (summary["rounds"], summary["seed"], summary["clients"], summary["status"]) == (4, 5, 5, "finished")
    assert summary["personalized_accuracy"] == last.personalized_accuracy
    assert summary["local_accuracy"] == last.local_accuracy
    assert summary["global_accuracy"] == last.global_accuracy
    assert summary["best_personalized_accuracy"] == max(record.personalized_accuracy for record in records)
    assert summary["worst_decile_accuracy"] == min(last.client_accuracy)
    assert (summary["minibatch_loss"], summary["seconds"]) == (last.minibatch_loss, last.seconds)
    assert (summary["uplink_bytes"], summary["downlink_bytes"]) == (last.uplink_bytes, last.downlink_bytes)
    assert summary["bytes_per_client_round"] == (last.uplink_bytes + last.downlink_bytes) / 20
    plan = simulation.algorithm.plan
    assert plan is not None
    assert summary["compression_rate"] == pytest.approx(plan.compression_rate, rel=0.2)
    assert summary["parameters"] == plan.dense.size
    assert summary["versions"]["tdpfed"] == tdpfed.__version__
    assert summary["versions"]["torch"] == torch.__version__


def test_a_summary_before_the_first_round_and_of_a_method_without_server() -> None:
    _, summary, _ = run(rounds=0)
    json.dumps(summary, allow_nan=False)
    assert (summary["rounds"], summary["personalized_accuracy"], summary["seconds"]) == (0, None, None)
    assert (summary["uplink_bytes"], summary["compression_rate"], summary["worst_decile_accuracy"]) == (0, None, None)
    _, summary, _ = run(Local(**small.COMMON))
    assert (summary["global_accuracy"], summary["compression_rate"], summary["uplink_bytes"]) == (None, None, 0)
    assert summary["personalized_accuracy"] is not None


def test_worst_decile() -> None:
    assert worst_decile([]) is None
    assert worst_decile([None, None]) is None
    assert worst_decile([0.9, None, 0.4]) == 0.4
    assert worst_decile([n / 20 for n in range(19, -1, -1)]) == pytest.approx(0.025)  # of twenty the worst two
    assert worst_decile([0.5] * 19 + [0.1]) == pytest.approx(0.3)


def test_device_name() -> None:
    assert device_name(torch.device("cpu")).startswith("cpu (")


def test_a_start_that_was_killed_is_no_run_and_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "seeds.toml.part").write_text("")
    (tmp_path / "config.toml.part").write_text("[run]\n")
    with pytest.raises(TDPFedError, match="must be a run folder"):
        RunFolder.open(tmp_path)
    RunFolder.create(tmp_path, "[run]\nrounds = 3\n")
    assert RunFolder.open(tmp_path)[1] == "[run]\nrounds = 3\n"
    with pytest.raises(TDPFedError, match="not empty"):
        RunFolder.check(tmp_path)


def test_a_folder_with_records_but_no_configuration_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(TDPFedError, match="not empty"):
        RunFolder.create(tmp_path, "")


def test_a_damaged_line_costs_itself_and_is_told(tmp_path: Path) -> None:
    config = load_config("digits", ["run.rounds=4", "algorithm.tau=1", "algorithm.s_prime=1", "run.evaluate_every=1"])
    Session.begin(config, tmp_path / "run", None).run(progress)
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    newer, tail = linked(small.lines(file)[2] | {"of_a_newer_version": 1}, Tail(2, link_of(lines[1])[1]))
    last, _ = linked(small.lines(file)[3], tail)
    file.write_text("\n".join([lines[0], lines[1][:20], newer, last, '{"round": 5, "lo']) + "\n")
    session = Session.resume(tmp_path / "run", None)
    assert [record.round for record in session.records] == [1, 3, 4]
    assert ["line 2" in warning for warning in session.warnings] == [True, False, False]
    assert "line 3" in session.warnings[1]
    assert "saved after 4" in session.warnings[2]


def test_a_finished_run_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    config = load_config("digits", ["run.rounds=2", "checkpoint.every=0", "algorithm.tau=1", "algorithm.s_prime=1"])
    Session.begin(config, tmp_path / "run", None).run(progress)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(TDPFedError, match="is finished, and has no checkpoint"):
        Session.resume(tmp_path / "run", None)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_hostile_clients_count_in_no_summary() -> None:
    simulation = small.train(Local(**small.COMMON), 3, attack=Attack("label-flip", 0.4))
    records = [simulation.record(0.0)]
    honest = [records[0].client_accuracy[k] for k in simulation.honest.nonzero().flatten().tolist()]
    assert summarize(facts_of(simulation, "mlp"), records, "finished")["worst_decile_accuracy"] == min(
        accuracy for accuracy in honest if accuracy is not None
    )
