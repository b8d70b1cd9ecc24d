"""Tensorized self-attention: a third-order tensor of token triples instead of a matrix of token pairs.

After Ma et al., "A tensorized transformer for language modeling" (2019). Block b has the CP tensor
``A_ijk = sum_h g_h q_ih k_jh v_kh`` over tokens i, j, k; the blocks are averaged, each token's ``(T, T)`` slice is read
as a vector and projected to the width. There is no softmax. The sequence length T is fixed by the projection.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tdpfed.errors import TDPFedError


class TensorAttention(nn.Module):
    """Attention over ``length`` tokens of ``width`` features, ``(..., T, width)`` to ``(..., T, width)``.

    With ``causal=True`` the output of token i depends on tokens 0 to i only: triples with a later j or k are left out,
    and the sum is divided by the share of triples that are left, so that early and late tokens have the same scale.
    The tensor of ``T x T x T`` triples is never built.
    """

    def __init__(
        self,
        width: int,
        length: int,
        rank: int,
        *,
        blocks: int = 2,
        causal: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (("width", width), ("length", length), ("rank", rank), ("blocks", blocks)):
            if value < 1:
                raise TDPFedError(f"{name}: {value} given, must be at least 1")
        self.width, self.length, self.rank, self.blocks, self.causal = width, length, rank, blocks, causal
        place = {"device": device, "dtype": dtype}
        self.qkv = nn.Linear(width, 3 * blocks * rank, bias=False, **place)
        self.core = nn.Parameter(torch.empty(blocks, rank, **place))
        self.out = nn.Parameter(torch.empty(length, length, width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights so that tokens of unit variance give outputs of unit variance."""
        nn.init.normal_(self.qkv.weight, std=1 / math.sqrt(self.width))
        nn.init.normal_(self.core, std=math.sqrt(self.blocks / self.rank))  # the blocks are averaged
        nn.init.normal_(self.out, std=1 / self.length)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Attend among the tokens of each sequence."""
        if x.shape[-2:] != (self.length, self.width):
            given, due = tuple(x.shape[-2:]), (self.length, self.width)
            raise TDPFedError(f"tokens: {given} given as (tokens, width), must be {due}")
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q * self.core.flatten() / self.blocks
        if not self.causal:
            seen = torch.einsum("...jh,...kh,jkd->...hd", k, v, self.out)
            return torch.einsum("...ih,...hd->...id", q, seen) + self.bias
        # Token i adds the triples in which it is the latest: (i, k) with k <= i, and (j, i) with j < i.
        as_j = k.unsqueeze(-1) * torch.einsum("...kh,ikd->...ihd", v, self.out * self._before(0))
        as_k = v.unsqueeze(-1) * torch.einsum("...jh,jid->...ihd", k, self.out * self._before(-1).transpose(0, 1))
        seen = (as_j + as_k).cumsum(-3)
        share = torch.arange(1, self.length + 1, device=x.device, dtype=x.dtype) / self.length
        return torch.einsum("...ih,...ihd->...id", q / share[:, None], seen) + self.bias

    def _before(self, diagonal: int) -> Tensor:
        """Return ones at (i, j) for j up to i + diagonal, shape ``(T, T, 1)``."""
        ones = torch.ones(self.length, self.length, dtype=self.out.dtype, device=self.out.device)
        return ones.tril(diagonal).unsqueeze(-1)

    def extra_repr(self) -> str:
        """Show sizes."""
        return f"{self.width}, length={self.length}, rank={self.rank}, blocks={self.blocks}, causal={self.causal}"
