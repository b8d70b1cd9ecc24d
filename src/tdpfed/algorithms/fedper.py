"""FedPer (Arivazhagan et al., 2019): the body of the model is shared, the head never leaves its client.

Body and head are trained together by SGD; the server averages the bodies.
"""

from tdpfed.algorithms.base import Update
from tdpfed.algorithms.split_model import SplitModel
from tdpfed.core.local import LocalWork
from tdpfed.core.state import State


class FedPer(SplitModel):
    """Federated learning with personalization layers."""

    name = "fedper"

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Train the received body together with the client's own head."""
        theta, loss = local.descend(self.start(message, private), lr=self.eta)
        return {"theta": theta}, self.sent(theta), {"loss": loss}
