"""The algorithms, one file each; ``ALGORITHMS`` finds them by name."""

from tdpfed.algorithms.base import Algorithm, Batches, Grad, State, Turn
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.algorithms.fedavg_sar import FedAvgSAR
from tdpfed.algorithms.local import Local
from tdpfed.algorithms.perfedavg import PerFedAvg
from tdpfed.algorithms.pfedme import PFedMe
from tdpfed.algorithms.tdpfed import TDPFed

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (TDPFed, FedAvg, FedAvgSAR, PFedMe, PerFedAvg, Local)
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Batches",
    "FedAvg",
    "FedAvgSAR",
    "Grad",
    "Local",
    "PFedMe",
    "PerFedAvg",
    "State",
    "TDPFed",
    "Turn",
]
