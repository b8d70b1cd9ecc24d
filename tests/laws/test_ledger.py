"""The ledger is the length of real messages, and uploads are what a server would read from them."""

from typing import Any

import pytest
import torch

import small
from tdpfed import FedAvg, TDPFedError
from tdpfed.core.state import layouts_of
from tdpfed.engine.runners import rows_of
from tdpfed.engine.simulation import Simulation
from tdpfed.server.records import Ledger
from tdpfed.wire import Expected, decode, encode, validate

CODECS = ("float32", "float16", "bfloat16", "int8")


def simulation_of(name: str, codec: Any) -> Simulation:
    data = small.federation(dtype=torch.float32)
    return Simulation(small.mlp(), data, small.variants()[name], seed=3, codec=codec)


@pytest.mark.parametrize("number", [1, 10])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", sorted(set(small.variants()) - {"local"}))
def test_the_ledger_is_the_length_of_real_messages_and_their_content_is_what_is_aggregated(
    name: str, codec: Any, number: int
) -> None:
    simulation = simulation_of(name, codec)
    if number > 1:  # after one whose number has a digit less, so that what is known of that must not count
        simulation.round = number - 2
        simulation.step()
        simulation.ledger = Ledger()
    going_down, coming_up = (
        layouts_of(entries) for entries in (simulation.algorithm.down(), simulation.algorithm.up())
    )
    samples = simulation.federation.train_size.tolist()
    turn = simulation._turn(number, torch.arange(5))
    down = simulation.algorithm.broadcast(simulation.server, turn)
    outcome = simulation.runner.run(simulation.server, rows_of(simulation.private, turn.clients), turn)
    seen = simulation.uplink.transmit(outcome.upload, simulation.server, turn)
    simulation.step()
    sent, received = 0, 0
    for k in range(5):
        common: dict[str, Any] = {"round_": number, "client": k, "seed": 3}
        message = encode(
            {entry: rows[k] for entry, rows in down.items()}, going_down,
            kind="down", samples=0, codec="float32", **common,
        )  # fmt: skip
        received += len(message)
        upload = {entry: rows[k] for entry, rows in outcome.upload.items()}
        data = encode(upload, coming_up, kind="up", samples=samples[k], codec=codec, **common)
        sent += len(data)
        expected = Expected(
            kind="up", round=number, lengths={entry: len(row) for entry, row in upload.items()}, layouts=coming_up,
            codec=codec, clients=range(5), samples=dict(enumerate(samples)),
        )  # fmt: skip
        state = validate(decode(data, 10**6), expected)
        assert all(torch.equal(state[entry], seen[entry][k]) for entry in state)
    assert (simulation.ledger.uplink, simulation.ledger.downlink) == (sent, received)


def test_rounds_in_which_everybody_takes_part_differ_by_the_digits_of_their_number_alone() -> None:
    simulation = Simulation(small.mlp(), small.federation(), FedAvg(tau=1), seed=3)
    sent, received = [], []
    for _ in range(11):
        up, down = simulation.ledger.uplink, simulation.ledger.downlink
        simulation.step()
        sent.append(simulation.ledger.uplink - up)
        received.append(simulation.ledger.downlink - down)
    clients, values = simulation.federation.clients, simulation.objective.layout.size
    for each in (sent, received):
        assert small.carries(each[0], clients, values)
        assert each == [each[0]] * 9 + [each[0] + clients] * 2  # a digit more in every header


def test_int8_uploads_of_tdpfed_at_compression_2_are_seven_times_smaller_than_dense_ones() -> None:
    from tdpfed import TDPFed
    from tdpfed.data import make_federation
    from tdpfed.models import build

    data = make_federation("synthetic", options={"dimension": 784}, clients=3)
    simulation = Simulation(build("dnn", (784,), 10, seed=0), data, TDPFed(tau=1, s=1, s_prime=1), codec="int8")
    simulation.step()
    assert simulation.compression_rate is not None
    assert simulation.compression_rate > 7


def test_a_codec_costs_little_accuracy_and_is_reproducible() -> None:
    exact, rounded, again = (simulation_of("tdpfed", codec) for codec in ("float32", "int8", "int8"))
    for _ in range(3):
        for simulation in (exact, rounded, again):
            simulation.step()
    assert small.equal(rounded, again)
    gap = (exact.server["factors"] - rounded.server["factors"]).norm() / exact.server["factors"].norm()
    assert 0 < float(gap) < 0.02


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(TDPFedError, match="codec: unknown 'int9', did you mean 'int8'"):
        simulation_of("tdpfed", "int9")
