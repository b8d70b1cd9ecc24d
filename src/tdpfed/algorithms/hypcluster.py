"""HypCluster (Mansour et al., 2020), also known as IFCA (Ghosh et al., 2020): clients sort themselves into clusters.

A client chooses the server's model with the least loss on its own data, trains it, and sends change and choice. The
server averages within each cluster. In the first rounds clusters are drawn instead: otherwise all clients choose the
model that happens to start best, and no other is ever trained.
"""

from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tdpfed.algorithms.base import Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.draws import dealt
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork, joined
from tdpfed.core.state import Entries, State, Turn
from tdpfed.errors import wrong


class HypCluster(FedAvg):
    """Federated averaging within clusters that clients choose by loss."""

    name = "hypcluster"
    averages_all = False
    summable = False
    averaged = ("models",)

    clusters: int = hyper(2, "number of clusters, each with a model of its own", least=1, most=10**4, search=(1, 5))
    drawn_rounds: int = hyper(1, "rounds at the start in which a client's cluster is drawn at random", least=0)
    choice_batches: int = hyper(5, "minibatches on which a client compares the models", least=1, most=10**6)

    def bind(self, layout: Layout, population: int, most_samples: int = 0) -> Self:
        """Bind the method; there may be no more clusters than clients."""
        if self.clusters > population:
            raise wrong("algorithm.clusters", self.clusters, f"at most {population}, the number of clients")
        return super().bind(layout, population, most_samples)

    @property
    def draws(self) -> int:
        """Minibatches for training, then for the choice."""
        return self.tau + self.choice_batches

    @cached_property
    def models(self) -> Layout:
        """Layout of all models, one after the other."""
        names = tuple(f"{number}.{name}" for number in range(self.clusters) for name in self.layout.names)
        return Layout(names, self.layout.shapes * self.clusters)

    def down(self) -> Entries:
        """All models."""
        return {"models": self.models}

    def up(self) -> Entries:
        """The change of the chosen model, and a 1 at its number."""
        return {"change": self.layout, "choice": self.clusters}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start the first model as given, the others with the same values of each parameter in another order."""
        parts = [part.flatten() for part in self.layout.split(theta) * (self.clusters - 1)]
        others = [part[torch.randperm(len(part), generator=generator).to(part.device)] for part in parts]
        return {"models": torch.cat([theta, *others])}

    def init_private(self, theta: Tensor) -> State:
        """Keep the trained model, and the choice."""
        return {"theta": theta, "choice": theta.new_zeros(self.clusters)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Choose a model and train it."""
        del private
        w, choice = self._chosen(message, local)
        theta, loss = local.descend(w, lr=self.eta)
        return {"theta": theta, "choice": choice}, {"change": theta - w, "choice": choice}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received model that the client chooses."""
        del private
        return self._chosen(message, local)[0]

    def _chosen(self, message: State, local: LocalWork) -> tuple[Tensor, Tensor]:
        """Return the model with the least loss, or in the first rounds a drawn one, and a 1 at its number."""
        models = message["models"].unflatten(-1, (self.clusters, self.layout.size))
        batch = joined((local.batch(self.tau + t) for t in range(self.choice_batches)), local.turn)
        losses = [local.loss(w, batch) if self.clusters > 1 else w[..., 0] for w in models.unbind(-2)]
        drawn = torch.as_tensor(local.turn.round, device=models.device) <= self.drawn_rounds
        number = dealt(local.turn, self.population, self.clusters)
        number = torch.where(drawn, number, torch.stack(losses, -1).argmin(-1))
        w = torch.take_along_dim(models, number[..., None, None], -2).squeeze(-2)
        return w, one_hot(number, self.clusters).to(models)

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Move each model by the mean change of the clients that chose it."""
        del turn
        chosen = one_hot(uploads["choice"].argmax(-1), self.clusters).to(uploads["change"])[..., None]
        sent = chosen.expand(-1, -1, self.layout.size).flatten(1)
        return {"models": server["models"] + average("change", lambda x: (chosen * x[:, None]).flatten(1), sent)}

    def center(self, server: State) -> State:
        """Return 0: changes are averaged."""
        return {"change": torch.zeros_like(server["models"]), "choice": server["models"].new_zeros(self.clusters)}

    def global_model(self, server: State) -> Tensor | None:
        """Return the model if there is only one."""
        return server["models"] if self.clusters == 1 else None
