"""Work on independent parts side by side on a GPU; on a CPU one after another."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import cycle

import torch

LANES = 8
"""Streams that share the parts; parts beyond them queue up."""

Lane = Callable[[], AbstractContextManager[object]]


@contextmanager
def side_by_side(device: torch.device) -> Iterator[Lane]:
    """Yield what opens a lane: what is computed in different lanes must not depend on each other.

    All lanes start after what was asked for before, and what follows waits for them all.
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
