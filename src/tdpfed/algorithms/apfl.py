"""APFL (Deng et al., 2020): every client mixes a model of its own with the shared one, and may learn how much.

The personalized model is ``m = alpha v + (1 - alpha) w_k``. Each local step moves w_k along its own gradient, and v and
alpha along those of ``f_k(m)``, all taken at the values before the step; alpha stays between 0 and 1.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class APFL(FedAvg):
    """Adaptive personalized federated learning."""

    name = "apfl"
    follows = "none"

    alpha: float = hyper(
        0.5,
        "initial share of a client's own model in its personalized one; 0 is FedAvg, 1 is local",
        least=0,
        most=1,
        search=(0.1, 0.9),
    )
    adaptive: bool = hyper(True, "whether each client learns its alpha")

    def init_private(self, theta: Tensor) -> State:
        """Keep the personalized model, the client's own one, and alpha."""
        return {"theta": theta, "v": theta, "alpha": theta.new_full((1,), self.alpha)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` steps of the shared model, of the own one and of alpha."""
        w, v, alpha = message["w"].clone(), private["v"].clone(), private["alpha"]
        m = torch.lerp(w, v, alpha)
        for batch in local.batches():  # in place: new memory in every step would take longer than the gradients
            of_w, _ = local.gradient(w, batch)
            g, loss = local.gradient(m, batch)
            of_alpha = torch.sub(v, w, out=m).mul_(g).sum(-1, keepdim=True) if self.adaptive else 0.0
            w.sub_(of_w, alpha=self.eta)
            v.addcmul_(alpha, g, value=-self.eta)
            alpha = (alpha - self.eta * of_alpha).clamp(0, 1)
            torch.lerp(w, v, alpha, out=m)
        return {"theta": m, "v": v, "alpha": alpha}, {"w": w}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the mixture of the client's own model and the received one."""
        del local
        return torch.lerp(message["w"], private["v"], private["alpha"])

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the client's shared model w_k."""
        del private
        return upload["w"]
