"""How one parameter of a change travels: all its values, or a few rank-one terms.

A term is an outer product of vectors, one for each mode. Terms are found by power steps that start from the vectors of
the client's previous round. All vectors of a term but the last are quantized; the last is then fitted to the quantized
ones by least squares, with all earlier terms subtracted, and quantized too. Rounding to the nearest moves no value
farther than to 0, so no term makes the residual larger.

Values have a leading client axis: ``(K, n)``.
"""

import math
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from tdpfed.wire.packing import FLOATS, LEVELS, Section, quantized, total_bytes

Parts = list[Tensor]
"""The numbers of each section, ``(K, length)``."""

LEAST_CLIENTS = 3
"""Products of fewer clients use other kernels on a CPU, whose last bits differ: fewer are padded with copies."""

VALUES_TWICE = 1 << 16
"""Values of a single client's product that are computed at a time."""


DEPENDENT = 1e-6
"""Length of what is left of a row of length 1, beside the span of others, below which it counts as part of the span."""


class Block(ABC):
    """How one parameter travels."""

    sections: tuple[Section, ...]
    kept: int
    """Number of values that a client keeps for its next round."""

    @abstractmethod
    def shrink(self, x: Tensor, kept: Tensor) -> tuple[Parts, Tensor]:
        """Return what is sent of ``x`` ``(K, n)``, and the next values of ``kept`` ``(K, kept)``."""

    @abstractmethod
    def grow(self, parts: Parts) -> Tensor:
        """Return the values ``(K, n)`` that were sent."""


