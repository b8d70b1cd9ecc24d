import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from tdpfed.cp.attention import TensorAttention
from tdpfed.errors import TDPFedError
from tdpfed.models import MODELS, build, from_spec

# The smallest comfortable input of each model.
TEXT = [name for name, entry in MODELS.items() if entry.tokens]
FLAT = ["logistic", *TEXT]
SIDES = {"cnn": 16, "vgg8": 32, "vgg8-gn": 32}
SMALL = {name: (5,) if name in FLAT else (1, SIDES.get(name, 8), SIDES.get(name, 8)) for name in MODELS}
RECURRENT = ("lstm", "gru")  # vmap, torch.export and torch.compile do not take their layers


@pytest.fixture(autouse=True)
def _same_draws_every_time() -> None:
    torch.manual_seed(0)


def inputs(name: str, *leading: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if name in TEXT:
        return torch.randint(3, (*leading, *SMALL[name]), generator=generator)
    return torch.randn(*leading, *SMALL[name], dtype=dtype, generator=generator)


def shapes(model: nn.Module, kind: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters() if name.endswith(kind)}


def test_registry_names() -> None:
    images = {"logistic", "dnn", "lenet", "cnn", "vgg8", "vgg8-gn", "resnet8", "resnet18", "transformer"}
    images |= {"tensor-transformer"}
    assert set(MODELS) == images | set(TEXT)
    assert set(TEXT) == {"lstm", "gru", "text-transformer", "text-tensor-transformer"}


@pytest.mark.parametrize("name", TEXT)
def test_no_place_of_a_text_sees_a_later_one(name: str) -> None:
    model, x = build(name, (9,), 7, seed=0).double(), torch.arange(9).remainder(7)[None]
    with torch.no_grad():
        before = model(x)
        for place in range(9):
            changed = x.clone()
            changed[0, place] = (changed[0, place] + 1) % 7
            after = model(changed)
            assert torch.allclose(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
            assert not torch.allclose(after[:, place], before[:, place], atol=1e-6)


@pytest.mark.parametrize("name", ["tensor-transformer", "text-tensor-transformer"])
def test_tensorized_attention_is_in_both_blocks(name: str) -> None:
    layers = [one for one in build(name).modules() if isinstance(one, TensorAttention)]
    assert [layer.causal for layer in layers] == [name.startswith("text")] * 2


def test_the_network_of_pfllibs_benchmark() -> None:
    """Its page prints 582,026 parameters."""
    model = build("cnn")
    assert sum(one.numel() for one in model.parameters()) == 582_026
    assert shapes(model, "weight") == {
        "conv1.weight": (32, 1, 5, 5), "conv2.weight": (64, 32, 5, 5), "fc1.weight": (512, 1024),
        "fc2.weight": (10, 512),
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_defaults(name: str) -> None:
    entry = MODELS[name]
    x = torch.zeros(2, *entry.input_shape, dtype=torch.int64 if entry.tokens else torch.float32)
    places = entry.input_shape if entry.tokens else ()
    with torch.no_grad():
        assert build(name)(x).shape == (2, *places, entry.classes)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("logistic", (2, 3)),
        ("dnn", (11,)),
        ("dnn", (3, 5, 7)),
        ("lenet", (1, 4, 4)),
        ("lenet", (3, 9, 14)),
        ("cnn", (1, 16, 16)),
        ("cnn", (3, 32, 28)),
        ("vgg8", (1, 32, 32)),
        ("vgg8", (3, 40, 64)),
        ("vgg8-gn", (3, 40, 64)),
        ("resnet8", (1, 4, 4)),
        ("resnet8", (2, 9, 7)),
        ("resnet18", (1, 8, 8)),
        ("resnet18", (3, 9, 17)),
        ("transformer", (1, 4, 1)),
        ("transformer", (3, 12, 7)),
    ],
)
@pytest.mark.parametrize("classes", [2, 7])
def test_output_shape(name: str, shape: tuple[int, ...], classes: int) -> None:
    with torch.no_grad():
        logits = build(name, shape, classes, seed=0)(torch.randn(3, *shape))
    assert logits.shape == (3, classes)
    assert logits.isfinite().all()


def test_table_1_dimensions() -> None:
    # The paper writes in x out; torch stores out x in.
    assert shapes(build("dnn"), "weight") == {"fc1.weight": (100, 784), "fc2.weight": (10, 100)}
    assert shapes(build("dnn"), "bias") == {"fc1.bias": (100,), "fc2.bias": (10,)}
    assert shapes(build("vgg8"), "weight") == {
        "conv1.weight": (32, 3, 3, 3),
        "conv2.weight": (64, 32, 3, 3),
        "conv3.weight": (128, 64, 3, 3),
        "conv4.weight": (256, 128, 3, 3),
        "conv5.weight": (256, 256, 3, 3),
        "fc1.weight": (256, 256),
        "fc2.weight": (256, 256),
        "fc3.weight": (10, 256),
    }
    assert shapes(build("vgg8", (1, 64, 96)), "weight")["fc1.weight"] == (256, 256 * 2 * 3)


def test_dnn_and_vgg8_forward_by_hand() -> None:
    model = build("dnn", (2, 3), 4, seed=0)
    p, x = dict(model.named_parameters()), torch.randn(5, 2, 3)
    hidden = (x.reshape(5, 6) @ p["fc1.weight"].T + p["fc1.bias"]).clamp(min=0)
    torch.testing.assert_close(model(x), hidden @ p["fc2.weight"].T + p["fc2.bias"])

    model = build("vgg8", (3, 32, 32), 4, seed=0).double()
    p, x = dict(model.named_parameters()), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = x
    for i in range(1, 6):
        y = functional.conv2d(y, p[f"conv{i}.weight"], p[f"conv{i}.bias"], padding=1).clamp(min=0)
        y = y.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))
    y = y.flatten(1)
    for i in range(1, 4):
        y = (y if i == 1 else y.clamp(min=0)) @ p[f"fc{i}.weight"].T + p[f"fc{i}.bias"]
    torch.testing.assert_close(model(x), y)


