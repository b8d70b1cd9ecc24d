"""Convolutions of many clients as matrix products, for a GPU.

Batched over K clients a convolution becomes one of K groups, for which GPU libraries have slow kernels. Here its
patches are laid out once (``im2col``) and multiplied with all clients' kernels by one batched matrix product; backward
takes the same patches again. :func:`as_products` puts this into a recorded graph in place of the library's operators.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn.functional import fold, pad

from tdpfed.fast.gpu import kernels_for

Pair = tuple[int, ...]
aten = torch.ops.aten

SHORT = (torch.float32, torch.bfloat16)
"""Numbers that our own kernels take."""


class Geometry(NamedTuple):
    """Where a two-dimensional convolution of several groups looks."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    output: Pair

    @property
    def positions(self) -> int:
        """How many places of an image it gives a value for."""
        return self.output[0] * self.output[1]


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Return what each output position sees, ``(G, C kh kw, B Ho Wo)``, of ``x`` ``(B, G C, H, W)``."""
    if kernels := kernels_for(x, dtypes=SHORT):
        own: Tensor = kernels.patches(x, geometry)
        return own
    down, right = geometry.padding
    x = pad(x, (right, right, down, down)).contiguous()
    (b, channels, _, _), (s0, s1, s2, s3) = x.shape, x.stride()
    c, stride, dilation, kernel = channels // geometry.groups, geometry.stride, geometry.dilation, geometry.kernel
    view = x.as_strided(
        (geometry.groups, c, *kernel, b, *geometry.output),
        (c * s1, s1, dilation[0] * s2, dilation[1] * s3, s0, stride[0] * s2, stride[1] * s3),
    )
    return view.reshape(geometry.groups, c * kernel[0] * kernel[1], b * geometry.positions)


def put_back(cols: Tensor, shape: Sequence[int], geometry: Geometry) -> Tensor:
    """Return the transpose of :func:`patches`: values ``(G, C kh kw, B Ho Wo)`` summed where they were seen."""
    if kernels := kernels_for(cols, dtypes=SHORT):
        own: Tensor = kernels.put_back(cols, shape, geometry)
        return own
    b, channels, height, width = shape
    # Of each client and image the columns that PyTorch's fold expects.
    cols = cols.reshape(geometry.groups, -1, b, geometry.positions).movedim(2, 1).flatten(0, 1)
    folded = fold(cols, (height, width), geometry.kernel, geometry.dilation, geometry.padding, geometry.stride)
    return folded.reshape(geometry.groups, b, -1, height, width).movedim(1, 0).reshape(b, channels, height, width)


def forward(cols: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Return the convolution, of shape ``(B, G Co, Ho, Wo)``, from patches and kernels ``(G Co, C, kh, kw)``."""
    groups, depth, _ = cols.shape
    kernels = weight.reshape(groups, -1, depth)
    y = kernels @ cols if bias is None else torch.baddbmm(bias.reshape(groups, -1, 1), kernels, cols)
    b, _, rows, columns = shape
    # Contiguous as the library's own: what follows was recorded with views of that.
    return y.reshape(groups, -1, b, rows, columns).movedim(2, 0).reshape(b, -1, rows, columns).contiguous()


def backward(
    grad: Tensor, cols: Tensor | None, shape: Sequence[int], weight: Tensor, geometry: Geometry, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients ``wanted`` of inputs of ``shape``, kernels and bias."""
    b, channels, _, _ = grad.shape
    groups = geometry.groups
    flat = grad.reshape(b, groups, channels // groups, -1).movedim(0, 2).reshape(groups, channels // groups, -1)
    in_x = in_weight = in_bias = None
    if wanted[0]:
        in_x = put_back(weight.reshape(groups, channels // groups, -1).mT @ flat, shape, geometry)
    if wanted[1]:
        assert cols is not None
        in_weight = (flat @ cols.mT).reshape(weight.shape)
    if wanted[2]:
        in_bias = flat.sum(-1).reshape(-1)
    return in_x, in_weight, in_bias


def as_products(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph with its two-dimensional convolutions of several groups as matrix products."""
    graph, cols = module.graph, dict[tuple[Any, ...], fx.Node]()
    first = _first_alike(graph)

    def patches_of(x: fx.Node, geometry: Geometry) -> fx.Node:
        """Return the node with the patches, which forward and backward share."""
        if (first[x], geometry) not in cols:
            cols[first[x], geometry] = graph.call_function(patches, (first[x], geometry))
        return cols[first[x], geometry]

    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
            if groups > 1 and not transposed and len(stride) == 2:
                shape = tuple(node.meta["val"].shape)
                geometry = _geometry(weight, stride, padding, dilation, groups, shape)
                with graph.inserting_before(node):
                    new = graph.call_function(forward, (patches_of(x, geometry), weight, bias, shape))
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        elif node.target is aten.convolution_backward.default:
            grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
            if groups > 1 and not transposed and len(stride) == 2:
                geometry = _geometry(weight, stride, padding, dilation, groups, grad.meta["val"].shape)
                with graph.inserting_before(node):
                    known = patches_of(x, geometry) if wanted[1] else None
                    shape = tuple(x.meta["val"].shape)
                    new = graph.call_function(backward, (grad, known, shape, weight, geometry, tuple(wanted)))
                assert all(user.target is operator.getitem for user in node.users)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
    module.recompile()
    return module


def _geometry(weight: fx.Node, stride: Pair, padding: Pair, dilation: Pair, groups: int, shape: Pair) -> Geometry:
    kernel = tuple(weight.meta["val"].shape[2:])
    return Geometry(kernel, tuple(stride), tuple(padding), tuple(dilation), groups, tuple(shape[2:]))


def _first_alike(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the first that computes the same: the same operator on the same inputs."""
    seen, first = dict[str, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda given: first[given])
        place = node.name if node.op in ("placeholder", "output") else ""
        first[node] = seen.setdefault(f"{node.op} {node.target} {arguments} {place}", node)
    return first
