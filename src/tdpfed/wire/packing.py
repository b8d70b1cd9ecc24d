"""Numbers as bytes: the sections of a payload, each a run of numbers of one format.

Sender and receiver derive the sections of a message from the configuration, so a payload holds values only: no names,
types or lengths. Bytes that no sender would write are refused: a number outside the format's range, a used padding bit,
positions that do not ascend.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Format = Literal["float32", "float16", "bfloat16", "int8", "int4", "positions"]

FLOATS: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
LEVELS: dict[str, int] = {"int8": 127, "int4": 7}
"""The largest number of each integer format; the smallest is its negative."""


class MalformedError(ValueError):
    """Bytes that no sender would write; the message says why."""


@dataclass(frozen=True)
class Section:
    """A run of ``length`` numbers; positions ascend below ``below``, scales are finite and not negative."""

    format: Format
    length: int
    below: int = 0
    scale: bool = False

    def pack(self, values: Tensor) -> bytes:
        """Return numbers ``(length,)``, which must be in the format's range, as bytes."""
        if self.format == "positions":
            return _pack_positions(values.numpy().astype(np.int64), self.below)
        if self.format in FLOATS:
            return values.to(FLOATS[self.format]).contiguous().view(torch.uint8).numpy().tobytes()
        whole = values.to(torch.int8).numpy()
        if self.format == "int8":
            return whole.tobytes()
        nibbles = np.zeros(2 * self.bytes, np.uint8)
        nibbles[: self.length] = whole.view(np.uint8) & 0xF
        return (nibbles[0::2] | nibbles[1::2] << 4).tobytes()

    def unpack(self, data: memoryview) -> Tensor:
        """Return the numbers in ``data``, which has the right length; float32 is a view: do not write to it."""
        if self.format == "positions":
            return torch.from_numpy(_unpack_positions(data, self.length, self.below))
        if self.format == "int4":
            return self._checked(_unpack_nibbles(data, self.length))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            if self.format == "int8":
                return self._checked(torch.frombuffer(data, dtype=torch.int8))
            values = torch.frombuffer(data, dtype=FLOATS[self.format])
        if self.scale and not bool((values.isfinite() & ~values.signbit()).all()):
            raise MalformedError("has a scale that is negative or not finite")
        return values

    def _checked(self, values: Tensor) -> Tensor:
        if bool((values < -LEVELS[self.format]).any()):
            raise MalformedError(f"holds {int(values.min())}, must be at least {-LEVELS[self.format]}")
        return values

    @property
    def bytes(self) -> int:
        """Number of bytes."""
        if self.format == "int4":
            return (self.length + 1) // 2
        if self.format == "int8":
            return self.length
        if self.format == "positions":
            return _position_bytes(self.length, self.below)
        return self.length * FLOATS[self.format].itemsize


def total_bytes(sections: Sequence[Section]) -> int:
    """Return the number of bytes of a payload."""
    return sum(section.bytes for section in sections)


def quantized(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return whole numbers up to ``levels`` and scales ``(..., 1)``, whose product is nearest to ``x`` ``(..., n)``.

    The numbers are float32, the scales are float32 numbers that bfloat16 holds. No value moves farther than to 0.
    """
    scale = (x.abs().amax(-1, keepdim=True) / levels).to(torch.bfloat16).float()
    scale = torch.where(scale >= torch.finfo(torch.float32).tiny, scale, 0)
    return (x / torch.where(scale > 0, scale, torch.inf)).round_().clamp_(-levels, levels), scale


def _unpack_nibbles(data: memoryview, length: int) -> Tensor:
    packed = np.frombuffer(data, np.uint8)
    both = np.stack((packed & 0xF, packed >> 4), -1).reshape(-1)
    if both[length:].any():
        raise MalformedError("has a used padding bit, must be 0")
    return torch.from_numpy(((both[:length] ^ 8).astype(np.int8) - 8).astype(np.int8))


def _low_bits(count: int, below: int) -> int:
    """Return how many low bits of a position are stored as they are: about those that are random."""
    return max(0, math.floor(math.log2(below / count)))


def _position_bytes(count: int, below: int) -> int:
    low = _low_bits(count, below)
    return (count * low + 7) // 8 + (count + (below >> low) + 1 + 7) // 8


def _pack_positions(positions: "np.typing.NDArray[np.int64]", below: int) -> bytes:
    """Return ascending positions in Elias-Fano code: low bits as they are, high bits as the gaps between ones."""
    count, low = len(positions), _low_bits(len(positions), below)
    lows = (positions[:, None] >> np.arange(low)) & 1
    highs = np.zeros(count + (below >> low) + 1, np.uint8)
    highs[(positions >> low) + np.arange(count)] = 1
    return np.packbits(lows.astype(np.uint8).reshape(-1)).tobytes() + np.packbits(highs).tobytes()


def _unpack_positions(data: memoryview, count: int, below: int) -> "np.typing.NDArray[np.int64]":
    low = _low_bits(count, below)
    cut = (count * low + 7) // 8
    lows = np.unpackbits(np.frombuffer(data[:cut], np.uint8))
    highs = np.unpackbits(np.frombuffer(data[cut:], np.uint8))
    ones = np.flatnonzero(highs)
    if len(ones) != count or lows[count * low :].any():
        raise MalformedError(f"has {len(ones)} positions, must be {count}, with unused bits 0")
    values: np.typing.NDArray[np.int64] = (
        lows[: count * low].reshape(count, low).astype(np.int64) << np.arange(low)
    ).sum(1)
    positions: np.typing.NDArray[np.int64] = ((ones - np.arange(count)) << low) + values
    if (np.diff(positions) <= 0).any() or positions[-1] >= below:
        raise MalformedError(f"has positions that do not ascend below {below}")
    return positions
