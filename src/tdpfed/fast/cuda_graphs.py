"""A round of all clients as one CUDA graph: thousands of small kernels, one launch.

The work of a round is the same from round to round: what changes are the values of its inputs. So it is computed once
as it is, recorded the second time its inputs have the same shapes, and replayed from then on.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tdpfed.core.state import State

States = tuple[State, ...]

RECORDINGS = 4
"""Kinds of input a graph is kept for; each holds its intermediates' memory."""


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
        return tuple({name: value.clone() for name, value in state.items()} for state in self.outputs)


class Graphed:
    """``function`` from states to states, all on one GPU; it must be the same work for any values.

    What cannot be recorded (a library that waits for the GPU in the middle) is computed as it is.
    """

    def __init__(self, function: Callable[..., States]) -> None:
        self._function = function
        self._kinds: OrderedDict[tuple[object, ...], _Recording | None] = OrderedDict()  # None: not recorded
        self._recordable = True

    def __call__(self, *states: State) -> States:
        """Return what ``function`` does for these states."""
        kind = tuple((name, v.shape, v.dtype, v.device) for state in states for name, v in state.items())
        if kind not in self._kinds:  # libraries set themselves up in a first call, which cannot be recorded
            self._kinds[kind] = None
            return self._function(*states)
        recording = self._kinds[kind]
        if recording is None and self._recordable:
            recording = self._kinds[kind] = self._record(states)
        self._kinds.move_to_end(kind)
        held = [other for other, one in self._kinds.items() if one is not None]
        for oldest in held[:-RECORDINGS]:
            self._kinds[oldest] = None  # its memory goes; it is recorded again when it comes back
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
