"""FedAvg (s.a.r.): only a random subset of the coordinates is sent, up and down (section VII-D).

Client and server draw the same subset from a shared seed, anew for each round and client, so values are sent without
their positions. A coordinate that a client does not receive keeps the client's previous value, one that no client sends
keeps the server's.
"""

from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.core.draws import Subsets
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn


class FedAvgSAR(FedAvg):
    """Federated averaging of randomly chosen coordinates."""

    name = "fedavg_sar"
    title = "FedAvg (s.a.r.)"
    shared_seed = True
    same_for_all = False

    compression: float = hyper(2.0, "compression rate: 1 of this many coordinates is sent, each way", least=1)

    def down(self) -> Entries:
        """Values without their positions."""
        return {"values": self.subsets.count}

    def up(self) -> Entries:
        """Values without their positions."""
        return {"values": self.subsets.count}

    @cached_property
    def subsets(self) -> Subsets:
        """The coordinates of each client's subset, ``(..., m)``, by round."""
        return Subsets(self.layout.size, max(1, round(self.layout.size / self.compression)))

    def broadcast(self, server: State, turn: Turn) -> State:
        """Send each client the values of its subset."""
        return {"values": server["w"][self.subsets.of(turn)]}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Overwrite the subset with the server's values, train, and upload the same subset."""
        theta, loss = local.descend(self.received(message, private, local), lr=self.eta)
        return {"theta": theta}, {"values": theta.gather(-1, self.subsets.of(local.turn))}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the client's own model with the received values of its subset."""
        return private["theta"].scatter(-1, self.subsets.of(local.turn), message["values"])

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the change of each coordinate over the clients that sent it."""
        del uploads
        w, chosen, sent = server["w"], self.subsets.of(turn), self.subsets.mask(turn, server["w"])

        def changes(values: Tensor) -> Tensor:
            """Return how far the sent values are from the server's, and 0 where nothing was sent."""
            return torch.zeros_like(sent).scatter_(-1, chosen, values).addcmul_(w, sent, value=-1)

        change = average("values", through=changes, sent=sent)
        return {"w": w + change}

    def center(self, server: State) -> State:
        """Return 0: changes are averaged."""
        return {"values": torch.zeros_like(server["w"])}

    @property
    def averaged(self) -> tuple[str, ...]:
        """The server's model."""
        return ("w",)

    def compression_reached(self) -> tuple[float, float, str]:
        """At least one value is sent."""
        size = self.layout.size
        return self.compression, size / self.subsets.count, f"the model has {size:,} values"
