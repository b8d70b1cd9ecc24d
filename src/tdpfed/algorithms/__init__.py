"""The algorithms, one file each; :func:`find` finds them by name, and those of others as ``module:Class``."""

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.algorithms.fedavg_sar import FedAvgSAR
from tdpfed.algorithms.local import Local
from tdpfed.algorithms.own import load
from tdpfed.algorithms.perfedavg import PerFedAvg
from tdpfed.algorithms.pfedme import PFedMe
from tdpfed.algorithms.tdpfed import TDPFed
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.errors import unknown

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (TDPFed, FedAvg, FedAvgSAR, PFedMe, PerFedAvg, Local)
}
DEFAULT = TDPFed.name
"""The method of a configuration that names none."""

COMPARED = (TDPFed.name, PFedMe.name, FedAvg.name, Local.name)
"""The methods of a comparison that names none."""

__all__ = [
    "ALGORITHMS",
    "COMPARED",
    "DEFAULT",
    "Algorithm",
    "Average",
    "Entries",
    "FedAvg",
    "FedAvgSAR",
    "Local",
    "LocalWork",
    "PFedMe",
    "PerFedAvg",
    "State",
    "TDPFed",
    "Turn",
    "Update",
    "find",
    "hyper",
]


def find(name: object) -> type[Algorithm]:
    """Return a method by its name, or a method of the user's own by ``package.module:Class``, which is imported."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if isinstance(name, str) and ":" in name:
        return load(name)
    raise unknown("name", name, [*ALGORITHMS, "your own as package.module:Class"])
