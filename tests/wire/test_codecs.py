"""Codecs: rounding is unbiased and bounded, scales belong to columns, and every draw has its own place."""

import math

import pytest
import torch
from forge import CODECS, FACTORS
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.wire import Codec, Kind, lossy
from tdpfed.wire.codecs import dither, draw_key, finite, first_not_finite, place, scales, shrink

BY_HAND = [0, 1] * 3 + [2, 3] * 4 + [4] * 3 + [5, 5, 6, 6]
"""Scales of A1 (3, 2), A2 (4, 2), a bias (3,) and a kernel (2, 1, 2)."""

ONE = torch.zeros((), dtype=torch.int64)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)


def seen(x: Tensor, codec: Codec = "int8", layout: Layout | None = None, seed: int = 0) -> Tensor:
    clients = torch.arange(len(x)) if x.ndim > 1 else ONE
    return lossy({"x": x}, {"x": layout}, codec, seed, 1, clients)["x"]


def scale_of(length: int, layout: Layout | None) -> list[int]:
    """Which scale each coordinate has: the one that a value there alone makes."""
    return shrink(torch.eye(length), layout, "int8", torch.zeros(length, dtype=torch.int64))[1].argmax(-1).tolist()


def test_scales_belong_to_factor_columns_and_output_channels() -> None:
    assert scale_of(FACTORS.size, FACTORS) == BY_HAND
    assert scales(FACTORS.size, FACTORS) == 7