@dataclass(frozen=True)
class Dense(Block):
    """All values of a parameter, in rows with a scale each if they are quantized."""

    rows: int
    columns: int
    codec: str
    kept = 0

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """The values, and the scales of the rows."""
        values = Section(self.codec, self.rows * self.columns)  # type: ignore[arg-type]
        return (values,) if self.codec in FLOATS else (values, Section("bfloat16", self.rows, scale=True))

    def shrink(self, x: Tensor, kept: Tensor) -> tuple[Parts, Tensor]:
        """Round every value to the nearest that the codec holds."""
        if self.codec in FLOATS:
            return [_saturated(x, self.codec)], kept
        whole, scale = quantized(x.unflatten(-1, (self.rows, self.columns)), LEVELS[self.codec])
        return [whole.flatten(-2), scale.flatten(-2)], kept

    def grow(self, parts: Parts) -> Tensor:
        """Multiply numbers and scales."""
        if self.codec in FLOATS:
            return parts[0].float()
        whole: Tensor = parts[0].float().unflatten(-1, (self.rows, self.columns))
        return (whole * parts[1].float().unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class MatrixTerms(Block):
    """Rank-one terms of a matrix, all at once: power steps on an orthonormal basis of its shorter side.

    The basis has a vector for each term. Its columns are quantized, then the vectors of the longer side are fitted one
    after another.
    """

    rows: int
    columns: int
    terms: int
    sweeps: int
    codec: str

    @property
    def kept(self) -> int:  # type: ignore[override]
        """The basis."""
        return self.terms * min(self.rows, self.columns)

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """The basis, the fitted vectors, and their scales."""
        return _sections(self.codec, self.terms, (min(self.rows, self.columns), max(self.rows, self.columns)))

    def shrink(self, x: Tensor, kept: Tensor) -> tuple[Parts, Tensor]:
        """Improve the basis by power steps, quantize it, and fit the other vectors."""
        matrix = self._short_first(x.unflatten(-1, (self.rows, self.columns)))
        basis = kept.unflatten(-1, (self.terms, -1))  # (K, R, m)
        for _ in range(self.sweeps):
            basis = _orthonormal(_unit(basis @ matrix) @ matrix.mT, basis)
        first = _rounded_direction(basis, self.codec)
        overlap, product = first @ first.mT, first @ matrix
        squares = overlap.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        squares = torch.where(squares > 0, squares, torch.inf)
        sent = torch.empty_like(product)  # vectors as the receiver sees them
        parts: list[Parts] = []
        for r in range(self.terms):
            vector = product[:, r : r + 1]
            if r:
                vector = torch.baddbmm(vector, overlap[:, r : r + 1, :r], sent[:, :r], alpha=-1)
            part, sent[:, r] = _rounded((vector / squares[:, r : r + 1]).squeeze(1), self.codec)
            parts.append(part)
        last = [torch.cat(column, -1) for column in zip(*parts, strict=True)]
        return [first.flatten(-2), *last], basis.flatten(-2)

    def grow(self, parts: Parts) -> Tensor:
        """Return the sum of the terms."""
        first = parts[0].float().unflatten(-1, (self.terms, -1))
        last = _scaled(parts[1:], self.terms)
        product = _one_product(first.mT, last) if len(last) == 1 and last.device.type == "cpu" else first.mT @ last
        return self._short_first(product).flatten(-2)

    def _short_first(self, matrix: Tensor) -> Tensor:
        return matrix if self.rows <= self.columns else matrix.mT


@dataclass(frozen=True)
class TensorTerms(Block):
    """Rank-one terms of a tensor of order 3 or more, found one after another."""

    shape: tuple[int, ...]
    terms: int
    sweeps: int
    codec: str

    @cached_property
    def order(self) -> list[int]:
        """The modes, the longest last: it is the one that is fitted."""
        return sorted(range(len(self.shape)), key=lambda mode: self.shape[mode])

    @property
    def kept(self) -> int:  # type: ignore[override]
        """All vectors but the fitted ones."""
        return self.terms * (sum(self.shape) - max(self.shape))

    @cached_property
    def sections(self) -> tuple[Section, ...]:  # type: ignore[override]
        """The vectors of each mode in turn, and the scales of the fitted ones."""
        return _sections(self.codec, self.terms, tuple(self.shape[mode] for mode in self.order))

    def shrink(self, x: Tensor, kept: Tensor) -> tuple[Parts, Tensor]:
        """Find terms one after another, each by power steps on what the earlier ones left over."""
        left = x.unflatten(-1, self.shape).permute(0, *(mode + 1 for mode in self.order))
        sizes = [self.shape[mode] for mode in self.order]
        starts = kept.unflatten(-1, (self.terms, -1))
        found: list[Tensor] = []
        parts: list[Parts] = []
        for r in range(self.terms):
            vectors = [*starts[:, r].split(sizes[:-1], -1)]
            vectors.append(_unit(_contracted(left, [*vectors, None])))
            for _ in range(self.sweeps):
                for mode in range(len(sizes)):
                    others: list[Tensor | None] = [*vectors]
                    others[mode] = None
                    vectors[mode] = _unit(_contracted(left, others), vectors[mode])
            found.append(torch.cat(vectors[:-1], -1))
            first = [_rounded_direction(vector, self.codec) for vector in vectors[:-1]]
            square = reduce(torch.mul, [vector.square().sum(-1, keepdim=True) for vector in first])
            fitted = _contracted(left, [*first, None]) / torch.where(square > 0, square, torch.inf)
            part, seen = _rounded(fitted, self.codec)
            left = left - _outer([*first, seen])
            parts.append([*first, *part])
        sent = [torch.cat(column, -1) for column in zip(*parts, strict=True)]
        return sent, torch.stack(found, 1).flatten(-2)

    def grow(self, parts: Parts) -> Tensor:
        """Return the sum of the terms."""
        modes = len(self.shape)
        first = [part.float().unflatten(-1, (self.terms, -1)) for part in parts[: modes - 1]]
        last = _scaled(parts[modes - 1 :], self.terms)
        total = sum(_outer([*(vectors[:, r] for vectors in first), last[:, r]]) for r in range(self.terms))
        assert isinstance(total, Tensor)
        back = [self.order.index(mode) + 1 for mode in range(modes)]
        return total.permute(0, *back).flatten(1)


def most_terms(shape: tuple[int, ...]) -> int:
    """Return the number of terms beyond which a tensor of this shape needs no more."""
    return math.prod(shape) // max(shape)


def dense_block(shape: tuple[int, ...], codec: str) -> Dense:
    """Return the block of all values: a scale per output of a matrix or kernel, one for a vector, which has 8 bits."""
    if len(shape) < 2:
        return Dense(1, math.prod(shape), "int8" if codec == "int4" else codec)
    return Dense(shape[0], math.prod(shape[1:]), codec)


def terms_block(shape: tuple[int, ...], terms: int, sweeps: int, codec: str) -> Block:
    """Return the block of rank-one terms, or that of all values if it takes no more bytes."""
    dense = dense_block(shape, codec)
    if len(shape) < 2 or most_terms(shape) < 2:
        return dense
    count = min(terms, most_terms(shape))
    block: Block = (
        MatrixTerms(*shape, count, sweeps, codec) if len(shape) == 2 else TensorTerms(shape, count, sweeps, codec)
    )
    return block if total_bytes(block.sections) < total_bytes(dense.sections) else dense


def _sections(codec: str, terms: int, sizes: tuple[int, ...]) -> tuple[Section, ...]:
    vectors = tuple(Section(codec, terms * size) for size in sizes)  # type: ignore[arg-type]
    return vectors if codec in FLOATS else (*vectors, Section("bfloat16", terms, scale=True))


def _rounded(vector: Tensor, codec: str) -> tuple[Parts, Tensor]:
    """Return what is sent of vectors ``(K, n)``, and what the receiver sees."""
    if codec in FLOATS:
        sent = _saturated(vector, codec)
        return [sent], sent.to(vector.dtype)
    whole, scale = quantized(vector, LEVELS[codec])
    return [whole, scale], whole * scale


def _rounded_direction(vector: Tensor, codec: str) -> Tensor:
    """Return vectors ``(..., n)`` rounded; only their direction matters, so no scale is sent."""
    return vector.to(FLOATS[codec]).to(vector.dtype) if codec in FLOATS else quantized(vector, LEVELS[codec])[0]


def _saturated(x: Tensor, codec: str) -> Tensor:
    """Return values in a floating-point format; a finite one beyond its range becomes its largest."""
    most = torch.finfo(FLOATS[codec]).max
    if most < torch.finfo(x.dtype).max:
        x = torch.where(x.isfinite(), x.clamp(-most, most), x)
    return x.to(FLOATS[codec])


def _one_product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of a single client, ``(1, m, n)``, with the bits that it has as one of several.

    The rows are computed twice, some at a time, so that this takes little memory.
    """
    out = b.new_empty(1, a.shape[1], b.shape[2])
    rows, b = max(1, VALUES_TWICE // b.shape[2]), b.expand(2, -1, -1)
    for start in range(0, a.shape[1], rows):
        out[:, start : start + rows] = (a[:, start : start + rows].expand(2, -1, -1) @ b)[:1]
    return out


def _scaled(parts: Parts, terms: int) -> Tensor:
    """Return the fitted vectors ``(K, R, n)`` as the receiver sees them."""
    vectors: Tensor = parts[0].float().unflatten(-1, (terms, -1))
    return vectors * parts[1].float().unsqueeze(-1) if len(parts) > 1 else vectors


def _unit(x: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return vectors ``(..., n)`` at length 1; one of length 0 is replaced, or stays 0."""
    peak = x.abs().amax(-1, keepdim=True)  # first by the largest value: squares of tiny numbers would vanish
    scaled = x / torch.where(peak > 0, peak, 1)
    unit = scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp_min(0.5)
    return unit if otherwise is None else torch.where(peak > 0, unit, otherwise)


def _orthonormal(x: Tensor, otherwise: Tensor) -> Tensor:
    """Return an orthonormal basis of the rows of ``x`` ``(K, R, m)`` by Gram-Schmidt, in their order.

    A row that depends on earlier ones is replaced.
    """
    rows = _unit(x)
    basis = rows.clone()
    for r in range(x.shape[1]):
        row, known = rows[:, r : r + 1], basis[:, :r]
        if r:
            row = torch.baddbmm(row, row @ known.mT, known, alpha=-1)
        length = torch.linalg.vector_norm(row, dim=-1, keepdim=True)
        basis[:, r : r + 1] = torch.where(length > DEPENDENT, row / length, otherwise[:, r : r + 1])
    return basis


def _contracted(x: Tensor, vectors: list[Tensor | None]) -> Tensor:
    """Return ``x`` ``(K, I_1, ..., I_N)`` multiplied by vectors ``(K, I_n)`` along all modes but the one of None."""
    letters = string.ascii_lowercase[: len(vectors)]
    given = [(letter, vector) for letter, vector in zip(letters, vectors, strict=True) if vector is not None]
    kept = next(letter for letter, vector in zip(letters, vectors, strict=True) if vector is None)
    for letter, vector in given:  # one mode after another: the first product is the only large one
        rest = letters.replace(letter, "")
        x = torch.einsum(f"z{letters},z{letter}->z{rest}", x, vector)
        letters = rest
    assert letters == kept
    return x


def _outer(vectors: Parts) -> Tensor:
    """Return the outer product ``(K, I_1, ..., I_N)`` of vectors ``(K, I_n)``, multiplied in this order everywhere."""
    product = vectors[0]
    for vector in vectors[1:]:
        product = product.unsqueeze(-1) * vector.reshape(len(vector), *(1,) * (product.ndim - 1), -1)
    return product
