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
from safetensors import SafetensorError
from safetensors.torch import load

from tdpfed.errors import TDPFedError
from tdpfed.wire import Codec, Expected, Rejected, Rule, decode, encode, screen, validate

RULES = set(get_args(Rule))
HONEST = {codec: forge.honest(codec) for codec in forge.CODECS}


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


@pytest.mark.parametrize("codec", forge.CODECS)
def test_honest_messages_pass(codec: Codec) -> None:
    """Also those that the other tests spoil, put together again by the same means."""
    good = HONEST[codec]
    want = forge.expected(codec)
    state = validate(decode(good, len(good)), want)
    for again in (forge.with_header(good), forge.with_tensors(good, {})):
        for name, value in validate(decode(again, forge.LIMIT), want).items():
            assert torch.equal(value, state[name])
            assert (value - forge.state()[name]).abs().max() < 0.05
    down = encode(forge.state(), forge.LAYOUTS, kind="down", round_=5, client=3, samples=0, codec=codec, seed=0)
    me = replace(want, kind="down", clients={3}, samples={})
    assert validate(decode(down, forge.LIMIT), me).keys() == forge.LENGTHS.keys()
    assert refusal(forge.with_header(down, samples=20), replace(me, samples={3: 20})).rule == "weight"


@pytest.mark.parametrize("codec", forge.CODECS)
def test_every_truncation_is_refused(codec: Codec) -> None:
    good = HONEST[codec]
    for end in range(len(good)):
        assert refusal(good[:end], forge.expected(codec)).rule in {"magic", "version", "header", "checksum"}


@pytest.mark.parametrize("codec", ["float32", "int8"])
def test_every_bit_flip_is_refused(codec: Codec) -> None:
    """By ``decode`` already, whoever is expected: a flipped client must not become another client."""
    good = HONEST[codec]
    for at in range(len(good)):
        for bit in range(8):
            flipped = bytearray(good)
            flipped[at] ^= 1 << bit
            with pytest.raises(Rejected):
                decode(bytes(flipped), forge.LIMIT)


def test_random_bytes_of_any_length_are_refused() -> None:
    source = random.Random(0)
    for _ in range(3000):
        data = source.randbytes(source.randrange(400))
        assert refusal(source.choice([b"", b"TDPF\x01"]) + data, forge.expected()).rule in BYTES


@pytest.mark.parametrize("codec", forge.CODECS)
@pytest.mark.parametrize(("index", "name"), [(1, "fc1.A1"), (13, "fc1.A2"), (16, "fc1.bias"), (18, "conv")])
def test_a_bad_value_is_located(codec: Codec, index: int, name: str) -> None:
    tensors = decode(HONEST[codec], forge.LIMIT).tensors
    entry, at = ("factors", index) if codec != "int8" else ("factors/scale", {1: 1, 13: 3, 16: 4, 18: 5}[index])
    spoilt = tensors[entry].clone()
    spoilt[at] = math.nan
    error = refusal(forge.with_tensors(HONEST[codec], {entry: spoilt}), forge.expected(codec))
    assert (error.rule, error.client, error.tensor) == ("nan", 12, f"factors/{name}")


