"""Federated evaluation of on-device personalization (Wang et al., 2019): FedAvg, and what fine-tuning changes.

Beside training for the federation, a client fine-tunes some layers of the global model that it received, for some steps
on its own data. A record says for each client by how much the accuracy of its tuned model is above the global model's.
"""

from functools import cached_property

from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.recipe import USUAL
from tdpfed.core.state import State


class FineTune(FedAvg):
    """FedAvg with fine-tuned personalized models."""

    name = "finetune"
    title = "Fine-tuning"
    reports_change = True

    layers: tuple[str, ...] = hyper(("*",), "patterns of the parameters that are fine-tuned; 'last' is the last layer")
    tune_steps: int = hyper(20, "fine-tuning steps, each on a minibatch", least=1, most=10**6)
    tune_rate: float = hyper(0.05, "learning rate of fine-tuning", above=0, most=1e38, rate=True)

    @property
    def draws(self) -> int:
        """Minibatches for training, then for fine-tuning."""
        return self.tau + self.tune_steps

    @cached_property
    def part(self) -> Layout:
        """The parameters that are fine-tuned."""
        return self.layout.select(self.layers, "algorithm.layers")

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Train the received model for the federation, and fine-tune it for the client."""
        del private
        w, loss = local.descend(message["w"], lr=self.eta)
        return {"theta": self._tuned(message["w"], local)}, {"w": w}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received model, tuned for the client."""
        del private
        return self._tuned(message["w"], local)

    def _tuned(self, theta: Tensor, local: LocalWork) -> Tensor:
        layout, part = self.layout, self.part
        if part == layout or local.optimizer != USUAL:
            only = None if part == layout else layout.ranges(part)
            return local.descend(theta, lr=self.tune_rate, steps=self.tune_steps, first=self.tau, only=only)[0]
        for t in range(self.tune_steps):
            g = local.gradient(theta, local.batch(self.tau + t))[0]
            moved = layout.take(theta, part) - self.tune_rate * layout.take(g, part)
            theta = layout.merge(theta, moved, part)
        return theta

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the model trained for the federation."""
        del private
        return upload["w"]
