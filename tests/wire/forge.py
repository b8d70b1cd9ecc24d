"""Messages as a careful enemy would make them: consistent in themselves, wrong in one thing. Shared by these tests.

The header is written here by hand, as its description says, so that a mistake in the package's own code is seen.
"""

import hashlib
import struct
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tdpfed.algorithms import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.core.state import Entries, State
from tdpfed.wire import Codec, Expected, Form, Layouts, Wire, encode, whole_parts
from tdpfed.wire.channel import Channel
from tdpfed.wire.packing import Section

FACTORS = Layout.of({"fc1.A1": (3, 2), "fc1.A2": (4, 2), "fc1.bias": (3,), "conv": (2, 1, 2)})
LAYOUTS: Layouts = {"factors": FACTORS, "values": None}
CODECS: tuple[Codec, ...] = ("float32", "float16", "bfloat16", "int8")
"""Those of entries that travel as they are."""

WEIGHTS = Layout.of({"fc.weight": (12, 17), "fc.bias": (12,), "conv.weight": (8, 4, 3, 3), "tall.weight": (21, 5)})
LENGTHS = {"w": WEIGHTS.size, "values": 31}
SAMPLES = {3: 20, 12: 21, 7: 22}
LIMIT = 8192

WIRES: dict[str, Wire] = {
    **{f"dense {codec}": Wire(codec=codec) for codec in CODECS},
    "change int4": Wire(codec="int4"),
    "change int8": Wire(codec="int8", feedback=True),
    "change bfloat16": Wire(codec="bfloat16", feedback=True),
    "factors int4": Wire(update="factors", terms=2),
    "factors int8": Wire(update="factors", codec="int8", terms=2, kernels="tensor"),
    "factors float32": Wire(update="factors", codec="float32", terms=2, kernels="tensor"),
    "factors float16": Wire(update="factors", codec="float16", compression=3),
    "top-k int8": Wire(update="top-k", share=0.1),
    "top-k int4": Wire(update="top-k", share=0.53, codec="int4"),
    "top-k float32": Wire(update="top-k", share=1.0, codec="float32", feedback=False),
}
"""Every form of an upload, with the number formats that make a difference to it."""
CHANGES = [label for label in WIRES if not label.startswith("dense")]


class Two(FedAvg):
    """A method with two entries: one with a layout, and one of plain values."""

    name = "two"

    def down(self) -> Entries:
        return {"w": self.layout, "values": LENGTHS["values"]}

    up = down


@cache
def channel(label: str) -> Channel:
    return Channel(Two().bind(WEIGHTS, 5), WIRES[label], 1)


def form(label: str) -> Form:
    return channel(label).form


def drawn(seed: int, scale: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(length, generator=generator) for name, length in LENGTHS.items()}


def received(label: str) -> State | None:
    """What the clients of these tests received, where uploads are changes."""
    return None if form(label).name == "dense" else drawn(99)


def parts_of(label: str, client: int = 12, round_: int = 5, seed: int = 0) -> tuple[list[Tensor], State]:
    """Return the numbers of an honest upload, and what the server must see."""
    state, start = drawn(seed), received(label)
    if start is None:
        found = whole_parts(state, form(label), kind="up", round_=round_, client=client, seed=1)
        return found, form(label).grow(found)
    kept = channel(label).start(torch.zeros(0))
    rows = [{name: value[None] for name, value in one.items()} for one in (state, start, kept)]
    sent = channel(label).send(*rows)
    return [part[0] for part in sent.parts], {name: value[0] for name, value in sent.seen.items()}


def honest(label: str = "dense float32", client: int = 12, round_: int = 5, seed: int = 0) -> bytes:
    found, _ = parts_of(label, client, round_, seed)
    return encode(found, form(label), kind="up", round_=round_, client=client, samples=SAMPLES[client])


def expected(label: str = "dense float32", **changes: Any) -> Expected:
    wanted: dict[str, Any] = {
        "kind": "up", "round": 5, "form": form(label), "clients": SAMPLES, "samples": SAMPLES,
        "unchanged": received(label),
    }  # fmt: skip
    return Expected(**wanted | changes)


HEADER = struct.Struct("<4s B BBB I I Q 8s 16s")
FIELDS = ("magic", "version", "kind", "form", "codec", "round", "client", "samples", "hash", "checksum")
HEADER_BYTES = 48
KINDS, FORMS = ("down", "up"), ("dense", "change", "factors", "top-k")
ALL_CODECS = ("float32", "float16", "bfloat16", "int8", "int4")


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and payload of a good message."""
    return dict(zip(FIELDS, HEADER.unpack(data[:HEADER_BYTES]), strict=True)), data[HEADER_BYTES:]


def signed(header: dict[str, Any], payload: bytes) -> bytes:
    """Put a message together and give it the checksum that fits, as the format's description says."""
    blank = HEADER.pack(*(header | {"checksum": bytes(16)}).values())
    return blank[:-16] + hashlib.sha256(blank + payload).digest()[:16] + payload


def with_header(data: bytes, **changes: Any) -> bytes:
    header, payload = parts(data)
    return signed(header | changes, payload)


def with_payload(data: bytes, payload: bytes) -> bytes:
    return signed(parts(data)[0], payload)


def with_bytes(data: bytes, at: int, new: bytes) -> bytes:
    """Return a message with other bytes at a place of its payload."""
    payload = parts(data)[1]
    assert 0 <= at <= len(payload) - len(new)
    return with_payload(data, payload[:at] + new + payload[at + len(new) :])


def sections(of: Form) -> list[tuple[str, Section, int]]:
    """Return entry, section and its place in the payload."""
    found, at = [], 0
    for name, entry in of.entries.items():
        for section in entry.sections:
            found.append((name, section, at))
            at += section.bytes
    return found


def number(kind: str, value: float) -> bytes:
    """Return a number in a floating-point format."""
    dtype = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}[kind]
    return bytes(torch.tensor([value]).to(dtype).view(torch.uint8).tolist())
