"""Per-FedAvg (Fallah et al., 2020): learn an initialization that one gradient step adapts to a client's data.

Each local step adapts on one minibatch, ``v = w - alpha g(w; D)``, and descends along the gradient of ``f(v)`` in w:
at v alone (first-order), with the Hessian factor approximated by a difference of gradients (Hessian-free), or with the
exact product of Hessian and gradient.
"""

from typing import Literal

from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class PerFedAvg(FedAvg):
    """Personalized FedAvg by meta-learning."""

    name = "perfedavg"
    title = "Per-FedAvg"
    follows = "none"

    alpha: float = hyper(0.01, "learning rate of the adaptation step", least=0, most=1e38, rate=True)
    variant: Literal["first-order", "hessian-free", "exact"] = hyper(
        "first-order", "how the adaptation step is differentiated"
    )
    delta: float = hyper(
        1e-3, "hessian-free: half the distance between the two points of the gradient difference", above=0
    )

    @property
    def draws(self) -> int:
        """Three minibatches per step (descent, adaptation, Hessian), and one for the final adaptation."""
        return 3 * self.tau + 1

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` meta steps; the personalized model is the result after one adaptation step."""
        del private
        w = message["w"]
        for t in range(self.tau):
            adapted = w - self.alpha * local.gradient(w, local.batch(self.tau + t))[0]
            g, loss = local.gradient(adapted, local.batch(t))
            if self.variant != "first-order":
                g = g - self.alpha * self._hessian_times(g, w, local, t)
            w = w - self.eta * g
        return {"theta": self._adapted(w, local)}, {"w": w}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received meta-model after one adaptation step."""
        del private
        return self._adapted(message["w"], local)

    def _adapted(self, w: Tensor, local: LocalWork) -> Tensor:
        return w - self.alpha * local.gradient(w, local.batch(3 * self.tau))[0]

    def _hessian_times(self, g: Tensor, w: Tensor, local: LocalWork, t: int) -> Tensor:
        batch = local.batch(2 * self.tau + t)
        if self.variant == "exact":
            return local.hessian_product(w, batch, g)
        ahead, behind = (local.gradient(w + delta * g, batch)[0] for delta in (self.delta, -self.delta))
        return (ahead - behind) / (2 * self.delta)

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the meta-model before adaptation."""
        del private
        return upload["w"]
