"""FedProx (Li et al., 2020): FedAvg whose clients are held near the received model by a proximal term.

A client takes its steps on ``f_k(y) + mu/2 ||y - w||^2`` with w as received. At mu = 0 this is FedAvg.
"""

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class FedProx(FedAvg):
    """Federated averaging with a proximal term."""

    name = "fedprox"

    mu: float = hyper(
        0.1, "how strongly the local model is held near the received one; at 0 this is FedAvg", least=0,
        search=(0.001, 1.0),
    )  # fmt: skip

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` steps on the loss and the proximal term; the loss reported is the client's own."""
        del private
        w = message["w"]
        y, loss = local.descend(w, lr=self.eta, anchor=w, lam=self.mu)
        return {"theta": y}, {"w": y}, {"loss": loss}
