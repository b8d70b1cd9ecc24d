"""Messages as a careful enemy would make them: consistent in themselves, wrong in one thing. Shared by these tests."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.wire import Codec, Expected, Layouts, decode, encode

FACTORS = Layout.of({"fc1.A1": (3, 2), "fc1.A2": (4, 2), "fc1.bias": (3,), "conv": (2, 1, 2)})
LAYOUTS: Layouts = {"factors": FACTORS, "values": None}
LENGTHS = {"factors": FACTORS.size, "values": 5}
SAMPLES = {3: 20, 12: 21, 7: 22}
CODECS: tuple[Codec, ...] = ("float32", "float16", "bfloat16", "int8")
LIMIT = 4096


def state(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(length, generator=generator) for name, length in LENGTHS.items()}


def honest(codec: Codec = "float32", client: int = 12, round_: int = 5, seed: int = 0) -> bytes:
    return encode(
        state(seed), LAYOUTS, kind="up", round_=round_, client=client, samples=SAMPLES[client], codec=codec, seed=1
    )


def expected(codec: Codec = "float32", **changes: Any) -> Expected:
    wanted: dict[str, Any] = {
        "kind": "up", "round": 5, "lengths": LENGTHS, "layouts": LAYOUTS, "codec": codec, "clients": SAMPLES,
        "samples": SAMPLES,
    }  # fmt: skip
    return Expected(**wanted | changes)


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return header and payload of a good message."""
    end = 9 + int.from_bytes(data[5:9], "little")
    return json.loads(data[9:end]), data[end:]


def signed(header: Mapping[str, Any], payload: bytes) -> bytes:
    """Put a message together and give it the checksum that fits, as the format's description says."""
    blank = json.dumps({**header, "sha256": ""}, separators=(",", ":")).encode()
    return framed({**header, "sha256": hashlib.sha256(blank + payload).hexdigest()}, payload)


def framed(header: Mapping[str, Any] | bytes, payload: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return b"TDPF\x01" + len(raw).to_bytes(4, "little") + raw + payload


def with_header(data: bytes, **changes: Any) -> bytes:
    header, payload = parts(data)
    return signed(header | changes, payload)


def with_tensors(data: bytes, changes: Mapping[str, Tensor | None]) -> bytes:
    """Return a message with tensors replaced, added or (None) taken away."""
    header, _ = parts(data)
    tensors: dict[str, Tensor | None] = {**decode(data, len(data)).tensors, **changes}
    return signed(header, save({name: value for name, value in tensors.items() if value is not None}))


def with_payload(data: bytes, entries: object, body: bytes) -> bytes:
    """Return a message with a safetensors payload written by hand."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return signed(parts(data)[0], len(raw).to_bytes(8, "little") + raw + body)
