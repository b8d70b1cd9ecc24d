"""Laws of tensorized layers: factor space against the composed layer, and what tensorize must keep of a model."""

import copy
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from layer_cases import convolutions, dense_twin, gradients_agree, randn, relative, small_net, train
from tdpfed.core.layout import Layout
from tdpfed.cp.layers import CPConv1d, CPConv2d, CPConv3d, CPLinear
from tdpfed.cp.plan import FactorPlan
from tdpfed.cp.tensorize import densify, tensorize
from tdpfed.errors import TDPFedError
from tdpfed.models import build

CONVS = {1: CPConv1d, 2: CPConv2d, 3: CPConv3d}


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def make(axes: int, arguments: dict[str, Any], dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """A tensorized convolution, and PyTorch's own with the weight that an einsum composes."""
    torch.manual_seed(0)
    layer = CONVS[axes](**arguments, dtype=dtype)
    modes = "abcde"[: axes + 2]
    weight = torch.einsum(",".join(f"{m}z" for m in modes) + "->" + modes, *layer.factors)
    return layer, dense_twin(layer, arguments, weight)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=120)
@given(convolutions())
def test_convolution_in_factor_space_equals_the_composed_layer(case: tuple[int, dict[str, Any], list[int]]) -> None:
    axes, arguments, shape = case
    layer, dense = make(axes, arguments, torch.float32)
    x = randn(*shape)
    assert relative(layer(x), dense(x)) < 1e-5
    assert relative(densify(layer)(x), dense(x)) < 1e-5


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60)
@given(convolutions())
def test_gradients_in_factor_space_equal_those_through_composition(
    case: tuple[int, dict[str, Any], list[int]],
) -> None:
    axes, arguments, shape = case
    layer, dense = make(axes, arguments, torch.float64)
    assert gradients_agree(layer, dense, randn(*shape, dtype=torch.float64).requires_grad_())


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.sampled_from([[], [3], [2, 4]]))
def test_linear_in_factor_space_equals_the_composed_layer(
    inputs: int, outputs: int, rank: int, bias: bool, batch: list[int]
) -> None:
    torch.manual_seed(0)
    layer = CPLinear(inputs, outputs, rank, bias, dtype=torch.float64)
    x = randn(*batch, inputs, dtype=torch.float64).requires_grad_()
    a1, a2 = layer.factors
    y, twin = layer(x), functional.linear(x, a1 @ a2.mT, layer.bias)
    assert relative(y, twin) < 1e-12
    assert torch.equal(densify(layer).weight, layer.weight)
    target = randn(*y.shape, seed=1, dtype=torch.float64)
    grads = torch.autograd.grad((y * target).sum(), [x, *layer.parameters()])
    twins = torch.autograd.grad((twin * target).sum(), [x, *layer.parameters()])
    assert all(relative(a, b) < 1e-10 for a, b in zip(grads, twins, strict=True))


def test_an_ungrouped_convolution_never_composes_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, grouped = CPConv2d(4, 6, 3, 2), CPConv2d(4, 6, 3, 2, groups=2)
    monkeypatch.setattr("tdpfed.cp.compose", lambda factors: pytest.fail("composed"))
    assert layer(randn(1, 4, 5, 5)).shape == (1, 6, 3, 3)
    with pytest.raises(pytest.fail.Exception):
        grouped(randn(1, 4, 5, 5))


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (CPLinear(200, 300, 20), 200),
        (CPConv1d(40, 50, 5, 30), 200),
        (CPConv2d(30, 40, 3, 40), 270),
        (CPConv3d(12, 14, 3, 60), 324),
        (CPConv2d(32, 32, 3, 40, groups=4), 72),
    ],
    ids=lambda value: type(value).__name__,
)
def test_default_weights_vary_as_pytorchs_do(layer: CPLinear, fan_in: int) -> None:
    draws = []
    for _ in range(40):
        layer.reset_parameters()
        draws.append(layer.weight.detach().square().mean().item())
        assert layer.bias is not None
        assert layer.bias.abs().max().item() <= 1 / math.sqrt(fan_in)
    assert sum(draws) / len(draws) == pytest.approx(1 / (3 * fan_in), rel=0.15)


def test_reprs() -> None:
    assert repr(CPLinear(3, 4, 2)) == "CPLinear(3, 4, rank=2, bias=True)"
    text = repr(CPConv2d(3, 4, 3, 2, stride=2, padding="valid", bias=False))
    assert text.startswith("CPConv2d(3, 4, kernel_size=(3, 3), rank=2, stride=(2, 2), padding=valid")
    assert text.endswith("groups=1, bias=False)")


@pytest.mark.parametrize("rank", [0, -2])
def test_layers_refuse_ranks_below_one(rank: int) -> None:
    for make in (lambda: CPLinear(3, 4, rank), lambda: CPConv2d(3, 4, 3, rank)):
        with pytest.raises(TDPFedError, match=f"rank: {rank} given, .* at least 1"):
            make()


