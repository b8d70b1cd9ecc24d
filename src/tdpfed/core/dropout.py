"""Dropout whose draws are a pure function of seed, round, client and step, and so the same wherever they are computed.

A minibatch for training carries the key of its draws: two more columns of every sample. A model that is called on it
drops by that key. Called on samples without a key, as in evaluation, it drops nothing.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tdpfed.core.draws import Stream, key
from tdpfed.core.permutation import MASK, mix
from tdpfed.core.state import Turn
from tdpfed.errors import TDPFedError

COLUMNS = 2
"""The upper and lower half of a 32-bit key: floats of 32 bits hold both exactly."""

HALF = 1 << 16


def is_active(model: nn.Module) -> bool:
    """Whether a layer of the model drops in training; refuse layers whose draws cannot be made by key."""
    found = False
    for name, layer in model.named_modules():
        if not layer.training:
            continue
        inside = isinstance(layer, nn.RNNBase) and layer.dropout > 0 and layer.num_layers > 1
        alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout) and layer.p > 0
        if inside or alpha:
            why = "drops between its own layers" if inside else "does more than drop"
            raise TDPFedError(
                f"layer {name!r} is a {type(layer).__name__} that {why}, whose draws are not reproducible; use "
                "nn.Dropout instead, or call model.eval()",
                field="model",
            )
        drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0
        found |= drops or (isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0)
    return found


def with_key(x: Tensor, dims: int, turn: Turn, step: int | Tensor) -> Tensor:
    """Return a minibatch ``(..., B, *shape)`` of samples of ``dims`` dimensions as rows that end with its key."""
    bits = key(turn.seed, Stream.DROPOUT, turn.round, turn.clients, step).to(x.device)
    halves = torch.stack([bits // HALF, bits % HALF], -1).unsqueeze(-2)
    rows = x.flatten(x.ndim - dims) if dims else x.unsqueeze(-1)
    return torch.cat([rows, halves.expand(*rows.shape[:-1], COLUMNS).to(x.dtype)], -1)


def key_of(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """Return samples ``(B, *shape)`` and the key that they carry; None without one."""
    size = math.prod(shape)
    if tuple(x.shape[1:]) == shape or x.ndim != 2 or x.shape[1] != size + COLUMNS:
        return x, None
    upper, lower = x[0, size:].long().unbind()
    return x[:, :size].reshape(len(x), *shape), upper * HALF + lower


def kept(bits: Tensor, shape: Iterable[int], p: float, call: int) -> Tensor:
    """Return which values of a tensor the ``call``-th dropout of a forward pass keeps: each with probability 1 - p."""
    shape = tuple(shape)
    index = mix(torch.arange(math.prod(shape), device=bits.device).reshape(shape))
    drawn = mix(mix(bits ^ (call * 0x9E3779B1 & MASK)) ^ index)
    return drawn >= int(p * 2**32)


class Drops(TorchFunctionMode):
    """Inside of it every dropout drops by a key, one call after another; without a key none drops anything.

    Attention is written out, so that several clients can be computed at once.
    """

    def __init__(self, bits: Tensor | None) -> None:
        super().__init__()
        self.bits, self.calls, self.attends = bits, 0, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the dropout functions of PyTorch."""
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return self._dropout(_DROPOUTS[func], *args, **given)
        if func in _WHOLE:
            with self:
                return _WHOLE[func](*args, **given)
        if func is functional.scaled_dot_product_attention:
            self.attends = True
            return self._attention(*args, **given)
        return func(*args, **given)

    def _dropout(
        self,
        channels: int | None,
        input: Tensor,  # noqa: A002 - PyTorch's name
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        """Drop single values, or whole channels of the last ``channels`` dimensions."""
        del inplace
        if not training or p == 0 or self.bits is None:
            return input
        shape = input.shape if channels is None else (*input.shape[:-channels], *(1 for _ in range(channels)))
        self.calls += 1
        if p == 1:
            return input * 0
        return torch.where(kept(self.bits, shape, p, self.calls), input / (1 - p), 0)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention whose weights are dropped, written out."""
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (one.repeat_interleave(groups, -3) for one in (key, value))
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(None, scores.softmax(-1), dropout_p) @ value


def _opened(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of PyTorch that a mode sees from the inside: PyTorch hands over such a function whole."""
    assert isinstance(function, FunctionType)
    names = {**vars(functional), "has_torch_function": lambda _: False}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


_WHOLE = {one: _opened(one) for one in (functional.multi_head_attention_forward,)}
"""Functions that drop somewhere inside."""

_DROPOUTS: dict[Callable[..., Any], int | None] = {
    functional.dropout: None,
    functional.dropout1d: 1,
    functional.dropout2d: 2,
    functional.dropout3d: 3,
}
"""The functions that are replaced, and how many dimensions of a channel are dropped together; None: single values."""
