"""Nodes that send what is finite but does harm, and what a server keeps of it: nothing, also across a restart."""

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import torch
from fake import NODES, QUICK, Case, FakeGrid, digits, worst_between
from flwr.app import Message
from safetensors.torch import load_file
from test_flower_run import with_wire

from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.flower.node import Node
from tdpfed.flower.settings import WEIGHT_CAP, read_settings, rule_of
from tdpfed.runs import checkpoints
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.server.round import ServerRound
from tdpfed.wire import encode

pytestmark = pytest.mark.hostile

ACT = ("algorithm.name=tdpfed", "algorithm.aggregation=act")


def from_round(number: int, tamper: Any) -> Any:
    """Return a tamper that begins with a round."""

    def later(message: Message) -> Any:
        return tamper(message) if int(message.metadata.group_id) >= number else message

    return later


def sends(case: Case, value: float, client: int = 2, samples: int | None = None) -> Any:
    """Return a tamper that sends an upload of one value, correct in everything else."""
    form, own = case.simulation.channel.form, int(case.simulation.federation.train_size[client])

    def tamper(message: Message) -> Message:
        parts = [torch.full((section.length,), value) for section in form.sections]
        given: dict[str, Any] = {"client": client, "samples": own if samples is None else samples}
        return with_wire(message, encode(parts, form, kind="up", round_=int(message.metadata.group_id), **given))

    return tamper


@pytest.mark.parametrize("value", [1e25, 3e38])
@pytest.mark.parametrize("settings", [QUICK, ACT], ids=["fedavg", "tdpfed act"])
def test_a_finite_upload_that_is_far_too_long_changes_nothing(
    tmp_path: Path, settings: tuple[str, ...], value: float
) -> None:
    case = Case(tmp_path, *settings, "run.rounds=2")
    summary = case.run(case.grid(tamper={2: sends(case, value)}))
    assert summary["status"] == "finished"
    refusals = case.lines("refusals.jsonl")
    assert [(line["round"], line["client"]) for line in refusals] == [(1, 2), (2, 2)]
    assert {line["rule"] for line in refusals} <= {"norm", "nan"}
    two = Case(tmp_path / "two", *settings, "run.rounds=2")
    two.run(two.grid(nodes=[0, 1]), changed={"flower.wait": 0.01})
    assert worst_between(tmp_path, tmp_path / "two") == 0


