"""How the values of a state are transmitted: as float32, float16, bfloat16, or as int8 with a few float32 scales.

``lossy`` returns what a receiver sees, for one client or for K at once. ``encode`` and ``validate`` use the same two
steps, ``shrink`` and ``grow``, so a simulation and a deployment compute with the same bits.

int8 uses stochastic rounding, ``floor(x / scale + u)``: unbiased, and never off by more than the scale. Matrices have a
scale for each column, since columns of factors have their own gauge: ``(c a, b / c)`` is the same tensor. A
tensor of more dimensions has a scale per output channel, a vector has one, and plain values have one per 256.
"""

import math
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, key
from tdpfed.core.layout import Layout
from tdpfed.core.permutation import mix
from tdpfed.core.state import State

Codec = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Kind = Literal["down", "up"]
Layouts = Mapping[str, Layout | None]

DTYPES: dict[Codec, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
SCALE = "/scale"
"""Suffix of the entry with the scales of an int8 entry."""
VALUES_PER_SCALE = 256
MAX_INT8 = 127
SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def lossy(
    state: State, layouts: Layouts, codec: Codec, seed: int, round_: int, clients: Tensor, kind: Kind = "up"
) -> State:
    """Return a state ``(..., n)`` of ``clients`` ``(...)`` as its receivers see it, in its own dtype.

    A value beyond the codec's range becomes infinity or NaN, while ``encode`` raises an error for it. Simulated uploads
    are checked by :func:`tdpfed.wire.screen`.
    """
    seen: State = {}
    for name, value in state.items():
        layout = layouts[name]
        parts = shrink(value, layout, codec, draw_key(seed, round_, clients.to(value.device), kind, name))
        seen[name] = grow(parts, layout).to(value.dtype)
    return seen


def shrink(x: Tensor, layout: Layout | None, codec: Codec, bits: Tensor) -> list[Tensor]:
    """Return the transmitted tensors of ``x`` ``(..., n)``: its values and, for int8, the scales ``(..., G)``.

    The integers of int8 are still float32 here, since a simulation needs no conversion. ``bits`` ``(...)`` are the keys
    of the draws.
    """
    if codec != "int8":
        return [x.float().to(DTYPES[codec])]
    steps = x.to(torch.float32, copy=True)
    scale = steps.new_empty(*x.shape[:-1], scales(x.shape[-1], layout))
    for block, own, axis in _blocks(steps, scale, layout):
        peak = block.abs().amax(axis, keepdim=True)
        # At least the smallest normal number, which has full precision: no column is clipped or divided by zero.
        own.copy_(torch.where(peak > 0, (peak / MAX_INT8).clamp_min(SMALLEST_NORMAL), 0))
        block.div_(torch.where(own > 0, own, 1))
    return [steps.add_(dither(bits, x.shape[-1])).floor_().clamp_(-MAX_INT8, MAX_INT8), scale]


def grow(parts: list[Tensor], layout: Layout | None) -> Tensor:
    """Return the float32 values ``(..., n)`` of transmitted tensors; for float32 the tensor itself."""
    values, *scale = parts
    if not scale:
        return values.float()
    grown = values.to(torch.float32, copy=True)
    for block, own, _ in _blocks(grown, scale[0], layout):
        block.mul_(own)
    return grown


def dither(bits: Tensor, length: int) -> Tensor:
    """Return draws ``(..., length)`` in (0, 1), a pure function of key, length and coordinate.

    They are odd multiples of ``2^-17``: a sum with an integer up to 127 is exact in float32, so values on the grid do
    not change.
    """
    half = mix(torch.arange((length + 1) // 2, device=bits.device))
    pairs = mix(bits.unsqueeze(-1) ^ half)  # 32 bits each: two draws
    return torch.cat((pairs & 0xFFFF, pairs >> 16), -1)[..., :length].float().add_(0.5).mul_(2**-16)


def draw_key(seed: int, round_: int, clients: Tensor, kind: Kind, entry: str) -> Tensor:
    """Return the keys ``(...)`` of the draws for an entry of the messages of ``clients`` ``(...)``."""
    return key(seed, Stream.CODEC, round_, int(kind == "up"), zlib.crc32(entry.encode()), clients)


def tensors_of(lengths: Mapping[str, int], layouts: Layouts, codec: Codec) -> dict[str, tuple[torch.dtype, int]]:
    """Return name, dtype and length of the transmitted tensors of a state."""
    transmitted = {name: (DTYPES[codec], length) for name, length in lengths.items()}
    if codec == "int8":
        transmitted |= {
            name + SCALE: (torch.float32, scales(length, layouts[name])) for name, length in lengths.items()
        }
    return transmitted


def scales(length: int, layout: Layout | None) -> int:
    """Return how many scales int8 needs for a vector."""
    return sum(map(_scales_of, _shapes(length, layout)))


def _blocks(x: Tensor, scale: Tensor, layout: Layout | None) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield views of the parameters in ``x`` ``(..., n)`` as matrices, of their scales, and the axis of a scale."""
    start = first = 0
    for shape in _shapes(x.shape[-1], layout):
        size, count = math.prod(shape), _scales_of(shape)
        block, own = x[..., start : start + size], scale[..., first : first + count]
        if len(shape) == 2:
            yield block.unflatten(-1, shape), own.unsqueeze(-2), -2
        else:
            yield block.unflatten(-1, (count, size // count)), own.unsqueeze(-1), -1
        start, first = start + size, first + count


def _shapes(length: int, layout: Layout | None) -> tuple[tuple[int, ...], ...]:
    """Return the shapes in a vector; plain values are split into blocks, each with its own scale."""
    if layout is not None:
        return layout.shapes
    whole, rest = divmod(length, VALUES_PER_SCALE)
    return ((whole, 1, VALUES_PER_SCALE),) * (whole > 0) + ((rest,),) * (rest > 0)


def _scales_of(shape: tuple[int, ...]) -> int:
    return 1 if len(shape) < 2 else shape[1] if len(shape) == 2 else shape[0]


def place(entry: str, layout: Layout | None, index: int) -> str:
    """Return the name of the parameter with coordinate ``index`` of an entry: ``factors/fc1.A1``."""
    return entry if layout is None else f"{entry}/{layout.names[bisect_right(list(accumulate(layout.sizes)), index)]}"


def finite(x: Tensor) -> Tensor:
    """Return for each vector of ``x`` ``(..., n)`` whether all values are finite, without a mask in memory."""
    if x.device.type == "cpu" and bool(
        x.sum(-1).isfinite().all()
    ):  # a finite sum means finite values: usually one pass
        return torch.ones(x.shape[:-1], dtype=torch.bool)
    return x.amin(-1).isfinite() & x.amax(-1).isfinite()  # both propagate NaN; aminmax is many times slower


def first_not_finite(x: Tensor) -> int:
    """Return the first coordinate of ``x`` ``(n,)`` that is not finite; there must be one."""
    start, end = 0, len(x)
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if bool(finite(x[start:middle])) else (start, middle)
    return start
