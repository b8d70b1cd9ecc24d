"""Messages: what comes out is what went in, on every algorithm's real states; sizes are exact; senders are told."""

import math
import tracemalloc
from typing import Any

import forge
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small
from tdpfed.algorithms import FedAvg, TDPFed
from tdpfed.core.layout import Layout
from tdpfed.core.state import Entries, State, Turn, layouts_of
from tdpfed.errors import TDPFedError
from tdpfed.models import build
from tdpfed.wire import Codec, Expected, Form, Kind, Wire, decode, encode, lossy, validate, whole_parts
from tdpfed.wire.channel import Channel
from tdpfed.wire.forms import HEADER_BYTES, dense_bytes

ALGORITHMS = {name: algorithm for name, algorithm in small.variants().items() if algorithm.communicates}
SEED, ROUND = 11, 3


def whole(state: State, entries: Entries, codec: Codec = "float32", kind: Kind = "up", **where: int) -> bytes:
    """Return a message with entries as they are."""
    form, seed = Form.whole(entries, codec), where.pop("seed", SEED)
    given = {"round_": ROUND, "client": 0, "samples": 0, **where}
    parts = whole_parts(state, form, kind=kind, round_=given["round_"], client=given["client"], seed=seed)
    return encode(parts, form, kind=kind, **given)


def read(data: bytes, entries: Entries, codec: Codec = "float32") -> State:
    message = decode(data, len(data))
    clients, samples = {message.client}, {message.client: message.samples}
    return validate(
        message,
        Expected(
            kind=message.kind, round=message.round, form=Form.whole(entries, codec), clients=clients, samples=samples
        ),
    )


@pytest.mark.parametrize("codec", forge.CODECS)
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_round_trip_loss_and_size_of_every_algorithms_messages(name: str, model: str, codec: Codec) -> None:
    run = small.train(ALGORITHMS[name], 1, model=model, data=small.federation(dtype=torch.float32))
    assert run._trained is not None
    sides: dict[Kind, tuple[State, Entries]] = {
        "down": (run.algorithm.broadcast(run.server, Turn(0, 2, torch.arange(5))), run.algorithm.down()),
        "up": (run._trained[1].upload, run.algorithm.up()),
    }
    for kind, (states, entries) in sides.items():
        simulated = lossy(states, layouts_of(entries), codec, SEED, ROUND, torch.arange(5), kind)
        for k in range(5):
            state, samples = {entry: value[k] for entry, value in states.items()}, 0 if kind == "down" else 10**k
            data = whole(state, entries, codec, kind, client=k, samples=samples)
            assert len(data) == Form.whole(entries, codec).bytes
            received = read(data, entries, codec)
            assert received.keys() == state.keys()
            for entry, value in received.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, simulated[entry][k])  # the simulator sees what a receiver does
                assert torch.equal(value, state[entry]) == (codec == "float32")


@pytest.mark.parametrize("label", forge.WIRES)
def test_the_header_has_at_most_64_bytes_and_the_length_is_known_before(label: str) -> None:
    form, data = forge.form(label), forge.honest(label)
    assert len(data) == form.bytes == HEADER_BYTES + sum(section.bytes for section in form.sections)
    assert HEADER_BYTES == forge.HEADER_BYTES <= 64


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1), st.sampled_from([*forge.WIRES]))
def test_the_length_does_not_depend_on_the_numbers_in_the_header(
    round_: int, client: int, samples: int, label: str
) -> None:
    form = forge.form(label)
    data = encode(forge.parts_of(label)[0], form, kind="up", round_=round_, client=client, samples=samples)
    assert len(data) == form.bytes
    message = decode(data, len(data))
    assert (message.kind, message.form, message.codec) == ("up", form.name, form.codec)
    assert (message.round, message.client, message.samples, message.hash) == (round_, client, samples, form.hash)


def test_a_message_can_be_put_together_by_hand() -> None:
    data = forge.honest("factors int4")
    assert data[:5] == b"TDPF\x02"
    header, payload = forge.parts(data)
    assert forge.signed(header, payload) == data
    assert (header["kind"], header["form"], header["codec"]) == (1, 2, 4)
    assert (header["round"], header["client"], header["samples"]) == (5, 12, 21)


@pytest.mark.parametrize("label", forge.WIRES)
def test_the_payload_is_the_numbers_one_section_after_another(label: str) -> None:
    """Read here with numpy alone."""
    form, payload = forge.form(label), forge.parts(forge.honest(label))[1]
    parts = forge.parts_of(label)[0]
    for (_, section, at), part in zip(forge.sections(form), parts, strict=True):
        raw = np.frombuffer(payload[at : at + section.bytes], np.uint8)
        expected = part.double().numpy()
        match section.format:
            case "positions":
                continue
            case "int4":
                found = np.stack((raw & 15, raw >> 4), 1).reshape(-1)[: section.length].astype(np.int64)
                found = np.where(found > 7, found - 16, found)
            case "int8":
                found = raw.view(np.int8)
            case "bfloat16":
                found = (raw.view("<u2").astype("<u4") << 16).view("<f4")
            case other:
                found = raw.view({"float32": "<f4", "float16": "<f2"}[other])
        assert np.array_equal(found.astype(np.float64), expected)


@pytest.mark.parametrize("label", forge.WIRES)
def test_the_same_state_gives_the_same_bytes(label: str) -> None:
    assert forge.honest(label) == forge.honest(label)
    header = forge.HEADER_BYTES
    drawn = label == "dense int8"  # rounded at random: with other draws in every round
    assert (forge.honest(label)[header:] != forge.honest(label, round_=6)[header:]) == drawn


