"""A server under fire: no malformed message gets through, and none changes what the honest ones add up to."""

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import get_args

import pytest
import torch
from faults import FAULTS, Scene, duplicate
from forge import CODECS
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import small
from tdpfed.algorithms import Algorithm, FedAvg, PFedMe, TDPFed
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.wire import Codec, Expected, Rejected, Rule, decode, encode, lossy, validate

ALGORITHMS: dict[str, Algorithm] = {
    "tdpfed": TDPFed(**small.TDPFED),
    "pfedme": PFedMe(**small.COMMON),
    "fedavg": FedAvg(**small.COMMON),
}
CLIENTS, ROUND, SEED, LIMIT = 5, 2, 7, 8192


@dataclass
class Server:
    """A server of the package's own parts: the gate, a place for what passed it, and the algorithm's average."""

    simulation: Simulation
    want: Expected
    accepted: dict[int, State] = field(default_factory=dict)

    def receive(self, data: bytes) -> None:
        message = decode(data, LIMIT)
        self.accepted[message.client] = validate(message, replace(self.want, seen=self.accepted))

    def aggregate(self) -> State:
        clients = sorted(self.accepted)
        uploads = {name: torch.stack([self.accepted[client][name] for client in clients]) for name in self.want.lengths}
        return mean_of(self.simulation, uploads, torch.tensor(clients))


def mean_of(simulation: Simulation, uploads: State, clients: torch.Tensor) -> State:
    samples, turn = simulation.federation.train_size[clients], Turn(0, ROUND, clients)
    return simulation.server_round.aggregate(simulation.server, uploads, samples, turn)


@cache
def scenario(name: str, codec: Codec) -> tuple[Simulation, Expected, list[bytes], State]:
    """Return a simulation after a round, what its server expects next, the honest messages and their aggregate."""
    simulation = small.train(ALGORITHMS[name], 1, data=small.federation(CLIENTS, dtype=torch.float32))
    everybody = torch.arange(CLIENTS)
    uploads = simulation.runner.run(simulation.server, simulation.private, Turn(0, ROUND, everybody)).upload
    layouts = layouts_of(simulation.algorithm.up())
    samples = dict(enumerate(simulation.federation.train_size.tolist()))
    messages = [
        encode(
            {entry: rows[client] for entry, rows in uploads.items()}, layouts,
            kind="up", round_=ROUND, client=client, samples=samples[client], codec=codec, seed=SEED,
        )
        for client in range(CLIENTS)
    ]  # fmt: skip
    want = Expected(
        kind="up", round=ROUND, lengths={entry: rows.shape[-1] for entry, rows in uploads.items()}, layouts=layouts,
        codec=codec, clients=range(CLIENTS), samples=samples,
    )  # fmt: skip
    seen = lossy(uploads, layouts, codec, SEED, ROUND, everybody)
    return simulation, want, messages, mean_of(simulation, seen, everybody)


def refuse(server: Server, data: bytes, rules: set[str]) -> str:
    """Let the server receive a malformed message; it must be refused by one of the rules, in few plain words."""
    before = dict(server.accepted)
    with pytest.raises(Rejected) as caught:
        server.receive(data)
    refusal = caught.value
    assert isinstance(refusal, TDPFedError)
    assert refusal.rule in rules
    assert refusal.rule in get_args(Rule)
    assert str(refusal).isascii()
    assert len(str(refusal)) < 500
    assert server.accepted == before
    return refusal.rule


@pytest.mark.parametrize("total", [5_000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_thousands_of_malformed_messages_are_refused_and_leave_the_aggregate_as_it_is(
    name: str, codec: Codec, total: int
) -> None:
    """Each example is a round: five honest messages in any order, and between them one message with every fault."""
    simulation, want, messages, honest = scenario(name, codec)
    refused: Counter[str] = Counter()
    examples = -(-total // (len(ALGORITHMS) * len(CODECS) * len(FAULTS)))

    @seed(zlib.crc32(f"{name} {codec}".encode()))
    @settings(max_examples=examples, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(st.data())
    def rounds(data: st.DataObject) -> None:
        server = Server(simulation, want)
        order = data.draw(st.permutations(range(CLIENTS)))
        times = [data.draw(st.integers(fault is duplicate, CLIENTS)) for fault in FAULTS]
        for time in range(CLIENTS + 1):
            replays = [messages[client] for client in order[:time]]
            for fault in (fault for fault, when in zip(FAULTS, times, strict=True) if when == time):
                victim = data.draw(st.sampled_from(order[time:] or order))
                scene = Scene(messages[victim], replace(want, seen=server.accepted), LIMIT, replays)
                spoilt, rules = fault(data.draw, scene)
                refused[refuse(server, spoilt, rules if time < CLIENTS else rules | {"duplicate"})] += 1
            if time < CLIENTS:
                server.receive(messages[order[time]])
        result = server.aggregate()
        assert result.keys() == honest.keys()
        assert all(torch.equal(value, honest[entry]) for entry, value in result.items())

    rounds()
    assert refused.total() * len(ALGORITHMS) * len(CODECS) >= total
    assert refused.keys() == set(get_args(Rule)) - {"gauge"}
