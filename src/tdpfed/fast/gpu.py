"""GPU utilities: our own kernels where they apply, and independent work on parallel streams."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import cycle
from types import ModuleType

import torch
from torch import Tensor

LANES = 8
"""Number of parallel streams; further work is queued on them in turn."""

Lane = Callable[[], AbstractContextManager[object]]


@contextmanager
def side_by_side(device: torch.device) -> Iterator[Lane]:
    """Yield a function that opens a lane; work in different lanes must be independent.

    All lanes start after the work submitted before, and later work waits for all lanes.
    """
    if device.type != "cuda":
        yield nullcontext
        return
    here, used, free = torch.cuda.current_stream(device), set[torch.cuda.Stream](), cycle(_streams(device))

    @contextmanager
    def lane() -> Iterator[None]:
        stream = next(free)
        if stream not in used:
            stream.wait_stream(here)
            used.add(stream)
        with torch.cuda.stream(stream):
            yield

    try:
        yield lane
    finally:
        for stream in used:
            here.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(LANES)]


def kernels_for(*tensors: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)) -> ModuleType | None:
    """Return the module of our own kernels; None if they do not support these tensors."""
    fitting = all(t.is_cuda and t.dtype in dtypes and not t.requires_grad and t.stride(-1) == 1 for t in tensors)
    return _kernels() if fitting else None


@cache
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("tdpfed.fast.kernels")
    except ImportError:  # a PyTorch without Triton
        return None
