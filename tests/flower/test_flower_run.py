"""Whole runs in one process: equal to the simulator, through failures, restarts and hostile nodes."""

import json
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import torch
from fake import (
    NODES,
    QUICK,
    Case,
    FakeGrid,
    Killed,
    bytes_of,
    digits,
    run_config,
    simulated,
    stop_at,
    worst,
    worst_between,
)
from flwr.app import Array, ArrayRecord, Message

from tdpfed.config import Config
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.flower import envelope, load_personalized, server_app
from tdpfed.wire import Form, with_header


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=tdpfed",),
        ("algorithm.name=tdpfed", "algorithm.aggregation=act"),
        ("algorithm.name=tdpfed", "algorithm.optimizer_state=run"),
        ("algorithm.name=tdpfed", "algorithm.keep_theta=true", "participation.clients=2"),
        ("algorithm.name=fedavg",),
        ("algorithm.name=fedavg", "wire.codec=int8", "algorithm.weights=uniform"),
        ("algorithm.name=fedavg", "participation.clients=2", "participation.train=all"),
        ("algorithm.name=fedavg", "robust.name=median"),
        ("algorithm.name=fedavg_sar", "participation.clients=2"),
        ("algorithm.name=pfedme",),
        ("algorithm.name=perfedavg",),
    ],
    ids=" ".join,
)
def test_a_run_is_the_simulation(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    case = Case(tmp_path, *overrides)
    summary, record = case.run(), case.simulation.record(0.0)
    assert worst(tmp_path, case.simulation) <= 1e-6
    assert summary["uplink_bytes"] == case.simulation.ledger.uplink
    assert summary["downlink_bytes"] == case.simulation.ledger.downlink
    for name in ("personalized_accuracy", "local_accuracy", "global_accuracy"):
        assert summary[name] == pytest.approx(getattr(record, name)), name
    for client in range(NODES):
        kept = case.state(client).upto(10)
        assert (kept is not None) == bool(case.simulation.store.touched[client])
        if kept is not None:
            assert torch.allclose(kept["theta"], case.simulation.private["theta"][client], atol=1e-6)


def test_training_alone_sends_nothing(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=local")
    grid = case.grid()
    summary = case.run(grid)
    assert (summary["uplink_bytes"], summary["global_accuracy"]) == (0, None)
    assert summary["personalized_accuracy"] == pytest.approx(case.simulation.record(0.0).personalized_accuracy)
    assert not (tmp_path / "run" / "global.safetensors").exists()


def test_the_run_folder_reads_as_any_other(tmp_path: Path) -> None:
    from tdpfed.report.read import read_run

    case = Case(tmp_path, *QUICK)
    case.run()
    assert read_run(tmp_path / "run")
    (record,) = case.lines("metrics.jsonl")
    assert len(record["client_accuracy"]) == NODES
    rounds = case.lines("rounds.jsonl")
    assert [line["round"] for line in rounds] == [1, 2, 3]
    assert all(line["server_seconds"] < line["seconds"] and line["client_seconds"] > 0 for line in rounds)


# -- what leaves a node ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["tdpfed", "pfedme"])
def test_the_personalized_model_never_leaves(tmp_path: Path, algorithm: str) -> None:
    case = Case(tmp_path, f"algorithm.name={algorithm}")
    grid = case.grid()
    case.run(grid)
    sent = b"".join(bytes_of(message) for message in grid.sent)
    assert case.simulation._trained is not None
    outcome = case.simulation._trained[1]
    local = case.simulation.algorithm.local_model(outcome.private, outcome.upload)
    for client in range(NODES):
        kept = case.state(client).upto(10)
        assert kept is not None
        theta, samples = kept["theta"], case.simulation.federation.client(client)[0]
        learnt = theta != local[client]  # a weight whose input is always 0 on this client stays as it came
        pieces = [
            theta[at : at + 4].numpy().tobytes()
            for at in range(0, len(theta) - 4, 11)
            if bool(learnt[at : at + 4].all())
        ]
        assert len(pieces) > 100
        assert not [piece for piece in pieces if piece in sent]
        assert samples[:1].numpy().tobytes() not in sent  # nor do samples


def test_the_check_of_bytes_sees_what_does_leave(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=fedavg")
    grid = case.grid()
    case.run(grid)
    kept = case.state(0).upto(10)
    assert kept is not None
    assert kept["theta"].numpy()[:64].tobytes() in b"".join(bytes_of(message) for message in grid.sent)


def test_uplink_on_flower_is_the_ledger_and_an_envelope(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed")
    grid = case.grid()
    case.run(grid)
    uploads = [message for message in grid.sent if envelope.wire_size(message)]
    measured, ledger = sum(len(bytes_of(message)) for message in uploads), case.simulation.ledger
    assert len(uploads) == ledger.uploads
    assert abs(measured - ledger.uplink - envelope.ENVELOPE * len(uploads)) <= 0.02 * ledger.uplink


def test_the_ids_of_messages_cannot_be_guessed(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    grid = case.grid()
    case.run(grid)
    nonces = {envelope.fields_of(message)["nonce"] for message in grid.asked}
    assert len(nonces) == len(grid.asked)


# -- bad nodes ---------------------------------------------------------------------------------------------------------


def with_wire(message: Message, data: bytes) -> Message:
    message.content["wire"] = ArrayRecord({"wire": Array("uint8", (len(data),), envelope.STYPE, data)})
    return message


def upload_of(case: Case, value: float, length: int | None = None, **changed: Any) -> Any:
    """Return what makes a node's reply one with a constant upload."""
    length = case.simulation.objective.layout.size if length is None else length
    entry = case.simulation.objective.layout if length == case.simulation.objective.layout.size else length

    def tamper(message: Message) -> Message:
        samples = int(case.simulation.federation.train_size[2])
        given = {"round_": int(message.metadata.group_id), "client": 2, "samples": samples, **changed}
        payload = torch.full((length,), value).numpy().tobytes()  # an honest sender encodes no NaN
        return with_wire(message, with_header(payload, Form.whole({"w": entry}), kind="up", **given))

    return tamper


def no_wire(message: Message) -> Message:
    del message.content["wire"]
    return message


def from_another_node(message: Message) -> Message:
    message.metadata.__dict__["_src_node_id"] = 999
    return message


BAD: dict[str, tuple[Any, str]] = {
    "nan": (lambda case: upload_of(case, float("nan")), "nan"),
    "shape": (lambda case: upload_of(case, 1.0, 12), "layout"),
    "huge": (lambda case: lambda message: with_wire(message, bytes(50_000_000)), "size"),
    "garbage": (lambda case: lambda message: with_wire(message, b"garbage"), "magic"),
    "weight": (lambda case: upload_of(case, 1.0, samples=10**9), "weight"),
    "another client": (lambda case: upload_of(case, 1.0, client=1), "client"),
    "another round": (lambda case: upload_of(case, 1.0, round_=77), "round"),
    "empty": (lambda case: no_wire, "header"),
    "another node": (lambda case: from_another_node, "client"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_left_out_and_the_others_go_on(tmp_path: Path, kind: str) -> None:
    make, rule = BAD[kind]
    case = Case(tmp_path, *QUICK, "run.rounds=2")
    summary = case.run(case.grid(tamper={2: make(case)}))
    assert summary["status"] == "finished"
    refusals = case.lines("refusals.jsonl")
    assert [(line["round"], line["client"], line["rule"]) for line in refusals] == [(1, 2, rule), (2, 2, rule)]
    two = Case(tmp_path / "two", *QUICK, "run.rounds=2")
    two.run(two.grid(nodes=[0, 1]), changed={"flower.wait": 0.01})
    assert worst_between(tmp_path, tmp_path / "two") == 0


def test_a_factor_outside_the_gauge_is_left_out(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed", "run.rounds=1", "robust.gauge=1e-6")
    with pytest.raises(QuorumError, match="farther from the broadcast factor"):
        case.run(changed={"participation.attempts": 1})
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_reply_that_cannot_be_read_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, *QUICK, "run.rounds=1")
    grid = case.grid()
    pull = grid.pull_messages
    seen: list[int] = []

    def broken(numbers: Any) -> Any:
        found = list(pull(numbers))
        if found and found[0].metadata.message_type == "train" and not seen:
            seen.append(1)
            raise ValueError("unknown object")
        return found

    monkeypatch.setattr(grid, "pull_messages", broken)
    assert case.run(grid)["status"] == "finished"
    assert list(case.lines("rounds.jsonl")[0]["lost"].values()) == [
        "the reply cannot be read: ValueError: unknown object"
    ]


def test_a_message_the_superlink_does_not_take_is_a_client_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(tmp_path, *QUICK, "run.rounds=1")
    grid = case.grid()
    push = grid.push_messages

    def broken(messages: Any) -> Any:
        if messages[0].metadata.message_type == "train" and messages[0].metadata.dst_node_id == 101:
            raise OSError("no route")
        return push(messages)

    monkeypatch.setattr(grid, "push_messages", broken)
    assert case.run(grid)["status"] == "finished"
    assert "not sent" in case.lines("rounds.jsonl")[0]["lost"]["1"]


# -- nodes that fail, leave, come late ---------------------------------------------------------------------------------


def test_a_straggler_past_the_deadline_is_left_out(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, "run.rounds=1", deadline=0.3)
    summary = case.run(case.grid(tamper={0: lambda message: None}))
    assert summary["status"] == "finished"
    assert case.lines("rounds.jsonl")[0]["lost"] == {"0": "no reply within 0.3 seconds"}


def test_below_the_quorum_a_round_is_repeated_then_the_run_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdpfed.flower.strategy.RETRY", 0.0)
    case = Case(tmp_path, *QUICK, "run.rounds=1", "participation.quorum=3", "participation.attempts=2", deadline=0.2)
    grid = case.grid(tamper={0: lambda message: None})
    with pytest.raises(QuorumError, match="2 uploads accepted in the last of 2 attempts"):
        case.run(grid)
    assert sum(message.metadata.message_type == "train" for message in grid.asked) == 6


def test_with_stop_a_round_is_tried_once(tmp_path: Path) -> None:
    case = Case(
        tmp_path, *QUICK, "run.rounds=1", "participation.quorum=3", "participation.below_quorum=stop", deadline=0.2
    )
    with pytest.raises(QuorumError, match=r"participation.quorum requires 3"):
        case.run(case.grid(tamper={0: lambda message: None}))


def test_a_round_nobody_answers_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdpfed.flower.strategy.RETRY", 0.0)
    case = Case(tmp_path, *QUICK, "run.rounds=1", "participation.attempts=2", deadline=0.1)
    with pytest.raises(QuorumError, match="0 uploads accepted"):
        case.run(case.grid(tamper=dict.fromkeys(range(NODES), lambda message: None)))


def test_a_round_that_is_repeated_starts_from_the_same_private_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tdpfed.flower.strategy.RETRY", 0.0)
    case = Case(
        tmp_path, "algorithm.name=tdpfed", "algorithm.keep_theta=true", "run.rounds=2", "participation.quorum=3",
        deadline=0.2,
    )  # fmt: skip
    lost = []

    def once(message: Message) -> Message | None:
        lost.append(message)
        return None if len(lost) == 2 else message

    case.run(case.grid(tamper={0: once}))
    assert worst(tmp_path, case.simulation) <= 1e-6


def test_a_node_that_leaves_is_not_waited_for_and_may_come_back(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    grid = case.grid()

    def leaves(message: Message) -> Message:
        grid.offline = {102} if message.metadata.group_id == "1" else set()
        return message

    grid.tamper = {0: leaves}
    case.run(grid)
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [3, 2, 3]
    assert case.lines("rounds.jsonl")[1]["lost"] == {"2": "not connected"}


def test_too_few_nodes_end_the_run_with_a_reason(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, wait=0.01)
    with pytest.raises(TDPFedError, match=r"flower.nodes: 0 of 3 clients .* must be at least 1$"):
        case.run(case.grid(nodes=[]))
    case.task.load = lambda node_config: node_config["data"]  # type: ignore[method-assign]
    words = r"must be at least 1; .* node 10\d .* its app failed: task.load: failed \(KeyError: 'data'\)"
    with pytest.raises(TDPFedError, match=words):
        case.run()


def test_a_node_that_fails_at_first_contact_is_turned_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, *QUICK, wait=0.01)
    grid = case.grid()
    grid.contexts[102].node_config["partition-id"] = 7
    with caplog.at_level("INFO", "flwr"):
        case.run(grid)
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [2, 2, 2]


def test_two_nodes_cannot_be_the_same_client(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK, wait=0.01)
    grid = case.grid()
    grid.contexts[102].node_config["partition-id"] = 1
    case.run(grid)
    assert case.lines("rounds.jsonl")[0]["replies"] == 2


def test_without_authentication_a_client_may_come_back_as_another_node(tmp_path: Path) -> None:
    for insecure, replies in ((False, [3, 2, 2]), (True, [3, 3, 3])):
        case = Case(tmp_path / str(insecure), *QUICK, insecure=insecure)
        grid = case.grid()

        def moves(message: Message, grid: FakeGrid = grid) -> Message:
            if 102 in grid.contexts:
                context = grid.contexts.pop(102)
                grid.contexts[202] = replace(context, node_id=202)
            return message

        grid.tamper = {2: moves}
        case.run(grid)
        assert [line["replies"] for line in case.lines("rounds.jsonl")] == replies


def test_a_node_with_another_model_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, *QUICK, wait=0.01)
    from tdpfed.flower.node import Node

    hello = Node.hello
    monkeypatch.setattr(Node, "hello", lambda self: {**hello(self), "model": "0" * 64})
    with pytest.raises(TDPFedError, match=r"flower.nodes: 0 of 3 clients"):
        case.run()


@pytest.mark.parametrize("answer", [{"samples": -1}, {"samples": 10**15}, {"client": True}, {"tests": "many"}])
def test_what_a_node_says_of_itself_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    case = Case(tmp_path, *QUICK, wait=0.01)
    from tdpfed.flower.node import Node

    hello = Node.hello
    monkeypatch.setattr(Node, "hello", lambda self: {**hello(self), **answer})
    with pytest.raises(TDPFedError, match=r"flower.nodes: 0 of 3 clients"):
        case.run()


def test_metrics_are_bounded_and_never_stop_a_run(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)

    def lies(message: Message) -> Message:
        message.content["metrics"] = type(message.content["metrics"])({"loss": float("nan"), "local_correct": 1e30})
        return message

    summary = case.run(case.grid(tamper={0: lies}))
    assert summary["local_accuracy"] <= 1
    assert summary["minibatch_loss"] is not None


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
def test_a_killed_server_goes_on_to_the_same_model(tmp_path: Path, every: int) -> None:
    case = Case(
        tmp_path, "algorithm.name=tdpfed", "algorithm.keep_theta=true", "run.rounds=4", f"checkpoint.every={every}"
    )
    with pytest.raises(Killed):
        case.run(case.grid(tamper={2: stop_at(4)}))
    assert case.run()["rounds"] == 4
    assert worst(tmp_path, case.simulation) <= 1e-6
    for client in range(NODES):
        assert torch.allclose(case.state(client).upto(10)["theta"], case.simulation.private["theta"][client], atol=1e-6)  # type: ignore[index]


def test_a_server_killed_before_the_first_round_begins_again(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    with pytest.raises(Killed):
        case.run(case.grid(tamper={0: stop_at(1)}))
    (tmp_path / "run" / "flower.json").unlink()
    assert case.run()["status"] == "finished"
    assert worst(tmp_path, case.simulation) <= 1e-6


def test_a_finished_run_may_be_made_longer_but_not_changed(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    case.run()
    with pytest.raises(TDPFedError, match=r"flower.out: the run in .* 3 rounds"):
        case.run()
    with pytest.raises(TDPFedError, match=r"algorithm.eta: 0.5 given, must be 0.05; run.seed: 9 given, must be 0"):
        case.run(changed={"algorithm.eta": 0.5, "run.seed": 9})
    many = {f"algorithm.{key}": 7 for key in ("eta", "tau", "batch_size")}
    many |= {f"run.{key}": 7 for key in ("seed", "evaluate_every", "threads")}
    many |= {"checkpoint.keep": 7, "checkpoint.every": 7, "participation.attempts": 7, "participation.quorum": 3}
    with pytest.raises(TDPFedError, match=r"algorithm.batch_size: 7 .*; and 2 more"):
        case.run(changed=many)
    assert case.run(changed={"run.rounds": 5})["rounds"] == 5
    assert worst(tmp_path, simulated(case.config, 5)) <= 1e-6


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(TDPFedError, match="not empty"):
        case.run()
    (tmp_path / "run" / "thesis.tex").unlink()
    case.run()
    (tmp_path / "run" / "flower.json").write_text("{")
    with pytest.raises(TDPFedError, match=r"flower.json' is damaged"):
        case.run(changed={"run.rounds": 5})


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    one, other = Case(tmp_path / "one", *QUICK), Case(tmp_path / "other", "algorithm.name=pfedme", "run.seed=4")
    one.run()
    other.run()
    shutil.rmtree(tmp_path / "one" / "run" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "run" / "checkpoints", tmp_path / "one" / "run" / "checkpoints")
    with pytest.raises(TDPFedError, match="checkpoint: algorithm 'pfedme' saved"):
        one.run(changed={"run.rounds": 5})


def test_a_node_keeps_its_model_through_a_restart(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=tdpfed", "algorithm.keep_theta=true")
    grid = case.grid()

    def restarts(message: Message) -> Message:
        fresh = case.grid()  # nothing of the old process but what is on the disk
        grid.contexts = fresh.contexts
        grid.app = fresh.app
        return message

    grid.tamper = {0: restarts}
    case.run(grid)
    assert worst(tmp_path, case.simulation) <= 1e-6
    (run,) = (tmp_path / "state").iterdir()
    mine = load_personalized(run / "client-1", case.task.model())
    wanted = case.simulation.objective.state_dict(case.simulation.personalized()[1])
    assert all(torch.allclose(mine[name], value, atol=1e-6) for name, value in wanted.items())


def test_a_damaged_private_state_is_a_client_lost_and_named(tmp_path: Path) -> None:
    case = Case(tmp_path, *QUICK)

    def damages(message: Message) -> Message:
        if message.metadata.group_id == "1":
            file = next((tmp_path / "state").glob("*/client-1/*.safetensors"))
            file.write_bytes(file.read_bytes()[:-1] + b"!")
        return message

    case.run(case.grid(tamper={1: damages}))
    lost = case.lines("rounds.jsonl")[1]["lost"]
    assert list(lost) == ["1"]
    assert "is damaged" in lost["1"]


# -- the two apps ------------------------------------------------------------------------------------------------------


def test_the_server_app_names_the_error_and_lets_flower_see_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    case = Case(tmp_path, *QUICK, insecure=True)
    grid = case.grid()
    app = server_app(case.task)
    context = replace(grid.contexts[100], run_config={**case.settings, "run.rounds": -1})
    with pytest.raises(TDPFedError, match=r"run.rounds: -1 given"):
        app(grid, context)
    assert "tdpfed: run.rounds: -1 given" in caplog.text
    with pytest.raises(TDPFedError) as raised:
        app(grid, context)
    places = traceback.extract_tb(raised.value.__traceback__)
    assert "checked.py" not in {Path(place.filename).name for place in places}  # not where it was found, a page long
    app(grid, replace(context, run_config=case.settings))
    assert "INSECURE" in caplog.text


def test_a_client_that_diverges_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = Case(tmp_path, *QUICK, "run.rounds=1")
    case.settings |= {"algorithm.eta": 1e38, "participation.attempts": 1}
    with pytest.raises(QuorumError):
        case.run()
    assert "not finite, the run diverges; lower the learning rates (eta=1e+38)" in caplog.text


def test_configurations_of_both_kinds_are_the_same(tmp_path: Path) -> None:
    config: Config = digits("algorithm.name=pfedme")
    from tdpfed.flower.settings import read_settings

    again, flower = read_settings(run_config(config, tmp_path))
    assert replace(again, data=config.data, model=config.model) == config
    assert flower.nodes == NODES
