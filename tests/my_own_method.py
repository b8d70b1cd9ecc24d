"""A method of a user's own in a module of its own, as tests write it to a folder."""

import importlib
import sys
from pathlib import Path

import pytest

NAME = "users_methods:Ditto"
SOURCE = '''
from typing import Literal

from tdpfed.algorithms import Algorithm, FedAvg, hyper
from tdpfed.errors import TDPFedError


class Ditto(FedAvg):
    """A method with settings of several types."""

    name = "ditto"
    lam: float = hyper(1.0, "pull towards the global model", least=0)
    bound: float | None = hyper(None, "longest step", above=0)
    kind: Literal["near", "far"] = hyper("near", "which model is pulled")
    extra: float = hyper(2.0, "something more")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == "far" and self.bound is None:
            raise TDPFedError("none given, must be set where kind is 'far'", field="bound")


class Abstract(Algorithm):
    name = "abstract"


class Bare(FedAvg):
    name = "bare"
    lam: float = 1.0


class Nameless(FedAvg):
    pass


Other = dict
number = 3
'''


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, *, on_path: bool = True) -> Path:
    """Write the module; it is forgotten after the test, and found on the path if asked for."""
    folder.mkdir(exist_ok=True)
    file = folder / "users_methods.py"
    file.write_text(SOURCE)
    monkeypatch.setattr(sys, "path", [*sys.path, *([str(folder)] if on_path else [])])
    monkeypatch.delitem(sys.modules, "users_methods", raising=False)
    importlib.invalidate_caches()
    return file
