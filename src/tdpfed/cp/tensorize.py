"""Replace the layers of a network by tensorized ones, and back.

Three kinds: CP factors (:mod:`tdpfed.cp.layers`), Tucker and block-term tensors (:mod:`tdpfed.cp.tucker_layers`).
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast, get_args

from torch import Tensor, nn

from tdpfed.core.layout import Layout
from tdpfed.cp.layer_base import Dense, FactoredLayer
from tdpfed.cp.layers import CPConv1d, CPConv2d, CPConv3d, CPLinear
from tdpfed.cp.plan import FactorPlan, selected
from tdpfed.cp.tucker import ranks_for, values
from tdpfed.cp.tucker_layers import TuckerConv1d, TuckerConv2d, TuckerConv3d, TuckerLinear
from tdpfed.errors import TDPFedError

Module = TypeVar("Module", bound=nn.Module)
Kind = Literal["cp", "tucker", "block-term"]
Ranks = int | tuple[int, ...]

LAYERS: dict[type[nn.Module], tuple[type[FactoredLayer], type[FactoredLayer]]] = {
    nn.Linear: (CPLinear, TuckerLinear),
    nn.Conv1d: (CPConv1d, TuckerConv1d),
    nn.Conv2d: (CPConv2d, TuckerConv2d),
    nn.Conv3d: (CPConv3d, TuckerConv3d),
}
"""The twins of each dense layer: with CP factors, and with Tucker blocks."""


def tensorize(
    model: Module,
    compression: float = 2.0,
    *,
    kind: Kind = "cp",
    blocks: int = 4,
    ranks: Mapping[str, Ranks] | None = None,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
    fit: bool = True,
    sweeps: int = 100,
    tol: float = 1e-5,
) -> Module:
    """Return a copy of ``model`` whose Linear and Conv layers are tensorized and fitted to its weights.

    ``kind`` is ``"cp"``, ``"tucker"`` or ``"block-term"`` (a sum of ``blocks`` Tucker tensors). A layer gets the ranks
    that make it ``compression`` times smaller, unless this would not reduce its size; ``ranks`` maps patterns of
    parameter names to other ranks: one number, or for Tucker tensors also one per dimension. ``fit=False`` leaves
    the new layers random, to load a ``state_dict`` into. Other parameters (embeddings, transposed convolutions, tied
    weights, subclasses of those layers) and buffers stay as they are.
    """
    if kind not in get_args(Kind):
        raise TDPFedError(f"kind: {kind!r} given, must be one of {', '.join(get_args(Kind))}")
    if blocks < 1:
        raise TDPFedError(f"blocks: {blocks} given, must be at least 1")
    count = blocks if kind == "block-term" else 1
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    planned = (
        _cp_ranks(shapes, compression, ranks, include, exclude)
        if kind == "cp"
        else _tucker_ranks(shapes, compression, count, ranks, include, exclude)
    )
    owners = Counter(id(weight) for layer in model.modules() for weight in layer.parameters(recurse=False))
    rank_of = {name: planned[name] for name, weight in model.named_parameters() if owners[id(weight)] == 1}

    def swap(name: str, layer: nn.Module) -> nn.Module | None:
        rank = rank_of.get(f"{name}.weight" if name else "weight")
        if rank is None or type(layer) not in LAYERS:
            return None
        dense = cast(Dense, layer)
        new = _empty_like(dense, rank, None if kind == "cp" else count)
        if fit:
            new.fit(dense.weight.detach(), sweeps=sweeps, tol=tol)
        else:
            new.reset_parameters()
        return _finish(new, new.parts, dense.weight.requires_grad, dense)

    return _replace_layers(model, swap)


def densify(model: Module) -> Module:
    """Return a copy of ``model`` with every tensorized layer composed into an ordinary dense one."""

    def swap(_: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, FactoredLayer):
            return None
        weight = layer.weight.detach()
        new = layer.dense().to_empty(device=weight.device).to(weight.dtype)
        new.weight.data.copy_(weight)
        return _finish(new, [new.weight], layer.parts[0].requires_grad, layer)

    return _replace_layers(model, swap)


def _cp_ranks(
    shapes: Mapping[str, tuple[int, ...]],
    compression: float,
    ranks: Mapping[str, Ranks] | None,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
) -> dict[str, Ranks | None]:
    """Return the rank of each parameter by :meth:`FactorPlan.of`; None: stays dense."""
    for pattern, rank in (ranks or {}).items():
        if not isinstance(rank, int):
            raise TDPFedError(f"ranks: {rank} given for {pattern!r}, must be one whole number for CP factors")
    plan = FactorPlan.of(
        shapes, compression, ranks=cast("Mapping[str, int] | None", ranks), include=include, exclude=exclude
    )
    return dict(zip(plan.dense.names, plan.ranks, strict=True))


def _tucker_ranks(
    shapes: Mapping[str, tuple[int, ...]],
    compression: float,
    blocks: int,
    ranks: Mapping[str, Ranks] | None,
    include: str | Sequence[str],
    exclude: str | Sequence[str],
) -> dict[str, Ranks | None]:
    """Return the ranks of each parameter; None: stays dense. One number in ``ranks`` is cut to each dimension."""
    layout = Layout.of(shapes)
    found: dict[str, Ranks | None] = dict.fromkeys(layout.names)
    for name in selected(layout, compression, include, exclude):
        shape = shapes[name]
        mine = ranks_for(shape, compression, blocks)
        if len(shape) > 1 and values(shape, mine, blocks) < math.prod(shape):
            found[name] = mine
    for pattern, given in (ranks or {}).items():
        for name in layout.matching(pattern, "ranks"):
            shape = shapes[name]
            if len(shape) < 2:
                raise TDPFedError(
                    f"ranks: {pattern!r} matches {name!r}, which has fewer than two dimensions and stays dense"
                )
            found[name] = tuple(min(given, size) for size in shape) if isinstance(given, int) else tuple(given)
    return found


def _empty_like(layer: Dense, rank: Ranks, blocks: int | None) -> FactoredLayer:
    """Return a tensorized layer with uninitialized values, created on ``meta`` to draw no random numbers."""
    place: dict[str, Any] = {"device": "meta", "dtype": layer.weight.dtype}
    make: Any = LAYERS[type(layer)][blocks is not None]
    if blocks is not None:
        place["blocks"] = blocks
    bias = layer.bias is not None
    new = (
        make(layer.in_features, layer.out_features, rank, bias, **place)
        if isinstance(layer, nn.Linear)
        else make(
            layer.in_channels, layer.out_channels, layer.kernel_size, rank, layer.stride, layer.padding, layer.dilation,
            layer.groups, bias, layer.padding_mode, **place,
        )
    )  # fmt: skip
    return cast(FactoredLayer, new.to_empty(device=layer.weight.device))


def _finish(new: nn.Module, weights: list[Tensor], trainable: bool, old: nn.Module) -> nn.Module:
    """Copy the bias, ``requires_grad`` and the training mode from ``old``."""
    for weight in weights:
        weight.requires_grad_(trainable)
    if isinstance(old.bias, Tensor) and isinstance(new.bias, Tensor):
        new.bias.data.copy_(old.bias.data)
        new.bias.requires_grad_(old.bias.requires_grad)
    return new.train(old.training)


def _replace_layers(model: Module, swap: Callable[[str, nn.Module], nn.Module | None]) -> Module:
    """Return a copy of ``model`` with layers replaced by the result of ``swap``, if any; shared layers stay shared."""
    model = copy.deepcopy(model)
    replaced = {id(layer): new for name, layer in list(model.named_modules()) if (new := swap(name, layer)) is not None}
    if id(model) in replaced:
        return cast(Module, replaced[id(model)])
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children would yield a shared layer only once
            if id(child) in replaced:
                setattr(parent, name, replaced[id(child)])
    return model
