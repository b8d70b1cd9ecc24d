"""Per-FedAvg (Fallah et al., 2020): learn a start from which one gradient step on a client's own data does well.

Each local step adapts on one minibatch, ``v = w - alpha g(w; D)``, and descends along the gradient of ``f(v)`` in w:
taken at v alone (first-order), or with its Hessian factor by a difference of gradients (Hessian-free).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from tdpfed.algorithms.base import Batches, Grad, State, Turn, hyper
from tdpfed.algorithms.fedavg import FedAvg


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """Personalised FedAvg by meta-learning."""

    name: ClassVar[str] = "perfedavg"

    alpha: float = hyper(0.01, "learning rate of the adaptation step", least=0, most=1e38)
    variant: Literal["first-order", "hessian-free"] = hyper("first-order", "how the adaptation step is differentiated")
    delta: float = hyper(1e-3, "hessian-free: half the distance of the two gradients that are compared", above=0)

    @property
    def draws(self) -> int:
        """One minibatch per step to descend on, one to adapt on, one for the Hessian; one more to adapt at the end."""
        return 3 * self.tau + 1

    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Take ``tau`` meta steps; the personalised model is the result after one adaptation step."""
        del private, turn
        w = message["w"]
        for t in range(self.tau):
            adapted = w - self.alpha * grad(w, batches(self.tau + t))[0]
            g, loss = grad(adapted, batches(t))
            if self.variant == "hessian-free":
                g = g - self.alpha * self._hessian_times(g, w, batches, t, grad)
            w = w - self.eta * g
        theta = w - self.alpha * grad(w, batches(3 * self.tau))[0]
        return {"theta": theta}, {"w": w}, {"loss": loss}

    def _hessian_times(self, g: Tensor, w: Tensor, batches: Batches, t: int, grad: Grad) -> Tensor:
        batch = batches(2 * self.tau + t)
        return (grad(w + self.delta * g, batch)[0] - grad(w - self.delta * g, batch)[0]) / (2 * self.delta)

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the meta-model before adaptation."""
        del private
        return upload["w"]
