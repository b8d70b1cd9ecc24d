"""FedRep (Collins et al., 2021): a shared representation, the body, and a head of its own for every client.

In each round a client first takes steps of its head with the received body frozen, then steps of the body with the new
head frozen. The server averages the bodies.
"""

from tdpfed.algorithms.base import Update, hyper
from tdpfed.algorithms.split_model import SplitModel
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class FedRep(SplitModel):
    """Federated representation learning."""

    name = "fedrep"

    head_steps: int = hyper(
        10, "steps of the head (minibatches) per round, before the tau steps of the body", least=1, most=10**6,
        search=(2, 30),
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        self._must_split()

    @property
    def draws(self) -> int:
        """One minibatch per step."""
        return self.head_steps + self.tau

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take the steps of the head, then those of the body."""
        head, body = (self.layout.ranges(part) for part in (self.own, self.shared))
        theta = self.start(message, private)
        theta, _ = local.descend(theta, lr=self.eta, steps=self.head_steps, only=head)
        theta, loss = local.descend(theta, lr=self.eta, first=self.head_steps, only=body)
        return {"theta": theta}, self.sent(theta), {"loss": loss}
