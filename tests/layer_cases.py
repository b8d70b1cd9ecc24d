"""Convolutions with every combination of arguments, a small network and its training, for the tests of layers."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def relative(x: Tensor, expected: Tensor) -> float:
    assert x.shape == expected.shape
    x, expected = x.detach(), expected.detach()
    return float((x - expected).norm() / expected.norm().clamp_min(1e-20))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, dict[str, Any], list[int]]:
    """Number of axes, arguments and an input shape; every combination that nn.ConvNd accepts."""
    axes = draw(st.integers(1, 3))

    def per_axis(least: int, most: int) -> int | tuple[int, ...]:
        one = st.integers(least, most)
        return draw(one | st.tuples(*[one] * axes))

    groups = draw(st.sampled_from([1, 1, 1, 2]))
    padding: Any = draw(st.sampled_from(["ints", "ints", "same", "valid"]))
    padding = per_axis(0, 2) if padding == "ints" else padding
    arguments = {
        "in_channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": per_axis(1, 3),
        "rank": draw(st.integers(1, 4)),
        "stride": 1 if padding == "same" else per_axis(1, 3),
        "padding": padding,
        "dilation": per_axis(1, 2),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"])),
    }
    batch = draw(st.sampled_from([[], [1], [3]]))
    return axes, arguments, [*batch, int(arguments["in_channels"]), *draw(st.tuples(*[st.integers(5, 7)] * axes))]


def dense_twin(layer: Any, arguments: dict[str, Any], weight: Tensor) -> Any:
    """PyTorch's own convolution of these arguments, with the given weight and the tensorized layer's bias."""
    make: Any = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[weight.ndim]
    dense = make(**{key: value for key, value in arguments.items() if key != "rank"}, dtype=weight.dtype)
    dense.weight.data = weight.detach()
    if layer.bias is not None:
        dense.bias.data = layer.bias.detach().clone()
    return dense


def gradients_agree(layer: Any, dense: nn.Module, x: Tensor) -> bool:
    """Whether gradients in factor space equal those that autograd sends through the composed weight."""
    parameters = dict(layer.named_parameters())
    y = layer(x)
    weights = {"weight": layer.weight} | ({} if layer.bias is None else {"bias": layer.bias})
    twin = torch.func.functional_call(dense, weights, (x,))
    target = randn(*y.shape, seed=1, dtype=torch.float64)
    grads = torch.autograd.grad((y * target).sum(), [x, *parameters.values()])
    twins = torch.autograd.grad((twin * target).sum(), [x, *parameters.values()])
    return all(relative(a, b) < 1e-10 or float(b.norm()) < 1e-12 for a, b in zip(grads, twins, strict=True))


def small_net() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 10, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(90, 20), nn.Tanh(), nn.Linear(20, 4),
    )  # fmt: skip


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 15) -> None:
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
