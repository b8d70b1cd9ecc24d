"""The path of the server's messages: its entries as they are, or rank-one terms of what changed since the last round.

With terms the server keeps the entries that the clients know. Each round it sends terms of the difference to its own
entries; what they leave out is part of the next difference, so nothing is lost. A client that missed rounds receives
the terms of all of them, or the dense entries if these are shorter. Clients know the initial entries without a message.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import WIRE, State, own_entries
from tdpfed.errors import wrong
from tdpfed.wire.blocks import Parts
from tdpfed.wire.channel import factored_form
from tdpfed.wire.forms import ChangeForm, Form, SideBySide, start_vectors
from tdpfed.wire.settings import Wire

ROUNDS = f"{WIRE}down.rounds"
"""The entry of the server's state with the round of each client's newest message, 0 before the first."""


@dataclass(frozen=True)
class Broadcast:
    """A round's message: the numbers that travel, the entries as clients then know them, the server's new memory."""

    parts: Parts
    known: State
    memory: State


@dataclass(frozen=True)
class Downlink:
    """The path of the messages to the clients of one method, which is bound to a model."""

    algorithm: Algorithm
    wire: Wire
    seed: int

    def __post_init__(self) -> None:
        _ = self.form  # errors are reported at once

    @property
    def changes(self) -> bool:
        """Whether messages are changes."""
        return self.wire.down == "factors" and self.algorithm.communicates

    @cached_property
    def dense(self) -> Form:
        """The form of a message with the entries as they are."""
        return Form.whole(self.algorithm.down())

    @cached_property
    def form(self) -> Form:
        """The form of a round's message."""
        if not self.changes:
            return self.dense
        algorithm = self.algorithm
        for bad, why in (
            (not algorithm.same_for_all, "sends other values to each client"),
            (algorithm.plan is not None, "sends CP factors already"),
        ):
            if bad:
                raise wrong("wire.down", "factors", f"'dense': {algorithm.name!r} {why}")
        wire = Wire(
            update="factors", codec=self.wire.down_codec, terms=self.wire.down_terms, sweeps=self.wire.sweeps,
            kernels=self.wire.kernels,
        )  # fmt: skip
        return factored_form(wire, algorithm.down(), "wire.down_terms")

    def start(self, server: State) -> State:
        """Return the server's memory before round 1."""
        if not self.changes:
            return {}
        found: State = {ROUNDS: torch.zeros(self.algorithm.population, dtype=torch.int64)}
        for name, form in self._forms().items():
            found[known_of(name)] = server[name].clone()
            if form.kept:
                found[_vectors_of(name)] = start_vectors(form, name, self.seed, server[name])
        return found

    def send(self, server: State, *, side_by_side: SideBySide | None = None) -> Broadcast:
        """Return the message of the next round."""
        own = own_entries(server)
        if not self.changes:
            return Broadcast([], own, {})
        parts: Parts = []
        known, memory = dict(own), {ROUNDS: server[ROUNDS]}
        for name, form in self._forms().items():
            before = server[known_of(name)]
            change = (own[name] - before)[None]
            found, vectors = form.shrink(change, server.get(_vectors_of(name), change[0, :0])[None], side_by_side)
            parts += found
            known[name] = memory[known_of(name)] = before + form.grow(found)[0].to(before.dtype)
            if form.kept:
                memory[_vectors_of(name)] = vectors[0]
        return Broadcast(parts, known, memory)

    def received(self, memory: State, clients: Tensor, round_: int) -> State:
        """Return the server's memory after clients have received a round's message."""
        if not self.changes:
            return {}
        rounds = memory[ROUNDS].index_fill(0, clients.to(memory[ROUNDS].device), round_)
        return memory | {ROUNDS: rounds}

    def bytes(self, server: State, clients: Tensor, round_: int) -> int:
        """Return the bytes of a round's messages to all of these clients, which may have missed rounds."""
        if not self.changes:
            return len(clients) * self.form.bytes
        missed = round_ - server[ROUNDS][clients.to(server[ROUNDS].device)]
        return int((missed * self.form.bytes).clamp_max(self.dense.bytes).sum())

    def difference(self, server: State, known: State) -> State:
        """Return what the server's entries have that clients do not know; added to uploads, nothing of it is lost."""
        return {n: server[n] - known[n] for n in self._forms() if n in self.algorithm.up()} if self.changes else {}

    def _forms(self) -> dict[str, ChangeForm]:
        return {name: form for name, form in self.form.entries.items() if isinstance(form, ChangeForm)}


def known_of(entry: str) -> str:
    """Return the name under which the server keeps the entry that clients know."""
    return f"{WIRE}down.{entry}.known"


def _vectors_of(entry: str) -> str:
    return f"{WIRE}down.{entry}.vectors"
