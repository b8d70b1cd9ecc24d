"""The ledger is the length of real messages, and uploads are what a server would read from them."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed import FedAvg, TDPFedError
from tdpfed.algorithms.base import Turn
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
    layouts, samples = simulation.algorithm.layouts, simulation.federation.train_size.tolist()
    turn = simulation._turn(number, torch.arange(5))
    down = simulation.algorithm.broadcast(simulation.server, turn)
    outcome = simulation.runner.run(simulation.server, rows_of(simulation.private, turn.clients), turn)
    seen = simulation.uplink.travel(outcome.upload, simulation.server, turn)
    simulation.step()
    sent, received = 0, 0
    for k in range(5):
        common: dict[str, Any] = {"round_": number, "client": k, "seed": 3}
        message = encode(
            {entry: rows[k] for entry, rows in down.items()}, {entry: layouts[entry] for entry in down},
            kind="down", samples=0, codec="float32", **common,
        )  # fmt: skip
        received += len(message)
        mine = {entry: layouts[entry] for entry in outcome.upload}
        upload = {entry: rows[k] for entry, rows in outcome.upload.items()}
        data = encode(upload, mine, kind="up", samples=samples[k], codec=codec, **common)
        sent += len(data)
        expected = Expected(
            kind="up", round=number, lengths={entry: len(row) for entry, row in upload.items()}, layouts=mine,
            codec=codec, clients=range(5), samples=dict(enumerate(samples)),
        )  # fmt: skip
        state = validate(decode(data, 10**6), expected)
        assert all(torch.equal(state[entry], seen[entry][k]) for entry in state)
    assert (simulation.ledger.uplink, simulation.ledger.downlink) == (sent, received)


@dataclass(frozen=True, kw_only=True)
class HeadInEvenRounds(FedAvg):
    """Sends all values in odd rounds, and the last three in even ones."""

    def update(self, message: Any, private: Any, batches: Any, grad: Any, turn: Turn) -> Any:
        kept, upload, metrics = super().update(message, private, batches, grad, turn)
        return kept, upload if turn.round % 2 else {"w": upload["w"][..., -3:]}, metrics

    def aggregate(self, server: Any, uploads: Any, weights: Tensor, turn: Turn, average: Any) -> Any:
        return server


def test_rounds_in_which_everybody_takes_part_are_counted_by_what_is_sent() -> None:
    simulation = Simulation(small.mlp(), small.federation(), HeadInEvenRounds(tau=1), seed=3)
    sent = []
    for _ in range(11):
        before = simulation.ledger.uplink
        simulation.step()
        sent.append(simulation.ledger.uplink - before)
    clients, values = simulation.federation.clients, simulation.objective.layout.size
    assert sent[0] - sent[1] >= clients * 4 * (values - 3)
    assert sent[:9] == [sent[0], sent[1]] * 4 + [sent[0]]
    assert sent[9:] == [sent[1] + clients, sent[0] + clients]  # a digit more in every header


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
