"""Faults a message can have: each takes what a server is about to receive, and returns it spoilt in one way.

With the spoilt message comes the set of rules that may refuse it. Draws come from hypothesis. A fault that a form
cannot have returns None.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import forge
from hypothesis import strategies as st

from tdpfed.wire import Expected
from tdpfed.wire.packing import FLOATS, Section

BYTES = {"size", "magic", "version", "header", "checksum"}


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
Fault = Callable[[Draw, Scene], Case | None]


def pick(draw: Draw, items: Sequence[Any]) -> Any:
    return items[draw(st.integers(0, len(items) - 1))]


def _place(draw: Draw, scene: Scene, fits: Callable[[Section], bool]) -> tuple[Section, int] | None:
    """Return a section of the form of this kind, and where it begins."""
    found = [(section, at) for _, section, at in forge.sections(scene.want.form) if fits(section)]
    return pick(draw, found) if found else None


def _with_number(draw: Draw, scene: Scene, section: Section, at: int, value: float) -> bytes:
    new = forge.number(section.format, value)
    return forge.with_bytes(scene.good, at + len(new) * draw(st.integers(0, section.length - 1)), new)


def _not_finite(draw: Draw, scene: Scene, values: Sequence[float]) -> Case | None:
    """A number that is no scale, or a scale that makes one: a large one times a whole number."""
    place = _place(draw, scene, lambda s: s.format in FLOATS and not s.scale)
    if place is not None:
        return _with_number(draw, scene, *place, pick(draw, values)), {"nan"}
    place = _place(draw, scene, lambda s: s.scale)
    assert place is not None
    return _with_number(draw, scene, *place, 3.38e38), {"nan"}


def nan(draw: Draw, scene: Scene) -> Case | None:
    return _not_finite(draw, scene, [math.nan])


def infinite(draw: Draw, scene: Scene) -> Case | None:
    return _not_finite(draw, scene, [math.inf, -math.inf])


def bad_scale(draw: Draw, scene: Scene) -> Case | None:
    place = _place(draw, scene, lambda s: s.scale)
    if place is None:
        return None
    return _with_number(draw, scene, *place, pick(draw, [math.nan, math.inf, -math.inf, -1.0, -0.0])), {"values"}


def out_of_range(draw: Draw, scene: Scene) -> Case | None:
    """A whole number that no sender makes: -128 of 8 bits, -8 of 4 bits."""
    place = _place(draw, scene, lambda s: s.format in ("int8", "int4"))
    if place is None:
        return None
    section, at = place
    where = draw(st.integers(0, section.length - 1))
    if section.format == "int8":
        return forge.with_bytes(scene.good, at + where, b"\x80"), {"values"}
    before = forge.parts(scene.good)[1][at + where // 2]
    new = (before & 0xF0) | 0x08 if where % 2 == 0 else (before & 0x0F) | 0x80
    return forge.with_bytes(scene.good, at + where // 2, bytes([new])), {"values"}


def padding(draw: Draw, scene: Scene) -> Case | None:
    """A number where the last of an odd count of nibbles ends."""
    place = _place(draw, scene, lambda s: s.format == "int4" and s.length % 2 == 1)
    if place is None:
        return None
    section, at = place
    last = at + section.bytes - 1
    new = forge.parts(scene.good)[1][last] | draw(st.integers(1, 15)) << 4
    return forge.with_bytes(scene.good, last, bytes([new])), {"values"}


def positions(draw: Draw, scene: Scene) -> Case | None:
    """A bit more or less among the positions, or all of one value: too many, too few, or not ascending."""
    place = _place(draw, scene, lambda s: s.format == "positions")
    if place is None:
        return None
    section, at = place
    own = bytearray(forge.parts(scene.good)[1][at : at + section.bytes])
    cut = (section.length * int(math.log2(section.below / section.length)) + 7) // 8  # the high bits begin here
    match pick(draw, ["flip", "ones", "zeros"]):
        case "flip":
            bit = draw(st.integers(8 * cut, 8 * len(own) - 1))
            own[bit // 8] ^= 0x80 >> bit % 8
        case "ones":
            own[:] = b"\xff" * len(own)
        case _:
            own[:] = bytes(len(own))
    return forge.with_bytes(scene.good, at, bytes(own)), {"values"}


def huge(draw: Draw, scene: Scene) -> Case | None:
    """A change that is finite and much larger than any training makes."""
    if scene.want.unchanged is None:
        return None
    place = _place(draw, scene, lambda s: s.scale or s.format in ("float32", "bfloat16"))
    if place is not None:
        return _with_number(draw, scene, *place, pick(draw, [1e20, 1e25])), {"norm"}
    of_16_bits = [(section, at) for _, section, at in forge.sections(scene.want.form) if section.format == "float16"]
    section, at = of_16_bits[0]  # no such number reaches so far alone
    return forge.with_bytes(scene.good, at, forge.number("float16", 6e4) * section.length), {"norm"}


def oversize(draw: Draw, scene: Scene) -> Case:
    """More bytes after the end, signed or not."""
    more = bytes(scene.limit - len(scene.good) + 1 + draw(st.integers(0, 500)))
    if draw(st.booleans()):
        return scene.good + more, {"size"}
    return forge.with_payload(scene.good, forge.parts(scene.good)[1] + more), {"size"}


def payload_length(draw: Draw, scene: Scene) -> Case:
    """A payload that is longer or shorter than its form, under a right checksum."""
    payload = forge.parts(scene.good)[1]
    if draw(st.booleans()):
        return forge.with_payload(scene.good, payload + draw(st.binary(min_size=1, max_size=60))), {"payload"}
    return forge.with_payload(scene.good, payload[: draw(st.integers(0, len(payload) - 1))]), {"payload"}


def duplicate(draw: Draw, scene: Scene) -> Case:
    """The accepted message again, or another one in the same name."""
    first = pick(draw, scene.replays)
    other = forge.with_payload(first, forge.parts(scene.good)[1])
    return pick(draw, [first, other]), {"duplicate"}


def unknown(draw: Draw, scene: Scene) -> Case:
    known: Any = scene.want.clients
    client = draw(st.integers(0, 2**32 - 1).filter(lambda k: k not in known))
    return forge.with_header(scene.good, client=client), {"client"}


def stale(draw: Draw, scene: Scene) -> Case:
    """Of the round before, or of any other."""
    now = scene.want.round
    other = draw(st.one_of(st.just(now - 1), st.integers(0, 2**32 - 1).filter(lambda number: number != now)))
    return forge.with_header(scene.good, round=other), {"round"}


def other_layout(draw: Draw, scene: Scene) -> Case:
    """A sender with another model, other terms or another share."""
    right = scene.want.form.hash
    other = draw(st.binary(min_size=8, max_size=8).filter(lambda value: value != right))
    return forge.with_header(scene.good, hash=other), {"layout"}


def weight(draw: Draw, scene: Scene) -> Case:
    mine = forge.parts(scene.good)[0]["samples"]
    other = draw(st.one_of(st.just(10 * mine), st.integers(0, 2**63 - 1).filter(lambda samples: samples != mine)))
    return forge.with_header(scene.good, samples=other), {"weight"}


def other_codec(draw: Draw, scene: Scene) -> Case:
    mine = forge.ALL_CODECS.index(scene.want.form.codec)
    return forge.with_header(scene.good, codec=pick(draw, [n for n in range(5) if n != mine])), {"codec"}


def other_form(draw: Draw, scene: Scene) -> Case:
    mine = forge.FORMS.index(scene.want.form.name)
    return forge.with_header(scene.good, form=pick(draw, [n for n in range(4) if n != mine])), {"form"}


def other_kind(draw: Draw, scene: Scene) -> Case:
    return forge.with_header(scene.good, kind=0), {"kind"}


def header_value(draw: Draw, scene: Scene) -> Case:
    """A code that means nothing, or a number of samples that no counter holds."""
    field, least = pick(draw, [("kind", 2), ("form", 4), ("codec", 5), ("samples", 2**63)])
    most = 2**64 - 1 if field == "samples" else 255
    return forge.with_header(scene.good, **{field: draw(st.integers(least, most))}), {"header"}


def short(draw: Draw, scene: Scene) -> Case:
    return scene.good[: draw(st.integers(5, forge.HEADER_BYTES - 1))], {"header"}


def magic(draw: Draw, scene: Scene) -> Case:
    start = draw(st.binary(min_size=4, max_size=4).filter(lambda start: start != scene.good[:4]))
    return start + scene.good[4:], {"magic"}


def version(draw: Draw, scene: Scene) -> Case:
    other = draw(st.integers(0, 255).filter(lambda version: version != scene.good[4]))
    return scene.good[:4] + bytes([other]) + scene.good[5:], {"version"}


def flipped_bit(draw: Draw, scene: Scene) -> Case:
    """A bit of header or payload that is not what was sent."""
    spoilt = bytearray(scene.good)
    spoilt[draw(st.integers(5, len(spoilt) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(spoilt), {"checksum"}


def cut(draw: Draw, scene: Scene) -> Case:
    return scene.good[: draw(st.integers(forge.HEADER_BYTES, len(scene.good) - 1))], {"checksum"}


def random_bytes(draw: Draw, scene: Scene) -> Case:
    good = scene.good
    start = pick(draw, [b"", b"TDPF", b"TDPF\x02", good[:9], good[: -draw(st.integers(9, 30))]])
    return start + draw(st.binary(max_size=60)), BYTES


FAULTS: list[Fault] = [
    nan, infinite, bad_scale, out_of_range, padding, positions, huge, oversize, payload_length, duplicate, unknown,
    stale, other_layout, weight, other_codec, other_form, other_kind, header_value, short, magic, version, flipped_bit,
    cut, random_bytes,
]  # fmt: skip


def rules_of(want: Expected) -> set[str]:
    """Return the rules that the faults of a form can violate."""
    changes, every = want.unchanged is not None, forge.sections(want.form)
    crooked = any(section.scale or section.format not in FLOATS for _, section, _ in every)
    always = {
        "size", "magic", "version", "header", "checksum", "kind", "client", "duplicate", "round", "weight", "codec",
        "form", "layout", "payload", "nan",
    }  # fmt: skip
    return always | ({"norm"} if changes else set()) | ({"values"} if crooked else set())
