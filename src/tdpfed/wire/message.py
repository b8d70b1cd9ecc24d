"""A message as bytes: ``TDPF``, a version, the length of a JSON header, the header, a safetensors payload.

The header describes the message and has a SHA-256 sum over itself and the payload, since safetensors does not detect
bit flips. The bytes are untrusted: ``decode`` checks every length against the actual size before it allocates, executes
nothing it reads, and raises only :class:`Rejected`.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.core.state import State
from tdpfed.errors import TDPFedError, unknown
from tdpfed.wire.codecs import (
    DTYPES,
    SCALE,
    Codec,
    Kind,
    Layouts,
    draw_key,
    finite,
    first_not_finite,
    grow,
    place,
    shrink,
    tensors_of,
)  # fmt: skip
from tdpfed.wire.payload import is_count, read_payload, strict_json
from tdpfed.wire.rejected import Rejected

MAGIC, VERSION = b"TDPF", 1
PREFIX_BYTES = len(MAGIC) + 1 + 4
HEADER_LIMIT_BYTES = 1024
KEYS = ("kind", "round", "client", "samples", "layout", "codec", "sha256")


@dataclass(frozen=True)
class Message:
    """The header of a message and its tensors as received, not yet validated.

    The tensors are views of the received bytes, to save memory: do not write to them.
    """

    kind: Kind
    round: int
    client: int
    samples: int
    layout: str
    codec: Codec
    tensors: Mapping[str, Tensor]


def encode(
    state: State, layouts: Layouts, *, kind: Kind, round_: int, client: int, samples: int, codec: Codec, seed: int
) -> bytes:
    """Return a client's state, tensors ``(n,)``, as a message from it (up) or to it (down).

    A value that the receiver would see as infinite or NaN is an error: float16 ends at 65504, values are not clipped.
    """
    lengths = _lengths(state, layouts, codec)
    tensors: dict[str, Tensor] = {}
    for name, value in state.items():
        layout, flat = layouts[name], value.detach().cpu()
        parts = shrink(flat, layout, codec, draw_key(seed, round_, torch.tensor(client), kind, name))
        seen = grow(parts, layout)
        if not bool(finite(seen)):
            first = first_not_finite(seen)
            raise TDPFedError(
                f"{place(name, layout, first)}: {float(flat[first])} given, must be a finite number that {codec} holds"
            )
        transmitted = zip((name, name + SCALE), (DTYPES[codec], torch.float32), parts, strict=False)
        tensors |= {key: part.to(dtype, copy=True) for key, dtype, part in transmitted}
    payload = save(tensors)
    fields = (kind, round_, client, samples, form_hash(lengths, layouts), codec)
    digest = _digest(fields, payload)
    _checked_header(dict(zip(KEYS, (*fields, digest), strict=True)))
    header = _header(*fields, digest)
    return MAGIC + bytes([VERSION]) + len(header).to_bytes(4, "little") + header + payload


def decode(data: bytes, limit: int) -> Message:
    """Return the message in ``data``, of at most ``limit`` bytes, or raise :class:`Rejected`."""
    if len(data) > limit:
        raise Rejected("size", f"{len(data)} bytes, must be at most {limit}")
    if data[:4] != MAGIC:
        raise Rejected("magic", f"begins with {data[:4]!r}, must be {MAGIC!r}")
    if data[4:5] != bytes([VERSION]):
        raise Rejected("version", f"format version {list(data[4:5])}, must be [{VERSION}]")
    end = PREFIX_BYTES + int.from_bytes(data[5:PREFIX_BYTES], "little")
    if len(data) < PREFIX_BYTES or end > min(len(data), PREFIX_BYTES + HEADER_LIMIT_BYTES):
        raise Rejected(
            "header", f"header ends at byte {end} of {len(data)}, must have at most {HEADER_LIMIT_BYTES} bytes"
        )
    header = _checked_header(strict_json(data[PREFIX_BYTES:end], "header"))
    payload = memoryview(data)[end:]
    fields = {name: header[name] for name in KEYS[:-1]}
    if _digest(tuple(fields.values()), payload) != header["sha256"]:
        raise Rejected("checksum", "content and SHA-256 differ", client=header["client"])
    return Message(**fields, tensors=read_payload(payload, header["client"]))


def encoded_size(
    lengths: Mapping[str, int], layouts: Layouts, codec: Codec, *, kind: Kind, round_: int, client: int, samples: int
) -> int:
    """Return the exact length of the message that :func:`encode` makes of a state with these ``lengths``."""
    blank = "0" * 64
    form = tuple((name, length, layouts[name]) for name, length in lengths.items())
    return PREFIX_BYTES + len(_header(kind, round_, client, samples, blank, codec, blank)) + _payload_size(form, codec)


def form_hash(lengths: Mapping[str, int], layouts: Layouts) -> str:
    """Return a SHA-256 sum over the names, lengths and layouts of a state's entries, to compare two sides."""
    entries = [(name, lengths[name], layout and layout.hash) for name, layout in sorted(layouts.items())]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


@lru_cache(maxsize=64)
def _payload_size(form: tuple[tuple[str, int, Layout | None], ...], codec: Codec) -> int:
    """Return the size of a payload, which depends only on names, types and lengths: measured with zeros."""
    lengths, layouts = {name: length for name, length, _ in form}, {name: layout for name, _, layout in form}
    transmitted = tensors_of(lengths, layouts, codec)
    return len(save({name: torch.zeros(length, dtype=dtype) for name, (dtype, length) in transmitted.items()}))


def _header(*values: str | int) -> bytes:
    return json.dumps(dict(zip(KEYS, values, strict=True)), separators=(",", ":")).encode()


def _digest(fields: tuple[str | int, ...], payload: bytes | memoryview) -> str:
    """Return the SHA-256 sum over the payload and the header, with the field of the sum left empty."""
    digest = hashlib.sha256(_header(*fields, ""))
    digest.update(payload)
    return digest.hexdigest()


def _lengths(state: State, layouts: Layouts, codec: Codec) -> dict[str, int]:
    """Return the lengths of a state's entries, which must be vectors that match their layouts."""
    if codec not in DTYPES:
        raise unknown("codec", codec, DTYPES)
    if state.keys() != layouts.keys():
        raise TDPFedError(f"state: entries {sorted(state)} given, must be {sorted(layouts)}")
    for name, value in state.items():
        layout = layouts[name]
        wanted = "(n,)" if layout is None else f"({layout.size},)"
        if value.ndim != 1 or not len(value) or (layout is not None and len(value) != layout.size):
            raise TDPFedError(f"{name}: shape {tuple(value.shape)} given, must be {wanted}")
    return {name: len(value) for name, value in state.items()}


def _checked_header(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header if it has exactly the required fields and types."""
    if header.keys() != set(KEYS):
        raise Rejected("header", f"header: fields {sorted(header)}, must be {sorted(KEYS)}")
    client = header["client"] if is_count(header["client"]) else None
    rules = {"kind": get_args(Kind).__contains__, "codec": get_args(Codec).__contains__}
    rules |= dict.fromkeys(("round", "client", "samples"), is_count) | dict.fromkeys(("layout", "sha256"), _is_digest)
    for name, holds in rules.items():
        if not holds(header[name]):
            raise Rejected("header", f"header: {name} is invalid", client=client)
    return header


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None
