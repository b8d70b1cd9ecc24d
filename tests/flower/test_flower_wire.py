"""Compressed changes both ways in a deployment: the simulator's bits and bytes, and nothing lost when messages are."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

import torch
from fake import NODES, Case, FakeGrid, Killed, Tamper, simulated, stop_at, worst
from flwr.app import Array, ArrayRecord, Message
from safetensors.torch import load_file

from tdpfed.core.state import State, Turn
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.flower import envelope
from tdpfed.flower.delivery import RECENT, Delivery
from tdpfed.flower.kept import COPY, LOST, Kept
from tdpfed.flower.node import Side
from tdpfed.flower.private import PrivateStore
from tdpfed.wire import Rejected, encode
from tdpfed.wire.channel import error_of
from tdpfed.wire.downlink import ROUNDS, Downlink, known_of

FEDAVG = ("algorithm.name=fedavg", "algorithm.tau=2")
FACTORS = (*FEDAVG, "wire.update=factors")
BOTH = (*FACTORS, "wire.down=factors")


def kept_by(case: Case, client: int) -> State | None:
    """Return the newest state of a client that the server's sessions have not discarded."""
    (run,) = (case.folder / "state").iterdir()
    starts = json.loads((case.folder / "run" / "flower.json").read_text())["starts"]
    return PrivateStore(run / f"client-{client}", starts).upto(10**6)


def down_of(case: Case) -> Downlink:
    return Downlink(case.simulation.algorithm, case.config.wire, case.config.run.seed)


def check_same(case: Case, simulation: Simulation, *, lost: tuple[int, ...] = ()) -> None:
    """Check that models and all private state are the simulator's, to the bit; uploads of ``lost`` did not count."""
    assert worst(case.folder, simulation) == 0
    for client in range(NODES):
        kept = kept_by(case, client)
        assert (kept is not None) == bool(simulation.store.touched[client])
        if kept is not None:
            found = Kept.of(kept)
            wire = found.resolved(0 if client in lost else found.round)
            for name, value in simulation.private.items():
                assert torch.equal((found.own | wire)[name], value[client]), (client, name)


