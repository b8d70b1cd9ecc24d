"""Faults a message can have: each takes what a server is about to receive, and returns it spoilt in one way.

With the spoilt message comes the set of rules that may refuse it. Draws come from hypothesis.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import forge
import torch
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.wire import Expected, decode, encode

BYTES = {"size", "magic", "version", "header", "checksum", "payload", "dtype", "shape"}
KINDS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


@dataclass(frozen=True)
class Scene:
    """A server in the middle of a round."""

    good: bytes
    """The honest message that is spoilt."""
    want: Expected
    limit: int
    replays: Sequence[bytes]
    """Messages that were accepted already."""


Draw = Callable[[st.SearchStrategy[Any]], Any]
Case = tuple[bytes, set[str]]
Fault = Callable[[Draw, Scene], Case]


def pick(draw: Draw, items: Sequence[Any]) -> Any:
    return items[draw(st.integers(0, len(items) - 1))]


def tensors_in(message: bytes) -> list[tuple[str, Tensor]]:
    return sorted(decode(message, len(message)).tensors.items())


def shape(draw: Draw, scene: Scene) -> Case:
    name, value = pick(draw, tensors_in(scene.good))
    other = pick(draw, [value[:-1], value.repeat(2), torch.cat((value, value[:1])), value[None], value[:, None]])
    return forge.with_tensors(scene.good, {name: other}), {"shape"}


def dtype(draw: Draw, scene: Scene) -> Case:
    name, value = pick(draw, tensors_in(scene.good))
    other = pick(draw, [kind for kind in KINDS if kind != value.dtype])
    return forge.with_tensors(scene.good, {name: value.to(other)}), {"dtype"}


def _with_value(draw: Draw, scene: Scene, bad: float) -> Case:
    name, value = pick(draw, [(name, value) for name, value in tensors_in(scene.good) if value.is_floating_point()])
    spoilt = value.clone()
    spoilt[pick(draw, range(len(value)))] = bad
    return forge.with_tensors(scene.good, {name: spoilt}), {"nan"}


def nan(draw: Draw, scene: Scene) -> Case:
    return _with_value(draw, scene, math.nan)


def infinite(draw: Draw, scene: Scene) -> Case:
    return _with_value(draw, scene, pick(draw, [math.inf, -math.inf]))


def oversize(draw: Draw, scene: Scene) -> Case:
    """More bytes after the end, or a whole message with more values."""
    room = scene.limit - len(scene.good) + 1 + draw(st.integers(0, 500))
    if draw(st.booleans()):
        return scene.good + bytes(room), {"size"}
    return forge.with_tensors(scene.good, {"more": torch.zeros(room)}), {"size"}


def duplicate(draw: Draw, scene: Scene) -> Case:
    """The accepted message again, or another one in the same name."""
    first = pick(draw, scene.replays)
    other = forge.with_tensors(first, {name: -value for name, value in tensors_in(first)})
    return pick(draw, [first, other]), {"duplicate"}


def unknown(draw: Draw, scene: Scene) -> Case:
    known: Any = scene.want.clients
    client = draw(st.integers(0, 2**63 - 1).filter(lambda k: k not in known))
    return forge.with_header(scene.good, client=client), {"client"}


def missing(draw: Draw, scene: Scene) -> Case:
    return forge.with_tensors(scene.good, {pick(draw, tensors_in(scene.good))[0]: None}), {"names"}


def other_name(draw: Draw, scene: Scene) -> Case:
    """One tensor too many, or one under another name."""
    name, value = pick(draw, tensors_in(scene.good))
    extra = "+" + draw(st.text(st.characters(codec="utf-8"), max_size=20))
    changes: dict[str, Tensor | None] = {name: None} if draw(st.booleans()) else {}
    return forge.with_tensors(scene.good, changes | {extra: value.clone()}), {"names"}


def stale(draw: Draw, scene: Scene) -> Case:
    """Of the round before, or of any other."""
    now = scene.want.round
    other = draw(st.one_of(st.just(now - 1), st.integers(0, 2**63 - 1).filter(lambda number: number != now)))
    return forge.with_header(scene.good, round=other), {"round"}


def _foreign(draw: Draw, scene: Scene) -> tuple[bytes, bool]:
    """Return a message of a client with another layout, and whether the layout is as long as the right one."""
    header, _ = forge.parts(scene.good)
    layouts = dict(scene.want.layouts)
    entry = next(name for name, layout in layouts.items() if layout is not None)
    right = layouts[entry]
    assert right is not None
    shapes = dict(zip(right.names, right.shapes, strict=True))
    name = pick(draw, [name for name, shape in shapes.items() if len(shape) == 2])
    rows, rank = shapes.pop(name)
    same = draw(st.booleans())
    new = (f"{name}x", (rows, rank)) if same else (name, (rows, rank + draw(st.integers(1 - rank, 3).filter(bool))))
    layouts[entry] = Layout.of({**shapes, new[0]: new[1]})
    state = {key: torch.ones(layout.size if layout else scene.want.lengths[key]) for key, layout in layouts.items()}
    fields = {key: header[key] for key in ("kind", "client", "samples", "codec")}
    return encode(state, layouts, round_=header["round"], seed=0, **fields), same


def wrong_rank(draw: Draw, scene: Scene) -> Case:
    """A sender with factors of another rank, or of the same under another name."""
    return _foreign(draw, scene)[0], {"layout"}


def lying_rank(draw: Draw, scene: Scene) -> Case:
    """The same, under the layout hash that is expected wherever the length gives it away."""
    data, same = _foreign(draw, scene)
    lied = forge.with_header(data, layout=forge.parts(scene.good)[0]["layout"])
    return (data, {"layout"}) if same else (lied, {"shape"})


def weight(draw: Draw, scene: Scene) -> Case:
    mine = forge.parts(scene.good)[0]["samples"]
    other = draw(st.one_of(st.just(10 * mine), st.integers(0, 2**63 - 1).filter(lambda samples: samples != mine)))
    return forge.with_header(scene.good, samples=other), {"weight"}


def other_codec(draw: Draw, scene: Scene) -> Case:
    other = pick(draw, [name for name in forge.CODECS if name != scene.want.codec])
    return forge.with_header(scene.good, codec=other), {"codec"}


def other_kind(draw: Draw, scene: Scene) -> Case:
    return forge.with_header(scene.good, kind="down"), {"kind"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(max_value=-1), st.integers(min_value=2**63), st.floats(),
    st.text(max_size=8).map("?".__add__), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


def header_value(draw: Draw, scene: Scene) -> Case:
    header, payload = forge.parts(scene.good)
    return forge.framed(header | {pick(draw, sorted(header)): draw(JUNK)}, payload), {"header"}


def header_fields(draw: Draw, scene: Scene) -> Case:
    header, payload = forge.parts(scene.good)
    if draw(st.booleans()):
        header["+" + draw(st.text(max_size=5))] = 1
    else:
        del header[pick(draw, sorted(header))]
    return forge.framed(header, payload), {"header"}


def header_bytes(draw: Draw, scene: Scene) -> Case:
    raw = draw(st.one_of(st.binary(max_size=40), JUNK.map(lambda value: json.dumps(value).encode())))
    return forge.framed(raw, forge.parts(scene.good)[1]), {"header"}


def magic(draw: Draw, scene: Scene) -> Case:
    start = draw(st.binary(min_size=4, max_size=4).filter(lambda start: start != scene.good[:4]))
    return start + scene.good[4:], {"magic"}


def version(draw: Draw, scene: Scene) -> Case:
    other = draw(st.integers(0, 255).filter(lambda version: version != scene.good[4]))
    return scene.good[:4] + bytes([other]) + scene.good[5:], {"version"}


def header_length(draw: Draw, scene: Scene) -> Case:
    right = int.from_bytes(scene.good[5:9], "little")
    length = (right + draw(st.integers(1, 2**32 - 1))) % 2**32
    return scene.good[:5] + length.to_bytes(4, "little") + scene.good[9:], {"header"}


def flipped_bit(draw: Draw, scene: Scene) -> Case:
    """A bit of the payload that is not what was sent."""
    start = len(scene.good) - len(forge.parts(scene.good)[1])
    spoilt = bytearray(scene.good)
    spoilt[draw(st.integers(start, len(spoilt) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(spoilt), {"checksum"}


def random_bytes(draw: Draw, scene: Scene) -> Case:
    good = scene.good
    start = pick(draw, [b"", b"TDPF", b"TDPF\x01", good[:9], good[: -draw(st.integers(9, 300))]])
    return start + draw(st.binary(max_size=60)), BYTES


def payload_entries(draw: Draw, scene: Scene) -> Case:
    """A payload that lies about itself, under a right checksum."""
    number = st.one_of(st.integers(-1, 90), st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64, 10**30]), JUNK)
    kinds = st.sampled_from(["F32", "I8", "BF16", "F64", "F4", "X", "", None])
    entry = st.fixed_dictionaries(
        {"dtype": kinds, "shape": st.lists(number, max_size=2), "data_offsets": st.lists(number, max_size=3)}
    )
    names = st.sampled_from(["factors", "w", "w/scale", "__metadata__", "\ud800"])
    entries = draw(st.dictionaries(names, st.one_of(entry, JUNK), max_size=3))
    data = forge.with_payload(scene.good, entries, draw(st.binary(max_size=90)))
    return data, {"payload", "dtype", "shape", "names"}


def payload_places(draw: Draw, scene: Scene) -> Case:
    """The honest payload with a tensor's place or length off by a little, or with more or less behind it."""
    payload = forge.parts(scene.good)[1]
    start = 8 + int.from_bytes(payload[:8], "little")
    entries, body = json.loads(payload[8:start]), payload[start:]
    entry, off = entries[pick(draw, sorted(entries))], draw(st.integers(-8, 8).filter(bool))
    match pick(draw, ["begin", "end", "shape", "body"]):
        case "begin":
            entry["data_offsets"][0] += off
        case "end":
            entry["data_offsets"][1] += off
        case "shape":
            entry["shape"][0] += off
        case _:
            body = body[:off] if off < 0 else body + bytes(off)
    return forge.with_payload(scene.good, entries, body), {"payload", "shape"}


def payload_bytes(draw: Draw, scene: Scene) -> Case:
    return forge.signed(forge.parts(scene.good)[0], draw(st.binary(max_size=60))), {"payload", "names"}


FAULTS: list[Fault] = [
    shape, dtype, nan, infinite, oversize, duplicate, unknown, missing, other_name, stale, wrong_rank, lying_rank,
    weight, other_codec, other_kind, magic, version, header_value, header_fields, header_bytes,
    header_length, flipped_bit, random_bytes, payload_entries, payload_places, payload_bytes,
]  # fmt: skip
