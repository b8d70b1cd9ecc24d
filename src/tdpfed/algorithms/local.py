"""Local training only: nothing travels. The baseline that says whether federation pays at all."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tdpfed.algorithms.base import Batches, Grad, State, Turn
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.server.robust import Average


@dataclass(frozen=True, kw_only=True)
class Local(FedAvg):
    """Each client trains its own model by SGD, alone."""

    name: ClassVar[str] = "local"
    communicates: ClassVar[bool] = False

    @property
    def uploaded(self) -> tuple[str, ...]:
        """Nothing."""
        return ()

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """The server holds nothing."""
        del theta, generator
        return {}

    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Go on from the client's own model."""
        del message, turn
        theta, loss = self.descend(private["theta"], batches, grad)
        return {"theta": theta}, {}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Nothing arrives, nothing changes."""
        del uploads, weights, turn, average
        return server

    def global_model(self, server: State) -> None:
        """There is none."""
        del server