def test_int8_factors_are_seven_times_smaller_than_the_dense_model() -> None:
    layout = Layout.of(build("dnn", (1, 28, 28), 10, seed=0))
    assert layout.size == 79_510
    tdpfed = TDPFed(compression=2.0).bind(layout, 20)
    assert dense_bytes(layout) == 4 * layout.size + HEADER_BYTES
    assert dense_bytes(layout) / Form.whole(tdpfed.up(), "int8").bytes >= 7


@pytest.mark.parametrize(("terms", "least"), [(1, 360), (2, 210), (4, 120)])
def test_the_sizes_of_factored_updates(terms: int, least: int) -> None:
    """Of the model with 79,510 values: vectors in 4 bits, biases in 8, scales of 2 bytes for each term and bias."""
    layout = Layout.of(build("dnn", (1, 28, 28), 10, seed=0))
    form = Channel(FedAvg().bind(layout, 20), Wire(update="factors", terms=terms), 0).form
    by_hand = HEADER_BYTES
    for shape in layout.shapes:
        by_hand += sum(-(-terms * size // 2) for size in shape) + 2 * terms if len(shape) == 2 else shape[0] + 2
    assert form.bytes == by_hand
    assert dense_bytes(layout) / form.bytes > least


@pytest.mark.parametrize("codec", forge.CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sender_may_not_send_what_is_not_finite(codec: Codec, value: float) -> None:
    state = forge.drawn(0)
    state["w"][204] = value
    with pytest.raises(TDPFedError, match=r"w/fc\.bias"):
        whole(state, {"w": forge.WEIGHTS, "values": 31}, codec)


@pytest.mark.parametrize("label", forge.CHANGES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_change_that_is_not_finite_is_not_sent_either(label: str, value: float) -> None:
    channel, state, start = forge.channel(label), forge.drawn(0), forge.received(label)
    assert start is not None
    state["w"][0] = value
    kept = channel.start(torch.zeros(0))
    rows = [{name: one[None] for name, one in some.items()} for some in (state, start, kept)]
    parts = [part[0] for part in channel.send(*rows).parts]
    with pytest.raises(TDPFedError, match=r"w: .* must be finite"):
        encode(parts, channel.form, kind="up", round_=1, client=0, samples=1)


@pytest.mark.parametrize("value", [65520.0, -1e6, 3.4e38])
def test_float16_does_not_overflow_silently(value: float) -> None:
    state = {"values": torch.ones(9)}
    state["values"][7] = value
    with pytest.raises(TDPFedError, match=r"values: .* float16"):
        whole(state, {"values": 9}, "float16")
    state["values"][7] = 65504.0
    assert float(read(whole(state, {"values": 9}, "float16"), {"values": 9}, "float16")["values"][7]) == 65504


def test_a_float64_beyond_float32_is_an_error_too() -> None:
    with pytest.raises(TDPFedError, match="values: 1e\\+39"):
        whole({"values": torch.tensor([1.0, 1e39], dtype=torch.float64)}, {"values": 2})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": "int4"}, "codec"),
        ({"codec": "int9"}, "codec: unknown 'int9', did you mean 'int8'"),
        ({"state": {"factors": torch.zeros(21)}}, "entries"),
        ({"state": {"factors": torch.zeros(20), "values": torch.zeros(5)}}, r"factors: shape \(20,\)"),
        ({"state": {"factors": torch.zeros(1, 21), "values": torch.zeros(5)}}, r"shape \(1, 21\)"),
        ({"state": {"factors": torch.zeros(21), "values": torch.zeros(0)}}, r"values: shape \(0,\)"),
        ({"client": -1}, "client"),
        ({"client": 2**32}, "client"),
        ({"round_": -1}, "round"),
        ({"round_": 2**32}, "round"),
        ({"samples": 2**63}, "samples"),
        ({"kind": "sideways"}, "kind"),
    ],
)
def test_a_sender_is_told_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "state": {"factors": torch.ones(21), "values": torch.ones(5)}, "round_": 1, "client": 0, "samples": 1,
        "entries": {"factors": forge.FACTORS, "values": 5},
    }  # fmt: skip
    with pytest.raises(TDPFedError, match=words):
        whole(**given | changes)


@pytest.mark.parametrize("label", forge.WIRES)
def test_numbers_that_do_not_fit_the_form_are_an_error(label: str) -> None:
    parts, form = forge.parts_of(label)[0], forge.form(label)
    for wrong in (parts[:-1], [*parts, parts[0]], [parts[0][:-1], *parts[1:]], [*parts[:-1], parts[-1][None]]):
        with pytest.raises(TDPFedError, match="given, must be"):
            encode(wrong, form, kind="up", round_=1, client=0, samples=1)


def test_entries_that_share_memory_and_views_can_be_sent() -> None:
    rows = torch.randn(4, 5, requires_grad=True)
    state: dict[str, Tensor] = {"a": rows[1], "b": rows[1], "c": rows[:, 0]}
    entries = {"a": 5, "b": 5, "c": 4}
    received = read(whole(state, entries, kind="down"), entries)
    assert all(torch.equal(received[name], value) for name, value in state.items())


def test_decoding_copies_no_values() -> None:
    """They are views of the bytes, which live as long as they do."""
    values = torch.arange(2_000_000.0)
    data = whole({"values": values}, {"values": 2_000_000})
    tracemalloc.start()
    state = read(data, {"values": 2_000_000})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000
    del data
    assert torch.equal(state["values"], values)
