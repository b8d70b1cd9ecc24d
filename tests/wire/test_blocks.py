"""Rank-one terms: what they compose is what an einsum says, no term makes a residual larger, enough are exact."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.wire.blocks import Block, Dense, MatrixTerms, TensorTerms, dense_block, most_terms, terms_block
from tdpfed.wire.forms import ChangeForm, TopK, all_values, as_matrix, rank_one_terms
from tdpfed.wire.packing import LEVELS, total_bytes

CODECS = ("float32", "float16", "bfloat16", "int8", "int4")
SHAPES = [
    (6, 9), (9, 6), (7, 7), (1, 8), (30, 2), (3, 4, 5), (5, 4, 3), (6, 2, 2), (8, 4, 3, 3), (2, 3, 4, 5),
    (4, 3, 2, 3, 2), (2, 2, 2, 2, 9),
]  # fmt: skip
LETTERS = "abcde"


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def terms_of(shape: tuple[int, ...], terms: int, codec: str, sweeps: int = 2) -> MatrixTerms | TensorTerms:
    return MatrixTerms(*shape, terms, sweeps, codec) if len(shape) == 2 else TensorTerms(shape, terms, sweeps, codec)


def shrunk(block: Block | ChangeForm, x: Tensor, kept: Tensor | None = None) -> Tensor:
    start = normal(99, 1, block.kept).expand(len(x), -1) if kept is None else kept
    return block.grow(block.shrink(x, start)[0])


def composed(shape: tuple[int, ...], terms: int, codec: str, parts: list[Tensor]) -> Tensor:
    """Return what the numbers of a message compose, ``(K, n)``: the modes from short to long, then the scales."""
    order = sorted(range(len(shape)), key=lambda mode: shape[mode])
    vectors = {mode: parts[at].double().unflatten(-1, (terms, shape[mode])) for at, mode in enumerate(order)}
    scale = parts[-1].double() if codec in LEVELS else torch.ones(len(parts[0]), terms, dtype=torch.float64)
    names = LETTERS[: len(shape)]
    equation = ",".join(["kr", *(f"kr{letter}" for letter in names)]) + f"->k{names}"
    return torch.einsum(equation, scale, *(vectors[mode] for mode in range(len(shape)))).flatten(1)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_message_composes_what_an_einsum_says(shape: tuple[int, ...], terms: int, codec: str) -> None:
    block = terms_of(shape, terms, codec)
    x = normal(1, 4, math.prod(shape))
    parts, kept = block.shrink(x, normal(2, 4, block.kept))
    assert [part.shape for part in parts] == [(4, section.length) for section in block.sections]
    assert kept.shape == (4, block.kept)
    expected = composed(shape, terms, codec, parts)
    torch.testing.assert_close(block.grow(parts).double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("kernels", [False, True])
def test_a_kernel_is_a_matrix_of_outputs_or_a_tensor(kernels: bool) -> None:
    """Held against the einsum of the parts, for the whole form of a model."""
    layout = Layout.of({"conv.weight": (8, 4, 3, 3), "conv.bias": (8,), "wide": (6, 20), "flat": (9, 1, 5, 1)})
    form = rank_one_terms(layout, dict.fromkeys(("conv.weight", "wide", "flat"), 2), 2, "int4", kernels=kernels)
    shapes = [(8, 4, 3, 3) if kernels else (8, 36), None, (6, 20), (9, 5)]
    x = normal(0, 3, layout.size)
    parts = form.shrink(x, normal(1, 3, form.kept))[0]
    grown, at = form.grow(parts).split(layout.sizes, -1), 0
    for shape, block, value in zip(shapes, form.blocks, grown, strict=True):
        own, at = parts[at : at + len(block.sections)], at + len(block.sections)
        if shape is None:
            assert torch.equal(value, block.grow(own))
        else:
            assert isinstance(block, TensorTerms if len(shape) > 2 else MatrixTerms)
            torch.testing.assert_close(value.double(), composed(shape, 2, "int4", own), rtol=1e-5, atol=1e-5)
    assert as_matrix((8, 4, 3, 3), kernels) == shapes[0]
    assert as_matrix((5, 1, 1, 1), kernels) == ((5,) if kernels else (5, 1))
    assert as_matrix((2, 3, 2, 3, 2, 3), True) == (2, 108)  # more modes than terms are taken of


KINDS = ("normal", "zero", "rank one", "one value", "few rows", "tiny", "denormal", "huge", "mixed")


def odd_values(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return values ``(2, n)`` of a kind that arithmetic can stumble over."""
    x = normal(seed, 2, math.prod(shape))
    rows = x.unflatten(-1, shape)
    match kind:
        case "zero":
            return torch.zeros_like(x)
        case "rank one":
            return (normal(seed, 2, shape[0], 1) * normal(seed + 1, 2, 1, math.prod(shape[1:]))).flatten(1)
        case "one value":
            return torch.where(torch.arange(x.shape[1]) == seed % x.shape[1], x, 0)
        case "few rows":
            return torch.where(torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) < 2, rows, 0).flatten(1)
        case "tiny":
            return x * 1e-30
        case "denormal":
            return x * 3e-40
        case "huge":
            return x * 1e20
        case "mixed":
            return x * torch.logspace(-12, 3, x.shape[1])[normal(seed, x.shape[1]).argsort()]
    return x


