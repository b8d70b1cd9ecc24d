"""Reads the untrusted payload of a message, in the safetensors format.

The library writes it, but its reader copies the values twice and accepts a hundred megabytes of names, extra fields and
duplicate names. This reader limits the size of the names, does not copy the values, and accepts a subset of what the
library accepts.
"""

import json
import warnings
from typing import Any

import torch
from torch import Tensor

from tdpfed.wire.rejected import Rejected, Rule

NAMES_LIMIT_BYTES = 16384
"""Limit for the names, dtypes and lengths of a message's few tensors."""

SAFETENSORS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I8": torch.int8}


def read_payload(payload: memoryview, client: int) -> dict[str, Tensor]:
    """Return the vectors of a payload, which must cover all of it, as views: do not write to them."""
    start = 8 + int.from_bytes(payload[:8], "little")
    if len(payload) < 8 or start > min(len(payload), 8 + NAMES_LIMIT_BYTES):
        reason = f"payload: header ends at byte {start} of {len(payload)}, must have at most {NAMES_LIMIT_BYTES} bytes"
        raise Rejected("payload", reason, client=client)
    entries = strict_json(bytes(payload[8:start]), "payload", client)
    spans = {name: _span(name, entry, client) for name, entry in entries.items()}
    at = 0
    for name, (begin, end, _) in sorted(spans.items(), key=lambda item: item[1][0]):
        if begin != at:
            raise Rejected(
                "payload", f"{name!r} begins at byte {begin}, must begin at {at}", client=client, tensor=name
            )
        at = end
    if at != len(payload) - start:
        raise Rejected("payload", f"declares {at} bytes of values, must be {len(payload) - start}", client=client)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return {
            name: torch.frombuffer(payload[start + begin : start + end], dtype=dtype)
            for name, (begin, end, dtype) in spans.items()
        }


def _span(name: str, entry: Any, client: int) -> tuple[int, int, torch.dtype]:
    """Return where a vector's bytes begin and end, and its dtype."""

    def refused(rule: Rule, reason: str) -> Rejected:
        return Rejected(rule, f"{name!r} {reason}", client=client, tensor=name)

    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [begin, end]} if len(entry) == 3:
            if code not in SAFETENSORS:
                raise refused("dtype", f"is {code!r}, must be one of {', '.join(SAFETENSORS)}")
            if len(shape) != 1 or not is_count(shape[0]) or shape[0] == 0:
                raise refused("shape", "is not a vector")
            dtype = SAFETENSORS[code]
            if not is_count(begin) or not is_count(end) or end - begin != shape[0] * dtype.itemsize:
                raise refused("payload", "has offsets that do not match its shape")
            return begin, end, dtype
        case _:
            raise refused("payload", "has other fields than dtype, shape and data_offsets")


def strict_json(raw: bytes, rule: Rule, client: int | None = None) -> dict[str, Any]:
    """Return a JSON object without duplicate keys."""
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Rejected(rule, f"{rule}: {error}", client=client) from None
    if not isinstance(value, dict):
        raise Rejected(rule, f"{rule}: not a JSON object", client=client)
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears more than once")
    return dict(pairs)


def is_count(value: object) -> bool:
    """Return whether a value is a whole number of at least 0 and below 2^63."""
    return type(value) is int and 0 <= value < 2**63