def test_vgg8_weights_have_variance_one_over_fan_in() -> None:
    for name, p in build("vgg8", seed=1).named_parameters():
        if name.endswith("bias"):
            assert not p.any()
        else:
            spread = float(p.detach().var() * p[0].numel())
            # A sample variance of n normal draws is off by about sqrt(2 / n); He would be 2, torch's default 1/3.
            assert abs(spread - 1) < 5 * (2 / p.numel()) ** 0.5, name


@pytest.mark.parametrize(("name", "layers", "reduced"), [("resnet8", 8, (64, 2, 4)), ("resnet18", 18, (512, 1, 2))])
def test_resnet_depth_and_strides(name: str, layers: int, reduced: tuple[int, ...]) -> None:
    model = build(name, (3, 8, 16), 10, seed=0)
    assert isinstance(model, nn.Sequential)
    weights = [n for n, p in model.named_parameters() if p.ndim > 1 and "shortcut" not in n]
    assert len(weights) == layers
    with torch.no_grad():
        assert model[:-3](torch.randn(2, 3, 8, 16)).shape == (2, *reduced)


def test_transformer_block_equals_torchs_encoder_layer() -> None:
    model = build("transformer", seed=0)
    block = next(m for name, m in model.named_children() if name == "block1")
    width = 64
    twin = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
    names = {
        "qkv.": "self_attn.in_proj_",
        "out.": "self_attn.out_proj.",
        "mlp.fc1.": "linear1.",
        "mlp.fc2.": "linear2.",
        "norm1.": "norm1.",
        "norm2.": "norm2.",
    }
    ours = block.state_dict()
    twin.load_state_dict(
        {new + end: ours[old + end] for old, new in names.items() for end in ("weight", "bias")}, strict=True
    )
    x = torch.randn(3, 9, width)
    torch.testing.assert_close(block(x), twin(x))


