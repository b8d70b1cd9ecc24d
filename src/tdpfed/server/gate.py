"""What happens to uploads on their way to the average: hostile clients, the codec's rounding, and the gate.

The gate refuses an upload that is not finite or whose factors lie too far from the broadcast ones (the CP gauge:
factors of an unchanged tensor can wreck an average). A refused upload is named and left out; the round goes on.
"""

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, State, Turn
from tdpfed.algorithms.tdpfed import TDPFed
from tdpfed.core.setting import check, setting
from tdpfed.cp.plan import FactorPlan
from tdpfed.engine import attacks
from tdpfed.errors import TDPFedError, unknown
from tdpfed.server.robust import Rule, within_gauge
from tdpfed.wire import Codec, Rejected, lossy, screen


@dataclass(frozen=True)
class Attack:
    """Which share of the clients is hostile, and how."""

    kind: attacks.Kind = setting(doc="what hostile clients do in simulation")
    fraction: float = setting(0.2, "share of the clients that is hostile", least=0, most=1)
    strength: float | None = setting(None, "how strong the attack is; its own by default", above=0)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Uplink:
    """The way from the clients of one federation to the server."""

    algorithm: Algorithm
    clients: int
    seed: int
    codec: Codec
    rule: Rule
    attack: Attack | None

    def __post_init__(self) -> None:
        if self.codec not in get_args(Codec):
            raise unknown("codec", self.codec, get_args(Codec))
        if self.plan is None and (self.rule.gauge is not None or (self.attack and self.attack.kind == "gauge")):
            raise TDPFedError(f"robust: the gauge is one of factors, {self.algorithm.name!r} sends none; use 'tdpfed'")

    @property
    def plan(self) -> FactorPlan | None:
        """The plan of what travels as factors."""
        return self.algorithm.plan if isinstance(self.algorithm, TDPFed) else None

    def travel(self, uploads: State, server: State, turn: Turn) -> State:
        """Return the uploads of the turn's clients as they arrive."""
        if self.attack is not None:
            hostile = attacks.attackers(self.seed, self.clients, self.attack.fraction).to(turn.clients.device)
            uploads = attacks.attack(
                self.attack.kind, uploads, self.algorithm.broadcast(server, turn), hostile[turn.clients], turn,
                plan=self.plan, strength=self.attack.strength,
            )  # fmt: skip
        if self.codec == "float32":
            return uploads
        return lossy(uploads, self.algorithm.layouts, self.codec, self.seed, int(turn.round), turn.clients)

    def refusals(self, uploads: State, server: State, turn: Turn, *, finite: bool = False) -> list[Rejected]:
        """Return what the gate refuses of the turn's uploads, a refusal for each client.

        ``finite``: that they are finite is known, and only the gauge is looked at.
        """
        refused = [] if finite else screen(uploads, self.algorithm.layouts, turn.clients)
        plan, bound = self.plan, self.rule.gauge
        if plan is not None and bound is not None:
            inside, farthest = within_gauge(uploads["factors"], server["factors"], plan.factors, bound)
            for row in (accepted(turn, refused) & ~inside.cpu()).nonzero().flatten().tolist():
                tensor = f"factors/{plan.factors.names[int(farthest[row])]}"
                reason = f"{tensor} is farther from the broadcast factor than {bound} of its norm"
                refused.append(Rejected("gauge", reason, client=int(turn.clients[row]), tensor=tensor))
        return refused


def accepted(turn: Turn, refused: list[Rejected]) -> Tensor:
    """Return the mask of the turn's clients that the gate let through."""
    out = {one.client for one in refused}
    return torch.tensor([client not in out for client in turn.clients.tolist()], dtype=torch.bool)
