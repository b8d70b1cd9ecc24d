"""The path of simulated uploads to the server: attacks by hostile clients, and the form in which uploads travel."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.engine import attacks
from tdpfed.engine.attacks import Attack
from tdpfed.engine.ranks import Ranks
from tdpfed.errors import wrong
from tdpfed.fast.cuda_graphs import Graphed
from tdpfed.wire import Rejected, lossy
from tdpfed.wire.channel import Channel, relative_norms
from tdpfed.wire.validate import LARGEST_CHANGE

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

    def unchanged(self, known: State, turn: Turn) -> State:
        """Return the uploads of clients that changed nothing."""
        return self.algorithm.unchanged(self.algorithm.broadcast(known, turn))

    def _compressed(self, uploads: State, known: State, kept: State, turn: Turn) -> tuple[State, State, list[Rejected]]:
        """Return uploads whose changes travel in a compressed form."""
        own = Turn(turn.seed, turn.round, self.ranks.own(turn.clients))
        mine, unchanged = self.ranks.part(uploads, turn.clients), self.unchanged(known, own)
        seen = {name: torch.empty_like(value) for name, value in mine.items()}
        after = {name: torch.empty_like(value) for name, value in kept.items()}
        send = self._graphed if own.clients.is_cuda else self._sent
        for rows in self._slices(len(own.clients), own.clients.is_cuda):
            some = ({name: value[rows] for name, value in state.items()} for state in (mine, unchanged, kept))
            for whole, part in zip((seen, after), send(*some), strict=True):
                for name, value in part.items():
                    whole[name][rows] = value
        seen = self.ranks.gather(seen, turn.clients)
        refused = []
        if self.attack is not None or any(not bool(value.isfinite().all()) for value in seen.values()):
            norms = relative_norms(seen, self.unchanged(known, turn))
            far = (norms > LARGEST_CHANGE) & norms.isfinite()  # the gate refuses what is not finite
            for client in turn.clients[far.to(turn.clients.device)].tolist():
                reason = f"the norm of its change is over {LARGEST_CHANGE:g} times that of what it received"
                refused.append(Rejected("norm", reason, client=client))
        return seen, after, refused

    def returned(self, kept: State, seen: State, known: State, turn: Turn, lost: Tensor) -> State:
        """Return the kept rows of this process's clients after the uploads in the mask ``(S,)`` were refused."""
        if not self.channel.changes or not bool(lost.any()):
            return kept
        own = Turn(turn.seed, turn.round, self.ranks.own(turn.clients))
        mine = self.ranks.part({**seen, "lost": lost.to(turn.clients.device)}, turn.clients)
        gone = mine.pop("lost")
        restored = self.channel.returned(kept, mine, self.unchanged(known, own))
        return {name: torch.where(gone[:, None], restored[name], value) for name, value in kept.items()}

    def _sent(self, uploads: State, unchanged: State, kept: State) -> tuple[State, ...]:
        sent = self.channel.send(uploads, unchanged, kept)
        return sent.seen, sent.kept

    @cached_property
    def _graphed(self) -> Graphed:
        return Graphed(self._sent)

    def _slices(self, count: int, whole: bool) -> list[slice]:
        size = count if whole else max(1, VALUES_AT_ONCE // self.algorithm.layout.size)
        return [slice(start, min(start + size, count)) for start in range(0, count, max(1, size))]
