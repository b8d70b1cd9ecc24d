"""Layers whose weights are Tucker or block-term tensors, with the forward pass in factor space.

A weight is a sum of ``blocks`` tensors, each a small core multiplied by a matrix per dimension; one block is a Tucker
tensor. ``core`` has shape ``(blocks, R1, ..., RN)``, ``U1, U2, ...`` shapes ``(I_n, blocks, R_n)``, in PyTorch's order:
output channels, input channels, then the kernel's axes. Factors of several clients must not be averaged, see
:mod:`tdpfed.cp.tucker`.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tdpfed.cp.algebra import mode_dot
from tdpfed.cp.layer_base import Dense, FactoredConv, FactoredLayer, FactoredLinear
from tdpfed.cp.tucker import check_ranks, compose_blocks, decompose_blocks


class _TuckerLayer(FactoredLayer):
    """A core and factors ``U1..UN`` of a dense weight, and a bias."""

    core: nn.Parameter

    def _create(self, template: Dense, ranks: int | Sequence[int], blocks: int, device: Any, dtype: Any) -> None:
        shape = template.weight.shape
        self.ranks = tuple(min(ranks, size) for size in shape) if isinstance(ranks, int) else tuple(ranks)
        self.blocks = blocks
        check_ranks(self.ranks, shape, blocks)
        self.core = nn.Parameter(torch.empty(blocks, *self.ranks, device=device, dtype=dtype))
        for n, (size, rank) in enumerate(zip(shape, self.ranks, strict=True), 1):
            self.register_parameter(f"U{n}", nn.Parameter(torch.empty(size, blocks, rank, device=device, dtype=dtype)))
        self._begin(template, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors of variance ``1 / R_n`` and a core whose composed weight has PyTorch's ``1 / (3 fan_in)``."""
        for factor, rank in zip(self.factors, self.ranks, strict=True):
            nn.init.normal_(factor, std=1 / math.sqrt(rank))
        nn.init.normal_(self.core, std=1 / math.sqrt(3 * self.fan_in * self.blocks))
        self._reset_bias()

    def fit(self, weight: Tensor, *, sweeps: int, tol: float) -> None:
        """Fit core and factors to a dense weight by higher-order orthogonal iteration."""
        core, factors = decompose_blocks(weight, self.ranks, self.blocks, sweeps=sweeps, tol=tol)
        self._set([core, *factors])

    @property
    def factors(self) -> list[Tensor]:
        """The matrices ``(I_n, blocks, R_n)``, in the order of the dense weight's dimensions."""
        return [cast(Tensor, getattr(self, f"U{n}")) for n in range(1, self.order + 1)]

    @property
    def parts(self) -> list[Tensor]:
        """The core and the factors."""
        return [self.core, *self.factors]

    @property
    def weight(self) -> Tensor:
        """The composed dense weight."""
        return compose_blocks(self.core, self.factors)

    def _ranks_shown(self) -> str:
        return f"ranks={self.ranks}" + (f", blocks={self.blocks}" if self.blocks > 1 else "")


class TuckerLinear(_TuckerLayer, FactoredLinear):
    """A linear layer ``y = sum_b U1_b (G_b (U2_b^T x)) + b``; ``ranks`` is one number or one per dimension."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ranks: int | Sequence[int],
        bias: bool = True,
        *,
        blocks: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._create(nn.Linear(in_features, out_features, bias, device="meta"), ranks, blocks, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(..., in_features)``."""
        u_out, u_in = self.factors
        inner = F.linear(x, u_in.flatten(1).mT).unflatten(-1, (self.blocks, -1))
        inner = torch.einsum("brs,...bs->...br", self.core, inner).flatten(-2)
        return F.linear(inner, u_out.flatten(1), self.bias)

    def extra_repr(self) -> str:
        """Show sizes and ranks."""
        return f"{self.in_features}, {self.out_features}, {self._ranks_shown()}, bias={self.bias is not None}"


class _TuckerConv(_TuckerLayer, FactoredConv):
    """A convolution as three: 1x1 in, a small one with a group per block, 1x1 out.

    A grouped convolution composes its kernel first, because its groups cannot share the 1x1 convolutions.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        ranks: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        blocks: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        template = self._geometry(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
        )
        self._create(template, ranks, blocks, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(batch, in_channels, *space)``."""
        x, padding = self._padded(x)
        conv = type(self)._conv
        if self.groups > 1:
            return conv(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)
        u_out, u_in, *axes = self.factors
        ones = (1,) * len(axes)
        small: Tensor = self.core
        for n, factor in enumerate(axes, 2):
            small = mode_dot(small, factor.transpose(0, 1), n, self.order)
        x = conv(x, u_in.flatten(1).mT.unflatten(-1, (-1, *ones)))
        x = conv(x, small.flatten(0, 1), None, self.stride, padding, self.dilation, self.blocks)
        return conv(x, u_out.flatten(1).unflatten(-1, (-1, *ones)), self.bias)

    def extra_repr(self) -> str:
        """Show sizes and ranks."""
        return self._shown(self._ranks_shown())


class TuckerConv1d(_TuckerConv):
    """:class:`torch.nn.Conv1d` with Tucker blocks; ``ranks`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv1d, staticmethod(F.conv1d)


class TuckerConv2d(_TuckerConv):
    """:class:`torch.nn.Conv2d` with Tucker blocks; ``ranks`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv2d, staticmethod(F.conv2d)


class TuckerConv3d(_TuckerConv):
    """:class:`torch.nn.Conv3d` with Tucker blocks; ``ranks`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv3d, staticmethod(F.conv3d)
