"""FedALA (Zhang et al., 2023): every client learns how much of the global model to take, element by element.

A client starts a round at ``v + (w - v) * W``, between its own model v and the global model w. Its weights W are in
[0, 1] and never leave it; they descend along the gradient of its loss at that start. Only the last layers are mixed;
the others start at w.
"""

from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class FedALA(FedAvg):
    """Federated averaging with adaptive local aggregation."""

    name = "fedala"

    adaptive: tuple[str, ...] = hyper(
        ("last",), "patterns of the parameters that are mixed with the client's own; 'last' is the last layer"
    )
    weight_rate: float = hyper(
        1.0, "learning rate of the mixing weights; at 0 they stay 1, as in FedAvg", least=0, search=(0.05, 20.0)
    )
    weight_steps: int = hyper(5, "steps on the mixing weights per round, each on a minibatch", least=1, most=10**6)

    @property
    def draws(self) -> int:
        """Minibatches for the model, then for the weights."""
        return self.tau + self.weight_steps

    @cached_property
    def part(self) -> Layout:
        """The parameters that are mixed."""
        return self.layout.select(self.adaptive, "algorithm.adaptive")

    def init_private(self, theta: Tensor) -> State:
        """Begin with the global model: all weights are 1."""
        return {"theta": theta, "mix": theta.new_ones(self.part.size)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Learn the weights, mix, and train from there."""
        start, mix = self._mixed(message, private, local)
        theta, loss = local.descend(start, lr=self.eta)
        return {"theta": theta, "mix": mix}, {"w": theta}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the mixture of the own and the received model, with weights learned for it."""
        return self._mixed(message, private, local)[0]

    def _mixed(self, message: State, private: State, local: LocalWork) -> tuple[Tensor, Tensor]:
        """Return the mixture of the own and the received model, and the weights."""
        layout, part = self.layout, self.part
        own, shared = (layout.take(model, part) for model in (private["theta"], message["w"]))
        mix, start = private["mix"], layout.merge(message["w"], torch.lerp(own, shared, private["mix"]), part)
        for t in range(self.weight_steps):
            g = layout.take(local.gradient(start, local.batch(self.tau + t))[0], part)
            mix = (mix - self.weight_rate * g * (shared - own)).clamp(0, 1)
            start = layout.merge(start, torch.lerp(own, shared, mix), part)
        return start, mix
