"""pFedPara (Hyeon-Woo et al., 2022): ``W = W1 * (W2 + 1)`` elementwise; the factors of W1 are shared, W2 is private.

W2 starts at 0, so that every client begins with the shared weights, and corrects them entry by entry.
"""

from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedpara import FedPara
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State
from tdpfed.cp.hadamard import HadamardPlan

SEED = 0x9FEDBA5A
"""Of the private factors before a client's first round: the same for all clients and runs."""


class PFedPara(FedPara):
    """FedPara with a private second product."""

    name = "pfedpara"
    title = "pFedPara"
    follows = "none"

    eta: float = hyper(0.05, "learning rate of the factors", above=0, most=1e38, rate=True)

    @cached_property
    def hadamard(self) -> HadamardPlan:
        """Which parameters are products, and of which ranks."""
        return HadamardPlan.of(self.layout, self.gamma, rank=self.rank, exclude=self.exclude, constant=1.0)

    @cached_property
    def factors(self) -> Layout:
        """Layout of what travels: the first factors, and the parameters that stay dense."""
        return self.hadamard.first

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Draw first factors whose products have the variance of the initial parameters."""
        return {"factors": self.hadamard.init(theta, generator)[0]}

    def init_private(self, theta: Tensor) -> State:
        """Draw second factors whose product is 0."""
        return {"theta": theta, "own": self.hadamard.init(theta, torch.Generator().manual_seed(SEED))[1]}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` SGD steps on both factor vectors; only the first is sent."""
        first, second = message["factors"], private["own"]
        theta, pull = self.hadamard.at(first, second)
        for batch in local.batches():
            g, loss = local.gradient(theta, batch)
            of_first, of_second = pull(g)
            first, second = first - self.eta * of_first, second - self.eta * of_second
            theta, pull = self.hadamard.at(first, second)
        return {"theta": theta, "own": second}, {"factors": first}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received weights with the client's own correction."""
        del local
        return self.hadamard.compose(message["factors"], private["own"])

    def global_model(self, server: State) -> Tensor:
        """Return the shared weights W1, those of a client without a correction."""
        first = server["factors"]
        return self.hadamard.compose(first, first.new_zeros(*first.shape[:-1], self.hadamard.second.size))
