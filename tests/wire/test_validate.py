"""The gate: whatever is wrong with a message ends in ``Rejected`` with the right rule, and costs no memory."""

import math
import random
import tracemalloc
from dataclasses import replace
from typing import get_args

import forge
import pytest
import torch
from faults import BYTES
from hypothesis import given, settings
from hypothesis import strategies as st

from tdpfed.errors import TDPFedError
from tdpfed.wire import Expected, Form, Rejected, Rule, decode, encode, screen, validate
from tdpfed.wire.forms import LARGEST_CHANGE
from tdpfed.wire.packing import FLOATS

RULES = set(get_args(Rule))
HONEST = {label: forge.honest(label) for label in forge.WIRES}


def refusal(data: bytes, expected: Expected, limit: int = forge.LIMIT) -> Rejected:
    try:
        validate(decode(data, limit), expected)
    except Rejected as error:
        refused = error
    else:
        raise AssertionError("accepted")
    assert isinstance(refused, TDPFedError)
    assert refused.rule in RULES
    assert str(refused).isascii()
    assert len(str(refused)) < 500
    return refused


@pytest.mark.parametrize("label", forge.WIRES)
def test_honest_messages_pass(label: str) -> None:
    """Also those that the other tests spoil, put together again by the same means."""
    good, want = HONEST[label], forge.expected(label)
    seen = forge.parts_of(label)[1]
    for data in (good, forge.with_header(good), forge.with_payload(good, forge.parts(good)[1])):
        state = validate(decode(data, len(good)), want)
        assert state.keys() == seen.keys()
        for name, value in state.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, seen[name])


@pytest.mark.parametrize("label", forge.WIRES)
def test_a_message_down_has_no_samples(label: str) -> None:
    parts, form = forge.parts_of(label)[0], forge.form(label)
    down = encode(parts, form, kind="down", round_=5, client=3, samples=0)
    me = replace(forge.expected(label), kind="down", clients={3}, samples={})
    assert validate(decode(down, forge.LIMIT), me).keys() == forge.LENGTHS.keys()
    assert refusal(forge.with_header(down, samples=20), replace(me, samples={3: 20})).rule == "weight"


@pytest.mark.parametrize("label", forge.WIRES)
def test_every_truncation_is_refused(label: str) -> None:
    good = HONEST[label]
    for end in range(len(good)):
        assert refusal(good[:end], forge.expected(label)).rule in {"magic", "version", "header", "checksum"}


@pytest.mark.parametrize("label", ["dense float32", "factors int4", "top-k int8"])
def test_every_bit_flip_is_refused(label: str) -> None:
    """By ``decode`` already, whoever is expected: a flipped client must not become another client."""
    good = HONEST[label]
    for at in range(len(good)):
        for bit in range(8) if at < 60 else (at % 8,):
            flipped = bytearray(good)
            flipped[at] ^= 1 << bit
            with pytest.raises(Rejected):
                decode(bytes(flipped), forge.LIMIT)


def test_random_bytes_of_any_length_are_refused() -> None:
    source = random.Random(0)
    for _ in range(3000):
        data = source.randbytes(source.randrange(400))
        assert refusal(source.choice([b"", b"TDPF\x02"]) + data, forge.expected()).rule in BYTES


@settings(max_examples=150)
@given(st.sampled_from(forge.CHANGES), st.data())
def test_any_payload_of_the_right_length_is_refused_or_within_bounds(label: str, data: st.DataObject) -> None:
    """Under a right checksum: whatever the numbers are, the server has a finite change that is not too large."""
    good, want = HONEST[label], forge.expected(label)
    assert want.unchanged is not None
    payload = random.Random(data.draw(st.integers(0, 2**32))).randbytes(len(forge.parts(good)[1]))
    message = decode(forge.with_payload(good, payload), forge.LIMIT)
    try:
        state = validate(message, want)
    except Rejected:
        assert refusal(forge.with_payload(good, payload), want).rule in {"values", "nan", "norm"}
        return
    for name, value in state.items():
        assert bool(value.isfinite().all())
        bound = LARGEST_CHANGE * max(1.0, float(want.unchanged[name].double().norm()))
        assert float((value - want.unchanged[name]).double().norm()) <= bound * 1.001


@pytest.mark.parametrize("label", [f"dense {codec}" for codec in forge.CODECS])
@pytest.mark.parametrize(("index", "name"), [(3, "fc.weight"), (210, "fc.bias"), (500, "conv.weight"), (590, "tall")])
def test_a_bad_value_is_located(label: str, index: int, name: str) -> None:
    first, *rest = forge.sections(forge.form(label))
    if rest[0][1].scale:  # one for a column of a matrix, for a vector, for an output of a kernel
        at = rest[0][2] + 4 * {3: 3, 210: 17, 500: 18 + 5, 590: 18 + 8 + 1}[index]
        data = forge.with_bytes(HONEST[label], at, forge.number("float32", 3.4e38))
    else:
        kind = first[1].format
        data = forge.with_bytes(HONEST[label], FLOATS[kind].itemsize * index, forge.number(kind, math.nan))
    error = refusal(data, forge.expected(label))
    assert (error.rule, error.client) == ("nan", 12)
    assert error.tensor is not None
    assert error.tensor.startswith(f"w/{name}")


