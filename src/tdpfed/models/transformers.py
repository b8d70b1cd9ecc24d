"""Small transformers for images and for text, with the usual attention or with tensorized attention."""

import math
from collections import OrderedDict
from typing import Literal

import torch
from torch import Tensor, nn

from tdpfed.cp.attention import TensorAttention
from tdpfed.errors import TDPFedError

Shape = tuple[int, ...]
Attention = Literal["softmax", "tensor"]

HEADS = 4
RANK = 16
"""The rank of each CP tensor of tensorized attention."""


class _TransformerBlock(nn.Module):
    """Multi-head self-attention and an MLP over tokens ``(B, T, width)``, pre-normed and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = _mlp(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, T, width / heads)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        attention = (scores if mask is None else scores + mask).softmax(-1)
        x = x + self.out((attention @ v).transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(self.norm2(x)))


class _TensorBlock(nn.Module):
    """Tensorized attention and an MLP over tokens ``(B, length, width)``, pre-normed and residual."""

    def __init__(self, width: int, length: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = TensorAttention(width, length, RANK, causal=causal)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = _mlp(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        del mask  # the layer masks by itself
        x = x + self.attention(self.norm1(x))
        return torch.add(x, self.mlp(self.norm2(x)))


def _block(attention: Attention, width: int, length: int, *, causal: bool) -> nn.Module:
    return _TransformerBlock(width, HEADS) if attention == "softmax" else _TensorBlock(width, length, causal=causal)


def _mlp(width: int) -> nn.Module:
    parts = {"fc1": nn.Linear(width, 2 * width), "gelu": nn.GELU(), "fc2": nn.Linear(2 * width, width)}
    return nn.Sequential(OrderedDict(parts))


class ImageTransformer(nn.Module):
    """Patches, linear embedding and learned positions, two blocks, mean over tokens, linear head."""

    def __init__(self, shape: Shape, classes: int, width: int = 64, attention: Attention = "softmax") -> None:
        super().__init__()
        channels, *sides = shape
        self.grid = tuple((side // _patch(side), _patch(side)) for side in sides)  # per side: patches, their size
        (rows, p), (columns, q) = self.grid
        if rows * columns < 2:
            rule = "a height or width that is not prime and can be cut into patches"
            raise TDPFedError(f"{shape!r} does not fit transformer. Allowed: {rule}", field="input_shape")
        self.embed = nn.Linear(channels * p * q, width)
        self.position = nn.Parameter(0.02 * torch.randn(rows * columns, width))
        self.block1 = _block(attention, width, rows * columns, causal=False)
        self.block2 = _block(attention, width, rows * columns, causal=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of images ``(B, channels, height, width)``."""
        (rows, p), (columns, q) = self.grid
        x = x.reshape(*x.shape[:2], rows, p, columns, q)
        x = x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        x = self.block2(self.block1(self.embed(x) + self.position))
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


def _patch(side: int) -> int:
    """Return the smallest divisor of ``side`` (at least 2) that gives at most eight patches; 4 for 32 and 28."""
    return next((p for p in range(2, side) if side % p == 0 and side <= 8 * p), side)


class TextTransformer(nn.Module):
    """Embeddings of tokens and of their places, two causal blocks, and logits of the next token at each place."""

    def __init__(self, shape: Shape, tokens: int, width: int = 64, attention: Attention = "softmax") -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.block1 = _block(attention, width, shape[0], causal=True)
        self.block2 = _block(attention, width, shape[0], causal=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next token at each place of sequences ``(B, length)``."""
        length = x.shape[-1]
        later = torch.full((length, length), -torch.inf, dtype=self.position.dtype, device=x.device).triu(1)
        x = self.embed(x) + self.position[:length]
        logits: Tensor = self.head(self.norm(self.block2(self.block1(x, later), later)))
        return logits
