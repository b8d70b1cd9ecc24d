"""Ditto (Li et al., 2021): beside FedAvg every client trains a model of its own, pulled towards the global one.

The personal model v takes steps on ``f_k(v) + lam/2 ||v - w||^2``, with w as the client received it. At lam = 0 this is
training alone. The clients' part in FedAvg does not depend on v.
"""

from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class Ditto(FedAvg):
    """FedAvg and a personal model per client."""

    name = "ditto"

    lam: float = hyper(
        1.0, "lambda: how strongly the personal model is pulled towards the received one; 0 is training alone", least=0,
        search=(0.05, 5.0),
    )  # fmt: skip

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` steps of the shared model, and as many of the personal one on the same minibatches."""
        w = message["w"]
        shared, _ = local.descend(w, lr=self.eta)
        v, loss = local.descend(private["theta"], lr=self.eta, anchor=w, lam=self.lam)
        return {"theta": v}, {"w": shared}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the client's own model, which a message does not change."""
        del message, local
        return private["theta"]

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the client's model in FedAvg."""
        del private
        return upload["w"]
