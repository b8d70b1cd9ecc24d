"""Random permutations that are computed, not stored: where an index goes follows from it, the size and a 32-bit key.

Exact for sizes below 2^53, and the same on a CPU and a GPU.
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Bits32 = NDArray[np.uint32]
Bits = TypeVar("Bits", int, Tensor)

MASK = 0xFFFFFFFF
FEISTEL_ROUNDS = 6
BLOCK = 1 << 19
"""On a CPU permutations of more elements are computed block by block, to limit memory."""

MAX_WALKS = 8
"""Most steps until a permutation is back in its range: enough up to size 81, above except with probability 1e-9."""


def mix(x: Bits) -> Bits:
    """Scramble 32-bit integers: every input bit reaches every output bit."""
    any_: Any = x
    any_ = ((any_ ^ (any_ >> 16)) * 0x7FEB352D) & MASK
    any_ = ((any_ ^ (any_ >> 15)) * 0x846CA68B) & MASK
    mixed: Bits = any_ ^ (any_ >> 16)
    return mixed


def permute(index: Tensor, size: Tensor, bits: Tensor) -> Tensor:
    """Return where the permutation of ``0..size-1`` named by ``bits`` sends ``index``; all three broadcast.

    A Feistel network on a grid of ``a x b >= size`` cells is a bijection. An index past the end is permuted again until
    it is inside (cycle walking), which preserves the bijection. Nothing of length ``size`` is stored or sorted.
    """
    if index.is_cuda:
        return _compiled_permute()(index, size, bits)
    shape = torch.broadcast_shapes(index.shape, size.shape, bits.shape)
    dimensions = max(1, len(shape))  # products of NumPy scalars would warn on overflow
    arrays = (np.array(tensor.numpy(), ndmin=dimensions, copy=False) for tensor in (index, size, bits))
    return torch.from_numpy(_permuted(*arrays)).reshape(shape)


def _permuted(index: Integers, size: Integers, bits: Integers) -> Integers:
    """Return :func:`permute` on a CPU, of arrays with equally many dimensions; block by block if they are large."""
    shape = np.broadcast_shapes(index.shape, size.shape, bits.shape)
    if math.prod(shape) <= BLOCK:
        return _permuted_block(index, size, bits)
    axis = int(np.argmax(shape))
    bounds = np.linspace(0, shape[axis], min(shape[axis], math.ceil(math.prod(shape) / BLOCK)) + 1).astype(int)

    def part(array: Integers, start: int, end: int) -> Integers:
        return array if array.shape[axis] == 1 else array[(slice(None),) * axis + (slice(start, end),)]

    blocks = [[part(array, *ends) for array in (index, size, bits)] for ends in pairwise(bounds)]
    return np.concatenate([_permuted_block(*block) for block in blocks], axis)


def _permuted_block(index: Integers, size: Integers, bits: Integers) -> Integers:
    places, sizes, keys = index.astype(np.float64), size.astype(np.float64), bits.astype(np.uint32)
    columns = np.ceil(np.sqrt(sizes))
    rows = np.ceil(sizes / columns)
    found = _feistel(places, rows, columns, keys)
    outside = np.nonzero(found >= sizes)
    if len(outside[0]):
        grid = [np.broadcast_to(array, found.shape)[outside] for array in (sizes, rows, columns, keys)]
        found[outside] = _walked(found[outside], *grid)
    return found.astype(np.int64)


def _walked(places: Floats, sizes: Floats, rows: Floats, columns: Floats, keys: Bits32) -> Floats:
    """Permute places past the end again, until they are inside."""
    out = np.arange(len(places))
    for _ in range(MAX_WALKS):
        places[out] = _feistel(places[out], rows[out], columns[out], keys[out])
        out = out[places[out] >= sizes[out]]
        if not len(out):
            break
    return places % sizes


def _feistel(places: Floats, rows: Floats, columns: Floats, keys: Bits32) -> Floats:
    """Permute the cells of grids. Places are whole float64 numbers: their division is exact, and far faster."""
    left = np.floor(places / columns)
    right = places - left * columns
    for turn in range(FEISTEL_ROUNDS):
        fixed, moved, length = (left, right, columns) if turn % 2 else (right, left, rows)
        salt = _mix_(keys ^ np.uint32(turn * 0x632BE5AB & MASK))
        moved = moved + _mix_(fixed.astype(np.uint32) * np.uint32(0x9E3779B1) + salt)
        whole = moved / length
        moved -= np.multiply(np.floor(whole, out=whole), length, out=whole)
        left, right = (fixed, moved) if turn % 2 else (moved, fixed)
    return left * columns + right


def _mix_(x: Bits32) -> Bits32:
    """Scramble like :func:`mix`, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x


@cache
def _compiled_permute() -> Callable[..., Tensor]:
    """Return :func:`permute` for a GPU, as one kernel instead of a thousand small ones."""
    code = f"""template <typename T>
    T permuted(T index, T size, T bits) {{
        auto mix = [](T x) {{
            x = ((x ^ (x >> 16)) * 0x7FEB352DLL) & {MASK}LL;
            x = ((x ^ (x >> 15)) * 0x846CA68BLL) & {MASK}LL;
            return x ^ (x >> 16);
        }};
        T columns = (T)ceil(sqrt((double)size)), rows = (size + columns - 1) / columns;
        for (int walk = 0; walk <= {MAX_WALKS} && (walk == 0 || index >= size); ++walk) {{
            T left = index / columns, right = index % columns;
            for (T turn = 0; turn < {FEISTEL_ROUNDS}; ++turn) {{
                T salt = mix(bits ^ ((turn * 0x632BE5ABLL) & {MASK}LL));
                if (turn % 2) right = (right + mix((left * 0x9E3779B1LL + salt) & {MASK}LL)) % columns;
                else left = (left + mix((right * 0x9E3779B1LL + salt) & {MASK}LL)) % rows;
            }}
            index = left * columns + right;
        }}
        return index % size;
    }}"""
    return torch.cuda.jiterator._create_jit_fn(code)
