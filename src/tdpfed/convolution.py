"""Convolutions of many clients as matrix products, for a GPU.

Batched over K clients a convolution becomes one of K groups, for which GPU libraries have slow kernels. Here its
patches are laid out once (``im2col``) and multiplied with all clients' kernels by one batched matrix product; backward
takes the same patches again. :func:`as_products` puts this into a recorded graph in place of the library's operators.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad

Pair = Sequence[int]
aten = torch.ops.aten


def patches(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, groups: int) -> Tensor:
    """Return what each output position sees, ``(G, C kh kw, B Ho Wo)``, of ``x`` ``(B, G C, H, W)``."""
    x = pad(x, (padding[1], padding[1], padding[0], padding[0])).contiguous()
    b, channels, height, width = x.shape
    rows, columns = (
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip((height, width), kernel, stride, dilation, strict=True)
    )
    c, (s0, s1, s2, s3) = channels // groups, x.stride()
    view = x.as_strided(
        (groups, c, *kernel, b, rows, columns),
        (c * s1, s1, dilation[0] * s2, dilation[1] * s3, s0, stride[0] * s2, stride[1] * s3),
    )
    return view.reshape(groups, c * kernel[0] * kernel[1], b * rows * columns)


def forward(cols: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Return the convolution, of shape ``(B, G Co, Ho, Wo)``, from patches and kernels ``(G Co, C, kh, kw)``."""
    groups, depth, _ = cols.shape
    kernels = weight.reshape(groups, -1, depth)
    y = kernels @ cols if bias is None else torch.baddbmm(bias.reshape(groups, -1, 1), kernels, cols)
    b, _, rows, columns = shape
    # Contiguous as the library's own: what follows was recorded with views of that.
    return y.reshape(groups, -1, b, rows, columns).movedim(2, 0).reshape(b, -1, rows, columns).contiguous()


def backward(
    grad: Tensor, cols: Tensor | None, x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair,
    groups: int, wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients ``wanted`` of inputs, kernels and bias."""
    b, channels, rows, columns = grad.shape
    kernel = weight.shape[2:]
    in_x = in_weight = in_bias = None
    if wanted[1]:
        assert cols is not None
        flat = (
            grad.reshape(b, groups, channels // groups, rows * columns).movedim(0, 2).reshape(groups, -1, cols.shape[2])
        )
        in_weight = (flat @ cols.mT).reshape(weight.shape)
    if wanted[2]:
        in_bias = grad.sum((0, 2, 3))
    if wanted[0]:
        back = [k - 1 - p for k, p in zip(kernel, padding, strict=True)]
        if all(one == 1 for one in (*stride, *dilation)) and min(back) >= 0:
            # The convolution of the gradient with the kernels turned round.
            turned = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flip(-1, -2)
            turned = turned.reshape(-1, turned.shape[2], *kernel)
            in_x = forward(patches(grad, kernel, (1, 1), back, (1, 1), groups), turned, None, x.shape)
        else:
            in_x = aten.convolution_backward(
                grad, x, weight, None, stride, padding, dilation, False, [0, 0], groups, [True, False, False]
            )[0]
    return in_x, in_weight, in_bias


def as_products(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph with its two-dimensional convolutions of several groups as matrix products."""
    graph, cols = module.graph, dict[tuple[Any, ...], fx.Node]()
    first = _first_alike(graph)

    def patches_of(x: fx.Node, weight: fx.Node, rest: tuple[Any, ...]) -> fx.Node:
        """Return the node with the patches, which forward and backward share."""
        arguments = (first[x], tuple(weight.meta["val"].shape[2:]), *map(tuple, rest[:3]), rest[3])
        if arguments not in cols:
            cols[arguments] = graph.call_function(patches, arguments)
        return cols[arguments]

    for node in list(graph.nodes):
        if node.target is aten.convolution.default:
            x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
            if groups > 1 and not transposed and len(stride) == 2:
                with graph.inserting_before(node):
                    seen = patches_of(x, weight, (stride, padding, dilation, groups))
                    new = graph.call_function(forward, (seen, weight, bias, tuple(node.meta["val"].shape)))
                node.replace_all_uses_with(new)
                graph.erase_node(node)
        elif node.target is aten.convolution_backward.default:
            grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
            if groups > 1 and not transposed and len(stride) == 2:
                with graph.inserting_before(node):
                    known = patches_of(x, weight, (stride, padding, dilation, groups)) if wanted[1] else None
                    settings = (tuple(stride), tuple(padding), tuple(dilation), groups, tuple(wanted))
                    new = graph.call_function(backward, (grad, known, x, weight, *settings))
                assert all(user.target is operator.getitem for user in node.users)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
    module.recompile()
    return module


def _first_alike(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Return for each node the first that computes the same: the same operator on the same inputs."""
    seen, first = dict[str, fx.Node](), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda given: first[given])
        place = node.name if node.op in ("placeholder", "output") else ""
        first[node] = seen.setdefault(f"{node.op} {node.target} {arguments} {place}", node)
    return first
