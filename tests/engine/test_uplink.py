"""The path of simulated uploads to the server: attackers' own rows alone, then the form, and what clients keep."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed import Local, Participation
from tdpfed.algorithms import Algorithm
from tdpfed.config.loading import load_config
from tdpfed.core.state import State, Turn, layouts_of, wire_entries
from tdpfed.engine.attacks import Attack, attack, attackers
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.uplink import Uplink
from tdpfed.errors import TDPFedError
from tdpfed.runs.prepare import prepare
from tdpfed.server.robust import Rule
from tdpfed.wire import PLAIN, Codec, Rejected, Wire, lossy
from tdpfed.wire.channel import error_of
from tdpfed.wire.forms import LARGEST_CHANGE

SOME = torch.tensor([1, 2, 5, 6, 8])
NAMES = ["fedavg", "fedavg_sar", "tdpfed", "tdpfed act"]
CHANGES = {
    "factors": Wire(update="factors", terms=1),
    "top-k": Wire(update="top-k", share=0.1),
    "int4": Wire(codec="int4"),
}


def sent(algorithm: Algorithm, wire: Wire = PLAIN) -> tuple[Simulation, State, State, Turn]:
    """Return a simulation of ten clients after a round, what some of them upload in the next, and what they keep."""
    simulation = small.train(algorithm, 1, data=small.federation(10, dtype=torch.float32), wire=wire)
    turn = Turn(0, 2, SOME)
    uploads = simulation.runner.run(simulation.broadcast.known, simulation.own_rows(SOME), turn).upload
    kept = simulation.store.rows(SOME, tuple(wire_entries(simulation.private)))
    return simulation, uploads, kept, turn


def transmitted(simulation: Simulation, uplink: Uplink, uploads: State, kept: State, turn: Turn) -> State:
    arrived, _, refused = uplink.transmit(uploads, simulation.broadcast.known, kept, turn)
    assert refused == []
    return arrived


@pytest.mark.parametrize("name", NAMES)
def test_without_attack_and_form_uploads_are_passed_on_as_they_are(name: str) -> None:
    simulation, uploads, kept, turn = sent(small.variants()[name])
    assert kept == {}
    assert transmitted(simulation, simulation.uplink, uploads, kept, turn) is uploads


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_attackers_rows_are_replaced_first_and_all_are_rounded_then(name: str, codec: Codec) -> None:
    simulation, uploads, kept, turn = sent(small.variants()[name], Wire(codec=codec))
    bad = spoilt(simulation, uploads, turn)
    uplink = replace(simulation.uplink, attack=Attack("sign-flip", 0.4, 3.0))
    arrived = transmitted(simulation, uplink, uploads, kept, turn)
    expected = bad if codec == "float32" else lossy(bad, layouts_of(simulation.algorithm.up()), codec, 0, 2, SOME)
    assert arrived.keys() == uploads.keys()
    assert all(torch.equal(value, expected[entry]) for entry, value in arrived.items())


@pytest.mark.parametrize("form", CHANGES)
@pytest.mark.parametrize("name", ["fedavg", "tdpfed", "tdpfed act"])
def test_attackers_rows_are_replaced_first_and_their_changes_compressed_then(name: str, form: str) -> None:
    if form == "factors" and name != "fedavg":
        return
    simulation, uploads, kept, turn = sent(small.variants()[name], CHANGES[form])
    bad = spoilt(simulation, uploads, turn)
    uplink = replace(simulation.uplink, attack=Attack("sign-flip", 0.4, 3.0))
    arrived = transmitted(simulation, uplink, uploads, kept, turn)
    expected = transmitted(simulation, simulation.uplink, bad, kept, turn)
    assert all(torch.equal(value, expected[entry]) for entry, value in arrived.items())


def spoilt(simulation: Simulation, uploads: State, turn: Turn) -> State:
    """Return the uploads with attackers' rows flipped by hand."""
    algorithm, hostile = simulation.algorithm, attackers(0, 10, 0.4)[SOME]
    assert 0 < int(hostile.sum()) < len(SOME)
    message = algorithm.broadcast(simulation.server, turn)
    bad = attack("sign-flip", uploads, algorithm.unchanged(message), hostile, turn, strength=3.0)
    for entry, value in bad.items():
        torch.testing.assert_close(value[hostile], (4 * message[entry] - 3 * uploads[entry])[hostile])
        assert torch.equal(value[~hostile], uploads[entry][~hostile])
    return bad


# What clients keep


@pytest.mark.parametrize("form", CHANGES)
def test_what_is_sent_and_what_is_left_are_what_was_meant(form: str) -> None:
    simulation, uploads, kept, turn = sent(small.variants()["fedavg"], CHANGES[form])
    arrived, after, _ = simulation.uplink.transmit(uploads, simulation.broadcast.known, kept, turn)
    server, error = simulation.server["w"], error_of("w")
    assert float(kept[error].abs().max()) > 0
    torch.testing.assert_close(
        arrived["w"] - server + after[error], uploads["w"] - server + kept[error], rtol=1e-5, atol=1e-7
    )
    assert not torch.equal(arrived["w"], uploads["w"])


@pytest.mark.parametrize("form", CHANGES)
def test_a_refused_upload_loses_nothing(form: str) -> None:
    """Its change is added to the error, so that it travels with the next; the others keep what they had."""
    simulation, uploads, kept, turn = sent(small.variants()["fedavg"], CHANGES[form])
    known, lost = simulation.broadcast.known, torch.tensor([False, True, False, False, True])
    arrived, after, _ = simulation.uplink.transmit(uploads, known, kept, turn)
    returned = simulation.uplink.returned(after, arrived, known, turn, lost)
    change, error = uploads["w"] - known["w"], error_of("w")
    torch.testing.assert_close(returned[error][lost], (change + kept[error])[lost], rtol=1e-5, atol=1e-7)
    for name, value in returned.items():
        assert torch.equal(value[~lost], after[name][~lost])
    assert simulation.uplink.returned(after, arrived, known, turn, torch.zeros(5, dtype=torch.bool)) is after


