"""A round of all clients as one CUDA graph: thousands of small kernels, one launch.

Every round does the same work on different values. So a round is computed directly the first time, recorded the
second time its inputs have the same shapes, and replayed from then on.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.core.state import State

States = tuple[State, ...]

MAX_FUNCTIONS = 2
"""Maximum number of functions that :class:`Latest` keeps."""

RECORDINGS = 4
"""Maximum number of recorded graphs, one per kind of input; each keeps the memory of its intermediates."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: States
    outputs: States

    def replay(self, states: States) -> States:
        for fixed, given in zip(self.inputs, states, strict=True):
            for name, value in given.items():
                fixed[name].copy_(value)
        self.graph.replay()
        copies: dict[int, Tensor] = {}  # a tensor that is both kept and sent is copied once
        return tuple({name: _copy(value, copies) for name, value in state.items()} for state in self.outputs)


def _copy(value: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(value) not in copies:
        copies[id(value)] = value.clone()
    return copies[id(value)]


class Graphed:
    """A ``function`` from states to states on one GPU, whose operations must not depend on the values.

    A function that cannot be recorded (because a library waits for the GPU in the middle) is called directly.
    """

    def __init__(self, function: Callable[..., States]) -> None:
        self._function = function
        self._kinds: OrderedDict[tuple[object, ...], _Recording | None] = OrderedDict()  # None: not recorded
        self._recordable = True

    def __call__(self, *states: State) -> States:
        """Return the result of ``function`` for these states."""
        kind = tuple((name, v.shape, v.dtype, v.device) for state in states for name, v in state.items())
        if kind not in self._kinds:  # libraries initialize themselves in the first call, which cannot be recorded
            self._kinds[kind] = None
            return self._function(*states)
        recording = self._kinds[kind]
        if recording is None and self._recordable:
            recording = self._kinds[kind] = self._record(states)
        self._kinds.move_to_end(kind)
        held = [other for other, one in self._kinds.items() if one is not None]
        for oldest in held[:-RECORDINGS]:
            self._kinds[oldest] = None  # frees its memory; it is recorded again if needed
        return self._function(*states) if recording is None else recording.replay(states)

    def _record(self, states: States) -> _Recording | None:
        inputs = tuple({name: value.clone() for name, value in state.items()} for state in states)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = self._function(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._recordable = False
            torch.cuda.synchronize()
            return None
        return _Recording(graph, inputs, outputs)


class Latest:
    """The most recently used functions by key, with their graphs."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Callable[..., States]] = OrderedDict()

    def of(self, key: object, make: Callable[[], Callable[..., States]]) -> Callable[..., States]:
        """Return the function of a key: that made first, while it is kept."""
        if key not in self._known:
            self._known[key] = make()
        self._known.move_to_end(key)
        while len(self._known) > MAX_FUNCTIONS:
            self._known.popitem(last=False)
        return self._known[key]
