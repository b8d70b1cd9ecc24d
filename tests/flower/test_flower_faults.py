"""Claims, stalls and restarts that a federation must survive without losing what is a client's own."""

import json
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import torch
from fake import NODES, QUICK, Case, FakeGrid, Killed, is_nudge, simulated, stop_at, worst, worst_between
from flwr.app import Message, MetricRecord

from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.flower import client_app, envelope
from tdpfed.flower.client_app import NUDGE_PERIOD
from tdpfed.flower.exchange import NUDGE_TTL
from tdpfed.flower.node import Node
from tdpfed.flower.server_app import _locked_folder

PERSONAL = ("algorithm.name=tdpfed", "algorithm.keep_theta=true", "run.rounds=4")


# -- what a node says of itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flower", "claimed"),
    [({}, 2**39), ({"max_samples": 2000}, 2001), ({"samples": "honest"}, 1999)],
    ids=["far too many", "above the bound", "not what the operator knows"],
)
def test_a_claim_of_samples_has_no_influence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flower: dict[str, Any], claimed: int
) -> None:
    hello = Node.hello

    def hostile(self: Node) -> Any:
        return {**hello(self), "samples": claimed} if self.client == 2 else hello(self)

    monkeypatch.setattr(Node, "hello", hostile)
    case = Case(tmp_path, *QUICK, wait=0.01)
    sizes = case.simulation.federation.train_size.tolist()
    case.settings |= {f"flower.{k}": str(sizes) if v == "honest" else v for k, v in flower.items()}
    case.run()
    two = Case(tmp_path / "two", *QUICK, wait=0.01)
    two.run(two.grid(nodes=[0, 1]))
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [2, 2, 2]
    assert worst_between(tmp_path, tmp_path / "two") == 0


