"""The methods, one file each; :func:`find` returns them by name, and custom ones by ``module:Class``.

Four files are no methods: ``base`` is the interface, ``split_model`` what methods with personal layers share, ``best``
wraps any method (a client may keep a model of its own), ``custom`` loads a user's class.
"""

from tdpfed.algorithms.apfl import APFL
from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.algorithms.best import Best
from tdpfed.algorithms.custom import load
from tdpfed.algorithms.dapper import Dapper
from tdpfed.algorithms.ditto import Ditto
from tdpfed.algorithms.fedala import FedALA
from tdpfed.algorithms.fedavg import FedAvg
from tdpfed.algorithms.fedavg_sar import FedAvgSAR
from tdpfed.algorithms.fedbabu import FedBABU
from tdpfed.algorithms.fedmac import FedMac
from tdpfed.algorithms.fedpara import FedPara
from tdpfed.algorithms.fedper import FedPer
from tdpfed.algorithms.fedprox import FedProx
from tdpfed.algorithms.fedrep import FedRep
from tdpfed.algorithms.finetune import FineTune
from tdpfed.algorithms.hypcluster import HypCluster
from tdpfed.algorithms.lgfedavg import LGFedAvg
from tdpfed.algorithms.local import Local
from tdpfed.algorithms.mapper import Mapper
from tdpfed.algorithms.mocha import Mocha
from tdpfed.algorithms.perfedavg import PerFedAvg
from tdpfed.algorithms.pfedme import PFedMe
from tdpfed.algorithms.pfedpara import PFedPara
from tdpfed.algorithms.scaffold import Scaffold
from tdpfed.algorithms.tdpfed import TDPFed
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.errors import unknown

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        TDPFed, FedAvg, FedAvgSAR, PFedMe, PerFedAvg, Local,
        FedProx, Scaffold, Ditto, APFL, FedPer, FedRep, LGFedAvg, FedBABU,
        FedALA, FedPara, PFedPara, FineTune,
        HypCluster, Mapper, Dapper, FedMac, Mocha,
    )
}  # fmt: skip
DEFAULT = TDPFed.name
"""The default method of a configuration."""

AVERAGED = FedAvg.name
"""The method to try where the uploads of another cannot be factored."""

COMPARED = (TDPFed.name, PFedMe.name, FedAvg.name, Local.name)
"""The default methods of a comparison."""

__all__ = [
    "ALGORITHMS",
    "APFL",
    "AVERAGED",
    "COMPARED",
    "DEFAULT",
    "Algorithm",
    "Average",
    "Best",
    "Dapper",
    "Ditto",
    "Entries",
    "FedALA",
    "FedAvg",
    "FedAvgSAR",
    "FedBABU",
    "FedMac",
    "FedPara",
    "FedPer",
    "FedProx",
    "FedRep",
    "FineTune",
    "HypCluster",
    "LGFedAvg",
    "Local",
    "LocalWork",
    "Mapper",
    "Mocha",
    "PFedMe",
    "PFedPara",
    "PerFedAvg",
    "Scaffold",
    "State",
    "TDPFed",
    "Turn",
    "Update",
    "find",
    "hyper",
]


def find(name: object) -> type[Algorithm]:
    """Return a method by its name, or import a custom one named as ``package.module:Class``."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if isinstance(name, str) and ":" in name:
        return load(name)
    raise unknown("name", name, [*ALGORITHMS, "your own as package.module:Class"])
