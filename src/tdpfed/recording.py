"""A gradient recorded once as a graph of tensor operators, put in better order, and replayed.

Recording strips the overhead of the function transforms, which for small models costs as much as the arithmetic. What
is then changed in the graph changes no number: products with 1 go, weight gradients are computed where they belong in
the flat vector instead of being copied there, and on a GPU convolutions become matrix products.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tdpfed.convolution import as_products

Gradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

RECORDINGS = 16
"""Kinds of input a recorded gradient is kept for."""

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.transpose.int)


def replayed(function: Gradient) -> Gradient:
    """Return ``function``, recorded once per kind of input and replayed: the same operations, and so the same bits.

    A function that cannot be recorded (its path depends on values) is called as it is. What a model's ``forward`` does
    outside of tensors happens at recording only. The ``RECORDINGS`` latest kinds are kept.
    """
    recorded: OrderedDict[tuple[object, ...], Gradient] = OrderedDict()

    def record(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # a signature that make_fx can read
        return function(theta, x, y)

    def call(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        kind = tuple((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in (theta, x, y))
        if kind not in recorded:
            try:
                graph = joined_in_place(without_idle(make_fx(record)(theta, x, y)))
                recorded[kind] = as_products(graph) if theta.is_cuda else graph
                recorded[kind](theta, x, y)  # what does not run is not kept
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception:  # whatever stops recording, calling it shows the real error if there is one
                recorded[kind] = function
            if len(recorded) > RECORDINGS:
                recorded.popitem(last=False)
        return recorded[kind](theta, x, y)

    return call


def without_idle(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph without products with 1, which come with every layer's bias."""
    for node in list(module.graph.nodes):
        if node.target is not aten.mul.Scalar or node.args[1] != 1:
            continue
        if node.meta["val"].dtype == node.args[0].meta["val"].dtype:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module


def joined_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded gradient whose parts are written into the flat vector as they come, not joined at the end."""
    graph = module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    cat = output.args[0][0]
    if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or len(cat.users) > 1:
        return module
    shape, begin = cat.meta["val"].shape, 0
    if len(shape) != 2 or cat.args[1:] not in ((1,), (-1,)):
        return module
    parts: Any = cat.args[0]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        given = next(node for node in graph.nodes if node.op == "placeholder")
        room = graph.call_function(torch.empty_like, (given,))
    if given.meta["val"].shape != shape or given.meta["val"].dtype != cat.meta["val"].dtype:
        graph.erase_node(room)
        return module
    for part in parts:
        size, product = part.meta["val"].shape[1], _product(part, shape[0])
        if product is None:
            with graph.inserting_before(cat):
                graph.call_function(_put, (room, begin, part))
        else:
            with graph.inserting_before(product):
                graph.call_function(_multiply_into, (room, begin, *product.args))
        begin += size
    cat.replace_all_uses_with(room)
    idle = [cat]
    while idle:  # only what the join was made of: other nodes without users may write in place
        node = idle.pop()
        if not node.users:
            idle += [given for given in node.all_input_nodes if given.target in (*VIEWS, aten.bmm.default)]
            graph.erase_node(node)
    module.recompile()
    return module


def _product(part: fx.Node, clients: int) -> fx.Node | None:
    """Return the product of matrices, one for each client, that a part is a plain view of; None if there is none."""
    node: Any = part
    turned = False
    while node.target in VIEWS and len(node.users) == 1:
        if node.target is aten.transpose.int:
            if sorted(d % 3 for d in node.args[1:]) != [1, 2] or node.meta["val"].ndim != 3:
                return None
            turned = not turned
        elif turned:
            return None
        node = node.args[0]
    alone = node.target is aten.bmm.default and len(node.users) == 1 and not turned and node is not part
    return node if alone and node.meta["val"].shape[0] == clients else None


def _put(room: Tensor, begin: int, part: Tensor) -> None:
    room.narrow(1, begin, part.shape[1]).copy_(part)


def _multiply_into(room: Tensor, begin: int, a: Tensor, b: Tensor) -> None:
    rows, columns = a.shape[1], b.shape[2]
    torch.bmm(a, b, out=room.narrow(1, begin, rows * columns).view(len(a), rows, columns))
