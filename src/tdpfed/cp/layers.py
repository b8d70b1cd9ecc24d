"""Tensorized layers: weights stored as CP factors, forward computed in factor space (section IV-B).

There is a factor ``A1, A2, ...`` for each dimension of the dense weight, in PyTorch's order: output channels, input
channels, then the kernel's axes. (The paper writes the kernel first: its A3 and A4 are our A2 and A1.) ``layer.weight``
composes the dense weight, so code that reads it keeps working. :func:`tensorize` puts such layers into a copy of any
model, :func:`densify` replaces them by dense ones. ``state_dict`` has the names of :class:`~tdpfed.cp.plan.FactorPlan`.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tdpfed import cp
from tdpfed.cp.plan import FactorPlan

Module = TypeVar("Module", bound=nn.Module)
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


class _CPLayer(nn.Module):
    """Factors ``A1..AN`` of a dense weight, and a bias; ``template`` is the dense layer it replaces, on ``meta``."""

    bias: nn.Parameter | None

    def __init__(self, template: nn.Linear | Convolution, rank: int, device: Any, dtype: Any) -> None:
        super().__init__()
        cp.check_rank(rank)
        self.rank = rank
        self.order = template.weight.ndim
        for n, size in enumerate(template.weight.shape, 1):
            self.register_parameter(f"A{n}", nn.Parameter(torch.empty(size, rank, device=device, dtype=dtype)))
        bias = (
            None
            if template.bias is None
            else nn.Parameter(torch.empty(len(template.weight), device=device, dtype=dtype))
        )
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors whose composed weight has the variance of PyTorch's default, ``1 / (3 fan_in)``."""
        fan_in = math.prod(factor.shape[0] for factor in self.factors[1:])
        std = (1 / (3 * fan_in * self.rank)) ** (0.5 / self.order)
        for factor in self.factors:
            nn.init.normal_(factor, std=std)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    @property
    def factors(self) -> list[Tensor]:
        """The factor matrices ``(I_n, R)``, in the order of the dense weight's dimensions."""
        return [cast(Tensor, getattr(self, f"A{n}")) for n in range(1, self.order + 1)]

    @property
    def weight(self) -> Tensor:
        """The composed dense weight."""
        return cp.compose(self.factors)


class CPLinear(_CPLayer):
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
        super().__init__(nn.Linear(in_features, out_features, bias, device="meta"), rank, device, dtype)
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(..., in_features)``."""
        a_out, a_in = self.factors
        return F.linear(F.linear(x, a_in.mT), a_out, self.bias)

    def dense(self) -> nn.Linear:
        """Return an empty dense layer of the same shape."""
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")

    def extra_repr(self) -> str:
        """Show sizes and rank."""
        return f"{self.in_features}, {self.out_features}, rank={self.rank}, bias={self.bias is not None}"


class _CPConv(_CPLayer):
    """A convolution as the paper's series: 1x1 in, one depthwise convolution per axis, 1x1 out (eqs. 8 to 11).

    A grouped convolution composes its kernel first, because its groups cannot share the 1x1 convolutions.
    """

    _dense: type[Convolution]
    _conv: Callable[..., Tensor]

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
        make = cast(Callable[..., Convolution], self._dense)
        template = make(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device="meta"
        )
        super().__init__(template, rank, device, dtype)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride, self.dilation = template.kernel_size, template.stride, template.dilation
        self.padding, self.padding_mode, self.groups = template.padding, template.padding_mode, groups
        self._wrap = list(template._reversed_padding_repeated_twice)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``(batch, in_channels, *space)``."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._wrap, mode=self.padding_mode), "valid"
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

    def dense(self) -> Convolution:
        """Return an empty dense layer of the same shape."""
        make = cast(Callable[..., Convolution], self._dense)
        return make(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation,
            self.groups, self.bias is not None, self.padding_mode, device="meta",
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show sizes and rank."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, rank={self.rank}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, groups={self.groups}, "
            f"bias={self.bias is not None}"
        )


class CPConv1d(_CPConv):
    """:class:`torch.nn.Conv1d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv1d, staticmethod(F.conv1d)


class CPConv2d(_CPConv):
    """:class:`torch.nn.Conv2d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv2d, staticmethod(F.conv2d)


class CPConv3d(_CPConv):
    """:class:`torch.nn.Conv3d` with CP factors; ``rank`` follows ``kernel_size``."""

    _dense, _conv = nn.Conv3d, staticmethod(F.conv3d)


def tensorize(
    model: Module,
    compression: float = 2.0,
    *,
    ranks: Mapping[str, int] | None = None,
    include: str | Sequence[str] = ("*",),
    exclude: str | Sequence[str] = (),
    fit: bool = True,
    sweeps: int = 100,
    tol: float = 1e-5,
) -> Module:
    """Return a copy of ``model`` whose Linear and Conv layers are tensorized and fitted to its weights by ALS.

    Ranks follow :meth:`FactorPlan.of`. ``fit=False`` leaves the new factors random, to load a ``state_dict``
    into. Other parameters (embeddings, transposed convolutions, tied weights, subclasses of those layers) stay dense.
    """
    plan = FactorPlan.of(model, compression, ranks=ranks, include=include, exclude=exclude)
    owners = Counter(id(weight) for layer in model.modules() for weight in layer.parameters(recurse=False))
    rank_of = {
        name: rank
        for (name, weight), rank in zip(model.named_parameters(), plan.ranks, strict=True)
        if owners[id(weight)] == 1
    }

    def swap(name: str, layer: nn.Module) -> nn.Module | None:
        rank = rank_of.get(f"{name}.weight" if name else "weight")
        if rank is None or type(layer) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return None
        dense = cast(nn.Linear | Convolution, layer)
        new = _empty_like(dense, rank)
        if fit:
            fitted = cp.decompose(dense.weight.detach(), rank, sweeps=sweeps, tol=tol)
            for factor, value in zip(new.factors, fitted, strict=True):
                factor.data.copy_(value)
        else:
            new.reset_parameters()
        return _finish(new, new.factors, dense.weight.requires_grad, dense)

    return _replace_layers(model, swap)


def densify(model: Module) -> Module:
    """Return a copy of ``model`` with every tensorized layer composed into an ordinary dense one."""

    def swap(_: str, layer: nn.Module) -> nn.Module | None:
        if not isinstance(layer, CPLinear | _CPConv):
            return None
        weight = layer.weight.detach()
        new = layer.dense().to_empty(device=weight.device).to(weight.dtype)
        new.weight.data.copy_(weight)
        return _finish(new, [new.weight], layer.factors[0].requires_grad, layer)

    return _replace_layers(model, swap)


def _empty_like(layer: nn.Linear | Convolution, rank: int) -> CPLinear | _CPConv:
    """Return a tensorized layer with uninitialized values, created on ``meta`` to draw no random numbers."""
    bias, place = layer.bias is not None, {"device": "meta", "dtype": layer.weight.dtype}
    new: CPLinear | _CPConv
    if isinstance(layer, nn.Linear):
        new = CPLinear(layer.in_features, layer.out_features, rank, bias, **place)
    else:
        new = {nn.Conv1d: CPConv1d, nn.Conv2d: CPConv2d, nn.Conv3d: CPConv3d}[type(layer)](
            layer.in_channels, layer.out_channels, layer.kernel_size, rank, layer.stride, layer.padding, layer.dilation,
            layer.groups, bias, layer.padding_mode, **place,
        )  # fmt: skip
    return new.to_empty(device=layer.weight.device)


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
