"""Convolutions of many clients as matrix products equal the library's, forward and backward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tdpfed.core.objective import Objective
from tdpfed.engine.precision import arithmetic
from tdpfed.fast.convolution import as_products
from tdpfed.models import build

MIXED = [
    nn.Conv2d(2, 6, (3, 5), stride=2, padding=(1, 2)), nn.ReLU(), nn.Conv2d(6, 4, 3, dilation=2, padding=2, bias=False),
    nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2, padding=3), nn.ReLU(), nn.Conv2d(4, 3, 1, padding=1),
    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3),
]  # fmt: skip
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "vgg8": (build("vgg8", seed=0), (3, 32, 32)),
    "strides, dilation, groups, wide padding": (nn.Sequential(*MIXED), (2, 12, 12)),
    "flattened at once": (
        nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3)),
        (2, 4, 4),
    ),
    "one-dimensional": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(18, 3)), (2, 8)),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(2, 3, 3), nn.Flatten(), nn.Linear(108, 3)), (2, 4, 4)),
}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_our_kernels_give_the_librarys_gradients(name: str) -> None:
    model, shape = CASES[name]
    model = copy.deepcopy(model).float().cuda()
    objective, generator = Objective.of(model), torch.Generator().manual_seed(0)
    theta = objective.initial() * (1 + 0.5 * torch.rand(3, objective.layout.size, generator=generator)).cuda()
    x = torch.randn(3, 4, *shape, generator=generator).cuda()
    y = torch.randint(0, 3, (3, 4), generator=generator).cuda()
    twin = Objective.of(copy.deepcopy(model).double())
    expected = vmap(grad_and_value(twin.value))(theta.double(), x.double(), y)
    with arithmetic("float32"):
        found = objective.gradient(theta, (x, y))
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_library(name: str) -> None:
    model, shape = CASES[name]
    objective, generator = Objective.of(model.double()), torch.Generator().manual_seed(0)
    theta = objective.initial() * (1 + 0.5 * torch.rand(3, objective.layout.size, generator=generator))
    x, y = torch.randn(3, 4, *shape, generator=generator).double(), torch.randint(0, 3, (3, 4), generator=generator)
    gradient = vmap(grad_and_value(objective.value))

    def record(*given: Any) -> Any:
        return gradient(*given)

    expected = gradient(theta, x, y)
    module = make_fx(record)(theta, x, y)
    before = [node.target for node in module.graph.nodes]
    found = as_products(module)(theta, x, y)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * float(other.abs().max()))
    aten = torch.ops.aten
    library = {aten.convolution.default, aten.convolution_backward.default}
    after = [node.target for node in module.graph.nodes]
    assert library & set(before)
    if name not in ("one-dimensional", "transposed"):
        assert not library & set(after)
        assert sum(getattr(t, "__name__", "") == "patches" for t in after) == before.count(aten.convolution.default)
    else:
        assert after == before  # what it does not know stays
