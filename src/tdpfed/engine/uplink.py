"""The path of simulated uploads to the server: attacks by hostile clients, and the form in which uploads travel."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.engine import attacks
from tdpfed.engine.attacks import Attack
from tdpfed.engine.processes import Ranks
from tdpfed.engine.updates import as_state
from tdpfed.errors import wrong
from tdpfed.fast.cuda_graphs import Graphed
from tdpfed.fast.gpu import side_by_side
from tdpfed.wire import Rejected, lossy, screen
from tdpfed.wire.channel import Channel
from tdpfed.wire.downlink import ROUNDS, Broadcast, Downlink
from tdpfed.wire.forms import LARGEST_CHANGE

TOO_FAR = "too far"
"""The entry, beside those of the uploads, that says which changes are too large."""

VALUES_AT_ONCE = 1 << 22
"""Values whose changes are compressed together on a CPU: few enough to stay in its caches."""


@dataclass(frozen=True)
class Uplink:
    """The path from the simulated clients of one federation to the server."""

    channel: Channel
    clients: int
    attack: Attack | None
    ranks: Ranks

    def __post_init__(self) -> None:
        if self.attack is not None and self.attack.kind == "gauge" and self.algorithm.plan is None:
            raise wrong("robust.attack", "gauge", f"another: {self.algorithm.name!r} sends no CP factors")

    @property
    def algorithm(self) -> Algorithm:
        """The method."""
        return self.channel.algorithm

    def transmit(self, uploads: State, known: State, kept: State, turn: Turn) -> tuple[State, State, list[Rejected]]:
        """Return the uploads of the turn's clients as the server receives them.

        ``known`` are the server's entries as clients know them. ``kept`` are the rows that this process's clients keep
        for the wire; their next values are returned, and refusals of changes that are too large.
        """
        seed = self.channel.seed
        if self.attack is not None:
            hostile = attacks.attackers(seed, self.clients, self.attack.fraction).to(turn.clients.device)
            uploads = attacks.attack(
                self.attack.kind, uploads, self.unchanged(known, turn), hostile[turn.clients], turn,
                plan=self.algorithm.plan, strength=self.attack.strength,
            )  # fmt: skip
        if self.channel.changes:
            return self._compressed(uploads, known, kept, turn)
        codec = self.channel.form.codec
        if codec != "float32":
            layouts = layouts_of(self.algorithm.up())
            uploads = lossy(uploads, layouts, codec, seed, int(turn.round), turn.clients)
        return uploads, kept, []

    def declared(self, samples: Tensor) -> Tensor:
        """Return the numbers of samples that clients say they have, given those that they have."""
        if self.attack is None or self.attack.kind != "samples":
            return samples
        hostile = attacks.attackers(self.channel.seed, self.clients, self.attack.fraction)
        return attacks.declared(samples, hostile, self.attack.strength)

    def unchanged(self, known: State, turn: Turn) -> State:
        """Return the uploads of clients that changed nothing."""
        return self.algorithm.unchanged(self.algorithm.broadcast(known, turn))

    def _compressed(self, uploads: State, known: State, kept: State, turn: Turn) -> tuple[State, State, list[Rejected]]:
        """Return uploads whose changes travel in a compressed form."""
        own = Turn(turn.seed, turn.round, self.ranks.own(turn.clients))
        mine = self.ranks.part(uploads, turn.clients)
        send = self._graphed if own.clients.is_cuda else self._sent
        sent = [
            send(
                {name: value[rows] for name, value in mine.items()},
                {name: value[rows] for name, value in kept.items()},
                known,
                as_state(replace(own, clients=own.clients[rows])),
            )
            for rows in self._slices(len(own.clients), own.clients.is_cuda)
        ]
        if not sent:  # other processes have all clients of the round
            sent = [(mine, kept, {TOO_FAR: torch.zeros(0, dtype=torch.bool, device=own.clients.device)})]
        seen, after, far = (_joined([parts[part] for parts in sent]) for part in range(3))
        seen = self.ranks.gather(seen | far, turn.clients)
        return seen, after, self._refused(seen, turn, seen.pop(TOO_FAR))

    def _refused(self, seen: State, turn: Turn, far: Tensor) -> list[Rejected]:
        """Return refusals of the uploads in the mask ``(S,)``, which are not finite or too large."""
        if not bool(far.any()):
            return []
        clients = turn.clients[far.to(turn.clients.device)]
        rows = {name: value[far] for name, value in seen.items()}
        refused = {refusal.client: refusal for refusal in screen(rows, self.channel.form.layouts, clients)}
        reason = f"the norm of its change is over {LARGEST_CHANGE:g} times that of what it received"
        return [refused.get(client) or Rejected("norm", reason, client=client) for client in clients.tolist()]

    def returned(self, kept: State, seen: State, known: State, turn: Turn, lost: Tensor) -> State:
        """Return the kept rows of this process's clients after the uploads in the mask ``(S,)`` were refused."""
        if not self.channel.changes or not bool(lost.any()):
            return kept
        own = Turn(turn.seed, turn.round, self.ranks.own(turn.clients))
        mine = self.ranks.part({**seen, "lost": lost.to(turn.clients.device)}, turn.clients)
        gone = mine.pop("lost")
        restored = self.channel.returned(kept, mine, self.unchanged(known, own))
        return {name: torch.where(gone[:, None], restored[name], value) for name, value in kept.items()}

    def _sent(self, uploads: State, kept: State, known: State, place: State) -> tuple[State, ...]:
        sent = self.channel.send(uploads, self.unchanged(known, Turn(**place)), kept, side_by_side=side_by_side)
        return sent.seen, sent.kept, {TOO_FAR: sent.too_far}

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(self._sent)

    def _slices(self, count: int, whole: bool) -> list[slice]:
        size = count if whole else max(1, VALUES_AT_ONCE // self.algorithm.layout.size)
        return [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]


def _joined(states: list[State]) -> State:
    """Return the rows of several states in one."""
    if len(states) == 1:
        return states[0]
    return {name: torch.cat([state[name] for state in states]) for name in states[0]}


class Down:
    """The server's messages of one simulation."""

    def __init__(self, downlink: Downlink) -> None:
        self.downlink = downlink
        self._graphed = Graphed(self._sent)

    def broadcast(self, server: State) -> Broadcast:
        """Return the message of the next round, without the numbers that travel; on a GPU as one CUDA graph."""
        on_gpu = any(value.is_cuda for value in server.values())
        if not on_gpu or not self.downlink.changes:
            return self.downlink.send(server, side_by_side=side_by_side)
        known, memory = self._graphed({name: value for name, value in server.items() if value.is_cuda})
        return Broadcast([], known, memory | {ROUNDS: server[ROUNDS]})

    def _sent(self, server: State) -> tuple[State, ...]:
        sent = self.downlink.send(server | {ROUNDS: torch.zeros(0)}, side_by_side=side_by_side)
        return sent.known, {name: value for name, value in sent.memory.items() if name != ROUNDS}