def test_tensorize_at_full_rank_keeps_a_trained_networks_outputs() -> None:
    model = small_net()
    x, y = randn(16, 3, 16, 16), torch.arange(16) % 4
    train(model, x, y)
    full = {n: p.numel() // max(p.shape) for n, p in model.named_parameters() if p.ndim > 1}
    tensorized = tensorize(model, ranks=full)
    assert [type(layer) for layer in tensorized if isinstance(layer, CPConv2d | CPLinear)] == [CPConv2d] * 2 + [
        CPLinear
    ] * 2
    assert relative(tensorized(x), model(x)) < 1e-5
    assert relative(densify(tensorized)(x), model(x)) < 1e-5


def test_tensorize_fits_better_than_chance_and_can_be_trained() -> None:
    model = small_net()
    x, y = randn(16, 3, 16, 16), torch.arange(16) % 4
    fitted, drawn = tensorize(model, 1.5), tensorize(model, 1.5, fit=False)

    def distance(other: Any) -> float:
        return sum(float((model[n].weight - other[n].weight).detach().norm()) for n in (3, 6))

    assert distance(fitted) < 0.8 * distance(drawn)
    before = functional.cross_entropy(fitted(x), y).item()
    train(fitted, x, y)
    assert functional.cross_entropy(fitted(x), y).item() < 0.5 * before


@pytest.mark.parametrize("name", ["dnn", "lenet", "vgg8", "resnet8", "transformer"])
def test_densify_gives_back_names_and_shapes(name: str) -> None:
    model = build(name, seed=0)
    tensorized = tensorize(model, 3.0, fit=False)
    assert sum(p.numel() for p in tensorized.parameters()) < 0.5 * sum(p.numel() for p in model.parameters())
    again = densify(tensorized)
    assert {n: v.shape for n, v in again.state_dict().items()} == {n: v.shape for n, v in model.state_dict().items()}
    assert type(again) is type(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_mode_and_trainability_are_kept(dtype: torch.dtype) -> None:
    model = small_net().to(dtype)
    model[3].requires_grad_(False)
    model[6].bias.requires_grad_(False)
    model[3].eval()
    for changed in (tensorize(model, 1.5), densify(tensorize(model, 1.5))):
        assert {p.dtype for p in changed.parameters()} == {dtype}
        assert [layer.training for layer in changed] == [layer.training for layer in model]
        assert not any(p.requires_grad for p in changed[3].parameters())
        assert all(p.requires_grad for p in changed[0].parameters())
        assert {n.split(".")[-1] for n, p in changed[6].named_parameters() if not p.requires_grad} == {"bias"}
        assert all(torch.equal(changed[n].bias, model[n].bias) for n in (0, 3, 6, 8))
    assert not tensorize(model.eval(), 1.5)[0].training


def test_the_device_is_kept() -> None:
    with torch.device("meta"):
        model = small_net()
    for changed in (tensorize(model, 1.5, fit=False), densify(tensorize(model, 1.5, fit=False))):
        assert {p.device.type for p in changed.parameters()} == {"meta"}


def test_the_model_and_torchs_generator_stay_as_they_were() -> None:
    model = small_net()
    before, structure, state = copy.deepcopy(model.state_dict()), repr(model), torch.random.get_rng_state()
    tensorized = tensorize(model, 1.5)
    factors = copy.deepcopy(tensorized.state_dict())
    densify(tensorized)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert repr(model) == structure
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(value, factors[name]) for name, value in tensorized.state_dict().items())
    memory = {p.data_ptr() for p in model.parameters()}
    assert not memory & {p.data_ptr() for p in tensorized.parameters()}


def test_a_bare_layer_can_be_tensorized() -> None:
    layer = nn.Linear(12, 10)
    tensorized: Any = tensorize(layer)
    assert isinstance(tensorized, CPLinear)
    assert Layout.of(tensorized) == FactorPlan.of(layer).factors
    again: Any = densify(tensorized)
    assert type(again) is nn.Linear


def test_include_exclude_and_ranks_reach_the_layers() -> None:
    model = small_net()
    chosen = tensorize(model, 1.5, include=["3.*", "6.*"], exclude=["6.*"], ranks={"8.weight": 2})
    assert [type(chosen[n]) for n in (0, 3, 6, 8)] == [nn.Conv2d, CPConv2d, nn.Linear, CPLinear]
    assert chosen[8].rank == 2
    with pytest.raises(TDPFedError, match="matches no parameter"):
        tensorize(model, include=["conv*"])
    with pytest.raises(TDPFedError, match="compression: 0 given"):
        tensorize(model, 0)


def test_state_dicts_travel_into_an_unfitted_twin() -> None:
    model, x = small_net(), randn(2, 3, 16, 16)
    one, other = tensorize(model, 1.5), tensorize(model, 1.5, fit=False)
    assert not torch.equal(one(x), other(x))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x), other(x))
    assert list(one.state_dict()) == list(FactorPlan.of(model, 1.5).factors.names)


