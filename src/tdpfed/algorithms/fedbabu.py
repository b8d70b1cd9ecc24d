"""FedBABU (Oh et al., 2022): only the body is learned together, under a common random head that is never trained.

A model is personalized by fine-tuning body and head. A client fine-tunes the received body in each round and keeps the
result, which is what its personalized accuracy measures; what it sends comes from training the body alone.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Average, Update, hyper
from tdpfed.algorithms.split_model import SplitModel
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State, Turn


class FedBABU(SplitModel):
    """Federated averaging with body aggregation and body update."""

    name = "fedbabu"

    fine_tune: int = hyper(
        20, "steps of body and head that personalize the received model", least=1, most=10**6, search=(4, 40)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must_split()

    @property
    def draws(self) -> int:
        """Training and fine-tuning use the same minibatches."""
        return max(self.tau, self.fine_tune)

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the common initial parameters; the head stays as it is drawn, and is not sent."""
        return {**super().init(theta, generator), "head": self.layout.take(theta, self.own)}

    def init_private(self, theta: Tensor) -> State:
        """Keep the fine-tuned model and the common head."""
        return {"theta": theta, "head": self.layout.take(theta, self.own)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Train the received body under the common head; fine-tune the received model for the client."""
        w = self._with_head(message["shared"], private["head"])
        body, _ = local.descend(w, lr=self.eta, only=self.layout.ranges(self.shared))
        theta, loss = self._tuned(w, local)
        return {"theta": theta, "head": private["head"]}, self.sent(body), {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received model, fine-tuned for the client."""
        return self._tuned(self._with_head(message["shared"], private["head"]), local)[0]

    def _tuned(self, w: Tensor, local: LocalWork) -> tuple[Tensor, Tensor]:
        return local.descend(w, lr=self.eta, steps=self.fine_tune)

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the bodies."""
        return {**super().aggregate(server, uploads, average, turn), "head": server["head"]}

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the client's body under the common head."""
        return self._with_head(upload["shared"], private["head"])

    def global_model(self, server: State) -> Tensor:
        """Return the averaged body under the common head, before any fine-tuning."""
        return self._with_head(server["shared"], server["head"])

    def _with_head(self, body: Tensor, head: Tensor) -> Tensor:
        whole = body.new_empty(*body.shape[:-1], self.layout.size)
        return self.layout.merge(self.layout.merge(whole, body, self.shared), head, self.own)
