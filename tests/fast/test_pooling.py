"""Max-pooling with the channels last: the same bits as the usual one, and part of a recorded gradient."""

from typing import Any

import pytest
import torch
from torch.nn.functional import max_pool2d

import small
from tdpfed.core.objective import Objective
from tdpfed.fast import pooling
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.models import build

CASES: list[dict[str, Any]] = [
    {"kernel_size": 2}, {"kernel_size": 3, "stride": 2}, {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "stride": (1, 2)}, {"kernel_size": 2, "ceil_mode": True},
    {"kernel_size": 2, "dilation": 2},
]  # fmt: skip


@pytest.mark.parametrize("how", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3, 8, 33])
def test_the_same_values_and_places(channels: int, dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Also where several values are the largest, as zeros are after a ReLU, and where there are none."""
    x = torch.randn(3, channels, 9, 8, generator=torch.Generator().manual_seed(0), dtype=dtype).relu()
    x[0, 0, 1, 1], x[1, 0] = torch.nan, -1.0
    usual = max_pool2d(x, return_indices=True, **how)
    size, stride = how["kernel_size"], how.get("stride", how["kernel_size"])
    rest = how.get("padding", 0), how.get("dilation", 1), how.get("ceil_mode", False)
    pair = [[one, one] if isinstance(one, int) else list(one) for one in (size, stride, *rest[:2])]
    own = pooling.max_pool(x, *pair, rest[2])
    for one, other in zip(own, usual, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("model", "uses"), [("cnn", 2), ("lenet", 1)])  # LeNet's first convolution has six channels
def test_a_recorded_gradient_uses_it_and_keeps_its_bits(model: str, uses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = Objective.of(build(model, (1, 28, 28), 10, seed=0))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(5, 1, 28, 28, generator=generator), torch.randint(10, (5,), generator=generator)
    theta = objective.initial()
    with monkeypatch.context() as patch:
        patch.setattr("tdpfed.fast.recorded_gradient.with_channels_last", lambda module: module)
        usual = RecordedGradient(objective)(theta, batch)
    seen = small.watched(monkeypatch, pooling, "max_pool")
    own = RecordedGradient(objective)(theta, batch)
    assert len(seen) >= uses
    assert all(torch.equal(one, other) for one, other in zip(own, usual, strict=True))
    gradient, loss = objective.gradient(theta, batch)
    torch.testing.assert_close(own, (gradient, loss), rtol=1e-5, atol=1e-7)
