"""Laws of Tucker and block-term layers, and of the three kinds of ``tensorize``."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import convolutions, dense_twin, gradients_agree, randn, relative, small_net, train
from tdpfed.cp.layers import CPConv2d, CPLinear
from tdpfed.cp.tensorize import densify, tensorize
from tdpfed.cp.tucker import compose_blocks, decompose_blocks, ranks_for, values
from tdpfed.cp.tucker_layers import TuckerConv1d, TuckerConv2d, TuckerConv3d, TuckerLinear
from tdpfed.errors import TDPFedError

CONVS: dict[int, Any] = {1: TuckerConv1d, 2: TuckerConv2d, 3: TuckerConv3d}


def composed(layer: Any) -> Tensor:
    """The weight as one einsum over the core and all factors."""
    modes, inner = "abcde"[: layer.order], "vwxyz"[: layer.order]
    terms = ",".join(f"{m}n{r}" for m, r in zip(modes, inner, strict=True))
    return torch.einsum(f"n{inner},{terms}->{modes}", layer.core, *layer.factors)


def make(axes: int, arguments: dict[str, Any], blocks: int, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    rest = {key: value for key, value in arguments.items() if key != "rank"}
    layer = CONVS[axes](**rest, ranks=arguments["rank"], blocks=blocks, dtype=dtype)
    return layer, dense_twin(layer, arguments, composed(layer))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=100)
@given(convolutions(), st.integers(1, 3))
def test_convolution_in_factor_space_equals_the_composed_layer(
    case: tuple[int, dict[str, Any], list[int]], blocks: int
) -> None:
    axes, arguments, shape = case
    layer, dense = make(axes, arguments, blocks, torch.float32)
    x = randn(*shape)
    assert relative(layer(x), dense(x)) < 1e-5
    assert relative(densify(layer)(x), dense(x)) < 1e-5


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60)
@given(convolutions(), st.integers(1, 3))
def test_gradients_in_factor_space_equal_those_through_composition(
    case: tuple[int, dict[str, Any], list[int]], blocks: int
) -> None:
    axes, arguments, shape = case
    layer, dense = make(axes, arguments, blocks, torch.float64)
    assert gradients_agree(layer, dense, randn(*shape, dtype=torch.float64).requires_grad_())


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3), st.booleans(),
    st.sampled_from([[], [3], [2, 4]]),
)  # fmt: skip
def test_linear_in_factor_space_equals_the_composed_layer(
    inputs: int, outputs: int, rank: int, blocks: int, bias: bool, batch: list[int]
) -> None:
    torch.manual_seed(0)
    layer = TuckerLinear(inputs, outputs, rank, bias, blocks=blocks, dtype=torch.float64)
    x = randn(*batch, inputs, dtype=torch.float64).requires_grad_()
    assert relative(layer(x), functional.linear(x, composed(layer), layer.bias)) < 1e-12
    assert relative(layer.weight, composed(layer)) < 1e-12
    assert gradients_agree(layer, densify(layer), x)


def test_an_ungrouped_convolution_never_composes_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, grouped = TuckerConv2d(4, 6, 3, 2), TuckerConv2d(4, 6, 3, 2, groups=2)
    monkeypatch.setattr("tdpfed.cp.tucker_layers.compose_blocks", lambda *_: pytest.fail("composed"))
    assert layer(randn(1, 4, 5, 5)).shape == (1, 6, 3, 3)
    with pytest.raises(pytest.fail.Exception):
        grouped(randn(1, 4, 5, 5))


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (TuckerLinear(200, 300, 40), 200),
        (TuckerConv1d(40, 50, 5, (20, 20, 3)), 200),
        (TuckerConv2d(30, 40, 3, (12, 12, 3, 3), blocks=3), 270),
        (TuckerConv3d(12, 14, 3, 6), 324),
    ],
    ids=lambda value: type(value).__name__,
)
def test_default_weights_vary_as_pytorchs_do(layer: Any, fan_in: int) -> None:
    torch.manual_seed(0)
    draws = []
    for _ in range(40):
        layer.reset_parameters()
        draws.append(layer.weight.detach().square().mean().item())
    assert sum(draws) / len(draws) == pytest.approx(1 / (3 * fan_in), rel=0.15)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor, tuple[int, ...], int]:
    """A tensor of order 2 to 5, ranks and a number of blocks."""
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    ranks = tuple(draw(st.integers(1, size)) for size in shape)
    return randn(*shape, seed=draw(st.integers(0, 99)), dtype=torch.float64), ranks, draw(st.integers(1, 3))


@given(tensors())
def test_fits_are_at_least_as_good_as_truncated_unfoldings_and_more_blocks_never_worse(
    case: tuple[Tensor, tuple[int, ...], int],
) -> None:
    theta, ranks, blocks = case
    core, factors = decompose_blocks(theta, ranks, blocks)
    assert core.shape == (blocks, *ranks)
    error = (theta - compose_blocks(core, factors)).norm()
    bases = [
        torch.linalg.svd(theta.movedim(n, 0).flatten(1), full_matrices=True)[0][:, :rank]
        for n, rank in enumerate(ranks)
    ]
    truncated = theta  # the truncated higher-order SVD, from the definition
    for n, basis in enumerate(bases):
        truncated = torch.tensordot(basis @ basis.mT, truncated, ([1], [n])).movedim(0, n)
    assert float(error) <= float((theta - truncated).norm()) * (1 + 1e-6) + 1e-7
    for n in range(theta.ndim):
        basis = factors[n][:, 0]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(ranks[n], dtype=basis.dtype), atol=1e-8, rtol=0)


def test_a_matrix_gets_its_truncated_svd_in_one_block_or_in_several() -> None:
    theta = randn(9, 7, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(theta)
    best = (u[:, :4] * s[:4]) @ vh[:4]
    for ranks, blocks in (((4, 4), 1), ((2, 2), 2), ((1, 1), 4)):
        torch.testing.assert_close(compose_blocks(*decompose_blocks(theta, ranks, blocks)), best)


def test_more_blocks_fit_a_sum_of_blocks_better() -> None:
    torch.manual_seed(1)
    layer = TuckerConv2d(8, 8, 3, (2, 2, 2, 2), blocks=3, dtype=torch.float64)
    theta = composed(layer).detach()
    errors = [
        relative(compose_blocks(*decompose_blocks(theta, (2, 2, 2, 2), blocks, sweeps=100)), theta)
        for blocks in (1, 2, 3)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.15


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=5), st.floats(1, 50), st.integers(1, 4),
)  # fmt: skip
def test_ranks_for_a_rate_are_the_largest_that_fit(shape: list[int], compression: float, blocks: int) -> None:
    ranks = ranks_for(shape, compression, blocks)
    budget = torch.tensor(shape).prod().item() / compression
    assert all(1 <= rank <= size for rank, size in zip(ranks, shape, strict=True))
    assert values(shape, ranks, blocks) <= budget or ranks == (1,) * len(shape)
    rank = max(ranks)
    assert ranks == tuple(min(rank, size) for size in shape)
    larger = tuple(min(rank + 1, size) for size in shape)
    used = any(rank < min(size, math.prod(shape) // size) for size in shape)
    assert not used or values(shape, larger, blocks) > budget


KINDS: list[tuple[dict[str, Any], type, type]] = [
    ({"kind": "cp"}, CPConv2d, CPLinear),
    ({"kind": "tucker"}, TuckerConv2d, TuckerLinear),
    ({"kind": "block-term", "blocks": 2}, TuckerConv2d, TuckerLinear),
]


@pytest.mark.parametrize(("how", "conv", "linear"), KINDS, ids=[how["kind"] for how, _, _ in KINDS])
def test_tensorize_at_full_rank_keeps_a_trained_networks_outputs(how: Any, conv: type, linear: type) -> None:
    torch.manual_seed(0)
    model = small_net()
    x, y = randn(16, 3, 16, 16), torch.arange(16) % 4
    train(model, x, y)
    full = {
        name: value.numel() // max(value.shape) if how["kind"] == "cp" else 1000
        for name, value in model.named_parameters() if value.ndim > 1
    }  # fmt: skip
    tensorized = tensorize(model, ranks=full, **how)
    assert [type(tensorized[n]) for n in (0, 3, 6, 8)] == [conv, conv, linear, linear]
    assert relative(tensorized(x), model(x)) < 1e-5
    assert relative(densify(tensorized)(x), model(x)) < 1e-5
    small = tensorize(model, 1.5, **how)
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    before = functional.cross_entropy(small(x), y).item()
    train(small, x, y)
    assert functional.cross_entropy(small(x), y).item() < before


@pytest.mark.parametrize("how", [how for how, _, _ in KINDS], ids=[how["kind"] for how, _, _ in KINDS])
def test_batch_norm_keeps_its_buffers(how: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(),
        nn.Linear(32, 20), nn.BatchNorm1d(20), nn.Linear(20, 4),
    )  # fmt: skip
    train(model, randn(16, 3, 6, 6), torch.arange(16) % 4)
    tensorized = tensorize(model.eval(), 1.5, **how)
    assert any(type(a) is not type(b) for a, b in zip(model, tensorized, strict=True))
    for name, value in model.named_buffers():
        assert torch.equal(dict(tensorized.named_buffers())[name], value)
        assert dict(tensorized.named_buffers())[name].data_ptr() != value.data_ptr()
    assert [layer.training for layer in tensorized] == [False] * 9
    assert densify(tensorized).state_dict().keys() == model.state_dict().keys()


def test_state_dicts_travel_into_an_unfitted_twin_and_the_model_stays_as_it_was() -> None:
    torch.manual_seed(0)
    model, x = small_net(), randn(2, 3, 16, 16)
    before, state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    one = tensorize(model, 1.5, kind="block-term")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    other = tensorize(model, 1.5, kind="block-term", fit=False)
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))


def test_half_precision_and_reprs() -> None:
    layer = tensorize(nn.Linear(12, 10, dtype=torch.bfloat16), kind="tucker")
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert repr(TuckerLinear(3, 4, 2)) == "TuckerLinear(3, 4, ranks=(2, 2), bias=True)"
    assert repr(TuckerConv2d(3, 4, 3, 2, blocks=2)).startswith(
        "TuckerConv2d(3, 4, kernel_size=(3, 3), ranks=(2, 2, 2, 2), blocks=2, stride=(1, 1)"
    )


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda: TuckerLinear(3, 4, (5, 2)), r"ranks: \(5, 2\) given, must be from 1 to the sizes \(4, 3\)"),
        (lambda: TuckerLinear(3, 4, 0), r"ranks: \(0, 0\) given"),
        (lambda: TuckerConv2d(3, 4, 3, (2, 2)), "must have one rank for each dimension"),
        (lambda: TuckerLinear(3, 4, 2, blocks=0), "blocks: 0 given, must be at least 1"),
        (lambda: tensorize(small_net(), kind="svd"), "kind: 'svd' given, must be one of cp, tucker, block-term"),  # type: ignore[arg-type]
        (lambda: tensorize(small_net(), kind="block-term", blocks=0), "blocks: 0 given, must be at least 1"),
        (lambda: tensorize(small_net(), 0, kind="tucker"), "compression: 0 given"),
        (lambda: tensorize(small_net(), kind="tucker", include="conv*"), "matches no parameter"),
        (lambda: tensorize(small_net(), kind="tucker", ranks={"*.bias": 2}), "fewer than two dimensions"),
        (lambda: tensorize(small_net(), kind="tucker", ranks={"0.weight": (9, 3, 3, 3)}), "from 1 to the sizes"),
        (lambda: tensorize(small_net(), ranks={"0.weight": (2, 2)}), "must be one whole number for CP factors"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(make_one: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        make_one()


@pytest.mark.parametrize("how", [how for how, _, _ in KINDS], ids=[how["kind"] for how, _, _ in KINDS])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_tensorize_at_full_rank_keeps_convolutions_of_every_order(how: Any, axes: int, stride: int) -> None:
    torch.manual_seed(0)
    dense = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
    model: Any = nn.Sequential(
        dense(2, 6, 3, stride=stride, padding=1, dtype=torch.float64), nn.Tanh(),
        dense(6, 4, 2, dilation=2, dtype=torch.float64),
    )  # fmt: skip
    x = randn(3, 2, *[8] * axes, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    full = {
        name: value.numel() // max(value.shape) if how["kind"] == "cp" else 1000
        for name, value in model.named_parameters() if value.ndim > 1
    }  # fmt: skip
    tensorized = tensorize(model, ranks=full, **how)
    assert not isinstance(tensorized[0], dense)
    assert not isinstance(tensorized[2], dense)
    assert relative(tensorized(x), model(x)) < 1e-5