@settings(max_examples=150)
@given(
    st.sampled_from(SHAPES), st.sampled_from(KINDS), st.sampled_from(CODECS), st.integers(1, 6), st.integers(1, 3),
    st.integers(0, 2**31),
)  # fmt: skip
def test_terms_never_make_a_residual_larger(
    shape: tuple[int, ...], kind: str, codec: str, terms: int, sweeps: int, seed: int
) -> None:
    """Round after round, as errors are fed back: from drawn vectors, from the last ones, and from zeros."""
    block = terms_of(shape, min(terms, most_terms(shape)), codec, sweeps)
    left, kept = odd_values(kind, shape, seed), normal(seed, 2, block.kept)
    for number in range(3):
        parts, kept = block.shrink(left, kept if number < 2 else torch.zeros_like(kept))
        after = left - block.grow(parts)
        assert bool(after.isfinite().all())
        assert bool(kept.isfinite().all())
        before = left.double().norm(dim=-1)
        assert bool((after.double().norm(dim=-1) <= before * (1 + 2e-6) + 1e-42).all())
        if kind == "zero":
            assert not after.any()
        left = after


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (8, 4, 3, 3), (4, 3, 2, 3, 2)])
def test_terms_make_the_residual_of_random_values_smaller(shape: tuple[int, ...], codec: str) -> None:
    x = normal(0, 5, math.prod(shape))
    shares = [
        ((x - shrunk(terms_of(shape, terms, codec), x)).norm(dim=-1) / x.norm(dim=-1)).mean() for terms in (1, 2, 5)
    ]
    assert 1 > shares[0] > shares[1] > shares[2] > 0


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (30, 2), (40, 25)])
def test_as_many_terms_as_a_matrix_has_are_exact(shape: tuple[int, int]) -> None:
    """To the rounding of float32, although the basis is not perfectly orthonormal."""
    x = normal(3, 4, math.prod(shape))
    block = MatrixTerms(*shape, min(shape), 2, "float32")
    assert float((shrunk(block, x) - x).abs().max()) < 2e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_enough_terms_are_all_values(shape: tuple[int, ...]) -> None:
    """Where terms take no fewer bytes than the values themselves these are sent: in float32 they are exact."""
    x = normal(0, 3, math.prod(shape))
    for codec in CODECS:
        block = terms_block(shape, 10**6, 2, codec)
        assert isinstance(block, Dense) or total_bytes(block.sections) < total_bytes(dense_block(shape, codec).sections)
    assert torch.equal(shrunk(terms_block(shape, 10**6, 2, "float32"), x), x)


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_matrix_of_low_rank_is_found(shape: tuple[int, int], rank: int) -> None:
    x = (normal(0, 3, shape[0], rank) @ normal(1, 3, rank, shape[1])).flatten(1)
    gap = (shrunk(MatrixTerms(*shape, rank, 2, "float32"), x) - x).norm() / x.norm()
    assert float(gap) < 1e-5