def test_transformer_sees_patches_and_their_places() -> None:
    model = build("transformer", (2, 8, 12), 3, seed=0).double()
    assert dict(model.named_parameters())["position"].shape == (4 * 6, 64)  # patches of 2 x 2
    x = torch.randn(1, 2, 8, 12, dtype=torch.float64)
    swapped = x.clone()
    swapped[:, :, 0:2, 0:2], swapped[:, :, 4:6, 10:12] = x[:, :, 4:6, 10:12], x[:, :, 0:2, 0:2]
    shifted = x.roll(1, -1)
    bag = {n: torch.zeros_like(p) if n == "position" else p for n, p in model.named_parameters()}
    assert not torch.allclose(model(swapped), model(x))
    torch.testing.assert_close(functional_call(model, bag, (swapped,)), functional_call(model, bag, (x,)))
    assert not torch.allclose(functional_call(model, bag, (shifted,)), functional_call(model, bag, (x,)))


@pytest.mark.parametrize("name", MODELS)
def test_seed_alone_decides_the_weights(name: str) -> None:
    before = torch.get_rng_state()
    first = build(name, SMALL[name], 3, seed=11)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    again, other = build(name, SMALL[name], 3, seed=11), build(name, SMALL[name], 3, seed=12)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_seed_leaves_the_gpus_alone_and_ignores_the_ambient_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(seed: int) -> None:
        raise AssertionError("the GPUs' generators were reseeded")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", touched)
    with torch.device("meta"):
        drawn, abstract = build("dnn", seed=0), build("dnn")
    assert {p.device.type for p in drawn.parameters()} == {"cpu"}
    assert {p.device.type for p in abstract.parameters()} == {"meta"}


def test_without_a_seed_the_global_generator_is_used() -> None:
    a, b = build("logistic"), build("logistic")
    assert not torch.equal(next(a.parameters()), next(b.parameters()))


@pytest.mark.parametrize("name", MODELS)
def test_pure_function_of_parameters_and_sample(name: str) -> None:
    model = build(name, SMALL[name], 3, seed=0).double()
    assert not list(model.buffers())
    assert not any(
        isinstance(m, nn.modules.batchnorm._NormBase | nn.modules.dropout._DropoutNd) for m in model.modules()
    )
    x = inputs(name, 3, dtype=torch.float64)
    with torch.no_grad():
        together = model.train()(x)
        alone = torch.cat([model(sample[None]) for sample in x])
        assert torch.equal(model.eval()(x), together)
    assert together.dtype == torch.float64
    torch.testing.assert_close(alone, together)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in RECURRENT])
def test_batched_gradients_equal_a_loop_over_clients(name: str) -> None:
    clients = [build(name, SMALL[name], 3, seed=k).double() for k in range(2)]
    x, y = inputs(name, 2, 3, dtype=torch.float64), torch.tensor([[0, 1, 2], [2, 2, 0]])
    y = y.repeat_interleave(5, 1) if name in TEXT else y
    for model, batch, labels in zip(clients, x, y, strict=True):
        functional.cross_entropy(model(batch).flatten(0, -2), labels).backward()

    def loss(theta: dict[str, Tensor], batch: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(clients[0], theta, (batch,)).flatten(0, -2), labels)

    rows = [dict(model.named_parameters()) for model in clients]
    stacked = {n: torch.stack([row[n].detach() for row in rows]) for n in rows[0]}
    for n, g in vmap(grad(loss))(stacked, x, y).items():
        assert g.abs().sum(tuple(range(1, g.ndim))).min() > 0, n  # every parameter of every client learns
        for row, client_g in zip(rows, g, strict=True):
            torch.testing.assert_close(client_g, row[n].grad, rtol=1e-9, atol=1e-12, msg=n)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in RECURRENT])
