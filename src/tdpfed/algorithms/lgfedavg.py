"""LG-FedAvg (Liang et al., 2020): every client learns its own representation; the layers on top of it are shared.

The opposite of FedPer: the server averages the last layer, and the layers before it, the local ones, stay.
"""

from tdpfed.algorithms.base import hyper
from tdpfed.algorithms.fedper import FedPer


class LGFedAvg(FedPer):
    """Federated averaging of the last layers, with local representations."""

    name = "lgfedavg"
    title = "LG-FedAvg"

    personal: tuple[str, ...] = hyper(
        ("!last",), "patterns of the parameters that stay on the client; '!last' is every layer but the last"
    )
