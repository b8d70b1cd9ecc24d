"""Communication-efficient personalized federated learning: every client keeps its own model and uploads CP factors.

The packages, each of which imports only those before it: ``core`` (flat parameters, draws, local work), ``cp``
(factors), ``algorithms`` (the methods), ``wire`` (messages), ``server`` (the server's half of a round), ``models``,
``data``, ``fast`` (speed; only the engine imports it), ``engine`` (simulation), ``config``, ``runs`` (run folders),
``report``, ``studies`` (many runs for one question), ``paper``, ``flower`` (deployment), ``cli``.

Names are imported from their modules on first use, so that code that does not need PyTorch does not wait for it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# The last bits of a matrix product must not depend on where its operands lie in memory: otherwise a client's result
# would depend on the other clients in its batch. MKL guarantees this in the mode set here, at no measurable cost; it
# reads the variable before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if TYPE_CHECKING:
    from tdpfed.algorithms import (
        Algorithm,
        Average,
        Entries,
        FedAvg,
        FedAvgSAR,
        Local,
        LocalWork,
        PerFedAvg,
        PFedMe,
        State,
        TDPFed,
        Turn,
        Update,
        hyper,
    )
    from tdpfed.core.layout import Layout
    from tdpfed.core.recipe import Optimizer
    from tdpfed.cp.plan import FactorPlan
    from tdpfed.cp.tensorize import densify, tensorize
    from tdpfed.data import Federation, make_federation
    from tdpfed.errors import TDPFedError
    from tdpfed.runs.simulate import Result, simulate
    from tdpfed.runs.trained import load_run
    from tdpfed.server.participation import Participation
    from tdpfed.server.step import ServerStep
    from tdpfed.wire import Wire

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Average",
    "Entries",
    "FactorPlan",
    "FedAvg",
    "FedAvgSAR",
    "Federation",
    "Layout",
    "Local",
    "LocalWork",
    "Optimizer",
    "PFedMe",
    "Participation",
    "PerFedAvg",
    "Result",
    "ServerStep",
    "State",
    "TDPFed",
    "TDPFedError",
    "Turn",
    "Update",
    "Wire",
    "densify",
    "hyper",
    "load_run",
    "make_federation",
    "simulate",
    "tensorize",
]

if not TYPE_CHECKING:  # a type checker reads the imports above instead
    _NAMES = {
        "tdpfed.algorithms": (
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
        ),
        "tdpfed.core.layout": ("Layout",),
        "tdpfed.core.recipe": ("Optimizer",),
        "tdpfed.data": ("Federation", "make_federation"),
        "tdpfed.server.participation": ("Participation",),
        "tdpfed.server.step": ("ServerStep",),
        "tdpfed.wire": ("Wire",),
        "tdpfed.runs.simulate": ("Result", "simulate"),
        "tdpfed.runs.trained": ("load_run",),
        "tdpfed.errors": ("TDPFedError",),
        "tdpfed.cp.tensorize": ("densify", "tensorize"),
        "tdpfed.cp.plan": ("FactorPlan",),
    }
    _MODULES = (
        "algorithms",
        "config",
        "core",
        "cp",
        "data",
        "engine",
        "errors",
        "models",
        "report",
        "runs",
        "server",
        "wire",
    )

    def __getattr__(name):
        for module, names in _NAMES.items():
            if name in names:
                globals()[name] = found = getattr(import_module(module), name)
                return found
        if name in _MODULES:
            return import_module(f"tdpfed.{name}")
        raise AttributeError(f"module 'tdpfed' has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *__all__, *_MODULES})
