"""Communication-efficient personalised federated learning: every client keeps its own model, only CP factors travel."""

import os

# A matrix product's last bits must not depend on where in memory it lies, or a client's would depend on its company.
# MKL promises that in this mode, at no measurable cost; it reads the variable before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from tdpfed.algorithms import FedAvg, FedAvgSAR, Local, PerFedAvg, PFedMe, TDPFed
from tdpfed.data import Federation, make_federation
from tdpfed.engine.participation import Participation
from tdpfed.engine.result import Result, simulate
from tdpfed.errors import TDPFedError
from tdpfed.nn import densify, tensorize
from tdpfed.plan import FactorPlan

__version__ = "0.1.0"

__all__ = [
    "FactorPlan",
    "FedAvg",
    "FedAvgSAR",
    "Federation",
    "Local",
    "PFedMe",
    "Participation",
    "PerFedAvg",
    "Result",
    "TDPFed",
    "TDPFedError",
    "densify",
    "make_federation",
    "simulate",
    "tensorize",
]
