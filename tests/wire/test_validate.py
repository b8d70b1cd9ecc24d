"""The gate: whatever is wrong with a message ends in ``Rejected`` with the right rule, and costs no memory."""

import json
import math
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import forge
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tdpfed.errors import TDPFedError
from tdpfed.layout import Layout
from tdpfed.wire import Codec, Expected, Rejected, Rule, decode, encode, screen, validate

RULES = set(get_args(Rule))
HONEST = {codec: forge.honest(codec) for codec in forge.CODECS}
BYTES = {"size", "magic", "version", "header", "checksum", "payload", "dtype", "shape"}
Case = tuple[bytes, Expected, int, set[str]]  # message, what is expected, limit, rules that may refuse it


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


class Draws:
    """Draws from hypothesis, remembered, so that one fault can be made again with every codec."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.values, self.at = data, list[Any](), 0

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        if self.at == len(self.values):
            self.values.append(self.data.draw(strategy))
        self.at += 1
        return self.values[self.at - 1]

    def pick(self, items: Sequence[Any]) -> Any:
        return items[self(st.integers(0, 2**16)) % len(items)]


def cases(data: st.DataObject, fault: "Fault") -> Iterator[Case]:
    """Yield a message with the fault for each codec."""
    draw = Draws(data)
    for codec in forge.CODECS:
        draw.at = 0
        yield fault(draw, codec, HONEST[codec], forge.expected(codec))


def tensors_in(message: bytes) -> list[tuple[str, Tensor]]:
    return sorted(decode(message, forge.LIMIT).tensors.items())


def shape(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    name, value = draw.pick(tensors_in(good))
    other = draw.pick([value[:-1], value.repeat(2), torch.cat((value, value[:1])), value[None], value[:, None]])
    rules = {"shape"} if len(value) > 1 or other.ndim > 1 or len(other) else {"shape", "payload"}
    return forge.with_tensors(good, {name: other}), want, forge.LIMIT, rules


def dtype(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    name, value = draw.pick(tensors_in(good))
    kinds = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
    ]
    other = draw.pick([kind for kind in kinds if kind != value.dtype])
    return forge.with_tensors(good, {name: value.to(other)}), want, forge.LIMIT, {"dtype"}


def not_finite(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    name, value = draw.pick([(name, value) for name, value in tensors_in(good) if value.is_floating_point()])
    spoilt = value.clone()
    spoilt[draw.pick(range(len(value)))] = draw.pick([math.nan, math.inf, -math.inf])
    return forge.with_tensors(good, {name: spoilt}), want, forge.LIMIT, {"nan"}


def oversize(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    return good, want, draw.pick(range(len(good))), {"size"}


def duplicate(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    return good, replace(want, seen={12, draw(st.integers(0, 99))}), forge.LIMIT, {"duplicate"}


def unknown(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    client = draw(st.integers(0, 2**63 - 1).filter(lambda k: k not in forge.SAMPLES))
    return forge.with_header(good, client=client), want, forge.LIMIT, {"client"}


def other_name(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    name = draw.pick(sorted(decode(good, forge.LIMIT).tensors))
    extra = draw(st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda n: n != "__metadata__"))
    added = {} if extra in decode(good, forge.LIMIT).tensors else {extra: torch.ones(2)}
    missing: dict[str, Tensor | None] = {name: None} if draw(st.booleans()) or not added else {}
    return forge.with_tensors(good, missing | added), want, forge.LIMIT, {"names"}


def stale(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    other = draw(st.integers(0, 2**63 - 1).filter(lambda r: r != 5))
    return forge.with_header(good, round=other), want, forge.LIMIT, {"round"}


def wrong_rank(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    """A sender with factors of another rank, or of the same length in another shape or under another name."""
    rank, name = draw.pick([(1, "fc1.A1"), (3, "fc1.A1"), (2, "fc2.A1")])
    layout = Layout.of({name: (3, rank), "fc1.A2": (4, rank), "fc1.bias": (3,), "conv": (2, 1, 2)})
    state = {"factors": torch.ones(layout.size), "values": torch.ones(5)}
    layouts = {"factors": layout, "values": None}
    data = encode(state, layouts, kind="up", round_=5, client=12, samples=21, codec=codec, seed=0)
    return data, want, forge.LIMIT, {"layout"}


def lying_rank(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    """The same, under the layout hash that is expected."""
    data, want, limit, _ = wrong_rank(draw, codec, good, want)
    lied = forge.with_header(data, layout=forge.parts(good)[0]["layout"])
    same = decode(lied, limit).tensors["factors"].shape == decode(good, limit).tensors["factors"].shape
    return (lied, want, limit, {"shape"}) if not same else (data, want, limit, {"layout"})


def weight(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    other = draw(st.integers(0, 2**63 - 1).filter(lambda n: n != 21))
    return forge.with_header(good, samples=other), want, forge.LIMIT, {"weight"}


def other_codec(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    other = draw.pick([name for name in forge.CODECS if name != codec])
    data = HONEST[other] if draw(st.booleans()) else forge.with_header(good, codec=other)
    return data, want, forge.LIMIT, {"codec"}


def other_kind(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    return forge.with_header(good, kind="down"), want, forge.LIMIT, {"kind"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(max_value=-1), st.integers(min_value=2**63), st.floats(), st.text(max_size=9),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def header_value(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    field = draw.pick(sorted(forge.parts(good)[0]))
    header, payload = forge.parts(good)
    return forge.framed(header | {field: draw(JUNK)}, payload), want, forge.LIMIT, {"header"}


def header_fields(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    header, payload = forge.parts(good)
    if draw(st.booleans()):
        header[draw(st.text(max_size=5))] = 1
    else:
        del header[draw.pick(sorted(header))]
    return forge.framed(header, payload), want, forge.LIMIT, {"header"}


def header_bytes(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    raw = draw(st.one_of(st.binary(max_size=40), JUNK.map(lambda value: json.dumps(value).encode())))
    return forge.framed(raw, forge.parts(good)[1]), want, forge.LIMIT, {"header"}


def header_length(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    length = draw(st.integers(0, 2**32 - 1).filter(lambda n: n != int.from_bytes(good[5:9], "little")))
    return good[:5] + length.to_bytes(4, "little") + good[9:], want, forge.LIMIT, {"header"}


def random_bytes(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    start = draw.pick([b"", b"TDPF", b"TDPF\x01", good[:9], good[: -draw(st.integers(1, 300))]])
    return start + draw(st.binary(max_size=60)), want, forge.LIMIT, BYTES


def payload_entries(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    """A payload that lies about itself, under a right checksum."""
    number = st.one_of(st.integers(-1, 90), st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64, 10**30]), JUNK)
    kinds = st.sampled_from(["F32", "I8", "BF16", "F64", "F4", "X", "", None])
    entry = st.fixed_dictionaries(
        {"dtype": kinds, "shape": st.lists(number, max_size=2), "data_offsets": st.lists(number, max_size=3)}
    )
    names = st.sampled_from(["factors", "values", "factors/scale", "__metadata__", "\ud800"])
    entries = draw(st.dictionaries(names, st.one_of(entry, JUNK), max_size=3))
    data = forge.with_payload(good, entries, draw(st.binary(max_size=90)))
    return data, want, forge.LIMIT, {"payload", "dtype", "shape", "names"}


def payload_bytes(draw: Draws, codec: Codec, good: bytes, want: Expected) -> Case:
    data = forge.signed(forge.parts(good)[0], draw(st.binary(max_size=60)))
    return data, want, forge.LIMIT, {"payload", "names"}


Fault = Callable[[Draws, Codec, bytes, Expected], Case]
FAULTS: list[Fault] = [
    shape, dtype, not_finite, oversize, duplicate, unknown, other_name, stale, wrong_rank, lying_rank, weight,
    other_codec, other_kind, header_value, header_fields, header_bytes, header_length, random_bytes, payload_entries,
    payload_bytes,
]  # fmt: skip


@settings(max_examples=250, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_twenty_thousand_malformed_messages_are_refused_by_the_right_rule(data: st.DataObject) -> None:
    """250 examples of each of the 20 faults, with each of the four codecs."""
    for fault in FAULTS:
        for message, want, limit, rules in cases(data, fault):
            assert refusal(message, want, limit).rule in rules


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


RESIDENT = """
import sys, torch
from tdpfed.wire import Expected, Rejected, decode, encode, validate
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
def verdict(data, length):
    want = Expected(
        kind="up", codec="float32", round=1, lengths={"w": length}, layouts={"w": None}, clients={0}, samples={0: 1}
    )
    try:
        return validate(decode(data, len(data)), want) and "accepted"
    except Rejected as error:
        return error.rule
small = {"w": torch.ones(100_000)}
verdict(encode(small, {"w": None}, kind="up", codec="float32", round_=1, client=0, samples=1, seed=0), 100_000)
before = peak()  # with the code in memory
data = open(sys.argv[1], "rb").read()
print(verdict(data, 20_000_000), (peak() - before) / len(data))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("spoil", "verdict"), [("spoil", "nan"), ("keep", "accepted")])
def test_resident_memory_is_the_message_and_one_copy(tmp_path: Any, spoil: str, verdict: str) -> None:
    """80 MB in a process of its own: twice its size, with the message itself counted."""
    values = torch.ones(20_000_000)
    data = encode({"w": values}, {"w": None}, kind="up", round_=1, client=0, samples=1, codec="float32", seed=0)
    if spoil == "spoil":
        values[-1] = math.nan
        data = forge.signed(forge.parts(data)[0], forge.parts(data)[1][:-4] + values[-1:].numpy().tobytes())
    (tmp_path / "message").write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT, str(tmp_path / "message")], capture_output=True, text=True, check=True
    )
    said, growth = done.stdout.split()
    assert said == verdict
    assert 1.5 < float(growth) < 2.2
