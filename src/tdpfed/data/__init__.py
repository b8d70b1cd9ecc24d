"""Data sets by name, partitions into clients, and the federation that the engine trains on."""

from tdpfed.data.build import make_federation
from tdpfed.data.datasets import Dataset, Listing, available, load
from tdpfed.data.federation import Federation
from tdpfed.data.partition import bounded, classes, dirichlet, iid, natural, split, split_official

__all__ = [
    "Dataset",
    "Federation",
    "Listing",
    "available",
    "bounded",
    "classes",
    "dirichlet",
    "iid",
    "load",
    "make_federation",
    "natural",
    "split",
    "split_official",
]
