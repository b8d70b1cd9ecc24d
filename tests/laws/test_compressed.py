"""Runs whose changes travel in terms, few bits or few values: dense runs to rounding, and the same however computed."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed import FedAvg, Participation
from tdpfed.core.state import State, wire_entries
from tdpfed.engine.attacks import Attack
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.server.privacy import Privacy
from tdpfed.server.step import ServerStep
from tdpfed.wire import Expected, Wire, decode, encode, validate
from tdpfed.wire.downlink import ROUNDS, known_of

WIRES: dict[str, Wire] = {
    "factors": Wire(update="factors", terms=2),
    "factors both ways": Wire(update="factors", terms=1, down="factors", down_terms=1, down_codec="int4"),
    "factors of kernels": Wire(update="factors", codec="float32", compression=2, kernels="tensor", down="factors"),
    "top-k": Wire(update="top-k", share=0.1),
    "int4": Wire(codec="int4"),
}
SOME = Participation(4, "all", dropout=0.3)


def run(wire: Wire, rounds: int = 3, name: str = "fedavg", **options: Any) -> Simulation:
    options = {"data": small.federation(7, dtype=torch.float32), "seed": 3, "participation": SOME, **options}
    return small.train(small.variants()[name], rounds, model="conv", wire=wire, **options)


EXACT: dict[str, Wire] = {
    "enough terms": Wire(update="factors", terms=12, codec="float32"),
    "enough terms of kernels": Wire(update="factors", terms=12, codec="float32", kernels="tensor"),
    "enough terms both ways": Wire(
        update="factors", terms=12, codec="float32", down="factors", down_terms=12, down_codec="float32"
    ),
    "all values": Wire(update="top-k", share=1.0, codec="float32"),
    "changes": Wire(codec="float32", feedback=True),
}


@pytest.mark.parametrize("name", ["fedavg", "pfedme", "perfedavg", "tdpfed", "tdpfed act"])
@pytest.mark.parametrize("form", EXACT)
def test_enough_in_float32_is_the_dense_run_to_rounding(name: str, form: str) -> None:
    if "tdpfed" in name and "terms" in form:
        return  # factors are not factorized again
    dense, own = run(Wire(), 2, name), run(EXACT[form], 2, name)
    for entry, value in dense.server.items():
        torch.testing.assert_close(own.server[entry], value, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(own.personalized(), dense.personalized(), rtol=1e-4, atol=1e-5)
    for entry, value in wire_entries(own.private).items():
        if entry.endswith(".error"):
            assert float(value.abs().max()) < 1e-5


@pytest.mark.parametrize("form", WIRES)
def test_chunks_slices_and_places_make_no_difference_to_the_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(WIRES[form])
    for options in ({"chunk": 1}, {"chunk": 3}, {"state": "mmap"}):
        assert small.equal(whole, run(WIRES[form], **options))
    for values in (1, 2000):  # a client at a time, and a few
        monkeypatch.setattr("tdpfed.engine.uplink.VALUES_AT_ONCE", values)
        assert small.equal(whole, run(WIRES[form]))


@pytest.mark.parametrize("form", WIRES)
def test_runs_together_equal_runs_alone(form: str) -> None:
    def begun(seed: int) -> Simulation:
        return Simulation(
            small.mlp(seed), small.federation(seed=seed), FedAvg(**small.COMMON), seed=seed, wire=WIRES[form],
            server_step=ServerStep(optimizer="sgd", momentum=0.5),
        )  # fmt: skip

    ensemble, alone = Ensemble([begun(0), begun(1)]), [begun(0), begun(1)]
    for _ in range(3):
        assert ensemble.step() == [None, None]
        for simulation in alone:
            simulation.step()
    assert all(small.equal(*pair) for pair in zip(ensemble.simulations, alone, strict=True))


@pytest.mark.parametrize("form", WIRES)
def test_a_client_that_never_took_part_has_the_common_state(form: str) -> None:
    simulation = run(WIRES[form], 2, participation=Participation(2))
    idle = [k for k in range(7) if not simulation.store.touched[k]]
    assert idle
    for entry, value in wire_entries(simulation.private).items():
        assert all(torch.equal(value[k], simulation.channel.start(value[0])[entry]) for k in idle)


# What the server sends


DOWN = {codec: Wire(down="factors", down_terms=2, down_codec=codec) for codec in ("float32", "float16", "int8", "int4")}


@pytest.mark.parametrize("kernels", ["matrix", "tensor"])
@pytest.mark.parametrize("codec", DOWN)
def test_clients_read_from_messages_what_the_simulation_computes_with(codec: str, kernels: Any) -> None:
    """One that composes every message since the beginning, also those it missed, has the server's memory to the bit."""
    wire = replace(DOWN[codec], kernels=kernels)
    simulation = run(wire, 0)
    mine: State = {"w": simulation.server["w"].clone()}
    for number in range(1, 7):
        sent, form = simulation.broadcast, simulation.downlink.form
        data = encode([part[0] for part in sent.parts], form, kind="down", round_=number, client=4, samples=0)
        assert len(data) == form.bytes
        want = Expected(kind="down", round=number, form=form, clients={4}, unchanged=mine)
        mine = validate(decode(data, 10**5), want)
        assert torch.equal(mine["w"], sent.known["w"])
        simulation.step()
        assert torch.equal(simulation.server[known_of("w")], mine["w"])


