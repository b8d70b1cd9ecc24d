"""The form of a message: for each entry, what of it travels and in which numbers.

An entry travels whole, as in :mod:`tdpfed.wire.codecs`, or as its change against what the client received: all values
of the change, rank-one terms of each parameter, or its largest values with their positions. What of a change is lost is
known to the sender, which may keep it and add it to its next change (error feedback).
"""

import hashlib
import json
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, key
from tdpfed.core.layout import Layout
from tdpfed.core.state import Entries, State, layouts_of, lengths_of
from tdpfed.errors import unknown
from tdpfed.wire.blocks import LEAST_CLIENTS, Block, Dense, Parts, dense_block, terms_block
from tdpfed.wire.codecs import DTYPES, VALUES_PER_SCALE, Codec, grow, scales
from tdpfed.wire.packing import FLOATS, Section, total_bytes

HEADER_BYTES = 48
"""Bytes of a message beside its values."""

MOST_MODES = 5
"""Tensors of more modes are taken as matrices."""


LARGEST_CHANGE = 1e4
"""Largest norm of a change over that of the received entry, or over 1 if that is larger: far beyond any training."""


Lane = Callable[[], AbstractContextManager[object]]
SideBySide = Callable[[torch.device], AbstractContextManager[Lane]]
"""Opens a context in which work in different lanes may be computed at the same time."""


class EntryForm(ABC):
    """How one entry travels."""

    sections: tuple[Section, ...]

    @abstractmethod
    def grow(self, parts: Parts) -> Tensor:
        """Return the values ``(K, n)`` that were sent."""


@dataclass(frozen=True)
class Whole(EntryForm):
    """The entry itself; :func:`tdpfed.wire.codecs.shrink` makes its parts."""

    length: int
    layout: Layout | None
    codec: Codec

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """The values, and for int8 the scales."""
        values = Section(self.codec, self.length)
        return (
            (values,)
            if self.codec in FLOATS
            else (values, Section("float32", scales(self.length, self.layout), scale=True))
        )

    def grow(self, parts: Parts) -> Tensor:
        """Return the values ``(..., n)``."""
        return grow(parts, self.layout)


class ChangeForm(EntryForm):
    """How the change of one entry travels."""

    length: int
    kept: int
    """Number of values that a client keeps for its next round, beside what was lost."""

    @abstractmethod
    def shrink(self, x: Tensor, kept: Tensor, side_by_side: SideBySide | None = None) -> tuple[Parts, Tensor]:
        """Return what is sent of ``x`` ``(K, n)``, and the next values of ``kept`` ``(K, kept)``.

        ``side_by_side`` may compute independent parts at the same time.
        """


@dataclass(frozen=True)
class Blocks(ChangeForm):
    """Every parameter in a block of its own."""

    sizes: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:  # type: ignore[override]
        """Number of values."""
        return sum(self.sizes)

    @property
    def kept(self) -> int:  # type: ignore[override]
        """What the blocks keep."""
        return sum(block.kept for block in self.blocks)

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """The sections of all blocks."""
        return tuple(section for block in self.blocks for section in block.sections)

    def shrink(self, x: Tensor, kept: Tensor, side_by_side: SideBySide | None = None) -> tuple[Parts, Tensor]:
        """Return the parts of all blocks."""
        count = len(x)
        if x.device.type == "cpu" and 0 < count < LEAST_CLIENTS:
            x, kept = (rows[torch.arange(LEAST_CLIENTS) % count] for rows in (x, kept))
        parts: Parts = []
        next_kept: list[Tensor] = []
        starts = kept.split([block.kept for block in self.blocks], -1)
        with (side_by_side or _in_turn)(x.device) as lane:
            for block, values, start in zip(self.blocks, x.split(self.sizes, -1), starts, strict=True):
                with lane():
                    found, new = block.shrink(values, start)
                parts += found
                next_kept.append(new)
        return [part[:count] for part in parts], torch.cat(next_kept, -1)[:count]

    def grow(self, parts: Parts) -> Tensor:
        """Return the values of all blocks."""
        rest, values = list(parts), []
        for block in self.blocks:
            own, rest = rest[: len(block.sections)], rest[len(block.sections) :]
            values.append(block.grow(own))
        return torch.cat(values, -1)


@dataclass(frozen=True)
class TopK(ChangeForm):
    """The values of largest magnitude, and where they are."""

    length: int
    count: int
    codec: Codec
    kept = 0

    @cached_property
    def _values(self) -> Dense:
        rows = math.ceil(self.count / VALUES_PER_SCALE)
        return Dense(rows, math.ceil(self.count / rows), self.codec)

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """Positions, values, and a scale per 256 values if they are quantized."""
        values, *scale = self._values.sections
        return (Section("positions", self.count, self.length), Section(values.format, self.count), *scale)

    def shrink(self, x: Tensor, kept: Tensor, side_by_side: SideBySide | None = None) -> tuple[Parts, Tensor]:
        """Choose the largest values, in the order of their positions."""
        del side_by_side
        where = x.abs().topk(self.count, sorted=False).indices.sort(-1).values
        values, *scale = self._values.shrink(self._padded(x.gather(-1, where)), kept)[0]
        return [where, values[..., : self.count], *scale], kept

    def grow(self, parts: Parts) -> Tensor:
        """Return the values at their positions, and 0 elsewhere."""
        where, values, *scale = parts
        grown = self._values.grow([self._padded(values), *scale])[..., : self.count]
        return grown.new_zeros(len(grown), self.length).scatter_(-1, where, grown)

    def _padded(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, self._values.rows * self._values.columns - self.count))