@pytest.mark.parametrize("label", forge.CHANGES)
def test_a_change_may_not_be_much_larger_than_what_was_received(label: str) -> None:
    """Exactly at the bound it may: the largest norm over that of the received entry, or over 1."""
    want, state = forge.expected(label), validate(decode(HONEST[label], forge.LIMIT), forge.expected(label))
    assert want.unchanged is not None
    change = {name: value - want.unchanged[name] for name, value in state.items()}
    norms = {name: float(value.double().norm()) for name, value in change.items()}
    for received in (1e-3, 1.0):  # the bound is LARGEST_CHANGE for both
        near = {name: received * value / value.norm() for name, value in want.unchanged.items()}
        scaled = replace(want, unchanged=near)
        assert max(norms.values()) < LARGEST_CHANGE
        assert validate(decode(HONEST[label], forge.LIMIT), scaled).keys() == near.keys()
    data = _scaled_up(label, 3 * LARGEST_CHANGE / min(norms.values()))
    error = refusal(data, replace(want, unchanged={name: 0 * value for name, value in want.unchanged.items()}))
    assert (error.rule, error.client) == ("norm", 12)
    assert error.tensor in norms


def _scaled_up(label: str, factor: float) -> bytes:
    """Return an honest message of changes this many times as large: what they are multiplied with is scaled."""
    data = HONEST[label]
    for _, section, at in forge.sections(forge.form(label)):
        if not section.scale and section.format not in FLOATS:
            continue
        numbers = section.unpack(memoryview(forge.parts(data)[1])[at : at + section.bytes]).float()
        data = forge.with_bytes(data, at, section.pack((numbers * factor).clamp(-6e4, 6e4)))
    return data


def test_refusals_say_who_and_where() -> None:
    good, want = HONEST["top-k int8"], forge.expected("top-k int8")
    crooked = forge.with_bytes(good, 0, bytes(10))
    error = refusal(crooked, want)
    assert (error.rule, error.client, error.tensor) == ("values", 12, "w")
    assert str(error).startswith("message of client 12: w ")
    assert refusal(b"nonsense", want).client is None
    assert refusal(good[:-1], want).client == 12
    told = str(refusal(forge.with_header(good, form=0), want))
    assert "dense" in told
    assert "top-k" in told


def test_the_form_is_not_taken_from_the_sender() -> None:
    """A message in one form is none in another, even of the same length, names and numbers."""
    four, other = forge.form("change int8"), forge.form("dense int8")
    assert four.hash != other.hash
    assert refusal(HONEST["change int8"], forge.expected("dense int8")).rule == "form"
    fewer = Form("top-k", "int8", forge.form("top-k int8").entries, forge.form("top-k int8").layouts)
    assert fewer.hash == forge.form("top-k int8").hash  # equal settings, equal hash
    hashes = {forge.form(label).hash for label in forge.WIRES}
    assert len(hashes) == len(forge.WIRES)


def test_screen_names_each_bad_client_once() -> None:
    generator = torch.Generator().manual_seed(0)
    state = {"factors": torch.randn(21, generator=generator), "values": torch.randn(5, generator=generator)}
    rows = {name: value.expand(4, -1).clone() for name, value in state.items()}
    rows["factors"][1, 14] = math.inf
    rows["values"][1, 0] = math.nan
    rows["values"][3, 2] = -math.inf
    clients = torch.tensor([7, 3, 12, 9])
    found = [(error.client, error.rule, error.tensor) for error in screen(rows, forge.LAYOUTS, clients)]
    assert found == [(3, "nan", "factors/fc1.bias"), (9, "nan", "values")]
    huge = {"factors": torch.full((2, 21), 3e38), "values": torch.full((2, 5), -3e38)}
    assert screen(huge, forge.LAYOUTS, clients[:2]) == []


@pytest.mark.parametrize("label", forge.WIRES)
def test_a_message_of_another_length_costs_no_memory(label: str) -> None:
    """Neither before its checksum is right nor, with a right one, before its length is compared with its form's."""
    good, want = HONEST[label], forge.expected(label)
    for data, limit in (
        (bytes(30_000_000), 1_000_000),
        (good + bytes(10_000_000), 10**9),
        (forge.with_payload(good, bytes(10_000_000)), 10**9),
        (good[:40], 10**9),
    ):
        tracemalloc.start()
        with pytest.raises(Rejected):
            validate(decode(data, limit), want)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000
