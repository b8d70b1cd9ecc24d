"""Validation of messages before they are used: values must be finite, shapes right, and each client counted once.

A receiver describes what it expects in :class:`Expected`. Nothing that a sender declares is trusted: its number of
samples must be the one that the receiver knows, and shapes are not broadcast.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tdpfed.core.state import State
from tdpfed.wire.codecs import SCALE, Codec, Kind, Layouts, finite, first_not_finite, grow, place, tensors_of
from tdpfed.wire.message import Message, form_hash
from tdpfed.wire.rejected import Rejected, Rule


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a receiver expects of a message."""

    kind: Kind
    round: int
    lengths: Mapping[str, int]
    layouts: Layouts
    codec: Codec
    clients: Container[int]
    """Clients that may send (up), or the receiving client (down)."""
    seen: Container[int] = ()
    """Clients whose message of this round is already accepted."""
    samples: Mapping[int, int] = field(default_factory=dict)
    """Number of training samples of each client; not used for down, where samples are 0."""


def validate(message: Message, expected: Expected) -> State:
    """Return the state of a message, float32 vectors ``(n,)``, or raise :class:`Rejected`.

    With the codec float32 they are the message's own tensors, views of the received bytes.
    """
    client = message.client
    form = form_hash(expected.lengths, expected.layouts)
    samples = 0 if expected.kind == "down" else expected.samples.get(client)
    rules: tuple[tuple[bool, Rule, str], ...] = (
        (message.kind == expected.kind, "kind", f"kind {message.kind}, must be {expected.kind}"),
        (client in expected.clients, "client", "unknown client"),
        (client not in expected.seen, "duplicate", f"a second message in round {message.round}"),
        (message.round == expected.round, "round", f"of round {message.round}, must be of {expected.round}"),
        (message.samples == samples, "weight", f"declares {message.samples} samples, must be {samples}"),
        (message.codec == expected.codec, "codec", f"codec {message.codec}, must be {expected.codec}"),
        (message.layout == form, "layout", f"layout {message.layout}, must be {form}"),
    )
    for holds, rule, reason in rules:
        if not holds:
            raise Rejected(rule, reason, client=client)
    _check_tensors(message, expected)
    state = {
        name: grow([message.tensors[key] for key in (name, name + SCALE) if key in message.tensors], layout)
        for name, layout in expected.layouts.items()
    }
    for refusal in screen(
        {name: value[None] for name, value in state.items()}, expected.layouts, torch.tensor([client])
    ):
        raise refusal
    return state


def _check_tensors(message: Message, expected: Expected) -> None:
    """Refuse tensors whose names, dtypes or lengths differ from those of the expected state."""
    transmitted = tensors_of(expected.lengths, expected.layouts, expected.codec)
    for name in sorted(transmitted.keys() ^ message.tensors.keys()):
        what = "missing" if name in transmitted else "not expected"
        raise Rejected("names", f"tensor {name!r} is {what}", client=message.client, tensor=name)
    for name, (dtype, length) in transmitted.items():
        tensor = message.tensors[name]
        if tensor.dtype != dtype:
            reason = f"{name} is {tensor.dtype}, must be {dtype}"
            raise Rejected("dtype", reason, client=message.client, tensor=name)
        if tensor.shape != (length,):
            reason = f"{name} has shape {tuple(tensor.shape)}, must be ({length},)"
            raise Rejected("shape", reason, client=message.client, tensor=name)


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