def test_refusals_say_who_and_where() -> None:
    good = HONEST["float32"]
    short = forge.with_tensors(good, {"values": torch.ones(4)})
    error = refusal(short, forge.expected())
    assert (error.client, error.tensor) == (12, "values")
    assert str(error) == "message of client 12: values has shape (4,), must be (5,)"
    assert refusal(b"nonsense", forge.expected()).client is None
    assert refusal(good[:-1], forge.expected()).client == 12
    assert refusal(forge.with_tensors(good, {"values": None}), forge.expected()).tensor == "values"
    hostile = refusal(forge.with_tensors(good, {"\u2028" * 90: torch.ones(1)}), forge.expected())
    assert hostile.tensor is not None
    assert len(hostile.tensor) <= 200
    assert hostile.tensor.isascii()


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("entries", "body"),
    [
        (b"[" * 16000, b""),
        (b'{"a":' * 3000, b""),
        (b'{"a":{"dtype":"F32","data_offsets":[0,4],"shape":' + b"[" * 900 + b"]" * 900 + b"}}", b"0000"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"[" * 900 + b"]" * 900 + b"]}}", b"0000"),
        (b'{"a":' + b"9" * 9000 + b"}", b""),
        (f'{{"a":{ENTRY},"a":{ENTRY}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY},"b":{ENTRY}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY},"b":{ENTRY.replace("0,4", "8,12")}}}'.encode(), b"0" * 12),
        (f'{{"a":{ENTRY}}}'.encode(), b"00000"),
        (f'{{"a":{ENTRY}}}'.encode(), b"000"),
        (f'{{"a":{ENTRY.replace("[1]", "[true]")}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY.replace("[1]", "[1.0]")}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY.replace("[1]", "[0]").replace("0,4", "0,0")}}}'.encode(), b""),
        (f'{{"__metadata__":{{"x":"y"}},"a":{ENTRY}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY[:-1]},"more":1}}}}'.encode(), b"0000"),
        (f'{{"a":{ENTRY}}}'.encode() + b" " * 20000, b"0000"),
        (b"\xff\xfe{}", b""),
    ],
)  # fmt: skip
def test_crooked_payloads_are_refused(entries: bytes, body: bytes) -> None:
    data = forge.with_payload(HONEST["float32"], entries, body)
    with pytest.raises(Rejected) as caught:
        decode(data, 10**6)
    assert caught.value.rule in {"payload", "shape"}
    assert caught.value.client == 12


@settings(max_examples=500)
@given(st.data())
def test_what_is_read_is_what_safetensors_reads(data: st.DataObject) -> None:
    """Nothing is accepted that the library refuses, and the values are the same."""
    spans = data.draw(st.lists(st.sampled_from([(0, 4), (4, 8), (0, 8), (8, 12), (4, 6), (6, 8)]), max_size=3))
    entries = {
        f"t{i}": {
            "dtype": data.draw(st.sampled_from(["F32", "F16", "BF16", "I8"])),
            "shape": [data.draw(st.integers(1, 4))],
            "data_offsets": list(span),
        }
        for i, span in enumerate(spans)
    }
    message = forge.with_payload(HONEST["float32"], entries, bytes(range(data.draw(st.sampled_from([0, 4, 8, 12])))))
    payload = forge.parts(message)[1]
    try:
        library = load(payload)
    except SafetensorError:
        with pytest.raises(Rejected):
            decode(message, forge.LIMIT)
        return
    tensors = decode(message, forge.LIMIT).tensors
    assert tensors.keys() == library.keys()
    for name, value in tensors.items():
        assert value.dtype == library[name].dtype
        assert torch.equal(value.view(torch.uint8), library[name].view(torch.uint8))


def test_screen_names_each_bad_client_once() -> None:
    rows = {name: value.expand(4, -1).clone() for name, value in forge.state().items()}
    rows["factors"][1, 14] = math.inf
    rows["values"][1, 0] = math.nan
    rows["values"][3, 2] = -math.inf
    clients = torch.tensor([7, 3, 12, 9])
    found = [(error.client, error.rule, error.tensor) for error in screen(rows, forge.LAYOUTS, clients)]
    assert found == [(3, "nan", "factors/fc1.bias"), (9, "nan", "values")]
    huge = {"factors": torch.full((2, 21), 3e38), "values": torch.full((2, 5), -3e38)}
    assert screen(huge, forge.LAYOUTS, clients[:2]) == []


def test_lies_about_size_cost_no_memory() -> None:
    huge = {"factors": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}
    many = {f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(20_000)}
    good = HONEST["float32"]
    for data, limit in (
        (bytes(30_000_000), 1_000_000),
        (forge.with_payload(good, huge, b"0000"), 10**9),
        (forge.with_payload(good, many, b""), 10**9),
        (b"TDPF\x01" + b"\xff" * 4 + bytes(10_000_000), 10**9),
        (forge.framed(b" " * 10_000_000), 10**9),
        (forge.signed(forge.parts(good)[0], b"\xff" * 8 + bytes(10_000_000)), 10**9),
    ):
        tracemalloc.start()
        with pytest.raises(Rejected):
            decode(data, limit)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000
