"""Convolutions of many clients as matrix products, for a GPU.

Batched over K clients, a convolution becomes a grouped convolution of K groups, for which GPU libraries have slow
kernels. Here its patches are laid out once (``im2col``) and multiplied by all clients' kernels in one batched matrix
product; the backward pass reuses them. :func:`as_products` replaces the library's operators in a recorded graph.
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

KERNEL_DTYPES = (torch.float32, torch.bfloat16)
"""Types that our own GPU kernels support."""


class Geometry(NamedTuple):
    """The geometry of a grouped two-dimensional convolution."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    output: Pair

    @property
    def positions(self) -> int:
        """The number of output positions per image."""
        return self.output[0] * self.output[1]


def patches(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the input patch of each output position, ``(G, C kh kw, B Ho Wo)``, for ``x`` ``(B, G C, H, W)``."""
    if kernels := kernels_for(x, dtypes=KERNEL_DTYPES):
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
    """Apply the transpose of :func:`patches`: sum values ``(G, C kh kw, B Ho Wo)`` into the pixels they belong to."""
    if kernels := kernels_for(cols, dtypes=KERNEL_DTYPES):
        own: Tensor = kernels.put_back(cols, shape, geometry)
        return own
    b, channels, height, width = shape
    # The columns that PyTorch's fold expects, for each client and image.
    cols = cols.reshape(geometry.groups, -1, b, geometry.positions).movedim(2, 1).flatten(0, 1)
    folded = fold(cols, (height, width), geometry.kernel, geometry.dilation, geometry.padding, geometry.stride)
    return folded.reshape(geometry.groups, b, -1, height, width).movedim(1, 0).reshape(b, channels, height, width)


def forward(cols: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Return the convolution, of shape ``(B, G Co, Ho, Wo)``, from patches and kernels ``(G Co, C, kh, kw)``."""
    groups, depth, _ = cols.shape
    kernels = weight.reshape(groups, -1, depth)
    y = kernels @ cols if bias is None else torch.baddbmm(bias.reshape(groups, -1, 1), kernels, cols)
    b, _, rows, columns = shape
    # Contiguous like the library's output: the operators that follow were recorded with views of it.
    return y.reshape(groups, -1, b, rows, columns).movedim(2, 0).reshape(b, -1, rows, columns).contiguous()


def backward(
    grad: Tensor, cols: Tensor | None, shape: Sequence[int], weight: Tensor, geometry: Geometry, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the inputs (of the given ``shape``), kernels and bias that are ``wanted``."""
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
    """Return a recorded graph with its grouped two-dimensional convolutions replaced by matrix products."""
    graph, cols = module.graph, dict[tuple[Any, ...], fx.Node]()
    first = _first_equal(graph)

    def patches_of(x: fx.Node, geometry: Geometry) -> fx.Node:
        """Return the node of the patches, which the forward and backward pass share."""
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


def _first_equal(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the first node that applies the same operator to the same inputs."""
    seen, first = dict[str, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda given: first[given])
        place = node.name if node.op in ("placeholder", "output") else ""
        first[node] = seen.setdefault(f"{node.op} {node.target} {arguments} {place}", node)
    return first
