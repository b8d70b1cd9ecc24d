"""Dapper (Mansour et al., 2020): clients train on their own samples and on a public sample of all clients' data.

Each gradient is ``lam`` times that of a minibatch of the client's own samples plus ``1 - lam`` times that of a public
minibatch. The public sample is drawn once from the training samples of all clients; its bytes are counted.
"""

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class Dapper(FedAvg):
    """Personalization by data interpolation."""

    name = "dapper"
    follows = "none"

    lam: float = hyper(
        0.5, "weight of a client's own samples; the public ones have the rest", least=0, most=1, search=(0.1, 1.0)
    )
    public: int = hyper(200, "number of public samples, drawn from the training samples of all", least=1, most=10**9)

    @property
    def public_samples(self) -> int:
        """The size of the public sample."""
        return self.public

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` SGD steps on both kinds of samples."""
        del private
        theta = message["w"]
        for t, batch in enumerate(local.batches()):
            g, loss = local.gradient(theta, batch)
            if self.lam < 1:
                g = self.lam * g + (1 - self.lam) * local.gradient(theta, local.public(t))[0]
            theta = theta - self.eta * g
        return {"theta": theta}, {"w": theta}, {"loss": loss}