def test_zeros_are_refused_by_the_gauge_check_after_a_restart_too(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed", "robust.gauge=1.0", "checkpoint.every=1", "run.rounds=2")
    case.run(case.grid(tamper={2: sends(case, 0.0)}))
    case.run(case.grid(tamper={2: sends(case, 0.0)}), changed={"run.rounds": 4})
    refusals = case.lines("refusals.jsonl")
    assert [(line["round"], line["client"], line["rule"]) for line in refusals] == [
        (n, 2, "gauge") for n in (1, 2, 3, 4)
    ]
    whole = Case(tmp_path / "whole", "algorithm.name=tdpfed", "robust.gauge=1.0", "checkpoint.every=1", "run.rounds=4")
    whole.run(whole.grid(tamper={2: sends(whole, 0.0)}))
    assert worst_between(tmp_path, tmp_path / "whole") == 0
    one, other = (Checkpoints(folder / "run" / "checkpoints").load() for folder in (tmp_path, tmp_path / "whole"))
    assert one is not None
    assert other is not None
    assert torch.equal(one[0].server["gate.norms"], other[0].server["gate.norms"])


def test_a_lie_about_samples_counts_as_little_as_the_cap_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = 90_000
    hello, sizes = Node.hello, list[torch.Tensor]()

    def hostile(self: Node) -> Any:
        return {**hello(self), "samples": claimed} if self.client == 2 else hello(self)

    case = Case(tmp_path, *QUICK, "run.rounds=1")
    monkeypatch.setattr(Node, "hello", hostile)
    tamper = sends(case, 0.0, samples=claimed)
    weigh = ServerRound.weights

    def watched(self: ServerRound, samples: torch.Tensor) -> torch.Tensor:
        sizes.append(weigh(self, samples))
        return sizes[-1]

    monkeypatch.setattr(ServerRound, "weights", watched)
    case.run(case.grid(tamper={2: tamper}), changed={"robust.bound": "off"})
    honest = case.simulation.federation.train_size[:2].double()
    median = float(torch.cat([honest, torch.tensor([claimed]).double()]).median())
    assert sizes[0].tolist() == [*honest.tolist(), WEIGHT_CAP * median]


def test_the_cap_is_the_default_of_deployments_only() -> None:
    assert digits(*QUICK).robust.rule.weight_cap == "auto"
    assert rule_of(digits(*QUICK)).weight_cap == WEIGHT_CAP
    assert rule_of(digits(*QUICK, "robust.weight_cap=off")).weight_cap == "off"
    assert rule_of(digits(*QUICK, "robust.weight_cap=1.5")).weight_cap == 1.5


def test_a_server_that_diverges_saves_nothing_of_it_and_resumes_from_before(tmp_path: Path) -> None:
    """Everybody sends the largest finite number, and the server's step makes an infinite one of it."""
    settings = ("algorithm.name=pfedme", "algorithm.beta=2.0", "robust.bound=off", "checkpoint.every=1")
    case, whole = Case(tmp_path, *settings), Case(tmp_path / "whole", *settings)

    grid = case.grid(tamper={k: from_round(2, sends(case, 3.4e38, k)) for k in range(NODES)})
    with pytest.raises(TDPFedError, match=r"round 2: loss or parameters are not finite, the run diverges"):
        case.run(grid)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    saved = Checkpoints(tmp_path / "run" / "checkpoints")
    assert saved.rounds() == [1]
    assert all(bool(value.isfinite().all()) for value in load_file(tmp_path / "run" / "global.safetensors").values())
    assert case.run()["rounds"] == 3
    whole.run()
    assert worst_between(tmp_path, tmp_path / "whole") == 0


def test_a_checkpoint_that_is_not_finite_is_named_and_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As an earlier version may have left one behind; this version writes none."""
    case = Case(tmp_path, *QUICK, "checkpoint.every=1")
    case.run(changed={"run.rounds": 1})
    folder = tmp_path / "run" / "checkpoints"
    writer = Checkpoints(folder)
    found = writer.load()
    assert found is not None
    snapshot = found[0]
    bad = {**snapshot.server, "w": snapshot.server["w"].index_fill(0, torch.tensor([5]), torch.inf)}
    spoilt = type(snapshot)(2, bad, snapshot.private, snapshot.meta)
    with pytest.raises(TDPFedError, match=r"checkpoint: 'w' of the server's state is not finite, nothing is saved"):
        writer.save(spoilt, None)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_not_finite", lambda state: None)
        Checkpoints(folder).save(spoilt, None)
    assert Checkpoints(folder).rounds() == [2, 1]
    with caplog.at_level(logging.INFO, logger="flwr"):
        assert case.run()["rounds"] == 3
    assert any("not finite" in message and "000002-server" in message for message in caplog.messages)
    assert any("resuming from round 1" in message for message in caplog.messages)
    whole = Case(tmp_path / "whole", *QUICK, "checkpoint.every=1")
    whole.run()
    assert worst_between(tmp_path, tmp_path / "whole") == 0


def test_a_run_whose_uploads_are_mostly_refused_stops_and_says_so(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed", "robust.gauge=1.0", "robust.patience=2", "checkpoint.every=1")

    def grid() -> FakeGrid:
        return case.grid(tamper={k: sends(case, 0.0, k) for k in (1, 2)})

    words = r"round 2: 2 of 3 uploads refused, and more than accepted in 2 rounds in a row \(robust\.patience\)"
    for _ in range(2):  # a restarted server has not forgotten the round before
        with pytest.raises(QuorumError, match=words):
            case.run(grid())
        assert Checkpoints(tmp_path / "run" / "checkpoints").rounds() == [1]
    assert case.run()["rounds"] == 3  # nodes that were set right go on


def test_settings_edited_in_the_folder_and_in_the_app_are_not_those_of_the_checkpoint(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, "checkpoint.every=1")
    case.run(changed={"run.rounds": 2})
    file = tmp_path / "run" / "config.toml"
    text = file.read_text()
    for edited in ({"algorithm.eta": 0.01}, {"robust.bound": "off"}, {"participation.quorum": 2}):
        (key, value) = next(iter(edited.items()))
        name = key.partition(".")[2]
        lines = [
            f"{name} = {json.dumps(value)}" if line.startswith(f"{name} = ") else line for line in text.splitlines()
        ]
        file.write_text("\n".join(lines) + "\n")
        with pytest.raises(TDPFedError, match=rf"{key}: .* given, must be .* as in the checkpoint"):
            case.run(changed=edited)
    file.write_text(text)
    assert case.run()["rounds"] == 3


def test_records_lost_on_the_server_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, *QUICK, "checkpoint.every=1", "run.evaluate_every=1")
    case.run(changed={"run.rounds": 2})
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[1])
    case.run()
    assert any(message.startswith("tdpfed: metrics.jsonl: ") for message in caplog.messages)


@pytest.mark.parametrize("name", ["flower.json", "config.toml"])
@pytest.mark.parametrize("content", [None, "a = " + "[" * 5000, "[" * 5000, "[run]\nrounds = " + "9" * 5000])
def test_a_file_of_the_servers_folder_that_was_made_to_do_harm_is_named(
    tmp_path: Path, name: str, content: str | None
) -> None:
    case = Case(tmp_path, *QUICK, "checkpoint.every=1")
    case.run(changed={"run.rounds": 1})
    file = tmp_path / "run" / name
    file.unlink()
    if content is None:
        os.mkfifo(file)  # nobody waits for it
    else:
        file.write_text(content)
    with pytest.raises(TDPFedError, match=name):
        case.run()


@pytest.mark.parametrize("value", ["[" * 5000, "[0x" + "f" * 5000 + "]", "{" + "a." * 5000 + "a = 1}", "[1", "{}}"])
def test_a_list_in_an_app_s_settings_that_was_made_to_do_harm_is_named(value: str) -> None:
    with pytest.raises(TDPFedError, match=r"^algorithm\.include") as error:
        read_settings({"algorithm.include": value})
    assert len(str(error.value)) < 3000