# -- undisturbed runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        FACTORS,
        (*FACTORS, "wire.compression=10", "wire.codec=int8", "wire.kernels=tensor"),
        (*FACTORS, "wire.feedback=false"),
        (*FACTORS, "participation.clients=2", "participation.train=all"),
        (*FACTORS, "robust.name=median"),
        (*FEDAVG, "wire.update=top-k", "wire.share=0.02"),
        (*FEDAVG, "wire.codec=int4"),
        (*FEDAVG, "wire.codec=int8", "wire.feedback=true"),
        BOTH,
        (*BOTH, "participation.clients=1", "run.rounds=6"),
        (*FEDAVG, "wire.down=factors", "wire.down_codec=float32", "wire.down_terms=10", "participation.clients=1",
         "run.rounds=8"),
        (*BOTH, "server.optimizer=sgd", "server.momentum=0.5", "server.rate=0.7"),
        (*FEDAVG, "server.optimizer=yogi", "server.rate=0.01"),
        ("algorithm.name=tdpfed", "wire.codec=int4", "algorithm.tau=2"),
        ("algorithm.name=tdpfed", "wire.update=top-k", "algorithm.tau=2", "algorithm.optimizer_state=run"),
        ("algorithm.name=pfedme", "wire.update=factors", "wire.down=factors", "algorithm.tau=2"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_run_is_the_simulation_to_the_bit(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    case = Case(tmp_path, *overrides)
    summary, ledger = case.run(), case.simulation.ledger
    check_same(case, case.simulation)
    assert (summary["uplink_bytes"], summary["downlink_bytes"]) == (ledger.uplink, ledger.downlink)


def test_a_node_that_missed_many_rounds_gets_the_dense_model(tmp_path: Path) -> None:
    """The parametrized case above with one client in each round reaches both sides of the limit."""
    case = Case(
        tmp_path, *FEDAVG, "wire.down=factors", "wire.down_codec=float32", "wire.down_terms=10",
        "participation.clients=1", "run.rounds=8",
    )  # fmt: skip
    downlink = down_of(case)
    grid = case.grid()
    case.run(grid)
    sizes = [envelope.wire_size(message) for message in grid.asked if message.metadata.message_type == "train"]
    assert downlink.dense.bytes in sizes
    assert downlink.form.bytes in sizes
    assert sum(sizes) == case.simulation.ledger.downlink
    assert max(sizes) <= downlink.dense.bytes
    assert downlink.form.bytes < newest_checkpoint(case)[RECENT].numel() <= downlink.dense.bytes


# -- uploads that do not count -----------------------------------------------------------------------------------------


def bad(message: Message) -> Message:
    data = b"garbage"
    message.content["wire"] = ArrayRecord({"wire": Array("uint8", (len(data),), envelope.STYPE, data)})
    return message


def in_round(round_: int, tamper: Tamper) -> Tamper:
    return lambda message: tamper(message) if message.metadata.group_id == str(round_) else message


def refusing(monkeypatch: pytest.MonkeyPatch, round_: int, client: int) -> None:
    """Let the server's gate refuse a client in one round, in the simulator and in a deployment."""
    from tdpfed.server.gate import refusals

    def refused(*given: Any, **options: Any) -> list[Rejected]:
        turn: Turn = given[4]
        found = refusals(*given, **options)
        mine = turn.round == round_ and client in turn.clients
        return [*found, Rejected("nan", "bad", client=client)] if mine else found

    monkeypatch.setattr("tdpfed.server.round.refusals", refused)


@pytest.mark.parametrize("overrides", [FACTORS, BOTH, (*FEDAVG, "wire.update=top-k"), (*FEDAVG, "wire.codec=int4")])
@pytest.mark.parametrize("how", ["gate", "malformed", "lost"])
@pytest.mark.parametrize("last", [False, True])
def test_an_upload_that_does_not_count_is_sent_with_the_next_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, overrides: tuple[str, ...], last: bool
) -> None:
    case = Case(tmp_path, *overrides, "run.rounds=4", deadline=0.5 if how == "lost" else 60.0)
    number = 4 if last else 2
    with monkeypatch.context() as gate:
        refusing(gate, number, 1)
        wanted = simulated(case.config, 4)
        if how == "gate":
            case.run()
    if how != "gate":
        case.run(case.grid(tamper={1: in_round(number, bad if how == "malformed" else lambda message: None)}))
    check_same(case, wanted, lost=(1,) if last else ())
    assert worst(tmp_path, case.simulation) > 0  # the refusal makes a difference


def test_what_was_lost_would_be_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that took every upload for counted would end elsewhere."""
    case = Case(tmp_path, *FACTORS, "run.rounds=4")
    with monkeypatch.context() as gate:
        refusing(gate, 2, 1)
        wanted = simulated(case.config, 4)
    monkeypatch.setattr(Kept, "resolved", lambda self, counted: self.wire)
    case.run(case.grid(tamper={1: in_round(2, bad)}))
    assert worst(tmp_path, wanted) > 0


def test_a_repeated_round_discards_the_first_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repetition draws other clients, so one that had trained in the first try goes back to its state before."""
    monkeypatch.setattr("tdpfed.flower.strategy.RETRY", 0.0)
    case = Case(tmp_path, *BOTH, "run.rounds=5", "run.seed=1", "participation.clients=2", "participation.quorum=2")

    draws = {n: [case.config.participation.draw(1, n, NODES, k)[0].tolist() for k in (0, 1)] for n in (2, 3, 4)}
    number = next(n for n, (first, second) in draws.items() if first != second)
    with monkeypatch.context() as gate:
        from tdpfed.server.gate import refusals

        tries: list[int] = []

        def refused(*given: Any, **options: Any) -> list[Rejected]:
            turn: Turn = given[4]
            tries.extend([1] * (turn.round == number))
            mine = turn.round == number and len(tries) == 1
            return [Rejected("nan", "bad", client=int(turn.clients[0]))] if mine else refusals(*given, **options)

        gate.setattr("tdpfed.server.round.refusals", refused)
        wanted = simulated(case.config, 5)
    asked: list[int] = []

    def lost_once(message: Message) -> Message:
        asked.append(message.metadata.src_node_id)
        return bad(message) if len(asked) == 1 else message

    summary = case.run(case.grid(tamper={k: in_round(number, lost_once) for k in range(NODES)}))
    assert len(set(asked)) == NODES  # the second try has another client
    check_same(case, wanted)
    assert summary["downlink_bytes"] == wanted.ledger.downlink
    case.run(changed={"run.rounds": 7})  # the sessions on disk fit those of the nodes
    assert worst(tmp_path, _advanced(wanted, 2)) == 0


def _advanced(simulation: Simulation, rounds: int) -> Simulation:
    for _ in range(rounds):
        simulation.step()
    return simulation


def test_a_huge_change_is_refused(tmp_path: Path) -> None:
    case = Case(tmp_path, *FEDAVG, "wire.feedback=true", "run.rounds=1")
    form = case.simulation.channel.form
    samples = int(case.simulation.federation.train_size[2])

    def huge(message: Message) -> Message:
        parts = [torch.full((section.length,), 1e6) for section in form.sections]
        data = encode(parts, form, kind="up", round_=1, client=2, samples=samples)
        message.content["wire"] = ArrayRecord({"wire": Array("uint8", (len(data),), envelope.STYPE, data)})
        return message

    case.run(case.grid(tamper={2: huge}))
    assert [(line["client"], line["rule"]) for line in case.lines("refusals.jsonl")] == [(2, "norm")]


# -- restarts and lost copies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("overrides", [(*BOTH, "participation.clients=2"), (*BOTH, "server.optimizer=adam")])
def test_a_killed_server_resumes_to_the_same_bits_and_bytes(
    tmp_path: Path, every: int, overrides: tuple[str, ...]
) -> None:
    case = Case(tmp_path, *overrides, "run.rounds=6", f"checkpoint.every={every}")
    with pytest.raises(Killed):
        case.run(case.grid(tamper={k: stop_at(4) for k in range(NODES)}))
    summary, ledger = case.run(), case.simulation.ledger
    check_same(case, case.simulation)
    assert (summary["uplink_bytes"], summary["downlink_bytes"]) == (ledger.uplink, ledger.downlink)


def test_a_killed_server_knows_which_uploads_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(tmp_path, *FACTORS, "run.rounds=5", "checkpoint.every=1")
    with monkeypatch.context() as gate:
        refusing(gate, 3, 1)
        wanted = simulated(case.config, 5)
    tampered: dict[int, Tamper] = {1: in_round(3, bad), 2: stop_at(4)}
    with pytest.raises(Killed):
        case.run(case.grid(tamper=tampered))
    case.run()
    check_same(case, wanted)


def test_nodes_are_restarted_at_any_time(tmp_path: Path) -> None:
    case = Case(tmp_path, *BOTH, "run.rounds=4")
    grid = case.grid()

    def restarts(message: Message) -> Message:
        fresh = case.grid()  # nothing of the old process but what is on the disk
        grid.contexts, grid.app = fresh.contexts, fresh.app
        return message

    grid.tamper = {0: restarts}
    case.run(grid)
    check_same(case, case.simulation)


def sizes_to(grid: FakeGrid, client: int) -> list[int]:
    told = [(message.metadata.dst_node_id, message.metadata.message_type, message) for message in grid.asked]
    return [envelope.wire_size(message) for node, kind, message in told if (node, kind) == (100 + client, "train")]


def copies(case: Case) -> list[torch.Tensor]:
    found = [kept_by(case, client) for client in range(NODES)]
    return [state[f"{COPY}w"] for state in found if state is not None]


def newest_checkpoint(case: Case) -> State:
    state: State = load_file(max((case.folder / "run" / "checkpoints").glob("*-server.safetensors")))
    return state


def test_a_node_that_was_away_gets_what_it_missed(tmp_path: Path) -> None:
    case = Case(tmp_path, *BOTH, "run.rounds=4")
    grid = case.grid()

    def leaves(message: Message) -> Message:
        grid.offline = {102} if message.metadata.group_id in ("1", "2") else set()
        return message

    grid.tamper = {0: leaves}
    case.run(grid)
    size = down_of(case).form.bytes
    assert sizes_to(grid, 0) == [size] * 4
    assert sizes_to(grid, 2) == [size, 3 * size]
    state = newest_checkpoint(case)
    assert all(torch.equal(copy, state[known_of("w")]) for copy in copies(case))
    assert state[ROUNDS].tolist() == [4, 4, 4]
    assert state[RECENT].numel() <= down_of(case).dense.bytes


def test_a_node_whose_reply_was_lost_skips_what_it_has(tmp_path: Path) -> None:
    case = Case(tmp_path, *BOTH, "run.rounds=4", deadline=0.5)
    grid = case.grid(tamper={1: in_round(2, lambda message: None)})
    case.run(grid)
    size = down_of(case).form.bytes
    assert sizes_to(grid, 1) == [size, size, 2 * size, size]
    assert all(torch.equal(copy, newest_checkpoint(case)[known_of("w")]) for copy in copies(case))


def test_a_node_that_lost_its_disk_gets_the_dense_model(tmp_path: Path) -> None:
    case = Case(tmp_path, *BOTH, "run.rounds=5")
    grid = case.grid()

    def burns(message: Message) -> Message:
        shutil.rmtree(next((tmp_path / "state").glob("*/client-1")))
        return message

    grid.tamper = {1: in_round(2, burns)}
    case.run(grid)
    size, dense = down_of(case).form.bytes, down_of(case).dense.bytes
    assert sizes_to(grid, 1) == [size, size, size, dense, size]
    assert [line["replies"] for line in case.lines("rounds.jsonl")] == [3, 3, 2, 3, 3]
    assert list(case.lines("rounds.jsonl")[2]["lost"]) == ["1"]
    assert all(torch.equal(copy, newest_checkpoint(case)[known_of("w")]) for copy in copies(case))


def test_a_server_without_recent_messages_sends_the_dense_model(tmp_path: Path) -> None:
    case = Case(tmp_path, *BOTH)
    side = Side.of(case.task, case.config, NODES, torch.device("cpu"))
    for remembers in (True, False):
        first = Delivery(side)
        first.begin(side.server, 1)
        server = first.complete(side.server, received=[0], counted=[0])
        tensors, told = first.saved()
        again = Delivery(side)
        again.restore(1, tensors[RECENT] if remembers else None, told)
        again.begin(server, 2)
        assert again.counted == {0: 1}
        size, whole = side.downlink.form.bytes, side.downlink.dense.bytes
        assert [len(again.down(k) or b"") for k in (0, 1)] == [size, 2 * size if remembers else whole]


# -- what is on the disk, and what is refused --------------------------------------------------------------------------


def test_what_a_client_keeps_is_read_back() -> None:
    tensors = {name: torch.randn(3) for name in "abcde"}
    kept = Kept(
        {"theta": tensors["a"]}, {error_of("w"): tensors["b"]}, {error_of("w"): tensors["c"]}, {"w": tensors["d"]}, 7
    )
    again = Kept.of(kept.state)
    assert again == kept
    assert torch.equal(again.resolved(7)[error_of("w")], tensors["b"])
    assert torch.equal(again.resolved(6)[error_of("w")], tensors["c"])
    assert Kept({"theta": tensors["a"]}, round=7).state.keys() == {"theta"}


def test_a_client_that_does_not_upload_keeps_its_error(tmp_path: Path) -> None:
    case = Case(tmp_path, *FACTORS, "participation.clients=1", "participation.train=all", "run.rounds=1")
    case.run()
    held = [kept_by(case, client) or {} for client in range(NODES)]
    (uploaded,) = [state for state in held if f"{LOST}{error_of('w')}" in state]
    assert bool(uploaded[error_of("w")].any())
    assert all(not bool(state[error_of("w")].any()) for state in held if state is not uploaded)


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (("algorithm.name=fedavg_sar", "wire.update=factors"), "wire.update"),
        (("algorithm.name=tdpfed", "wire.update=factors"), "wire.update"),
        (("algorithm.name=tdpfed", "wire.down=factors"), "wire.down"),
        (("algorithm.name=fedavg", "wire.update=factors", "wire.terms=99999"), "wire.terms"),
        (("algorithm.name=tdpfed", "algorithm.aggregation=act", "server.optimizer=adam"), "server.optimizer"),
    ],
)
def test_a_wire_that_does_not_fit_the_method_ends_the_run_before_any_message(
    tmp_path: Path, overrides: tuple[str, ...], field: str
) -> None:
    case = Case(tmp_path, *FEDAVG, "run.rounds=1")
    case.settings |= dict(text.split("=") for text in overrides)
    case.settings = {name: int(v) if str(v).isdigit() else v for name, v in case.settings.items()}
    grid = case.grid()
    with pytest.raises(TDPFedError, match=rf"^{field}: "):
        case.run(grid)
    assert not grid.asked
