"""SCAFFOLD (Karimireddy et al., 2020): control variates correct the drift of clients whose data differ.

Server and clients keep a control variate each, c and c_k: running estimates of the gradient of all and of the client.
A local step descends along ``g + c - c_k``. Both the change of the model and that of c_k are sent (option II).
"""

from typing import Literal

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn


class Scaffold(Algorithm):
    """Stochastic controlled averaging."""

    name = "scaffold"
    title = "SCAFFOLD"
    follows = "rate"
    counts_clients = True

    eta: float = hyper(0.05, "learning rate of the clients", above=0, most=1e38, rate=True)
    eta_g: float = hyper(
        1.0, "learning rate of the server: share of the clients' mean change", above=0, rate=True, search=False
    )
    weights: Literal["samples", "uniform"] = hyper(
        "uniform", "weight of a client in the averages: the same for all, or its number of training samples"
    )

    def down(self) -> Entries:
        """The model and the server's control variate."""
        return {"w": self.layout, "c": self.layout}

    def up(self) -> Entries:
        """The changes of the model and of the client's control variate."""
        return {"dw": self.layout, "dc": self.layout}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the common initial parameters and control variates of 0."""
        del generator
        return {"w": theta, "c": torch.zeros_like(theta)}

    def init_private(self, theta: Tensor) -> State:
        """Keep the local model and the client's control variate."""
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` corrected steps; the mean gradient of these steps is the new control variate."""
        w, c, own = message["w"], message["c"], private["c"]
        y, loss = local.descend(w, lr=self.eta, correction=c - own)
        new = own - c + (w - y) / (self.tau * local.rate(self.eta))
        return {"theta": y, "c": new}, {"dw": y - w, "dc": new - own}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the global model."""
        del private, local
        return message["w"]

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Add the mean changes; that of the control variates with the share of the clients that took part."""
        del uploads
        share = len(turn.clients) / self.population
        return {
            "w": server["w"] + self.eta_g * average("dw"),
            "c": server["c"] + share * average("dc"),
        }

    @property
    def averaged(self) -> tuple[str, ...]:
        """The server's model."""
        return ("w",)

    def global_model(self, server: State) -> Tensor:
        """Return the server's model."""
        return server["w"]
