"""What a model takes: a tensor, or several by name or position.

The samples of several tensors are stored as rows of numbers, one row for each sample, and cut up only where the model
is called. So minibatches, draws, padding and messages know one tensor, whatever a model takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from tdpfed.errors import TDPFedError

WHOLE = (torch.int64, torch.int32)
"""Types of inputs that are token ids; other whole numbers, such as bytes, are numbers like any."""


@dataclass(frozen=True)
class Part:
    """One of several inputs: its name (empty: only a position), the shape of a sample, and whether it is token ids."""

    name: str
    shape: tuple[int, ...]
    tokens: bool = False

    @property
    def size(self) -> int:
        """The number of values of a sample."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Inputs:
    """The shape of a stored sample, and the inputs that it holds if they are several."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Tensor] | Sequence[Tensor]) -> Self:
        """Return the inputs that a dict or a tuple of tensors ``(N, ...)`` holds."""
        pairs = list(values.items()) if isinstance(values, Mapping) else [("", value) for value in values]
        if not pairs:
            raise TDPFedError("no tensors; allowed: 1 or more", field="x")
        if any(not isinstance(name, str) or (isinstance(values, Mapping) and not name) for name, _ in pairs):
            raise TDPFedError("a name that is no text; allowed: the names of forward's arguments", field="x")
        if len({len(value) for _, value in pairs}) != 1:
            counts = ", ".join(str(len(value)) for _, value in pairs)
            raise TDPFedError(f"tensors of {counts} samples; allowed: equally many", field="x")
        parts = tuple(Part(name, tuple(value.shape[1:]), value.dtype in WHOLE) for name, value in pairs)
        return cls((sum(part.size for part in parts),), parts)

    @property
    def places(self) -> list[slice]:
        """Where in a row each part is."""
        ends = list(accumulate(part.size for part in self.parts))
        return [slice(end - part.size, end) for part, end in zip(self.parts, ends, strict=True)]

    def pack(self, values: Mapping[str, Tensor] | Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a dict or tuple of tensors ``(N, ...)`` as rows ``(N, size)``; refuse ids that ``dtype`` rounds."""
        found = list(values.values()) if isinstance(values, Mapping) else list(values)
        columns = []
        for part, value in zip(self.parts, found, strict=True):
            column = value.reshape(len(value), part.size)
            if part.tokens and not torch.equal(column.to(dtype).to(column.dtype), column):
                raise TDPFedError(f"token ids up to {int(value.max())}; allowed: those exact in {dtype}", field="x")
            columns.append(column.to(dtype))
        return torch.cat(columns, 1)

    def unpack(self, x: Tensor) -> Tensor | dict[str, Tensor] | tuple[Tensor, ...]:
        """Return what a batch of stored samples holds: the tensor itself, or the dict or tuple of its parts."""
        if not self.parts:
            return x
        pairs = zip(self.parts, self.places, strict=True)
        cut = [x[..., place].reshape(*x.shape[:-1], *part.shape) for part, place in pairs]
        typed = [value.long() if part.tokens else value for part, value in zip(self.parts, cut, strict=True)]
        if self.parts[0].name:
            return {part.name: value for part, value in zip(self.parts, typed, strict=True)}
        return tuple(typed)

    def arguments(self, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the positional and named arguments with which a model is called on a batch."""
        found = self.unpack(x)
        if isinstance(found, dict):
            return (), found
        return (found if isinstance(found, tuple) else (found,)), {}
