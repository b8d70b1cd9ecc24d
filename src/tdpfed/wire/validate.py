"""Validation of messages before they are used: values must be finite, lengths right, and each client counted once.

A receiver describes what it expects in :class:`Expected`. Nothing that a sender declares is trusted: its number of
samples must be the one that the receiver knows, and the length of the payload is that of the expected form.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.wire.blocks import Parts
from tdpfed.wire.codecs import Kind, Layouts, finite, first_not_finite, place
from tdpfed.wire.forms import HEADER_BYTES, Form, Whole
from tdpfed.wire.message import Message
from tdpfed.wire.packing import MalformedError
from tdpfed.wire.rejected import Rejected, Rule

LARGEST_CHANGE = 1e4
"""Largest norm of a change over that of the received entry, or over 1 if that is larger: far beyond any training."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a receiver expects of a message."""

    kind: Kind
    round: int
    form: Form
    clients: Container[int]
    """Clients that may send (up), or the receiving client (down)."""
    seen: Container[int] = ()
    """Clients whose message of this round is already accepted."""
    samples: Mapping[int, int] = field(default_factory=dict)
    """Number of training samples of each client; not used for down, where samples are 0."""
    unchanged: State | None = None
    """For a form of changes: the entries ``(n,)`` of a client that changed nothing."""


def validate(message: Message, expected: Expected) -> State:
    """Return the state of a message, float32 vectors ``(n,)``, or raise :class:`Rejected`.

    With the codec float32 they are views of the received bytes: do not write to them.
    """
    client, form = message.client, expected.form
    samples = 0 if expected.kind == "down" else expected.samples.get(client)
    length = form.bytes - HEADER_BYTES
    rules: tuple[tuple[bool, Rule, str], ...] = (
        (message.kind == expected.kind, "kind", f"kind {message.kind}, must be {expected.kind}"),
        (client in expected.clients, "client", "unknown client"),
        (client not in expected.seen, "duplicate", f"a second message in round {message.round}"),
        (message.round == expected.round, "round", f"of round {message.round}, must be of {expected.round}"),
        (message.samples == samples, "weight", f"declares {message.samples} samples, must be {samples}"),
        (message.codec == form.codec, "codec", f"codec {message.codec}, must be {form.codec}"),
        (message.form == form.name, "form", f"form {message.form}, must be {form.name}"),
        (message.hash == form.hash, "layout", f"layout {message.hash.hex()}, must be {form.hash.hex()}"),
        (len(message.payload) == length, "payload", f"{len(message.payload)} bytes of values, must be {length}"),
    )
    for holds, rule, reason in rules:
        if not holds:
            raise Rejected(rule, reason, client=client)
    state = _grown(_parts(message, form), form)
    for refusal in screen({n: value[None] for n, value in state.items()}, form.layouts, torch.tensor([client])):
        raise refusal
    if expected.unchanged is None:
        return state
    for name, change in state.items():
        norm, bound = _norm(change), LARGEST_CHANGE * max(1.0, _norm(expected.unchanged[name]))
        if norm > bound:
            reason = f"the change of {name} has norm {norm:.3g}, must be at most {bound:.3g}"
            raise Rejected("norm", reason, client=client, tensor=name)
    return {name: expected.unchanged[name] + change for name, change in state.items()}


def _parts(message: Message, form: Form) -> Parts:
    """Return the numbers in a payload of the right length."""
    parts: Parts = []
    at = 0
    for name, entry in form.entries.items():
        for section in entry.sections:
            data = message.payload[at : at + section.bytes]
            at += section.bytes
            try:
                parts.append(section.unpack(data))
            except MalformedError as error:
                raise Rejected("values", f"{name} {error}", client=message.client, tensor=name) from None
    return parts


def _grown(parts: Parts, form: Form) -> State:
    state: State = {}
    for name, own in form.split(parts).items():
        entry = form.entries[name]
        if isinstance(entry, Whole):
            state[name] = entry.grow(own)
        else:
            state[name] = entry.grow([part[None] for part in own])[0]
    return state


def _norm(values: Tensor) -> float:
    """Return the norm, computed in float64 and in parts: a copy of everything would take twice the memory."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in values.split(1 << 18)))


def screen(state: State, layouts: Layouts, clients: Tensor) -> list[Rejected]:
    """Return a refusal for each of ``clients`` ``(K,)`` whose row of a state ``(K, n)`` is not finite."""
    refusals: dict[int, Rejected] = {}
    for name, value in state.items():
        for row in (~finite(value)).nonzero().flatten().tolist():
            first = first_not_finite(value[row])
            tensor, client = place(name, layouts[name], first), int(clients[row])
            reason = f"{tensor} holds {float(value[row, first])}, must be finite"
            refusals.setdefault(client, Rejected("nan", reason, client=client, tensor=tensor))
    return list(refusals.values())