@pytest.mark.parametrize(("length", "count"), [(1, 1), (255, 1), (256, 1), (257, 2), (1000, 4)])
def test_plain_values_have_a_scale_per_block(length: int, count: int) -> None:
    assert scales(length, None) == count
    assert scale_of(length, None) == [i // 256 for i in range(length)]


def test_int8_equals_a_loop_over_columns() -> None:
    x = torch.randn(FACTORS.size, generator=torch.Generator().manual_seed(3))
    bits = draw_key(7, 2, torch.tensor(4), "up", "factors")
    values, scale = shrink(x, FACTORS, "int8", bits)
    u = dither(bits, FACTORS.size).tolist()
    for column in range(7):
        members = [i for i, group in enumerate(BY_HAND) if group == column]
        step = max(abs(float(x[i])) for i in members) / 127
        assert float(scale[column]) == pytest.approx(step, rel=1e-6)
        assert [int(values[i]) for i in members] == [math.floor(float(x[i] / scale[column]) + u[i]) for i in members]


def test_a_large_column_leaves_the_others_alone() -> None:
    x = torch.randn(FACTORS.size, generator=torch.Generator().manual_seed(0))
    loud = x.clone()
    loud[0:6:2] *= 1e6  # first column of A1
    quiet = [i for i in range(FACTORS.size) if i not in (0, 2, 4)]
    assert torch.equal(seen(x, layout=FACTORS)[quiet], seen(loud, layout=FACTORS)[quiet])


@given(st.lists(FLOATS, min_size=1, max_size=40), st.integers(0, 2**63 - 1))
def test_int8_error_is_at_most_the_scale(values: list[float], seed: int) -> None:
    x = torch.tensor(values)
    peak = float(x.abs().max())
    scale = max(peak / 127, torch.finfo(torch.float32).tiny) if peak else 0.0
    error = (seen(x, seed=seed).double() - x.double()).abs().max()
    assert float(error) <= scale * (1 + 1e-5)


@given(st.lists(st.integers(-127, 127), min_size=1, max_size=300), st.integers(-60, 60), st.integers(0, 99))
def test_what_lies_on_the_grid_stays(steps: list[int], exponent: int, seed: int) -> None:
    x = torch.tensor([127, *steps, -127]).float() * 2.0**exponent
    assert torch.equal(seen(x[:256], seed=seed), x[:256])


@pytest.mark.parametrize("extreme", [0.0, 1e-45, 2e-43, 1e-38, 3e38, -3e38])
def test_extreme_columns_are_neither_clipped_nor_divided_by_zero(extreme: float) -> None:
    x = torch.tensor([extreme, extreme / 3, 0.0])
    result = seen(x.expand(1000, 3)).double()
    scale = max(abs(extreme) / 127, 1.2e-38) if extreme else 0.0
    assert bool(result.isfinite().all())
    assert bool(((result - x.double()).abs() <= scale * (1 + 1e-5)).all())
    assert bool((result[:, 2] == 0).all())
    step = shrink(x, None, "int8", ONE)[1].double()
    assert float(x.double().abs().max()) <= float(127 * step) * (1 + 1e-6)


def test_int8_is_unbiased_over_clients_and_over_seeds() -> None:
    x = torch.tensor([1.0, 0.5001, -0.3217, 0.0049, -0.0001, 0.77])
    draws, scale = 40_000, 1 / 127
    over_clients = seen(x.expand(draws, 6)).double().mean(0)
    over_seeds = torch.stack([seen(x, seed=seed) for seed in range(2000)]).double().mean(0)
    for mean, count in ((over_clients, draws), (over_seeds, 2000)):
        assert bool(((mean - x).abs() < 5 * 0.5 * scale / count**0.5).all())
    assert not torch.equal(over_clients[1:], x[1:].double())  # it did round


def test_draws_are_uniform_and_independent() -> None:
    u = dither(draw_key(0, 1, torch.arange(200), "up", "x"), 1001).double()
    assert 0 < float(u.min()) < float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 5 / (12 * u.numel()) ** 0.5
    counts = torch.histc(u.float(), 64, 0, 1).double()
    even = u.numel() / 64
    assert abs(float(((counts - even) ** 2 / even).sum()) - 63) < 6 * (2 * 63) ** 0.5
    near = torch.corrcoef(u)  # between clients
    assert float((near - torch.eye(200)).abs().max()) < 0.2
    assert float(torch.corrcoef(torch.stack((u[:, 1:501].flatten(), u[:, 501:].flatten())))[0, 1].abs()) < 0.02


@pytest.mark.parametrize(
    "other",
    [(1, 1, 1, "up", "x"), (0, 2, 1, "up", "x"), (0, 1, 2, "up", "x"), (0, 1, 1, "down", "x"), (0, 1, 1, "up", "y")],
)
def test_seed_round_client_direction_and_entry_each_change_the_draws(other: tuple[int, int, int, Kind, str]) -> None:
    seed, round_, client, kind, entry = other
    here = dither(draw_key(0, 1, torch.tensor(1), "up", "x"), 500)
    there = dither(draw_key(seed, round_, torch.tensor(client), kind, entry), 500)
    assert float((here == there).float().mean()) < 0.02


@pytest.mark.parametrize("codec", CODECS)
def test_chunks_and_order_of_clients_do_not_matter(codec: Codec) -> None:
    x, layouts = torch.randn(7, FACTORS.size, generator=torch.Generator().manual_seed(1)), {"x": FACTORS}
    whole = lossy({"x": x}, layouts, codec, 5, 3, torch.arange(7))["x"]
    order = torch.tensor([4, 1, 6])
    assert torch.equal(whole[order], lossy({"x": x[order]}, layouts, codec, 5, 3, order)["x"])
    assert torch.equal(whole[4], lossy({"x": x[4]}, layouts, codec, 5, 3, torch.tensor(4))["x"])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_states_dtype_is_kept_and_the_state_not_changed(codec: Codec, dtype: torch.dtype) -> None:
    x = torch.randn(4, FACTORS.size, dtype=dtype, generator=torch.Generator().manual_seed(1))
    before = x.clone()
    result = seen(x, codec, FACTORS)
    assert result.dtype == dtype
    assert torch.equal(x, before)
    assert torch.equal(result, seen(x.float(), codec, FACTORS).to(dtype))


@pytest.mark.parametrize(("codec", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_half_precision_rounds_to_nearest(codec: Codec, bits: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) + 3
    assert float(((seen(x, codec) - x) / x).abs().max()) <= 2.0**-bits
    assert not torch.equal(seen(x, codec), x)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_does_not_become_finite(codec: Codec, bad: float) -> None:
    x = torch.randn(3, FACTORS.size, generator=torch.Generator().manual_seed(1))
    x[1, 9] = bad
    assert seen(x, codec, FACTORS).isfinite().all(-1).tolist() == [True, False, True]


def test_places_have_names() -> None:
    names = [place("factors", FACTORS, i) for i in (0, 5, 6, 13, 14, 16, 17, 20)]
    parts = ["fc1.A1", "fc1.A1", "fc1.A2", "fc1.A2", "fc1.bias", "fc1.bias", "conv", "conv"]
    assert names == [f"factors/{part}" for part in parts]
    assert place("values", None, 3) == "values"


@given(st.integers(1, 50), st.data())
def test_the_first_bad_value_is_found(length: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, length - 1)))
    x = torch.zeros(length)
    x[sorted(bad)] = torch.tensor([math.nan, math.inf, -math.inf] * 20)[: len(bad)]
    assert bool(finite(x)) == (not bad)
    if bad:
        assert first_not_finite(x) == min(bad)