def test_safetensors(tmp_path: Path) -> None:
    model, x = small_net(), randn(2, 3, 16, 16)
    one, other, third = tensorize(model, 1.5), tensorize(model, 1.5, fit=False), tensorize(model, 1.5, fit=False)
    safetensors.torch.save_file(one.state_dict(), tmp_path / "a.safetensors")
    other.load_state_dict(safetensors.torch.load_file(tmp_path / "a.safetensors"))
    assert torch.equal(one(x), other(x))
    safetensors.torch.save_model(one, str(tmp_path / "b.safetensors"))
    missing, unexpected = safetensors.torch.load_model(third, str(tmp_path / "b.safetensors"))
    assert not missing
    assert not unexpected
    assert torch.equal(one(x), third(x))


def mixed_net() -> nn.Sequential:
    """Zero and circular padding, a grouped convolution, a linear layer."""
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.Conv2d(8, 8, 3, padding="same", padding_mode="circular"),
        nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 12),
    )  # fmt: skip


def test_torch_compile() -> None:
    backend = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"
    model = tensorize(mixed_net(), ranks={"*.weight": 3})
    x = randn(2, 4, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_torch_export() -> None:
    model = tensorize(mixed_net(), ranks={"*.weight": 3}).eval()
    x = randn(2, 4, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    torch.testing.assert_close(exported.module()(randn(5, 4, 8, 8)), model(randn(5, 4, 8, 8)))


def test_vmap_of_grad_over_stacked_factors() -> None:
    model = tensorize(mixed_net(), ranks={"*.weight": 3})
    x = randn(2, 4, 8, 8)
    stacked = {name: torch.stack([p.detach(), 2 * p.detach()]) for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().mean()  # type: ignore[no-any-return]

    together = torch.func.vmap(torch.func.grad(loss))(stacked)
    for k in range(2):
        alone = torch.func.grad(loss)({name: value[k] for name, value in stacked.items()})
        assert all(relative(together[name][k], value) < 1e-4 for name, value in alone.items())


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.again = self.first
        self.chain = nn.Sequential(self.first, nn.ReLU(), self.first)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.chain(self.again(self.first(x)))
        return y


def test_a_shared_layer_is_replaced_everywhere_by_one() -> None:
    model = Shared()
    for changed, kind in ((tensorize(model, 1.5), CPLinear), (densify(tensorize(model, 1.5)), nn.Linear)):
        assert type(changed.first) is kind
        assert changed.first is changed.again is changed.chain[0] is changed.chain[2]
        assert len(list(changed.state_dict())) == 4 * len(list(changed.parameters()))
    assert Layout.of(tensorize(model, 1.5)) == FactorPlan.of(model, 1.5).factors


@pytest.mark.parametrize("order", [("head", "embedding"), ("embedding", "head"), ("head", "other")])
def test_tied_weights_stay_tied_and_dense(order: tuple[str, str]) -> None:
    kinds: dict[str, Any] = {"head": nn.Linear(8, 30), "other": nn.Linear(8, 30), "embedding": nn.Embedding(30, 8)}
    model = nn.ModuleDict({name: kinds[name] for name in order} | {"free": nn.Linear(20, 20)})
    model[order[1]].weight = model[order[0]].weight
    tensorized = tensorize(model)
    assert tensorized[order[0]].weight is tensorized[order[1]].weight
    assert isinstance(tensorized[order[0]].weight, nn.Parameter)
    assert type(tensorized["free"]) is CPLinear


def test_other_layers_stay_as_they_are() -> None:
    class Own(nn.Linear):
        """A subclass may do anything with its weight."""

    model = nn.Sequential(Own(20, 20), nn.ConvTranspose2d(8, 8, 3), nn.Embedding(30, 30), nn.Bilinear(5, 5, 5))
    assert [type(layer) for layer in tensorize(model)] == [type(layer) for layer in model]


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder_layers_work(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train(training)
    full = dict.fromkeys(("linear1.weight", "linear2.weight"), 16)
    tensorized: Any = tensorize(layer, ranks=full, include=["linear*"])
    assert type(tensorized.linear1) is CPLinear
    x = randn(3, 5, 16)
    with torch.set_grad_enabled(training):  # without gradients, eval takes PyTorch's fast path over linear1.weight
        assert relative(tensorized(x), layer(x)) < 1e-5
    assert type(tensorize(layer).self_attn.out_proj) is type(layer.self_attn.out_proj)
