"""What all tensorized layers share: the dense layer they stand for, the bias, and the composed weight."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Dense = nn.Linear | Convolution


class FactoredLayer(nn.Module):
    """A Linear or Conv layer whose weight is composed of smaller tensors; subclasses say of which."""

    bias: nn.Parameter | None
    order: int
    fan_in: int

    def _begin(self, template: Dense, device: Any, dtype: Any) -> tuple[int, ...]:
        """Create the bias; return the shape of the dense weight. ``template`` is the dense layer, on ``meta``."""
        shape = tuple(template.weight.shape)
        self.order, self.fan_in = len(shape), math.prod(shape[1:])
        empty = None if template.bias is None else nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype))
        self.register_parameter("bias", empty)
        return shape

    def _reset_bias(self) -> None:
        """Draw the bias as PyTorch's layers do."""
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(self.fan_in), 1 / math.sqrt(self.fan_in))

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that the weight is composed of."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """The composed dense weight."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw a weight with the variance of PyTorch's default, ``1 / (3 fan_in)``."""
        raise NotImplementedError

    def fit(self, weight: Tensor, *, sweeps: int, tol: float) -> None:
        """Fit the parts to a dense weight."""
        raise NotImplementedError

    def dense(self) -> Dense:
        """Return an empty dense layer of the same shape."""
        raise NotImplementedError

    def _set(self, values: Sequence[Tensor]) -> None:
        for part, value in zip(self.parts, values, strict=True):
            part.data.copy_(value)


class FactoredLinear(FactoredLayer):
    """The sizes of a linear layer."""

    in_features: int
    out_features: int

    def dense(self) -> nn.Linear:
        """Return an empty dense layer of the same shape."""
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")


class FactoredConv(FactoredLayer):
    """The sizes, stride, padding, dilation and groups of a convolution."""

    _dense: type[Convolution]
    _conv: Callable[..., Tensor]

    def _geometry(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: str | int | Sequence[int],
        dilation: int | Sequence[int],
        groups: int,
        bias: bool,
        padding_mode: str,
    ) -> Convolution:
        """Keep a convolution's arguments, checked and completed by PyTorch; return the dense layer on ``meta``."""
        make = cast(Callable[..., Convolution], self._dense)
        template = make(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = template.kernel_size, template.stride, template.dilation
        self.padding, self.padding_mode = template.padding, template.padding_mode
        self._wrap = list(template._reversed_padding_repeated_twice)
        return template

    def _padded(self, x: Tensor) -> tuple[Tensor, str | tuple[int, ...]]:
        """Return the input and the padding that is left for the convolution; only zeros are left to it."""
        if self.padding_mode == "zeros":
            return x, self.padding
        return F.pad(x, self._wrap, mode=self.padding_mode), "valid"

    def dense(self) -> Convolution:
        """Return an empty dense layer of the same shape."""
        make = cast(Callable[..., Convolution], self._dense)
        return make(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation,
            self.groups, self.bias is not None, self.padding_mode, device="meta",
        )  # fmt: skip

    def _shown(self, ranks: str) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, {ranks}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )
