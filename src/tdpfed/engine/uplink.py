"""The path of simulated uploads to the server: attacks by hostile clients, and the codec's rounding."""

from dataclasses import dataclass
from typing import get_args

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.engine import attacks
from tdpfed.engine.attacks import Attack
from tdpfed.errors import unknown, wrong
from tdpfed.wire import Codec, lossy


@dataclass(frozen=True)
class Uplink:
    """The path from the simulated clients of one federation to the server."""

    algorithm: Algorithm
    clients: int
    seed: int
    codec: Codec
    attack: Attack | None

    def __post_init__(self) -> None:
        if self.codec not in get_args(Codec):
            raise unknown("codec", self.codec, get_args(Codec))
        if self.attack is not None and self.attack.kind == "gauge" and self.algorithm.plan is None:
            raise wrong("robust.attack", "gauge", f"another: {self.algorithm.name!r} sends no CP factors")

    def transmit(self, uploads: State, server: State, turn: Turn) -> State:
        """Return the uploads of the turn's clients as the server receives them."""
        if self.attack is not None:
            hostile = attacks.attackers(self.seed, self.clients, self.attack.fraction).to(turn.clients.device)
            unchanged = self.algorithm.unchanged(self.algorithm.broadcast(server, turn))
            uploads = attacks.attack(
                self.attack.kind, uploads, unchanged, hostile[turn.clients], turn,
                plan=self.algorithm.plan, strength=self.attack.strength,
            )  # fmt: skip
        if self.codec == "float32":
            return uploads
        layouts = layouts_of(self.algorithm.up())
        return lossy(uploads, layouts, self.codec, self.seed, int(turn.round), turn.clients)
