"""A layout maps the slices of a flat vector to named parameters.

The state of a model is one tensor ``(P,)``, that of K clients ``(K, P)``; a layout turns it into named tensors and back
without a copy. It depends only on names and shapes; equal hashes mean that two sides use the same layout.
"""

import fnmatch
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from tdpfed.errors import TDPFedError

Ranges = tuple[tuple[int, int], ...]
"""Ranges ``begin <= n < end`` of positions in a flat vector, in order."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters in a flat vector, in order."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        doubled = (
            sorted({name for name in self.names if self.names.count(name) > 1})
            if len(set(self.names)) < len(self.names)
            else []
        )
        if doubled:
            raise TDPFedError(f"layout: the name {doubled[0]!r} appears more than once, names must be unique")
        for name, shape in zip(self.names, self.shapes, strict=True):
            if any(size < 1 for size in shape):
                raise TDPFedError(f"layout: {name!r} has shape {shape}, every dimension must be at least 1")

    @classmethod
    def of(cls, source: "nn.Module | Mapping[str, Tensor | Sequence[int]]") -> "Layout":
        """Return the layout of a module's parameters, or of a dict of tensors or shapes."""
        if isinstance(source, nn.Module):
            refuse_running_statistics(source)
            source = dict(source.named_parameters())
        shapes = {
            name: tuple(value.shape) if isinstance(value, Tensor) else tuple(value) for name, value in source.items()
        }
        if not shapes:
            raise TDPFedError("layout: no parameters given, at least one is needed")
        return cls(tuple(shapes), tuple(shapes.values()))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of values of each parameter."""
        return [math.prod(shape) for shape in self.shapes]

    @cached_property
    def size(self) -> int:
        """Length P of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """The slice of each parameter in the flat vector."""
        ends = [sum(self.sizes[: n + 1]) for n in range(len(self.sizes))]
        return {name: slice(end - size, end) for name, size, end in zip(self.names, self.sizes, ends, strict=True)}

    @cached_property
    def hash(self) -> str:
        """SHA-256 over names and shapes, as hex."""
        return hashlib.sha256(json.dumps([self.names, self.shapes]).encode()).hexdigest()

    def matching(self, patterns: str | Sequence[str], field: str = "patterns") -> list[str]:
        """Return the names that match shell-style patterns, in order.

        ``"last"`` means the last layer, and ``"!last"`` or ``"!conv*"`` all names that the rest of the pattern does not
        match. A pattern that matches nothing is an error that names ``field``.
        """
        found: set[str] = set()
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            matched = self._matched(pattern.removeprefix("!"))
            names = [name for name in self.names if (name in matched) != pattern.startswith("!")]
            if not names:
                raise TDPFedError(
                    f"the pattern {pattern!r} matches no parameter, must match one of {', '.join(self.names)}",
                    field=field, value=pattern, allowed=self.names,
                )  # fmt: skip
            found.update(names)
        return [name for name in self.names if name in found]

    def _matched(self, pattern: str) -> set[str]:
        owner = self.names[-1].rpartition(".")[0]
        return {
            name
            for name in self.names
            if fnmatch.fnmatchcase(name, pattern) or (pattern == "last" and name.rpartition(".")[0] == owner)
        }

    def select(self, patterns: str | Sequence[str], field: str = "patterns") -> "Layout":
        """Return the layout of the parameters that match, as a part of this one."""
        if not patterns:
            raise TDPFedError(f"{patterns!r} given, must be at least one pattern", field=field, value=patterns)
        shapes = dict(zip(self.names, self.shapes, strict=True))
        return Layout.of({name: shapes[name] for name in self.matching(patterns, field)})

    def without(self, patterns: str | Sequence[str], field: str = "patterns") -> "Layout":
        """Return the layout of the parameters that do not match; at least one must remain."""
        out = set(self.matching(patterns, field))
        rest = {name: shape for name, shape in zip(self.names, self.shapes, strict=True) if name not in out}
        if not rest:
            given = [patterns] if isinstance(patterns, str) else list(patterns)
            raise TDPFedError(
                f"{given} given, which match every parameter, at least one of {', '.join(self.names)} must remain",
                field=field, value=given, allowed=self.names,
            )  # fmt: skip
        return Layout.of(rest)

    def take(self, flat: Tensor, part: "Layout") -> Tensor:
        """Return the values ``(..., part.size)`` of a part of ``flat`` ``(..., P)``."""
        return torch.cat([flat[..., self.slices[name]] for name in part.names], dim=-1)

    def merge(self, flat: Tensor, values: Tensor, part: "Layout") -> Tensor:
        """Return ``flat`` ``(..., P)`` with the values ``(..., part.size)`` of a part put in its place."""
        pieces = [values[..., part.slices[n]] if n in part.slices else flat[..., self.slices[n]] for n in self.names]
        return torch.cat(pieces, dim=-1)

    def ranges(self, part: "Layout") -> Ranges:
        """Return where the values of a part are in the flat vector; adjacent parameters are one range."""
        found: list[tuple[int, int]] = []
        for name in self.names:
            if name in part.slices:
                place = self.slices[name]
                begin = found.pop()[0] if found and found[-1][1] == place.start else place.start
                found.append((begin, place.stop))
        return tuple(found)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters of ``flat`` ``(..., P)`` as views ``(..., *shape)``, in order."""
        if flat.shape[-1:] != (self.size,):
            raise TDPFedError(f"flat vector: shape {tuple(flat.shape)} given, the last dimension must be {self.size}")
        # One split instead of a slice per parameter: its backward is a single concatenation.
        parts = torch.split(flat, self.sizes, dim=-1)
        return [part.reshape((*part.shape[:-1], *shape)) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return tensors ``(..., *shape)``, given in order, as one flat tensor ``(..., P)``."""
        return torch.cat(
            [
                tensor.reshape(*tensor.shape[: tensor.ndim - len(shape)], size)
                for tensor, shape, size in zip(tensors, self.shapes, self.sizes, strict=True)
            ],
            dim=-1,
        )

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return ``flat`` ``(..., P)`` as named views ``(..., *shape)``."""
        return dict(zip(self.names, self.split(flat), strict=True))

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return named tensors ``(..., *shape)`` as one flat tensor ``(..., P)``; names and shapes must match."""
        missing, extra = set(self.names) - set(tensors), set(tensors) - set(self.names)
        if missing or extra:
            raise TDPFedError(f"flatten: missing {sorted(missing)}, not in the layout {sorted(extra)}")
        batch: tuple[int, ...] | None = None
        for name, shape in zip(self.names, self.shapes, strict=True):
            given = tuple(tensors[name].shape)
            lead = given[: len(given) - len(shape)]
            if given[len(lead) :] != shape or (batch is not None and lead != batch):
                expected = (*(("...",) if batch is None else batch), *shape)
                raise TDPFedError(f"flatten: {name!r} has shape {given}, must be {expected}")
            batch = lead
        return self.join([tensors[name] for name in self.names])


def refuse_running_statistics(module: nn.Module) -> None:
    """Refuse layers that change buffers in ``forward``: these are not parameters and cannot be averaged."""
    for name, layer in module.named_modules():
        if getattr(layer, "track_running_stats", False):
            raise TDPFedError(
                f"model: layer {name or '(the model itself)'!r} is a {type(layer).__name__} with running statistics, "
                "which are not supported; use nn.GroupNorm or nn.LayerNorm instead"
            )
