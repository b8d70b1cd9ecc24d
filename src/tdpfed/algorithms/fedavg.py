"""FedAvg (McMahan et al., 2017): clients train the global model on their own data, the server averages what comes back.

Its "personalised" model is the local one after training, also called FedAvg with fine-tuning: a strong baseline.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Batches, Grad, State, Turn, hyper, to_each
from tdpfed.core import optim
from tdpfed.server.robust import Average


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """Federated averaging with local SGD."""

    name: ClassVar[str] = "fedavg"

    eta: float = hyper(0.05, "learning rate", above=0, most=1e38)

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the common initial parameters."""
        del generator
        return {"w": theta}

    def broadcast(self, server: State, turn: Turn) -> State:
        """Send the global model."""
        return to_each(server, turn)

    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Take ``tau`` SGD steps from the global model."""
        del private, turn
        theta, loss = self.descend(message["w"], batches, grad)
        return {"theta": theta}, {"w": theta}, {"loss": loss}

    def descend(self, theta: Tensor, batches: Batches, grad: Grad) -> tuple[Tensor, Tensor]:
        """Return the parameters after ``tau`` steps, and the last loss; all minibatches are of one shape."""
        return optim.descend(grad, optim.own_copy(theta), batches, self.tau, self.eta)

    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Average the local models."""
        del server, turn
        return {"w": average(uploads["w"], weights)}

    def global_model(self, server: State) -> Tensor | None:
        """Return the averaged model."""
        return server["w"]
