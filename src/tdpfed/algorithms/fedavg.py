"""FedAvg (McMahan et al., 2017): clients train the global model on their own data, the server averages the results.

Its "personalized" model is the local one after training, also called FedAvg with fine-tuning: a strong baseline.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State, Turn


class FedAvg(Algorithm):
    """Federated averaging with local SGD."""

    name = "fedavg"

    eta: float = hyper(0.05, "learning rate", above=0, most=1e38, rate=True)

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the common initial parameters."""
        del generator
        return {"w": theta}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` SGD steps from the global model."""
        del private
        theta, loss = local.descend(message["w"], lr=self.eta)
        return {"theta": theta}, {"w": theta}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the global model."""
        del private, local
        return message["w"]

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the local models."""
        del server, uploads, turn
        return {"w": average("w")}

    def global_model(self, server: State) -> Tensor | None:
        """Return the averaged model."""
        return server["w"]
