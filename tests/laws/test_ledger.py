"""The ledger is the length of real messages, and uploads are what a server would read from them."""

from typing import Any

import pytest
import torch

import small
from tdpfed import Participation, TDPFed, TDPFedError
from tdpfed.core.state import State, wire_entries
from tdpfed.engine.simulation import Simulation
from tdpfed.server.records import Ledger
from tdpfed.wire import Expected, Form, Wire, decode, encode, validate, whole_parts
from tdpfed.wire.forms import dense_bytes

WIRES: dict[str, Wire] = {
    "float32": Wire(), "float16": Wire(codec="float16"), "bfloat16": Wire(codec="bfloat16"), "int8": Wire(codec="int8"),
    "change int4": Wire(codec="int4"), "change int8": Wire(codec="int8", feedback=True),
    "factors int4": Wire(update="factors", terms=1), "factors float32": Wire(update="factors", codec="float32"),
    "factors int8 tensor": Wire(update="factors", codec="int8", kernels="tensor"),
    "top-k int8": Wire(update="top-k", share=0.05), "top-k float32": Wire(update="top-k", codec="float32"),
}  # fmt: skip


def allowed(name: str, wire: Wire) -> bool:
    """Whether a method's uploads may travel in this form."""
    return not (wire.sends_changes if name == "fedavg_sar" else wire.update == "factors" and "tdpfed" in name)


CASES = [
    (name, label)
    for name in sorted(set(small.variants()) - {"local"})
    for label, wire in WIRES.items()
    if allowed(name, wire)
]


def simulation_of(name: str, wire: Wire, **options: Any) -> Simulation:
    data = small.federation(dtype=torch.float32)
    return Simulation(small.convnet(), data, small.variants()[name], seed=3, wire=wire, **options)


def one(state: State, client: int) -> State:
    return {entry: rows[client] for entry, rows in state.items()}


@pytest.mark.parametrize(("name", "label"), CASES)
def test_the_ledger_is_the_length_of_real_messages_and_their_content_is_what_is_aggregated(
    name: str, label: str
) -> None:
    """Uploads of a second round, encoded one client at a time: their bytes, and the bits that the server reads."""
    simulation = simulation_of(name, WIRES[label])
    simulation.step()
    simulation.ledger = Ledger()
    algorithm, channel, known = simulation.algorithm, simulation.channel, simulation.broadcast.known
    samples = simulation.federation.train_size.tolist()
    turn = simulation._turn(2, torch.arange(5))
    going_down = algorithm.broadcast(known, turn)
    outcome = simulation.runner.run(known, simulation.own_rows(turn.clients), turn)
    kept = {entry: rows.clone() for entry, rows in wire_entries(simulation.private).items()}
    start = simulation.uplink.unchanged(known, turn)
    seen, after, refused = simulation.uplink.transmit(outcome.upload, known, kept, turn)
    assert refused == []
    simulation.step()
    for entry, rows in after.items():
        assert torch.equal(simulation.private[entry], rows)
    sent, received = 0, 0
    for k in range(5):
        common: dict[str, Any] = {"round_": 2, "client": k}
        down = Form.whole(algorithm.down())
        parts = whole_parts(one(going_down, k), down, kind="down", seed=3, **common)
        received += len(encode(parts, down, kind="down", samples=0, **common))
        if channel.changes:
            mine = [
                {entry: value[k : k + 1] for entry, value in state.items()} for state in (outcome.upload, start, kept)
            ]
            alone = channel.send(*mine)
            parts = [part[0] for part in alone.parts]
            for entry, value in alone.kept.items():
                assert torch.equal(value[0], after[entry][k])
        else:
            parts = whole_parts(one(outcome.upload, k), channel.form, kind="up", seed=3, **common)
        data = encode(parts, channel.form, kind="up", samples=samples[k], **common)
        sent += len(data)
        expected = Expected(
            kind="up", round=2, form=channel.form, clients=range(5), samples=dict(enumerate(samples)),
            unchanged=one(start, k) if channel.changes else None,
        )  # fmt: skip
        state = validate(decode(data, 10**6), expected)
        assert state.keys() == seen.keys()
        assert all(torch.equal(state[entry], seen[entry][k]) for entry in state)
    assert (simulation.ledger.uplink, simulation.ledger.downlink) == (sent, received)


@pytest.mark.parametrize("wire", [Wire(), Wire(update="factors"), Wire(update="factors", down="factors")], ids=str)
def test_rounds_in_which_everybody_takes_part_cost_the_same(wire: Wire) -> None:
    simulation = simulation_of("fedavg", wire)
    sent, received = [], []
    for _ in range(11):
        up, down = simulation.ledger.uplink, simulation.ledger.downlink
        simulation.step()
        sent.append(simulation.ledger.uplink - up)
        received.append(simulation.ledger.downlink - down)
    assert sent == [5 * simulation.channel.form.bytes] * 11
    assert received == [5 * simulation.downlink.form.bytes] * 11
    assert small.carries(simulation.ledger.uplink, 55, simulation.objective.layout.size) == (wire == Wire())


@pytest.mark.parametrize("participation", [Participation(2), Participation(3, dropout=0.4), Participation(1, "all")])
def test_a_client_that_missed_rounds_costs_what_it_missed_or_the_dense_model(participation: Participation) -> None:
    """Held against a loop over clients that remembers who received what."""
    simulation = simulation_of(
        "fedavg", Wire(down="factors", down_terms=2, down_codec="float32"), participation=participation
    )
    each, dense = simulation.downlink.form.bytes, dense_bytes(simulation.objective.layout)
    assert 2 * each < dense < 5 * each  # both ways occur
    newest, expected, ways = dict.fromkeys(range(5), 0), 0, set()
    for number in range(1, 25):
        turn, _ = simulation.next_turn()
        for client in turn.clients.tolist():
            missed = number - newest[client]
            ways.add(missed * each < dense)
            expected += min(missed * each, dense)
            newest[client] = number
        simulation.step()
        assert simulation.ledger.downlink == expected
    assert ways == ({True} if participation.train == "all" else {True, False})


def test_int8_uploads_of_tdpfed_at_compression_2_are_seven_times_smaller_than_dense_ones() -> None:
    from tdpfed.data import make_federation
    from tdpfed.models import build

    data = make_federation("synthetic", options={"dimension": 784}, clients=3)
    rates = []
    for wire in (Wire(codec="int8"), Wire(codec="int4"), Wire(codec="int8", feedback=True)):
        algorithm = TDPFed(tau=1, s=1, s_prime=1)
        simulation = Simulation(build("dnn", (784,), 10, seed=0), data, algorithm, wire=wire)
        simulation.step()
        assert simulation.compression_rate is not None
        rates.append(simulation.compression_rate)
    assert rates[0] > 7
    assert rates[1] > 12
    assert rates[2] > 7


@pytest.mark.parametrize("label", ["int8", "change int8", "change int4", "top-k float32"])
def test_a_codec_costs_little_accuracy_and_is_reproducible(label: str) -> None:
    exact, rounded, again = (simulation_of("tdpfed", wire) for wire in (Wire(), WIRES[label], WIRES[label]))
    for _ in range(3):
        for simulation in (exact, rounded, again):
            simulation.step()
    assert small.equal(rounded, again)
    gap = (exact.server["factors"] - rounded.server["factors"]).norm() / exact.server["factors"].norm()
    assert 0 < float(gap) < (0.3 if label.startswith("top-k") else 0.05)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(TDPFedError, match=r"codec: 'int9' given, must be .*; did you mean 'int8'"):
        Wire(codec="int9")  # type: ignore[arg-type]
