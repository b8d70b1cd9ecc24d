"""Tensorized layers: weights stored as CP factors, forward computed in factor space (section IV-B).

There is a factor ``A1, A2, ...`` for each dimension of the dense weight, in PyTorch's order: output channels, input
channels, then the kernel's axes. (The paper writes the kernel first: its A3 and A4 are our A2 and A1.) ``layer.weight``
composes the dense weight, so code that reads it keeps working. ``state_dict`` has the names of
:class:`~tdpfed.cp.plan.FactorPlan`.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tdpfed import cp
from tdpfed.cp.layer_base import Dense, FactoredConv, FactoredLayer, FactoredLinear


class _CPLayer(FactoredLayer):
    """Factors ``A1..AN`` of a dense weight, and a bias."""

    def _create(self, template: Dense, rank: int, device: Any, dtype: Any) -> None:
        cp.check_rank(rank)
        self.rank = rank
        for n, size in enumerate(template.weight.shape, 1):
            self.register_parameter(f"A{n}", nn.Parameter(torch.empty(size, rank, device=device, dtype=dtype)))
        self._begin(template, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors whose composed weight has the variance of PyTorch's default, ``1 / (3 fan_in)``."""
        std = (1 / (3 * self.fan_in * self.rank)) ** (0.5 / self.order)
        for factor in self.factors:
            nn.init.normal_(factor, std=std)
        self._reset_bias()

    def fit(self, weight: Tensor, *, sweeps: int, tol: float) -> None:
        """Fit the factors to a dense weight by alternating least squares."""
        self._set(cp.decompose(weight, self.rank, sweeps=sweeps, tol=tol))

    @property
    def factors(self) -> list[Tensor]:
        """The factor matrices ``(I_n, R)``, in the order of the dense weight's dimensions."""
        return [cast(Tensor, getattr(self, f"A{n}")) for n in range(1, self.order + 1)]

    parts = factors

    @property
    def weight(self) -> Tensor:
        """The composed dense weight."""
        return cp.compose(self.factors)


class CPLinear(_CPLayer, FactoredLinear):
    """A linear layer with weight ``A1 A2^T``: ``y = A1 (A2^T x) + b``."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._create(nn.Linear(in_features, out_features, bias, device="meta"), rank, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(..., in_features)``."""
        a_out, a_in = self.factors
        return F.linear(F.linear(x, a_in.mT), a_out, self.bias)

    def extra_repr(self) -> str:
        """Show sizes and rank."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, bias={self.bias is not None}"


class _CPConv(_CPLayer, FactoredConv):
    """A convolution as the paper's series: 1x1 in, one depthwise convolution per axis, 1x1 out (eqs. 8 to 11).

    A grouped convolution composes its kernel first, because its groups cannot share the 1x1 convolutions.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        rank: int,
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        template = self._geometry(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        )
        self._create(template, rank, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(batch, in_channels, *space)``."""
        x, padding = self._padded(x)
        conv = type(self)._conv
        if self.groups > 1:
            return conv(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        a_out, a_in, *kernel = self.factors
        ones = (1,) * len(kernel)
        x = conv(x, a_in.mT.reshape(self.rank, -1, *ones))
        for axis, factor in enumerate(kernel):
            alone = [factor.shape[0] if n == axis else 1 for n in range(len(kernel))]
            stride, dilation = (
                tuple(v if n == axis else 1 for n, v in enumerate(values)) for values in (self.stride, self.dilation)
            )
            pad = padding if isinstance(padding, str) else tuple(v if n == axis else 0 for n, v in enumerate(padding))
            x = conv(x, factor.mT.reshape(self.rank, 1, *alone), None, stride, pad, dilation, self.rank)
        return conv(x, a_out.reshape(*a_out.shape, *ones), self.bias)

    def extra_repr(self) -> str:
        """Show sizes and rank."""
        return self._shown(f"rank={self.rank}")


class CPConv1d(_CPConv):
    """:class:`torch.nn.Conv1d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv1d, staticmethod(F.conv1d)


class CPConv2d(_CPConv):
    """:class:`torch.nn.Conv2d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv2d, staticmethod(F.conv2d)


class CPConv3d(_CPConv):
    """:class:`torch.nn.Conv3d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv3d, staticmethod(F.conv3d)
