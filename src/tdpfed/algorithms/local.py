"""Local training only, without communication: the baseline that shows whether federation helps at all."""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Average, Update
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn


class Local(FedAvg):
    """Each client trains its own model by SGD."""

    name = "local"
    communicates = False

    def down(self) -> Entries:
        """Nothing is sent to clients."""
        return {}

    def up(self) -> Entries:
        """Nothing is uploaded."""
        return {}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """The server has no state."""
        del theta, generator
        return {}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Continue from the client's own model."""
        del message
        theta, loss = local.descend(private["theta"], lr=self.eta)
        return {"theta": theta}, {}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the client's own model, which a message does not change."""
        del message, local
        return private["theta"]

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Nothing changes."""
        del uploads, average, turn
        return server

    def global_model(self, server: State) -> None:
        """There is none."""
        del server