def honest_sums(simulation: Simulation, refused: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Step once; return by client what was meant (trained plus left before) and what is left, ``(K, P)`` each."""
    before, known = simulation.private[error_of("w")].clone(), simulation.broadcast.known["w"].clone()
    simulation.step()
    assert [one.client for one in simulation.refused] == list(refused)
    return simulation.personalized() - known + before, simulation.private[error_of("w")]


@pytest.mark.parametrize("form", CHANGES)
def test_in_a_run_a_client_whose_upload_is_refused_keeps_all_of_its_change(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = small.train(small.variants()["fedavg"], 1, data=small.federation(dtype=torch.float32),
                             wire=CHANGES[form])  # fmt: skip
    meant, left = honest_sums(simulation, [])
    assert bool(((meant - left).abs().sum(-1) > 0).all())
    monkeypatch.setattr("tdpfed.server.round.refusals", lambda *_, **__: [Rejected("gauge", "for a test", client=3)])
    meant, left = honest_sums(simulation, [3])
    for client in range(5):
        same = torch.allclose(meant[client], left[client], rtol=1e-5, atol=1e-7)
        assert same == (client == 3)


@pytest.mark.parametrize("form", CHANGES)
def test_a_client_that_drops_out_or_does_not_upload_keeps_what_it_had(form: str) -> None:
    simulation = small.train(
        small.variants()["fedavg"], 2, data=small.federation(8, dtype=torch.float32), wire=CHANGES[form],
        participation=Participation(4, "all", dropout=0.5), seed=2,
    )  # fmt: skip
    turn, reported = simulation.next_turn()
    senders = turn.clients[reported].tolist()
    assert 0 < len(senders) < len(turn.clients) < 8  # some sent, some only trained, some dropped out
    before = {name: value.clone() for name, value in wire_entries(simulation.private).items()}
    simulation.step()
    for client in range(8):
        same = all(torch.equal(simulation.private[name][client], value[client]) for name, value in before.items())
        assert same == (client not in senders)


# Changes that are too large


def test_a_change_far_beyond_training_is_refused_as_a_deployment_refuses_it() -> None:
    wire = CHANGES["factors"]
    data = small.federation(10, dtype=torch.float32)
    simulation = small.train(small.variants()["fedavg"], 1, data=data, wire=wire, attack=Attack("scale", 0.2, 1e7))
    bad = attackers(0, 10, 0.2).nonzero().flatten().tolist()
    assert [(one.client, one.rule) for one in simulation.refused] == [(client, "norm") for client in bad]
    assert simulation.ledger.rejected == 2
    mild = small.train(small.variants()["fedavg"], 1, data=data, wire=wire, attack=Attack("scale", 0.2, 10))
    assert mild.refused == []
    assert LARGEST_CHANGE == 1e4


def test_rules_act_on_the_composed_change() -> None:
    """Clipped to a norm, one client moves the model no farther than its share of it, whatever its factors are."""
    data = small.federation(10, dtype=torch.float32)
    for wire in CHANGES.values():
        bounded = small.train(
            small.variants()["fedavg"], 1, data=data, wire=wire, rule=Rule(clip=0.02), attack=Attack("scale", 1.0, 1e3)
        )
        free = small.train(small.variants()["fedavg"], 1, data=data, wire=wire, attack=Attack("scale", 1.0, 1e3))
        start = small.train(small.variants()["fedavg"], 0, data=data).server["w"]
        assert float((bounded.server["w"] - start).norm()) <= 0.02 * (1 + 1e-5)
        assert float((free.server["w"] - start).norm()) > 1


# Settings


@pytest.mark.parametrize("codec", ["flaot16", "int9"])
def test_an_unknown_codec_is_refused_with_a_suggestion(codec: Any) -> None:
    with pytest.raises(TDPFedError, match=r"codec: .* given, must be .*; did you mean '(float16|int8)'"):
        Wire(codec=codec)


def test_local_training_meets_no_attack_and_no_wire() -> None:
    simulation = small.train(Local(**small.COMMON), 1, attack=Attack("noise"))
    assert simulation.refused == []
    assert small.equal(simulation, small.train(Local(**small.COMMON), 1))
    for wire in (*CHANGES.values(), Wire(down="factors")):
        assert small.equal(simulation, small.train(Local(**small.COMMON), 1, wire=wire))


def test_the_configuration_reaches_the_uplink() -> None:
    overrides = [
        "robust.name=median",
        "robust.gauge=2",
        "robust.attack=noise",
        "robust.attack_strength=3",
        "wire.codec=int8",
        "wire.feedback=true",
    ]
    simulation = prepare(load_config("digits", overrides))
    rule, uplink = simulation.server_round.rule, simulation.uplink
    assert (rule.name, rule.gauge, uplink.channel.form.codec) == ("median", 2.0, "int8")
    assert uplink.channel.wire == Wire(codec="int8", feedback=True)
    assert uplink.attack == Attack("noise", 0.2, 3.0)
    chosen = ["algorithm.name=fedavg", "wire.down=factors", "wire.down_terms=3", "server.optimizer=adam"]
    other = prepare(load_config("digits", chosen))
    assert other.downlink.wire.down_terms == 3
    assert other.server_round.step.optimizer == "adam"