@pytest.mark.parametrize("shape", [(3, 4, 5), (8, 4, 3, 3), (4, 3, 2, 3, 2)])
def test_a_tensor_of_rank_one_is_found(shape: tuple[int, ...]) -> None:
    names = LETTERS[: len(shape)]
    vectors = [normal(mode, 3, size) for mode, size in enumerate(shape)]
    x = torch.einsum(",".join(f"k{letter}" for letter in names) + f"->k{names}", *vectors).flatten(1)
    gap = (shrunk(TensorTerms(shape, 1, 2, "float32"), x) - x).norm() / x.norm()
    assert float(gap) < 1e-5


def test_with_many_sweeps_terms_are_the_best_of_their_number() -> None:
    """Held against the singular value decomposition, which no rank-R approximation is better than."""
    x = normal(0, 4, 12 * 30)
    sent = shrunk(MatrixTerms(12, 30, 3, 60, "float32"), x)
    values = torch.linalg.svdvals(x.unflatten(-1, (12, 30)))
    best = values[:, 3:].square().sum(-1).sqrt()
    left = (x - sent).norm(dim=-1)
    assert bool((left >= best * (1 - 1e-5)).all())
    assert bool((left <= best * 1.01).all())


def test_the_next_round_starts_with_the_last_vectors() -> None:
    """One sweep a round comes as near as many sweeps at once, if what is sent hardly changes."""
    x, block = normal(0, 4, 12 * 30), MatrixTerms(12, 30, 2, 1, "float32")
    kept = normal(1, 4, block.kept)
    first = (x - shrunk(block, x, kept)).norm()
    for _ in range(40):
        kept = block.shrink(x, kept)[1]
    last, best = (x - shrunk(block, x, kept)).norm(), (x - shrunk(MatrixTerms(12, 30, 2, 60, "float32"), x)).norm()
    assert float(last) < 1.01 * float(best) < float(first)


LAYOUT = Layout.of({"a": (64, 32, 3, 3), "b": (100, 50), "c": (7,), "d": (10, 100)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("kind", "terms"), [("matrix", 1), ("matrix", 4), ("tensor", 2), ("values", 0), ("top", 0)])
def test_many_clients_at_once_equal_one_at_a_time_to_the_bit(
    kind: str, terms: int, codec: str, dtype: torch.dtype
) -> None:
    """In any grouping: with matrices large enough for other kernels, and with rows anywhere in memory."""
    form: ChangeForm
    if kind == "values":
        form = all_values(LAYOUT.size, LAYOUT, codec)  # type: ignore[arg-type]
    elif kind == "top":
        form = TopK(LAYOUT.size, 700, codec)  # type: ignore[arg-type]
    else:
        form = rank_one_terms(LAYOUT, dict.fromkeys("abd", terms), 1, codec, kernels=kind == "tensor")  # type: ignore[arg-type]
    x, kept = normal(0, 7, LAYOUT.size).to(dtype), normal(1, 7, form.kept).to(dtype)
    parts, after = form.shrink(x, kept)
    grown = form.grow(parts)
    for rows in (slice(0, 1), slice(1, 3), slice(3, 6), slice(6, 7)):
        own, next_own = form.shrink(x[rows].clone(), kept[rows].clone())
        assert all(torch.equal(mine, part[rows]) for mine, part in zip(own, parts, strict=True))
        assert torch.equal(next_own, after[rows])
        assert torch.equal(form.grow(own), grown[rows])
    assert form.grow(parts).dtype == torch.float32


def test_values_beyond_16_bits_are_sent_as_the_largest() -> None:
    """What they lack stays with the sender; only what is not finite stays so."""
    x = torch.tensor([[1e6, -1e6, 1.0, math.inf, math.nan]])
    sent = shrunk(dense_block((5,), "float16"), x)
    assert sent[0, :3].tolist() == [65504, -65504, 1]
    assert float(sent[0, 3]) == math.inf
    assert math.isnan(sent[0, 4])
    matrix = 1e6 * normal(0, 2, 60)
    assert bool(shrunk(MatrixTerms(6, 10, 2, 2, "float16"), matrix).isfinite().all())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(6, 9), (3, 4, 5)])
def test_what_is_not_finite_does_not_become_finite(shape: tuple[int, ...], codec: str, bad: float) -> None:
    x = normal(0, 3, math.prod(shape))
    x[1, 7] = bad
    assert shrunk(terms_of(shape, 2, codec), x).isfinite().all(-1).tolist() == [True, False, True]
    assert shrunk(dense_block(shape, codec), x).isfinite().all(-1).tolist() == [True, False, True]