@pytest.mark.parametrize("codec", DOWN)
def test_the_servers_average_is_of_changes_and_loses_nothing(codec: str) -> None:
    """Its step is the mean of what clients did to the model they know, whatever of it they do not know yet."""
    simulation = run(DOWN[codec], 3, participation=Participation())
    before, known = simulation.server["w"].clone(), simulation.broadcast.known["w"]
    assert float((before - known).abs().max()) > 1e-5
    simulation.step()
    assert simulation._trained is not None
    uploads = simulation._trained[1].upload["w"]
    share = simulation.federation.train_size / simulation.federation.train_size.sum()
    expected = before + share.float() @ (uploads - known)
    torch.testing.assert_close(simulation.server["w"], expected, rtol=1e-5, atol=1e-6)


def test_what_clients_know_follows_the_servers_model() -> None:
    """A server that stands still is known in the end; one that moves is known nearly."""
    simulation = run(DOWN["int4"], 10)
    server, gaps = simulation.server, []
    for _ in range(60):
        sent = simulation.downlink.send(server)
        server = server | sent.memory
        gaps.append(float((server["w"] - sent.known["w"]).norm()))
    assert gaps[-1] < 1e-3 * gaps[0]
    assert all(late <= early * 1.00001 for early, late in pairwise(gaps))


def test_who_received_which_round_is_remembered() -> None:
    simulation, newest = run(DOWN["int8"], 0, participation=Participation(3, dropout=0.3)), [0] * 7
    for number in range(1, 8):
        for client in simulation.next_turn()[0].clients.tolist():
            newest[client] = number
        simulation.step()
        assert simulation.server[ROUNDS].tolist() == newest


def test_the_global_model_is_the_servers_not_what_clients_know() -> None:
    simulation = run(DOWN["int4"], 3)
    assert simulation.global_model() is simulation.server["w"]
    assert not torch.equal(simulation.server["w"], simulation.broadcast.known["w"])


@pytest.mark.parametrize(
    ("name", "why"),
    [("fedavg_sar", "sends other values to each client"), ("tdpfed", "sends CP factors"), ("tdpfed act", "CP factors")],
)
def test_methods_without_one_message_for_all_are_refused(name: str, why: str) -> None:
    with pytest.raises(TDPFedError, match=rf"wire\.down: 'factors' given, must be 'dense': .*{why}") as error:
        run(Wire(down="factors"), 0, name)
    assert (error.value.field, error.value.value) == ("wire.down", "factors")
    with pytest.raises(TDPFedError, match=r"wire\.down_terms: 13 given, must be at most 12"):
        run(Wire(down="factors", down_terms=13), 0)


# With the rest


def moved(simulation: Simulation, start: Tensor) -> float:
    return float((simulation.server["w"] - start).norm())


@pytest.mark.parametrize("form", WIRES)
def test_privacy_bounds_the_composed_change(form: str) -> None:
    options: dict[str, Any] = {"participation": Participation(), "privacy": Privacy(0.01, 1e-3)}
    algorithm = FedAvg(**small.COMMON, weights="uniform")
    data = small.federation(7, dtype=torch.float32)
    start = small.train(algorithm, 0, data=data, wire=WIRES[form]).server["w"]
    bounded = small.train(algorithm, 1, data=data, wire=WIRES[form], **options)
    free = small.train(algorithm, 1, data=data, wire=WIRES[form])
    assert 0 < moved(bounded, start) <= 0.01 * 1.01
    assert moved(free, start) > 0.05


@pytest.mark.parametrize("form", ["factors", "factors both ways"])
def test_there_is_no_gauge_to_attack(form: str) -> None:
    with pytest.raises(TDPFedError, match=r"robust\.attack: 'gauge' given, must be another"):
        run(WIRES[form], 0, attack=Attack("gauge", 0.2))


@pytest.mark.parametrize("form", WIRES)
def test_a_long_run_learns_what_a_dense_one_learns(form: str) -> None:
    """With drop-outs, over rounds enough for errors to matter: finite, and nearly as good."""
    dense, own = (run(wire, 60, participation=Participation(dropout=0.3)) for wire in (Wire(), WIRES[form]))
    assert all(bool(value.isfinite().all()) for value in (*own.server.values(), *own.private.values()))
    losses = [simulation.minibatch_loss for simulation in (dense, own)]
    assert losses[0] is not None
    assert losses[1] is not None
    assert losses[1] < losses[0] + 0.15
    assert own.ledger.uplink < 0.6 * dense.ledger.uplink