@dataclass(frozen=True)
class Form:
    """The form of a message: how each of its entries travels."""

    name: str  # dense, change, factors or top-k
    codec: Codec
    entries: Mapping[str, EntryForm]
    layouts: Mapping[str, Layout | None]

    @classmethod
    def whole(cls, entries: Entries, codec: Codec = "float32") -> "Form":
        """Return the form of messages whose entries travel as they are."""
        if codec not in DTYPES:
            raise unknown("codec", codec, DTYPES)
        lengths, layouts = lengths_of(entries), layouts_of(entries)
        return cls("dense", codec, {n: Whole(lengths[n], layouts[n], codec) for n in lengths}, layouts)

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of the payload, in order."""
        return tuple(section for entry in self.entries.values() for section in entry.sections)

    @cached_property
    def hash(self) -> bytes:
        """Eight bytes of a SHA-256 sum over everything that both sides must agree on."""
        told = [
            (name, layout and layout.hash, [(s.format, s.length, s.below) for s in self.entries[name].sections])
            for name, layout in self.layouts.items()
        ]
        return hashlib.sha256(json.dumps([self.name, self.codec, told]).encode()).digest()[:8]

    def split(self, parts: Sequence[Tensor]) -> dict[str, Parts]:
        """Return the parts of each entry."""
        rest, found = list(parts), {}
        for name, entry in self.entries.items():
            found[name], rest = rest[: len(entry.sections)], rest[len(entry.sections) :]
        return found

    def grow(self, parts: Parts) -> State:
        """Return the values of every entry from the parts of all; with ``changes`` these are changes."""
        return {name: self.entries[name].grow(own) for name, own in self.split(parts).items()}

    @cached_property
    def bytes(self) -> int:
        """The length of a message, header included."""
        return HEADER_BYTES + total_bytes(self.sections)


def dense_bytes(layout: Layout) -> int:
    """Return the bytes of a message with the dense model."""
    return Form.whole({"w": layout}).bytes


def start_vectors(form: ChangeForm, entry: str, seed: int, like: Tensor) -> Tensor:
    """Return the values ``(kept,)`` that a client keeps before its first round, the same for all clients."""
    generator = torch.Generator().manual_seed(int(key(seed, Stream.INIT, 1, zlib.crc32(entry.encode()))))
    return torch.randn(form.kept, generator=generator).to(like)


def all_values(length: int, layout: Layout | None, codec: Codec) -> Blocks:
    """Return the form of a change of which all values travel."""
    shapes = _shapes(length, layout)
    return Blocks(tuple(map(math.prod, shapes)), tuple(dense_block(shape, codec) for shape in shapes))


def rank_one_terms(
    layout: Layout, terms: Mapping[str, int], sweeps: int, codec: Codec, *, kernels: bool = False
) -> Blocks:
    """Return the form of a change of which rank-one terms travel, a number for each parameter.

    Kernels are matrices (outputs x rest) unless ``kernels`` keeps them as tensors.
    """
    blocks = [
        terms_block(as_matrix(shape, kernels), terms[name], sweeps, codec)
        if name in terms
        else dense_block(shape, codec)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    ]
    return Blocks(tuple(layout.sizes), tuple(blocks))


def as_matrix(shape: tuple[int, ...], kernels: bool = False) -> tuple[int, ...]:
    """Return the shape that terms are taken of: a matrix, or with ``kernels`` a tensor of up to five modes."""
    if kernels:
        shape = tuple(size for size in shape if size > 1)
        if len(shape) <= MOST_MODES:
            return shape or (1,)
    return shape if len(shape) <= 2 else (shape[0], math.prod(shape[1:]))


def _shapes(length: int, layout: Layout | None) -> tuple[tuple[int, ...], ...]:
    if layout is not None:
        return layout.shapes
    whole, rest = divmod(length, VALUES_PER_SCALE)
    return ((whole, VALUES_PER_SCALE),) * (whole > 0) + ((rest,),) * (rest > 0)


def too_large(change: Tensor, unchanged: Tensor) -> Tensor:
    """Return whether a change ``(..., n)`` is not finite or far larger than any training makes it."""
    size, least = (torch.linalg.vector_norm(x, dim=-1) for x in (change, unchanged))
    near: Tensor = size <= LARGEST_CHANGE * least.clamp_min(1)
    return ~near


def _in_turn(device: torch.device) -> AbstractContextManager[Lane]:
    del device
    return nullcontext(nullcontext)