def test_export_with_any_batch_size(name: str) -> None:
    model = build(name, SMALL[name], 3, seed=0)
    program = torch.export.export(model, (inputs(name, 2),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = inputs(name, 5)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize(
    "name", [name for name in MODELS if name not in ("resnet18", *RECURRENT)]
)  # resnet8 is like it
def test_compiles_as_one_graph(name: str) -> None:
    model = build(name, SMALL[name], 3, seed=0)
    x = inputs(name, 2)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize(
    ("name", "shape", "rule"),
    [
        ("logistic", (), "at least 1"),
        ("dnn", (3, 0), "at least 1"),
        ("dnn", (2.5,), "at least 1"),
        ("lenet", (28, 28), "channels, height, width"),
        ("lenet", (0, 28, 28), "channels, height, width"),
        ("lenet", (1, 3, 28), "at least 4"),
        ("vgg8", (3, 32, 31), "at least 32"),
        ("vgg8", (1, 3, 32, 32), "channels, height, width"),
        ("resnet8", (3, 3, 3), "at least 4"),
        ("resnet18", (3, 7, 8), "at least 8"),
        ("transformer", (64,), "channels, height, width"),
        ("transformer", (1, 7, 13), "not prime"),
    ],
)
def test_shapes_refused(name: str, shape: Any, rule: str) -> None:
    with pytest.raises(TDPFedError) as caught:
        build(name, shape)
    message = str(caught.value)
    assert message.startswith("input_shape: ")
    assert repr(shape) in message
    assert name in message
    assert rule in message


@pytest.mark.parametrize("classes", [-1, 0, 2.5])
def test_classes_refused(classes: Any) -> None:
    with pytest.raises(TDPFedError, match=rf"classes: {classes}\. Allowed: .* at least 1"):
        build("dnn", classes=classes)


def test_unknown_model() -> None:
    with pytest.raises(TDPFedError, match="model: unknown 'vgg9', did you mean 'vgg8'"):
        build("vgg9")
    with pytest.raises(TDPFedError, match="model: unknown 'vgg9'"):
        from_spec("vgg9", (3, 32, 32), 10)


FACTORIES = """
import math
from torch import nn

def sized(input_shape, classes):
    assert isinstance(input_shape, tuple)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))

def fixed(): return nn.Linear(4, 2)
def text(): return "net"
def broken(input_shape, classes): raise KeyError("no such width")
class Zoo:
    sized = staticmethod(sized)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = "tdpfed_test_user_models"
    (tmp_path / f"{name}.py").write_text(FACTORIES)
    (tmp_path / f"{name}_bad.py").write_text("raise RuntimeError('broken at import')")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_from_spec_builds_by_name() -> None:
    a, b = from_spec("lenet", (1, 8, 8), 3, seed=5), build("lenet", (1, 8, 8), 3, seed=5)
    assert shapes(a, "") == shapes(b, "")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_from_spec_calls_the_users_factory(user_module: str) -> None:
    before = torch.get_rng_state()
    for spec in ("sized", "Zoo.sized"):
        model = from_spec(f"{user_module}:{spec}", [2, 3], 4, seed=5)
        assert shapes(model, "weight") == {"1.weight": (4, 6)}
        again = from_spec(f"{user_module}:{spec}", [2, 3], 4, seed=5)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)
    assert shapes(from_spec(f"{user_module}:fixed", (2, 3), 4), "weight") == {"weight": (2, 4)}
    assert isinstance(from_spec(f"{user_module}:fixed"), nn.Linear)


@pytest.mark.parametrize(
    ("end", "cause", "text"),
    [
        ("_missing:net", ModuleNotFoundError, "No module named"),
        ("_bad:net", RuntimeError, "broken at import"),
        (":absent", AttributeError, "no attribute 'absent'"),
        (":", AttributeError, "no attribute ''"),
        (":broken", KeyError, "no such width"),
        (":math", TypeError, "not callable"),
        (":text", None, "returned a str"),
    ],
)
def test_from_spec_names_what_failed(user_module: str, end: str, cause: type | None, text: str) -> None:
    with pytest.raises(TDPFedError) as caught:
        from_spec(user_module + end, (2, 3), 4)
    message = str(caught.value)
    assert repr(user_module + end) in message
    assert text in message
    assert "Allowed: 'package.module:factory'" in message
    assert type(caught.value.__cause__) is (cause or type(None))


def test_from_spec_without_a_module_name() -> None:
    with pytest.raises(TDPFedError, match="model: ':net' failed"):
        from_spec(":net")


def test_from_spec_factory_that_needs_what_was_not_given(user_module: str) -> None:
    with pytest.raises(TDPFedError, match="missing 2 required positional arguments"):
        from_spec(f"{user_module}:sized")
