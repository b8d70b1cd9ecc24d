"""FedMac (Liu et al., 2021): sparse personalized models that correlate with the local ones.

A client minimizes ``f_k(theta) - lam <theta, w_k> + gamma sum rho log cosh(theta / rho)`` by s steps on each minibatch,
then moves its local model, ``w_k <- w_k - eta lam (w_k - theta)``. The last term approximates gamma times the l1-norm.
It outweighs the correlation only where ``lam |w_k| <= gamma``, so w_k is kept in that box: outside it the objective has
no lower bound.
"""

import math

from torch import Tensor

from tdpfed.algorithms.base import Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.optim import logistic, towards, within_float32
from tdpfed.core.state import State, Turn
from tdpfed.errors import wrong


class FedMac(FedAvg):
    """Sparse personalized federated learning by maximizing correlation."""

    name = "fedmac"
    follows = "none"

    lam: float = hyper(
        1.0, "lambda: weight of the correlation of theta with the local model", least=0, most=1e38, search=(0.1, 10.0)
    )
    gamma: float = hyper(
        1.0, "weight of the sparsity term; local models stay within gamma / lambda", least=0, most=1e38,
        search=(0.1, 10.0),
    )  # fmt: skip
    rho: float = hyper(1.0, "width in which the sparsity term is smooth; smaller is nearer to the l1-norm", above=0)
    beta: float = hyper(1.0, "share of the clients' average in the new global model", above=0)
    s: int = hyper(5, "steps on theta per local round", least=1, most=10**6)
    eta: float = hyper(0.05, "learning rate of the local model", above=0, most=1e38, rate=True)
    eta_p: float = hyper(0.08, "learning rate of theta", above=0, most=1e38, rate=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam > 0 and self.gamma == 0:
            raise wrong("gamma", self.gamma, "above 0 with lam above 0: without sparsity there is no lower bound")

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Alternate steps on theta and on the local model."""
        del private
        w = self._boxed(message["w"])
        theta, step = w.clone(), within_float32(2 * self.eta_p * self.gamma)
        for batch in local.batches():
            pull = self.lam * w - self.gamma
            for _ in range(self.s):
                g, loss = local.gradient(theta, batch)
                slope = logistic(theta, -2 / self.rho)  # tanh(x) = 1 - 2 / (1 + exp(2x))
                theta.sub_(g.sub_(pull), alpha=self.eta_p).add_(slope, alpha=step)
            w = self._boxed(towards(w, theta, self.eta * self.lam))  # w - eta lam (w - theta)
        return {"theta": theta}, {"w": w}, {"loss": loss}

    def _boxed(self, w: Tensor) -> Tensor:
        bound = self.gamma / self.lam if self.lam else math.inf
        return w.clamp(-bound, bound)

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Mix the average of the local models into the global one with share ``beta``."""
        del uploads, turn
        return {"w": (1 - self.beta) * server["w"] + self.beta * average("w")}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the client's own model, which a message does not change."""
        del message, local
        return private["theta"]

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the local model w_k."""
        del private
        return upload["w"]
