"""pFedMe (Dinh et al., 2020): personalised models held near local models by a Moreau envelope; local models travel.

TDPFed without the factorisation: in each local round ``s`` steps on theta with one minibatch, then one gradient step of
the local model towards it, ``w <- w - eta lam (w - theta)``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Batches, Grad, State, Turn, hyper, to_each
from tdpfed.core import optim
from tdpfed.fast.first_layer import float32
from tdpfed.server.robust import Average


@dataclass(frozen=True, kw_only=True)
class PFedMe(Algorithm):
    """Personalised federated learning with Moreau envelopes."""

    name: ClassVar[str] = "pfedme"

    lam: float = hyper(12.0, "lambda: how strongly theta is held near the local model", least=0)
    beta: float = hyper(1.0, "share of the clients' average in the new global model", above=0)
    s: int = hyper(5, "steps on theta per local round", least=1, most=10**6)
    tau: int = hyper(23, "local rounds (minibatches) per communication round", least=1, most=10**6)
    eta: float = hyper(0.05, "learning rate of the local model", above=0, most=1e38)
    eta_p: float = hyper(0.08, "learning rate of theta", above=0, most=1e38)
    momentum: float = hyper(0.0, "Nesterov momentum of theta's steps", least=0, most=1)

    @property
    def steps_alone(self) -> bool:
        """A local round is ``s`` steps on theta."""
        return self.s > 1 and self.momentum == 0

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
        """Alternate steps on theta and on the local model."""
        del private, turn
        w = message["w"]
        theta = optim.own_copy(w)  # steps may be taken in its memory
        personal = optim.proximal(self.eta_p, self.lam, self.momentum, self.s)
        step = float32(self.eta * self.lam)
        for t in range(self.tau):
            theta, loss, _ = personal(grad, theta, batches(t), w)
            w = torch.lerp(w, theta, step)  # w - eta lam (w - theta)
        return {"theta": theta}, {"w": w}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Mix the average of the local models into the global one with share ``beta``."""
        del turn
        return {"w": (1 - self.beta) * server["w"] + self.beta * average(uploads["w"], weights)}

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the local model w_k."""
        del private
        return upload["w"]

    def global_model(self, server: State) -> Tensor:
        """Return the averaged model."""
        return server["w"]
