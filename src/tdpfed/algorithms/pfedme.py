"""pFedMe (Dinh et al., 2020): personalized models held near local models by a Moreau envelope; local models are sent.

TDPFed without the factorization: in each local round ``s`` steps on theta with one minibatch, then one gradient step of
the local model towards it, ``w <- w - eta lam (w - theta)``.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.core.local import LocalWork, Near
from tdpfed.core.optim import towards
from tdpfed.core.state import State, Turn


class PFedMe(Algorithm):
    """Personalized federated learning with Moreau envelopes."""

    name = "pfedme"
    title = "pFedMe"
    follows = "none"

    lam: float = hyper(12.0, "lambda: how strongly theta is held near the local model", least=0, search=(3.0, 30.0))
    beta: float = hyper(1.0, "share of the clients' average in the new global model", above=0)
    s: int = hyper(5, "steps on theta per local round", least=1, most=10**6)
    tau: int = hyper(23, "local rounds (minibatches) per communication round", least=1, most=10**6)
    eta: float = hyper(0.05, "learning rate of the local model", above=0, most=1e38, rate=True)
    eta_p: float = hyper(0.08, "learning rate of theta", above=0, most=1e38, rate=True)
    momentum: float = hyper(0.0, "Nesterov momentum of theta's steps", least=0, most=1)

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the common initial parameters."""
        del generator
        return {"w": theta}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Alternate steps on theta and on the local model."""
        del private
        theta: Tensor | Near = message["w"]
        w = message["w"]
        for batch in local.batches():
            theta = near = local.proximal(
                theta, batch, anchor=w, lam=self.lam, lr=self.eta_p, momentum=self.momentum, steps=self.s
            )
            w = towards(w, near.theta, self.eta * self.lam)  # w - eta lam (w - theta)
        return {"theta": near.theta}, {"w": w}, {"loss": near.loss}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Mix the average of the local models into the global one with share ``beta``."""
        del uploads, turn
        return {"w": (1 - self.beta) * server["w"] + self.beta * average("w")}

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the local model w_k."""
        del private
        return upload["w"]

    def global_model(self, server: State) -> Tensor:
        """Return the averaged model."""
        return server["w"]