def test_the_operators_numbers_are_the_weights(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    case.settings["flower.samples"] = str(case.simulation.federation.train_size.tolist())
    case.run()
    assert worst(tmp_path, case.simulation) <= 1e-6
    for given in ("[1, 2]", "[0, 1, 2]"):
        with pytest.raises(TDPFedError, match=r"flower.samples: .* must be a"):
            case.run(changed={"flower.samples": given})


def test_clients_are_drawn_by_the_operators_numbers_as_in_simulation(tmp_path: Path) -> None:
    case = Case(
        tmp_path, *QUICK, "participation.sampling=samples", "participation.clients=2", "algorithm.weights=uniform",
        "data.partition=iid", "data.size_skew=0.5",
    )  # fmt: skip
    sizes = case.simulation.federation.train_size.tolist()
    assert len(set(sizes)) > 1
    with pytest.raises(TDPFedError, match=r"^flower\.samples: None given, must be a number for each node"):
        case.run()
    with pytest.raises(TDPFedError, match=r"^participation\.clients: 2 given, must be at most 1 "):
        case.run(changed={"flower.samples": "[10, 100, 10]"})
    with pytest.raises(TDPFedError, match=r"^algorithm\.weights: 'samples' given, must be 'uniform'"):
        case.run(changed={"flower.samples": str(sizes), "algorithm.weights": "samples"})
    case.settings["flower.samples"] = str(sizes)
    case.run()
    assert worst(tmp_path, case.simulation) <= 1e-6
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [2, 2, 2]


def test_a_node_that_fails_at_first_contact_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdpfed.flower.strategy.ASK_AGAIN", 0.0)
    hello, asked = Node.hello, []

    def shaky(self: Node) -> Any:
        asked.append(self.client)
        if asked.count(2) == 1 and self.client == 2:
            raise TDPFedError("task.load: the disk is not there yet")
        return hello(self)

    monkeypatch.setattr(Node, "hello", shaky)
    case = Case(tmp_path, *QUICK)
    case.run()
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [3, 3, 3]
    assert asked.count(2) == 2


def test_losses_and_times_stay_finite(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)

    def lies(message: Message) -> Message:
        given: dict[str, Any] = {"loss": 1.7e308, "seconds": 1.7e308, "local_correct": 1, "local_loss": -1.7e308}
        message.content["metrics"] = MetricRecord(given)
        return message

    case.run(case.grid(tamper={0: lies, 1: lies}))
    for name in ("rounds.jsonl", "metrics.jsonl", "summary.json"):
        text = (tmp_path / "run" / name).read_text()
        assert "Infinity" not in text
        assert "NaN" not in text
    assert case.lines("metrics.jsonl")[0]["minibatch_loss"] is not None
    assert max(line["client_seconds"] for line in case.lines("rounds.jsonl")) <= 60


# -- replies that do not come to an end --------------------------------------------------------------------------------


class Stalling(FakeGrid):
    """A grid that never hands out the replies of one node; of which messages is told."""

    kinds: tuple[str, ...] = ("train",)
    free = threading.Event()

    def pull_messages(self, message_ids: Any) -> Any:
        numbers = list(message_ids)
        for message in self.asked:
            told = message.metadata
            if told.message_id in numbers and told.dst_node_id == 100 and told.message_type in self.kinds:
                self.free.wait(30)
        return super().pull_messages(numbers)


@pytest.mark.parametrize("kind", ["train", "query", "evaluate"])
def test_a_reply_that_stalls_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("tdpfed.flower.exchange.FETCH_WAIT", 0.2)
    case = Case(tmp_path, *QUICK, "run.rounds=1", "run.evaluate_every=1", deadline=1.0, wait=0.01)
    grid = Stalling(case.task, case.settings, tmp_path / "state")
    grid.kinds = (kind,)
    began = time.monotonic()
    case.run(grid)
    assert time.monotonic() - began < 10
    (line,), (record,) = case.lines("rounds.jsonl"), case.lines("metrics.jsonl")
    assert line["replies"] == (3 if kind == "evaluate" else 2)
    assert line["lost"] == {
        "train": {"0": "no reply within 1 seconds"}, "query": {"0": "not connected"}, "evaluate": {},
    }[kind]  # fmt: skip
    assert [value is None for value in record["client_accuracy"]] == [kind != "train", False, False]


def test_a_reply_that_is_slow_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdpfed.flower.exchange.FETCH_WAIT", 0.1)
    case = Case(tmp_path, *QUICK, "run.rounds=1")
    grid = Stalling(case.task, case.settings, tmp_path / "state")
    grid.free = threading.Event()
    threading.Timer(0.7, grid.free.set).start()
    case.run(grid)
    assert case.lines("rounds.jsonl")[0]["replies"] == 3


# -- a SuperNode that is one message behind, as Flower 1.41 can leave it -----------------------------------------------


class Behind(FakeGrid):
    """Node 101 holds a reply of a run that is over, and sends what it holds only when another message comes.

    It is set right when it sends the replies to two nudges in one go: ``heals``.
    """

    heals = False
    held: list[tuple[str, Message | None, bool]]

    def push_messages(self, messages: Any) -> Any:
        (message,) = messages
        (number,) = super().push_messages([message])
        if message.metadata.dst_node_id == 101 and self.held:
            mine = number, self.replies.pop(number), is_nudge(message)
            together = self.heals and mine[2] and self.held[0][2]
            for known, reply, _ in [*self.held, mine] if together else self.held:
                if reply is not None:
                    self.replies[known] = reply
            self.held = [] if together else [mine]
        return [number]


@pytest.mark.parametrize("heals", [False, True])
def test_a_node_that_is_a_message_behind_takes_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    monkeypatch.setattr("tdpfed.flower.exchange.NUDGE_AFTER", 0.2)
    case = Case(tmp_path, *QUICK, deadline=20.0)
    grid = Behind(case.task, case.settings, tmp_path / "state")
    grid.heals, grid.held = heals, [("stale", None, False)]
    case.run(grid)
    assert [(line["replies"], line["lost"]) for line in case.lines("rounds.jsonl")] == [(3, {})] * 3
    assert worst(tmp_path, case.simulation) <= 1e-6
    assert case.lines("metrics.jsonl")[0]["client_accuracy"][1] is not None
    nudged = [message.metadata.dst_node_id for message in grid.asked if is_nudge(message)]
    assert nudged == [101] * (2 if heals else 2 * 5)  # at first contact; in three rounds and an evaluation, too


def test_nudges_are_answered_at_the_same_moment_and_read_nothing(tmp_path: Path) -> None:
    grid = Case(tmp_path, *QUICK).grid()
    app = client_app(object())  # type: ignore[arg-type]
    nudge = envelope.request("query", 100, {envelope.NUDGE: True}, None, 10.0)
    app(nudge, grid.contexts[100])
    assert time.time() % NUDGE_PERIOD < 0.3
    assert not (tmp_path / "state").exists()


def test_a_round_that_takes_long_has_few_nudges(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, "run.rounds=1", deadline=2.0)
    grid = case.grid(tamper={0: lambda message: None})
    case.run(grid)
    nudges = [message.metadata for message in grid.asked if is_nudge(message)]
    assert [told.dst_node_id for told in nudges] == [100] * 4  # after 1 and 1.8 seconds, twice each
    assert {told.ttl for told in nudges} == {NUDGE_TTL}


# -- restarts ----------------------------------------------------------------------------------------------------------


def damage_newest(case: Case) -> None:
    newest = max((case.folder / "run" / "checkpoints").glob("*-server.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")


def test_from_an_older_checkpoint_nodes_still_have_their_models(tmp_path: Path) -> None:
    case = Case(tmp_path, *PERSONAL, "checkpoint.every=1", "checkpoint.keep=2")
    with pytest.raises(Killed):
        case.run(case.grid(tamper={2: stop_at(4)}))
    damage_newest(case)
    assert case.run()["rounds"] == 4
    assert [line["round"] for line in case.lines("rounds.jsonl")] == [1, 2, 3, 4]
    assert worst(tmp_path, case.simulation) <= 1e-6
    for client in range(NODES):
        kept = case.state(client).upto(10)
        assert kept is not None
        assert torch.allclose(kept["theta"], case.simulation.private["theta"][client], atol=1e-6)


def test_a_model_that_is_needed_and_gone_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    case = Case(tmp_path, *PERSONAL, "checkpoint.every=1")
    with pytest.raises(Killed):
        case.run(case.grid(tamper={2: stop_at(4)}))
    damage_newest(case)
    for file in (tmp_path / "state").glob("*/client-1/00000002.safetensors"):
        file.unlink()
    case.run()
    lost = [line["lost"].get("1", "") for line in case.lines("rounds.jsonl")]
    assert "needed but deleted" in lost[2]


def test_without_checkpoints_nodes_do_not_keep_every_round(tmp_path: Path) -> None:
    case = Case(tmp_path, *PERSONAL, "checkpoint.every=0")
    with pytest.raises(Killed):
        case.run(case.grid(tamper={2: stop_at(4)}))
    for client in range(NODES):
        assert len(list((tmp_path / "state").glob(f"*/client-{client}/*"))) <= 2
    assert case.run()["rounds"] == 4  # from the start
    assert worst(tmp_path, case.simulation) <= 1e-6


def test_one_folder_has_one_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["tdpfed.flower.server_app"], "LOCK_WAIT", 0.3)
    case = Case(tmp_path, *QUICK)
    with _locked_folder(tmp_path / "run"), pytest.raises(TDPFedError, match=r"flower.out: another server app"):
        case.run()
    assert case.run()["status"] == "finished"


def test_checkpoints_without_the_name_of_their_run_are_refused(tmp_path: Path) -> None:
    case, other = (Case(tmp_path / name, *QUICK, "checkpoint.every=1") for name in ("one", "other"))
    for one in (case, other):
        one.run()
    longer = {"run.rounds": 5}
    session = case.folder / "run" / "flower.json"
    kept = session.read_text()
    session.unlink()
    with pytest.raises(TDPFedError, match=r"flower.json' is missing"):
        case.run(changed=longer)
    shutil.copy(other.folder / "run" / "flower.json", session)
    with pytest.raises(TDPFedError, match=r"checkpoint: run '[0-9a-f]{16}' saved, must be"):
        case.run(changed=longer)
    session.write_text(kept)
    with pytest.raises(TDPFedError, match=r"flower.nodes: 4 given, must be 3"):
        case.run(changed={**longer, "flower.nodes": 4})
    (case.folder / "run" / "config.toml").write_text("[run\n")
    with pytest.raises(TDPFedError, match=r"config.toml' is damaged"):
        case.run(changed=longer)


def test_a_checkpoint_that_lacks_its_members_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tdpfed.flower.strategy import Strategy

    case, state = Case(tmp_path, *QUICK, "checkpoint.every=1"), Strategy.state

    def without_members(self: Strategy) -> Any:
        tensors, told = state(self)
        return tensors, {**told, "members": None}

    monkeypatch.setattr(Strategy, "state", without_members)
    case.run()
    with pytest.raises(TDPFedError, match="checkpoint: its members"):
        case.run(changed={"run.rounds": 5})


def test_a_run_that_goes_on_with_other_nodes_says_so_at_once(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, "checkpoint.every=1", wait=300.0)
    case.run()
    grid = case.grid()
    grid.contexts = {node + 100: replace(one, node_id=node + 100) for node, one in grid.contexts.items()}
    began = time.monotonic()
    with pytest.raises(TDPFedError, match=r"clients have new node ids: 0 \(was 100, now 200\)"):
        case.run(grid, changed={"run.rounds": 5})
    assert time.monotonic() - began < 30


def test_refusals_of_the_round_that_ends_a_run_are_written(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed", "run.rounds=1", "robust.gauge=1e-6", "participation.attempts=1")
    with pytest.raises(QuorumError):
        case.run()
    assert [(line["round"], line["client"]) for line in case.lines("refusals.jsonl")] == [(1, k) for k in range(NODES)]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_state_of_an_abandoned_session_is_not_used(tmp_path: Path) -> None:
    """All had trained round 3 when the server died; client 2 is away when the round is done again, without it."""
    case = Case(tmp_path, *PERSONAL, "run.rounds=4", "checkpoint.every=1")
    with pytest.raises(Killed):
        case.run(case.grid(tamper={2: stop_at(3)}))
    grid = case.grid()

    def back(message: Message) -> Message:
        grid.offline = {102} if message.metadata.group_id != "3" else set()
        return message

    grid.offline, grid.tamper = {102}, {0: back}
    case.run(grid)
    twin = Case(tmp_path / "twin", *PERSONAL, "checkpoint.every=1")
    away = twin.grid()

    def leaves(message: Message) -> Message:
        away.offline = {102} if message.metadata.group_id == "2" else set()
        return message

    away.tamper = {0: leaves}
    twin.run(away)
    assert case.lines("rounds.jsonl")[2]["lost"] == twin.lines("rounds.jsonl")[2]["lost"] == {"2": "not connected"}
    assert worst_between(tmp_path, tmp_path / "twin") == 0
    kept, wanted = case.state(2).upto(9), twin.state(2).upto(9)
    assert kept is not None
    assert wanted is not None
    assert torch.equal(kept["theta"], wanted["theta"])
    assert not torch.equal(kept["theta"], simulated(case.config, 4).private["theta"][2])
