"""The algorithms, one file each; ``ALGORITHMS`` finds them by name."""

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.algorithms.fedavg_sar import FedAvgSAR
from tdpfed.algorithms.local import Local
from tdpfed.algorithms.perfedavg import PerFedAvg
from tdpfed.algorithms.pfedme import PFedMe
from tdpfed.algorithms.tdpfed import TDPFed
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (TDPFed, FedAvg, FedAvgSAR, PFedMe, PerFedAvg, Local)
}

__all__ = [
    "ALGORITHMS",
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
    "hyper",
]
