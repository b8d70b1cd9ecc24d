"""The contents of Flower's messages: a record of plain values, and one opaque array with an encoded wire message.

Flower's own serialization of tensors is not used, so the codecs, the validation and the byte count are those of
:mod:`tdpfed.wire`. Flower adds about :data:`ENVELOPE` bytes to an upload.
"""

import math
import secrets
from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from tdpfed.wire import Rejected

FIELDS, WIRE, METRICS = "tdpfed", "wire", "metrics"
NUDGE = "nudge"
"""The field of a message that asks for no work: see :mod:`tdpfed.flower.exchange`."""

LACKS = "lacks-copy"
"""The field of a reply without an upload: the node has no copy of the server's entries, and needs them whole."""

STYPE = "tdpfed.wire"
ENVELOPE = 1024
"""Bytes that Flower's records, object headers and our metrics add to an upload; 100 more for every 5 MiB of it."""

REQUESTS = 512
"""Bytes of the requests that deliver a reply; the SuperLink counts them as received together with it."""

Plain = int | float | str | bool


def request(kind: str, node: int, fields: Mapping[str, Plain], wire: bytes | None, ttl: float) -> Message:
    """Return a message to a node. Its id cannot be guessed, so that no other node can answer it."""
    content = _content(ConfigRecord({**fields, "nonce": secrets.token_hex(16)}), wire)
    return Message(content, node, kind, ttl=ttl, group_id=str(fields.get("round", "")))


def reply(message: Message, fields: Mapping[str, Plain], wire: bytes | None, metrics: Mapping[str, float]) -> Message:
    """Return the reply to a message."""
    content = _content(ConfigRecord(dict(fields)), wire)
    content[METRICS] = MetricRecord(dict(metrics))
    return Message(content, reply_to=message)


def fields_of(message: Message) -> dict[str, Plain]:
    """Return the plain values of a message."""
    record = message.content.get(FIELDS) if message.has_content() else None
    if not isinstance(record, ConfigRecord):
        raise Rejected("header", f"no record {FIELDS!r}")
    return {name: value for name, value in record.items() if isinstance(value, int | float | str)}


def wire_of(message: Message, limit: int, client: int) -> bytes:
    """Return the encoded message inside, which may have at most ``limit`` bytes."""
    record = message.content.get(WIRE)
    if not isinstance(record, ArrayRecord) or list(record) != [WIRE]:
        raise Rejected("header", f"no record {WIRE!r} with one array", client=client)
    data = record[WIRE].data
    if len(data) > limit:
        raise Rejected("size", f"{len(data)} bytes, at most {limit} are allowed", client=client)
    return data


def wire_size(message: Message) -> int:
    """Return how many bytes the array records of a message hold, valid or not."""
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


def metrics_of(message: Message) -> dict[str, float]:
    """Return the finite numbers of a reply's metrics."""
    record = message.content.get(METRICS)
    if not isinstance(record, MetricRecord):
        return {}
    return {name: v for name, v in record.items() if isinstance(v, int | float) and math.isfinite(v)}


def _content(fields: ConfigRecord, wire: bytes | None) -> RecordDict:
    content = RecordDict({FIELDS: fields})
    if wire is not None:
        content[WIRE] = ArrayRecord({WIRE: Array("uint8", (len(wire),), STYPE, wire)})
    return content
