"""A server under fire: no malformed message gets through, and none changes what the honest ones add up to."""

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import get_args

import pytest
import torch
from faults import FAULTS, Scene, duplicate, rules_of
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import small
from tdpfed.algorithms import Algorithm, FedAvg, PFedMe, TDPFed
from tdpfed.core.state import State, Turn
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.wire import Expected, Rejected, Rule, Wire, decode, encode, validate, whole_parts

pytestmark = pytest.mark.hostile

ALGORITHMS: dict[str, Algorithm] = {
    "tdpfed": TDPFed(**small.TDPFED),
    "pfedme": PFedMe(**small.COMMON),
    "fedavg": FedAvg(**small.COMMON),
}
DENSE = {f"dense {codec}": Wire(codec=codec) for codec in ("float32", "float16", "bfloat16", "int8")}
CHANGES = {
    "change int4": Wire(codec="int4"),
    "change int8": Wire(codec="int8", feedback=True),
    "top-k int8": Wire(update="top-k", share=0.1),
    "top-k float32": Wire(update="top-k", codec="float32"),
}
FACTORS = {
    "factors int4": Wire(update="factors", terms=2),
    "factors float32": Wire(update="factors", terms=1, codec="float32"),
    "factors int8, kernels": Wire(update="factors", codec="int8", kernels="tensor"),
    "factors, down too": Wire(update="factors", down="factors", down_terms=1),
}
CASES = [
    (name, label, "conv" if "kernels" in label else "dense", wire)
    for name, algorithm in ALGORITHMS.items()
    for label, wire in (DENSE | CHANGES | ({} if name == "tdpfed" else FACTORS)).items()
]
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
        uploads = {
            name: torch.stack([self.accepted[client][name] for client in clients]) for name in self.want.form.entries
        }
        return mean_of(self.simulation, uploads, torch.tensor(clients))


def mean_of(simulation: Simulation, uploads: State, clients: torch.Tensor) -> State:
    samples, turn = simulation.federation.train_size[clients], Turn(SEED, ROUND, clients)
    for name, difference in simulation.downlink.difference(simulation.server, simulation.broadcast.known).items():
        uploads = uploads | {name: uploads[name] + difference}
    return simulation.server_round.aggregate(simulation.server, uploads, samples, turn)


@cache
def scenario(name: str, model: str, wire: Wire) -> tuple[Simulation, Expected, list[bytes], State]:
    """Return a simulation after a round, what its server expects next, the honest messages and their aggregate."""
    data = small.federation(CLIENTS, dtype=torch.float32)
    simulation = small.train(ALGORITHMS[name], 1, model=model, data=data, seed=SEED, wire=wire)
    channel, turn = simulation.channel, Turn(SEED, ROUND, torch.arange(CLIENTS))
    known, form = simulation.broadcast.known, simulation.channel.form
    uploads = simulation.runner.run(known, simulation.own_rows(turn.clients), turn).upload
    kept = {entry: rows for entry, rows in simulation.private.items() if entry.startswith("wire.")}
    start = simulation.uplink.unchanged(known, turn)
    samples = dict(enumerate(simulation.federation.train_size.tolist()))
    messages = []
    for client in range(CLIENTS):
        if channel.changes:  # one client at a time, as a deployment does
            own = [
                {entry: rows[client : client + 1] for entry, rows in state.items()} for state in (uploads, start, kept)
            ]
            parts = [part[0] for part in channel.send(*own).parts]
        else:
            state = {entry: rows[client] for entry, rows in uploads.items()}
            parts = whole_parts(state, form, kind="up", round_=ROUND, client=client, seed=SEED)
        messages.append(encode(parts, form, kind="up", round_=ROUND, client=client, samples=samples[client]))
    unchanged = {entry: rows[0] for entry, rows in start.items()} if channel.changes else None
    want = Expected(
        kind="up", round=ROUND, form=form, clients=range(CLIENTS), samples=samples, unchanged=unchanged
    )  # fmt: skip
    seen, _, refused = simulation.uplink.transmit(uploads, known, kept, turn)
    assert refused == []
    return simulation, want, messages, mean_of(simulation, seen, turn.clients)


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


@pytest.mark.parametrize("total", [5_000, pytest.param(60_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "label", "model", "wire"), CASES, ids=lambda value: str(value)[:30])
def test_thousands_of_malformed_messages_are_refused_and_leave_the_aggregate_as_it_is(
    name: str, label: str, model: str, wire: Wire, total: int
) -> None:
    """Each example is a round: five honest messages in any order, and between them one message with every fault."""
    simulation, want, messages, honest = scenario(name, model, wire)
    refused: Counter[str] = Counter()
    sure = 19  # faults that every form can have
    examples = -(-total // (len(CASES) * sure))

    @seed(zlib.crc32(f"{name} {label}".encode()))
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
                case = fault(data.draw, scene)
                if case is not None:
                    spoilt, rules = case
                    refused[refuse(server, spoilt, rules if time < CLIENTS else rules | {"duplicate"})] += 1
            if time < CLIENTS:
                server.receive(messages[order[time]])
        result = server.aggregate()
        assert result.keys() == honest.keys()
        assert all(torch.equal(value, honest[entry]) for entry, value in result.items())

    rounds()
    assert refused.total() >= examples * sure
    assert refused.keys() == rules_of(want)
