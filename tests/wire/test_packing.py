"""Numbers as bytes: what is unpacked was packed, and there is one way only to write it."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.wire.packing import FLOATS, LEVELS, Format, MalformedError, Section, quantized, total_bytes


def round_trip(section: Section, values: Tensor) -> Tensor:
    data = section.pack(values)
    assert len(data) == section.bytes == total_bytes([section])
    return section.unpack(memoryview(data))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_every_number_of_16_bits_survives(kind: Format) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(FLOATS[kind])
    back = round_trip(Section(kind, 2**16), every)
    assert back.dtype == FLOATS[kind]
    assert torch.equal(back.view(torch.int16), every.view(torch.int16))  # NaN too, which is refused later


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_every_number_of_32_bits_survives(numbers: list[float]) -> None:
    values = torch.tensor(numbers)
    back = round_trip(Section("float32", len(numbers)), values)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("kind", ["int8", "int4"])
@given(st.data())
def test_whole_numbers_survive(kind: Format, data: st.DataObject) -> None:
    """Also an odd number of nibbles, and whatever type the sender computes with."""
    most = LEVELS[kind]
    numbers = data.draw(st.lists(st.integers(-most, most), min_size=1, max_size=40))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.int8]))
    back = round_trip(Section(kind, len(numbers)), torch.tensor(numbers).to(dtype))
    assert back.dtype == torch.int8
    assert back.tolist() == numbers


def test_nibbles_lie_two_in_a_byte_the_first_in_the_low_half() -> None:
    assert Section("int4", 5).pack(torch.tensor([1, -1, 7, -7, 3])) == bytes([0xF1, 0x97, 0x03])


@given(st.data())
def test_positions_survive(data: st.DataObject) -> None:
    below = data.draw(st.integers(1, 5000))
    count = data.draw(st.integers(1, below))
    where = np.random.default_rng(data.draw(st.integers(0, 2**32))).permutation(below)[:count]
    values = torch.from_numpy(np.sort(where))
    section = Section("positions", count, below)
    assert round_trip(section, values).tolist() == values.tolist()
    assert section.bytes <= count * (2 + math.log2(below / count)) / 8 + 3  # about two bits more than are needed


@pytest.mark.parametrize(("count", "below"), [(1, 1), (3, 3), (1, 7), (2, 6), (3, 8), (1, 100)])
def test_of_all_bytes_those_of_positions_alone_are_read(count: int, below: int) -> None:
    """Every payload of one or two bytes: as many are read as there are sets, each in one way."""
    section = Section("positions", count, below)
    assert section.bytes <= 2
    found = []
    for number in range(256**section.bytes):
        data = number.to_bytes(section.bytes, "little")
        try:
            values = section.unpack(memoryview(data))
        except MalformedError:
            continue
        assert section.pack(values) == data
        found.append(tuple(values.tolist()))
    assert sorted(found) == sorted(combinations(range(below), count))


@pytest.mark.parametrize(("kind", "length"), [("int4", 1), ("int4", 2), ("int8", 1)])
def test_of_all_bytes_those_of_whole_numbers_alone_are_read(kind: Format, length: int) -> None:
    section, read = Section(kind, length), 0
    for number in range(256**section.bytes):
        data = number.to_bytes(section.bytes, "little")
        try:
            values = section.unpack(memoryview(data))
        except MalformedError:
            continue
        assert section.pack(values) == data
        read += 1
    assert read == (2 * LEVELS[kind] + 1) ** length


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -0.0])
def test_a_scale_is_finite_and_not_negative(kind: Format, bad: float) -> None:
    section = Section(kind, 3, scale=True)
    assert section.unpack(memoryview(section.pack(torch.tensor([0.0, 1.0, 3e38])))).tolist()[:2] == [0, 1]
    with pytest.raises(MalformedError, match="scale"):
        section.unpack(memoryview(section.pack(torch.tensor([1.0, bad, 1.0]))))


# Rounding


EXTREMES = st.one_of(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-1, 1, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1e-38, 1.2e-38, -3e-38, 5e-37]),
)


@pytest.mark.parametrize("levels", LEVELS.values())
@given(st.lists(EXTREMES, min_size=1, max_size=30))
def test_numbers_and_scale_are_nearest_to_the_values_and_never_worse_than_0(levels: int, values: list[float]) -> None:
    x = torch.tensor(values)
    whole, scale = quantized(x, levels)
    assert torch.equal(whole, whole.round())
    assert float(whole.abs().max()) <= levels
    assert torch.equal(scale, scale.to(torch.bfloat16).float())
    step, peak = float(scale), float(x.abs().max())
    assert step == 0 or abs(step - peak / levels) <= 2**-8 * peak / levels
    assert step > 0 or peak / levels < 1.2e-38
    error = (whole.double() * step - x.double()).abs()
    assert bool((error <= x.double().abs() * (1 + 1e-6)).all())
    clipped = levels * 2**-8 * step * (whole.abs() == levels)
    assert bool((error <= (0.5001 * step if step else peak) + clipped).all())


def test_a_row_of_values_has_its_own_scale() -> None:
    rows = (
        torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 1e9, 0.0])[:, None, None]
    )
    whole, scale = quantized(rows, 7)
    assert scale.shape == (3, 5, 1)
    for i in range(3):
        for j in range(5):
            one, own = quantized(rows[i, j], 7)
            assert torch.equal(one, whole[i, j])
            assert torch.equal(own, scale[i, j])
    assert not scale[2].any()
