"""FedPara (Hyeon-Woo et al., 2022): every weight is an elementwise product of two low-rank ones; factors travel.

Clients take SGD steps on the factors: the gradient of the composed weights, by the chain rule through the product. The
server averages factors.
"""

from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.cp.hadamard import HadamardPlan


class FedPara(FedAvg):
    """Federated averaging of the factors of low-rank elementwise products."""

    name = "fedpara"
    follows = "none"

    eta: float = hyper(0.1, "learning rate of the factors", above=0, most=1e38, rate=True)
    gamma: float = hyper(
        0.5, "rank of each weight, from the least that can reach full rank (0) to the most that saves values (1)",
        least=0, most=1,
    )  # fmt: skip
    rank: int | None = hyper(
        None,
        "explicit rank of every weight, at most its smaller side; it may have more values then",
        least=1,
        most=10**6,
    )
    exclude: tuple[str, ...] = hyper((), "patterns of parameters to keep dense")

    @cached_property
    def hadamard(self) -> HadamardPlan:
        """Which parameters are products, and of which ranks."""
        return HadamardPlan.of(self.layout, self.gamma, rank=self.rank, exclude=self.exclude)

    @cached_property
    def factors(self) -> Layout:
        """Layout of both factor vectors, one after the other."""
        first, second = self.hadamard.first, self.hadamard.second
        return Layout(first.names + second.names, first.shapes + second.shapes)

    def down(self) -> Entries:
        """Factors, and the parameters that stay dense."""
        return {"factors": self.factors}

    def up(self) -> Entries:
        """Factors, and the parameters that stay dense."""
        return {"factors": self.factors}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Draw factors whose products have the variance of the initial parameters."""
        return {"factors": torch.cat(self.hadamard.init(theta, generator), -1)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take ``tau`` SGD steps on the factors."""
        del private
        a = message["factors"]
        theta, pull = self.hadamard.at(*self._halves(a))
        for batch in local.batches():
            g, loss = local.gradient(theta, batch)
            a = a - self.eta * torch.cat(pull(g), -1)
            theta, pull = self.hadamard.at(*self._halves(a))
        return {"theta": theta}, {"factors": a}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the composed model that was received."""
        del private, local
        return self.hadamard.compose(*self._halves(message["factors"]))

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the factors."""
        del server, uploads, turn
        return {"factors": average("factors")}

    def global_model(self, server: State) -> Tensor:
        """Return the composed global model."""
        return self.hadamard.compose(*self._halves(server["factors"]))

    def _halves(self, a: Tensor) -> tuple[Tensor, Tensor]:
        first = self.hadamard.first.size
        return a[..., :first], a[..., first:]
