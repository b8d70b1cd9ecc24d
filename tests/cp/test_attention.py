"""Tensorized attention against the tensor of triples built element by element, and its causal mask."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import randn, relative
from tdpfed.cp.attention import TensorAttention
from tdpfed.cp.tensorize import tensorize
from tdpfed.errors import TDPFedError


def twin(layer: TensorAttention, x: Tensor) -> Tensor:
    """One sequence, from the definition: every triple in plain loops, the mask as an if."""
    count, rank = layer.length, layer.rank
    rows = []
    q, k, v = (part.unflatten(-1, (layer.blocks, rank)) for part in (x @ layer.qkv.weight.mT).chunk(3, -1))
    for i in range(count):
        row = layer.bias.clone()
        for j in range(count):
            for m in range(count):
                if layer.causal and (j > i or m > i):
                    continue
                triple = x.new_zeros(())
                for b in range(layer.blocks):
                    for h in range(rank):
                        triple = triple + layer.core[b, h] * q[i, b, h] * k[j, b, h] * v[m, b, h] / layer.blocks
                share = (i + 1) / count if layer.causal else 1.0
                row = row + triple / share * layer.out[j, m]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("causal", [False, True])
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_factor_space_equals_the_tensor_of_triples(
    causal: bool, width: int, length: int, rank: int, blocks: int
) -> None:
    torch.manual_seed(0)
    layer = TensorAttention(width, length, rank, blocks=blocks, causal=causal, dtype=torch.float64)
    x = randn(2, length, width, dtype=torch.float64).requires_grad_()
    expected = torch.stack([twin(layer, one) for one in x])
    y = layer(x)
    assert relative(y, expected) < 1e-10
    target = randn(*y.shape, seed=1, dtype=torch.float64)
    grads = torch.autograd.grad((y * target).sum(), [x, *layer.parameters()])
    twins = torch.autograd.grad((expected * target).sum(), [x, *layer.parameters()])
    assert all(relative(a, b) < 1e-9 or float(b.norm()) < 1e-12 for a, b in zip(grads, twins, strict=True))


def futures_seen(layer: nn.Module, x: Tensor) -> list[tuple[int, int]]:
    """The pairs (token, later token) where a change of the later one reaches the token's output."""
    jacobian = torch.autograd.functional.jacobian(layer, x)
    reached = jacobian.abs().sum((1, 3))
    return [(i, j) for i in range(len(reached)) for j in range(i + 1, len(reached)) if reached[i, j] > 0]


def test_no_token_sees_its_future_with_a_causal_mask_and_all_see_the_past() -> None:
    torch.manual_seed(0)
    x = randn(6, 5, dtype=torch.float64)
    masked = TensorAttention(5, 6, 4, causal=True, dtype=torch.float64)
    assert not futures_seen(masked, x)
    reached = torch.autograd.functional.jacobian(masked, x).abs().sum((1, 3))
    assert all(reached[i, j] > 0 for i in range(6) for j in range(i + 1))
    open_ = TensorAttention(5, 6, 4, dtype=torch.float64)
    assert len(futures_seen(open_, x)) == 15  # the test can fail: without the mask every future is seen


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_start_with_the_scale_of_the_tokens_at_every_position(causal: bool) -> None:
    torch.manual_seed(0)
    variance = torch.zeros(12)
    for _ in range(60):
        layer = TensorAttention(32, 12, 16, blocks=3, causal=causal)
        assert all(torch.isfinite(p).all() for p in layer.parameters())
        variance += layer(torch.randn(8, 12, 32)).detach().square().mean((0, 2)) / 60
    assert variance.min() > 0.5
    assert variance.max() < 2


def test_it_learns_what_only_the_past_can_tell() -> None:
    """Each token's label is the first token: attention must carry it forward."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 4, (64, 6))
    y = tokens[:, :1].expand(-1, 6)
    model = nn.Sequential(nn.Embedding(4, 16), TensorAttention(16, 6, 8, causal=True), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    assert (model(tokens).argmax(-1) == y).float().mean() > 0.95


def test_batches_vmap_and_other_layers() -> None:
    torch.manual_seed(0)
    layer = TensorAttention(4, 5, 3, causal=True, dtype=torch.float64)
    x = randn(2, 3, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), torch.stack([layer(one) for one in x]))
    stacked = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in layer.named_parameters()}
    together = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (x[0],)))(stacked)
    torch.testing.assert_close(together[0], layer(x[0]))
    assert isinstance(tensorize(nn.Sequential(layer), 1.1)[0], TensorAttention)
    assert repr(layer).startswith("TensorAttention(\n  4, length=5, rank=3, blocks=2, causal=True")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorAttention(4, 5, 0), "rank: 0 given, must be at least 1"),
        (lambda: TensorAttention(4, 0, 2), "length: 0 given"),
        (
            lambda: TensorAttention(4, 5, 2)(torch.zeros(1, 6, 4)),
            r"\(6, 4\) given as .*, must be \(5, 4\)",
        ),
    ],
)
def test_bad_input_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        make()
