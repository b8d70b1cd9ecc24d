"""Small models with every kind of layer, and data of every kind of task, for the tests of what works."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdpfed import Federation
from tdpfed.cp.layers import CPConv2d, CPLinear

CLIENTS = 3
PER_CLIENT = 16  # 12 for training
IMAGE, FLAT, SEQUENCE, VOLUME, TEXT = (2, 6, 6), (6,), (5, 4), (1, 4, 4, 4), (5,)
CLASSES, TOKENS = 3, 7


class Last(nn.Module):
    """The last step of a recurrent layer's output."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0][:, -1]


class Every(nn.Module):
    """Every step of a recurrent layer's output."""

    def forward(self, found: tuple[Tensor, Any]) -> Tensor:
        return found[0]


class Attends(nn.Module):
    """Self-attention, and the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return found.mean(1)


class Cells(nn.Module):
    """A recurrent cell, called step by step."""

    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell]) -> None:
        super().__init__()
        self.cell = kind(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        found: Tensor = state[0] if isinstance(state, tuple) else state
        return found


class Paired(nn.Module):
    """A bilinear layer of both halves of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(3, 3, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.both(x[:, :3], x[:, 3:])
        return found


class Case(NamedTuple):
    """A layer inside a small network, and the shape of its samples; token ids if that is so."""

    layers: Callable[[], list[nn.Module]]
    shape: tuple[int, ...] = FLAT
    alone: bool = False  # clients are computed one after another


def head(inputs: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(inputs, CLASSES)]


LAYERS: dict[str, Case] = {
    "Linear": Case(lambda: [nn.Linear(6, 5), nn.Tanh(), *head(5)]),
    "Bilinear": Case(lambda: [Paired(), *head(4)], alone=True),
    "Conv1d": Case(lambda: [nn.Conv1d(5, 4, 3, padding=1), nn.ReLU(), *head(16)], SEQUENCE),
    "Conv2d": Case(lambda: [nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), *head(16)], IMAGE),
    "Conv2d in groups": Case(lambda: [nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), *head(64)], IMAGE),
    "Conv3d": Case(lambda: [nn.Conv3d(1, 2, 3), nn.ReLU(), *head(16)], VOLUME),
    "ConvTranspose2d": Case(lambda: [nn.ConvTranspose2d(2, 1, 2, stride=2), nn.ReLU(), *head(144)], IMAGE),
    "MaxPool2d": Case(lambda: [nn.MaxPool2d(2), *head(18)], IMAGE),
    "AvgPool2d": Case(lambda: [nn.AvgPool2d(2), *head(18)], IMAGE),
    "AdaptiveAvgPool2d": Case(lambda: [nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), *head(4)], IMAGE),
    "Upsample": Case(lambda: [nn.Upsample(scale_factor=2), *head(288)], IMAGE),
    "PixelShuffle": Case(lambda: [nn.Conv2d(2, 4, 3), nn.PixelShuffle(2), *head(64)], IMAGE),
    "LayerNorm": Case(lambda: [nn.Linear(6, 5), nn.LayerNorm(5), *head(5)]),
    "RMSNorm": Case(lambda: [nn.Linear(6, 5), nn.RMSNorm(5), *head(5)]),
    "GroupNorm": Case(lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), *head(64)], IMAGE),
    "InstanceNorm2d": Case(lambda: [nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), *head(64)], IMAGE),
    "PReLU": Case(lambda: [nn.Linear(6, 5), nn.PReLU(5), *head(5)]),
    "GELU": Case(lambda: [nn.Linear(6, 5), nn.GELU(), *head(5)]),
    "Embedding": Case(lambda: [nn.Embedding(TOKENS, 4), *head(20)], TEXT),
    "EmbeddingBag": Case(lambda: [nn.EmbeddingBag(TOKENS, 4), *head(4)], TEXT, alone=True),
    "MultiheadAttention": Case(lambda: [Attends(), *head(4)], SEQUENCE),
    "TransformerEncoderLayer": Case(
        lambda: [nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), *head(20)], SEQUENCE
    ),
    "LSTM": Case(lambda: [nn.LSTM(4, 5, batch_first=True), Last(), *head(5)], SEQUENCE, alone=True),
    "LSTM of two layers, both ways": Case(
        lambda: [nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), Last(), *head(6)], SEQUENCE, alone=True
    ),
    "GRU": Case(lambda: [nn.GRU(4, 5, batch_first=True), Last(), *head(5)], SEQUENCE, alone=True),
    "RNN": Case(lambda: [nn.RNN(4, 5, batch_first=True), Last(), *head(5)], SEQUENCE, alone=True),
    "LSTMCell": Case(lambda: [Cells(nn.LSTMCell), *head(5)], SEQUENCE, alone=True),
    "GRUCell": Case(lambda: [Cells(nn.GRUCell), *head(5)], SEQUENCE, alone=True),
    "CPLinear": Case(lambda: [CPLinear(6, 5, rank=2), nn.Tanh(), *head(5)]),
    "CPConv2d": Case(lambda: [CPConv2d(2, 4, 3, rank=2), nn.ReLU(), *head(64)], IMAGE),
}
"""Layers by name, each in a small network that ends in three classes."""


def network(name: str) -> nn.Module:
    """Return the network of a layer, with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(7)
        return nn.Sequential(*LAYERS[name].layers()).double()


def owners() -> Tensor:
    return torch.arange(CLIENTS).repeat_interleave(PER_CLIENT)


def samples(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Return inputs for all clients: token ids for text, otherwise floats."""
    generator = torch.Generator().manual_seed(seed)
    if shape == TEXT:
        return torch.randint(TOKENS, (len(owners()), *shape), generator=generator)
    return torch.randn(len(owners()), *shape, generator=generator, dtype=torch.float64)


def federation(x: Any, y: Tensor, **more: Any) -> Federation:
    """Return the federation of samples with targets, as float64."""
    return Federation.from_tensors(x, y, owners(), dtype=torch.float64, **more)


def classes(shape: tuple[int, ...]) -> Federation:
    return federation(samples(shape), torch.arange(len(owners())) % CLASSES)
