"""Mapper (Mansour et al., 2020): every client's model lies between one of its own and the global one.

Given the global model w, a client fits its own model v for each candidate lambda, and keeps the pair whose mixture
``lam v + (1 - lam) w`` has the least loss on samples that it holds out. Then it trains w through that mixture.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.local import LocalWork, joined
from tdpfed.core.state import State
from tdpfed.errors import wrong


class Mapper(FedAvg):
    """Personalization by model interpolation."""

    name = "mapper"
    follows = "none"

    mixes: tuple[float, ...] = hyper(
        (0.0, 0.5, 0.8), "candidates for lambda, the share of the client's own model", least=0, most=1
    )
    validation: float = hyper(
        0.2, "share of each client's training samples that is held out to choose lambda", above=0, below=1
    )
    choice_batches: int = hyper(5, "minibatches of held-out samples that the choice is made on", least=1, most=10**6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mixes:
            raise wrong("mixes", self.mixes, "at least one number from 0 to 1")

    @property
    def held_out(self) -> float:
        """The validation share; with one candidate there is nothing to choose."""
        return self.validation if len(self.mixes) > 1 else 0.0

    @property
    def draws(self) -> int:
        """Minibatches for the global model, then for the client's own."""
        return 2 * self.tau

    def init_private(self, theta: Tensor) -> State:
        """Keep the mixture, the client's own model and lambda."""
        return {"theta": theta, "own": theta, "lam": theta.new_zeros(1)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Fit own models, choose lambda, then train the global model."""
        w = message["w"]
        fitted = [self._fitted(lam, private["own"], w, local) for lam in self.mixes]
        lam, v = self._chosen(fitted, w, local)
        for batch in local.batches():
            g, loss = local.gradient(lam * v + (1 - lam) * w, batch)
            w = w - self.eta * (1 - lam) * g
        return {"theta": lam * v + (1 - lam) * w, "own": v, "lam": lam}, {"w": w}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the mixture of the client's own model and the received one."""
        del local
        return private["lam"] * private["own"] + (1 - private["lam"]) * message["w"]

    def _fitted(self, lam: float, v: Tensor, w: Tensor, local: LocalWork) -> Tensor:
        """Take SGD steps on ``f(lam v + (1 - lam) w)`` in v: the mixture itself moves by ``lam^2`` as much."""
        if lam == 0:
            return v
        rest = (1 - lam) * w
        mixture, _ = local.descend(lam * v + rest, lr=self.eta * lam * lam, first=self.tau)
        return (mixture - rest) / lam

    def _chosen(self, fitted: list[Tensor], w: Tensor, local: LocalWork) -> tuple[Tensor, Tensor]:
        """Return lambda ``(..., 1)`` and the own model of the candidate with the least held-out loss."""
        mixes = torch.stack([w.new_full((), lam) for lam in self.mixes])
        if len(fitted) == 1:
            return mixes.expand(*w.shape[:-1], 1), fitted[0]
        batch = joined((local.validation(t) for t in range(self.choice_batches)), local.turn)
        pairs = zip(self.mixes, fitted, strict=True)
        losses = torch.stack([local.loss(lam * v + (1 - lam) * w, batch) for lam, v in pairs], -1)
        best = losses.argmin(-1, keepdim=True)
        return mixes[best], torch.take_along_dim(torch.stack(fitted, -2), best[..., None], -2).squeeze(-2)
