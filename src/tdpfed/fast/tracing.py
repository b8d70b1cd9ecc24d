"""Recording a function as a graph of operators, without what PyTorch would leave on the disk for it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable of PyTorch with the folder of its compiler, which is not used here."""


def recorded(function: Callable[..., Any], *given: Any) -> fx.GraphModule:
    """Return the operators that a function calls for these arguments; ``make_fx`` reads its signature."""
    _import_tracer()
    return make_fx(function)(*given)


@cache
def _import_tracer() -> None:
    """Import what PyTorch imports with the first recording.

    Its import creates a folder of a known name below the common temporary one, and follows settings in it, which
    another user of the machine could have put there. It looks into this package's own folder instead, and finds none.
    """
    with _cache_dir(str(Path(__file__).parent)), suppress(ImportError):
        import_module("torch._inductor.compiler_bisector")


@contextmanager
def _cache_dir(folder: str) -> Iterator[None]:
    before = os.environ.get(CACHE_DIR)
    if before is not None:  # the user's own
        yield
        return
    os.environ[CACHE_DIR] = folder
    try:
        yield
    finally:
        os.environ.pop(CACHE_DIR, None)
