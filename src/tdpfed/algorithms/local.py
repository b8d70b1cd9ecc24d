"""Local training only: nothing travels. The baseline that says whether federation pays at all."""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Average, Update
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn


class Local(FedAvg):
    """Each client trains its own model by SGD, alone."""

    name = "local"
    communicates = False

    def down(self) -> Entries:
        """Nothing goes down."""
        return {}

    def up(self) -> Entries:
        """Nothing comes up."""
        return {}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """The server holds nothing."""
        del theta, generator
        return {}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Continue from the client's own model."""
        del message
        theta, loss = local.descend(private["theta"], lr=self.eta)
        return {"theta": theta}, {}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Nothing arrives, nothing changes."""
        del uploads, average, turn
        return server

    def global_model(self, server: State) -> None:
        """There is none."""
        del server
