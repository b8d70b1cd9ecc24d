"""A message as bytes: a header of 48 bytes, then the numbers of its form, one section after another.

The header says what the message is and ends with a checksum over itself and the payload. Names, types and lengths are
not sent: both sides derive the form from the configuration, and the header only has its hash. The bytes are untrusted:
``decode`` and :func:`tdpfed.wire.validate` check every length before they allocate, execute nothing, and raise only
:class:`Rejected`.
"""

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.errors import TDPFedError, unknown
from tdpfed.wire.codecs import Codec, Kind, draw_key, finite, first_not_finite, place, shrink
from tdpfed.wire.forms import HEADER_BYTES, Form, Whole
from tdpfed.wire.rejected import Rejected

MAGIC, VERSION = b"TDPF", 2
HEADER = struct.Struct("<4sBBBBIIQ8s16s")
"""Magic, version, kind, form, codec, round, client, samples, hash of the form, checksum."""
assert HEADER.size == HEADER_BYTES
CHECKSUM_BYTES = 16

KINDS: tuple[Kind, ...] = get_args(Kind)
CODECS: tuple[Codec, ...] = get_args(Codec)
FORMS = ("dense", "change", "factors", "top-k")


@dataclass(frozen=True)
class Message:
    """The header of a message and its payload as received, not yet validated."""

    kind: Kind
    form: str
    codec: Codec
    round: int
    client: int
    samples: int
    hash: bytes
    payload: memoryview


def encode(parts: Sequence[Tensor], form: Form, *, kind: Kind, round_: int, client: int, samples: int) -> bytes:
    """Return the numbers of one client, ``(length,)`` for each section of the form, as a message from or to it."""
    return with_header(packed(parts, form), form, kind=kind, round_=round_, client=client, samples=samples)


def packed(parts: Sequence[Tensor], form: Form) -> bytes:
    """Return the payload of a message, which is the same for all clients that receive the same numbers."""
    return b"".join(_sections(parts, form))


def with_header(payload: bytes, form: Form, *, kind: Kind, round_: int, client: int, samples: int) -> bytes:
    """Return a message with this payload."""
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    codes = KINDS.index(kind), FORMS.index(form.name), CODECS.index(form.codec)
    for name, value, below in (("round", round_, 2**32), ("client", client, 2**32), ("samples", samples, 2**63)):
        if not 0 <= value < below:
            raise TDPFedError(f"{name}: {value} given, must be at least 0 and below {below}")
    fields = (MAGIC, VERSION, *codes, round_, client, samples, form.hash)
    return HEADER.pack(*fields, _checksum(HEADER.pack(*fields, b""), payload)) + payload


def _sections(parts: Sequence[Tensor], form: Form) -> Iterator[bytes]:
    """Yield the bytes of each section; numbers that are not finite or not as many as the form says are an error."""
    if len(parts) != len(form.sections):
        raise TDPFedError(f"parts: {len(parts)} given, must be {len(form.sections)}")
    for name, own in form.split(parts).items():
        for section, part in zip(form.entries[name].sections, own, strict=True):
            if part.shape != (section.length,):
                raise TDPFedError(f"{name}: numbers of shape {tuple(part.shape)} given, must be ({section.length},)")
            numbers = part.detach().cpu()
            if not bool(finite(numbers)):
                raise TDPFedError(f"{name}: {float(numbers[first_not_finite(numbers)])} given, must be finite")
            yield section.pack(numbers)


def whole_parts(state: State, form: Form, *, kind: Kind, round_: int, client: int, seed: int) -> list[Tensor]:
    """Return the numbers of entries ``(n,)`` that travel as they are, for :func:`encode`.

    A value that the receiver would see as infinite or NaN is an error: float16 ends at 65504, values are not clipped.
    """
    if state.keys() != form.entries.keys():
        raise TDPFedError(f"state: entries {sorted(state)} given, must be {sorted(form.entries)}")
    parts: list[Tensor] = []
    for name, entry in form.entries.items():
        assert isinstance(entry, Whole)
        value = state[name].detach().cpu()
        if value.shape != (entry.length,):
            raise TDPFedError(f"{name}: shape {tuple(value.shape)} given, must be ({entry.length},)")
        bits = draw_key(seed, round_, torch.tensor(client), kind, name)
        own = shrink(value, entry.layout, entry.codec, bits)
        seen = entry.grow(own)
        if not bool(finite(seen)):
            first = first_not_finite(seen)
            raise TDPFedError(
                f"{place(name, entry.layout, first)}: {float(value[first])} given, must be a finite number that "
                f"{entry.codec} holds"
            )
        parts += own
    return parts


def decode(data: bytes, limit: int) -> Message:
    """Return the message in ``data``, of at most ``limit`` bytes, or raise :class:`Rejected`."""
    if len(data) > limit:
        raise Rejected("size", f"{len(data)} bytes, must be at most {limit}")
    if data[:4] != MAGIC:
        raise Rejected("magic", f"begins with {data[:4]!r}, must be {MAGIC!r}")
    if data[4:5] != bytes([VERSION]):
        raise Rejected("version", f"format version {list(data[4:5])}, must be [{VERSION}]")
    if len(data) < HEADER_BYTES:
        raise Rejected("header", f"{len(data)} bytes, must be at least {HEADER_BYTES}")
    _, _, kind, form, codec, round_, client, samples, hash_, checksum = HEADER.unpack_from(data)
    payload = memoryview(data)[HEADER_BYTES:]
    if checksum != _checksum(data[: HEADER_BYTES - CHECKSUM_BYTES] + bytes(CHECKSUM_BYTES), payload):
        raise Rejected("checksum", "content and checksum differ", client=client)
    for name, code, known in (("kind", kind, KINDS), ("form", form, FORMS), ("codec", codec, CODECS)):
        if code >= len(known):
            raise Rejected("header", f"{name} {code}, must be below {len(known)}", client=client)
    if samples >= 2**63:
        raise Rejected("header", f"{samples} samples, must be below 2^63", client=client)
    return Message(KINDS[kind], FORMS[form], CODECS[codec], round_, client, samples, hash_, payload)


def _checksum(header: bytes, payload: bytes | memoryview) -> bytes:
    """Return half of the SHA-256 sum over the header, with zeros in place of the checksum, and the payload."""
    digest = hashlib.sha256(header)
    digest.update(payload)
    return digest.digest()[:CHECKSUM_BYTES]
