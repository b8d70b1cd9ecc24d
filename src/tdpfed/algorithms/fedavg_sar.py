"""FedAvg (s.a.r.): only a random subset of the coordinates travels, up and down (section VII-D).

Client and server draw the same subset from a shared seed, afresh each round and for each client, so values travel
without their positions. What a client does not receive keeps the client's previous value, what no client sends the
server's.
"""

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from tdpfed.algorithms.base import Batches, Grad, State, Turn, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.draws import Stream, key, permute
from tdpfed.core.layout import Layout
from tdpfed.server.robust import Average


@dataclass(frozen=True, kw_only=True)
class FedAvgSAR(FedAvg):
    """Federated averaging of randomly chosen coordinates."""

    name: ClassVar[str] = "fedavg_sar"
    shared_seed: ClassVar[bool] = True

    compression: float = hyper(2.0, "one in so many coordinates travels, each way", least=1)

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """Values without their positions."""
        return {"values": None}

    def values(self, size: int) -> int:
        """Return how many of ``size`` coordinates travel."""
        return max(1, round(size / self.compression))

    def compression_met(self) -> tuple[float, float, str] | None:
        """A whole number of coordinates travels, at least one."""
        assert self.layout is not None, "bind the algorithm to a model first"
        size = self.layout.size
        return self.compression, size / self.values(size), f"the model has {size:,} values"

    def subset(self, turn: Turn, size: int) -> Tensor:
        """Return the coordinates of each client's subset, ``(..., m)``; the latest are remembered."""
        known = next((drawn for seen, drawn in tuple(self._memo) if _same(seen, turn)), None)
        if known is None:
            known = self._draw(turn, size)
            self._memo.append((turn, known))
        return known

    @cached_property
    def _memo(self) -> deque[tuple[Turn, Tensor]]:
        return deque(maxlen=4)  # broadcast, update and aggregate of a round ask for the same subset, groups in between

    def _draw(self, turn: Turn, size: int) -> Tensor:
        bits = key(turn.seed, Stream.SUBSET, turn.round, turn.clients).unsqueeze(-1)
        position = torch.arange(self.values(size), device=turn.clients.device)
        return permute(position, torch.full((), size, device=turn.clients.device), bits)

    def broadcast(self, server: State, turn: Turn) -> State:
        """Send each client the values of its subset."""
        return {"values": server["w"][self.subset(turn, server["w"].shape[-1])]}

    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Overwrite the subset with the server's values, train, report the same subset."""
        chosen = self.subset(turn, private["theta"].shape[-1])
        theta, loss = self.descend(private["theta"].scatter(-1, chosen, message["values"]), batches, grad)
        return {"theta": theta}, {"values": theta.gather(-1, chosen)}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Average the update of each coordinate over the clients that sent it."""
        w = server["w"]
        chosen = self.subset(turn, w.shape[-1])
        deltas = torch.zeros(len(weights), w.shape[-1], dtype=w.dtype, device=w.device)
        deltas.scatter_(-1, chosen, uploads["values"] - w[chosen])
        sent = torch.zeros_like(deltas).scatter_(-1, chosen, 1.0)
        return {"w": w + average(deltas, weights[:, None] * sent)}

    def center(self, server: State) -> Tensor:
        """Updates are averaged here, and none is 0."""
        return torch.zeros_like(server["w"])


def _same(one: Turn, other: Turn) -> bool:
    if one is other or isinstance(one.round, Tensor) or isinstance(other.round, Tensor):
        return one is other  # what is recorded has no values to compare
    return (one.seed, one.round) == (other.seed, other.round) and torch.equal(one.clients, other.clients)
