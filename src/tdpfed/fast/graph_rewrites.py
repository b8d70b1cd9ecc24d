"""Rewrites of a recorded gradient before it is replayed; they change no result.

Operators without effect are removed: products with 1, views of the same shape. Constants are computed once. Weight
gradients are written directly to their place in the flat vector instead of being copied there; if the gradient is only
used for a step, the matrix products that compute it update the parameters. Consecutive steps in the same memory create
their views of it once.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tdpfed.core.layout import Ranges

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default)
VIEWS = (*RESHAPES, aten.transpose.int)
OF_SHAPES_ALONE = (aten.ones_like.default, aten.zeros_like.default, aten.new_zeros.default)
OF_CONSTANTS = (*VIEWS, aten.neg.default, aten.expand.default, aten.div.Scalar, aten.mul.Scalar)

SHORTCUTS: dict[Any, Callable[..., Any]] = {
    aten.view.default: Tensor.view, aten._unsafe_view.default: Tensor.view, aten.transpose.int: torch.transpose,
    aten.split_with_sizes.default: torch.split_with_sizes, aten.unsqueeze.default: torch.unsqueeze,
    aten.bmm.default: torch.bmm, aten.add.Tensor: torch.add, aten.mul.Tensor: torch.mul, aten.relu.default: torch.relu,
    aten.tanh.default: torch.tanh, aten.neg.default: torch.neg, aten.gather.default: torch.gather,
    aten._log_softmax.default: torch._log_softmax, aten.scatter_add.default: torch.scatter_add,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data, aten.sum.dim_IntList: torch.sum,
    aten.mean.dim: torch.mean,
}  # fmt: skip
"""Faster Python functions for some operators, with the same arguments."""

SMALL_PRODUCT = 1 << 14
"""Number of values below which a product in separate memory is faster than products in place, client by client."""


class Part(NamedTuple):
    """A piece of the flat gradient: where it starts, its node, and the matrix product it is a view of, if any."""

    begin: int
    node: fx.Node
    product: fx.Node | None


def without_unit_products(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph without products with 1, which every layer's bias produces."""
    for node in list(module.graph.nodes):
        unit = node.target is aten.mul.Scalar and node.args[1] == 1
        if unit and node.meta["val"].dtype == node.args[0].meta["val"].dtype:
            _replace(node, node.args[0])
    module.recompile()
    return module


def simplified(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph without views that have no effect, and with shape-dependent constants precomputed.

    Each operator costs a CPU one or two microseconds. A graph that writes in place is returned unchanged.
    """
    graph = module.graph
    if writes(module):
        return module
    for node in list(graph.nodes):
        if node.target in (*RESHAPES, aten.expand.default) and shape_of(node) == shape_of(node.args[0]):
            _replace(node, node.args[0])
        elif node.target is aten.transpose.int and _undoes_transpose(node, node.args[0]):
            _replace(node, node.args[0].args[0])
        elif node.target in RESHAPES and _drops_summed(node, node.args[0]):
            node.args[0].args = node.args[0].args[:2]
            node.args[0].meta = dict(node.meta)
            _replace(node, node.args[0])
    _compute_constants(module)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op == "call_function":
            graph.erase_node(node)
    module.recompile()
    return module


def called_directly(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded graph with faster calls of the same operators; apply this after all other rewrites."""
    for node in module.graph.nodes:
        if not node.kwargs:
            node.target = SHORTCUTS.get(node.target, node.target)
    module.recompile()
    return module


def writes(module: fx.GraphModule) -> bool:
    """Whether a recorded graph modifies a tensor in place."""
    targets: list[Any] = [node.target for node in module.graph.nodes]
    return any(isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable for target in targets)


def joined_in_place(module: fx.GraphModule) -> fx.GraphModule:
    """Return a recorded gradient that writes its parts directly into the flat vector instead of joining them."""
    graph = module.graph
    cat, parts = parts_of(graph)
    given = next(node for node in graph.nodes if node.op == "placeholder")
    if cat is None or len(shape_of(cat)) < 2 or _shape_and_dtype(given) != _shape_and_dtype(cat):
        return module
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        whole = graph.call_function(torch.empty_like, (given,))
    for part in parts:
        if part.product is None:
            with graph.inserting_before(cat):
                graph.call_function(_put, (whole, part.begin, part.node))
        else:
            with graph.inserting_before(part.product):
                graph.call_function(_multiply_into, (whole, part.begin, *part.product.args))
    return without_join(module, cat, whole)


@dataclass(frozen=True)
class InPlace:
    """A recorded step in the memory of theta: views, created once for all steps, and the work of each step."""

    make_views: fx.GraphModule  # theta -> its views
    move: fx.GraphModule  # (x, y, w, pull, lr, *views) -> the loss, and any further outputs
    move_only: fx.GraphModule  # the same without the loss

    def __call__(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor | None, pull: float, lr: float
    ) -> tuple[Tensor, Tensor]:
        """Move ``theta`` to ``theta + pull (w - theta) - lr g``, or to ``theta - lr g`` if ``w`` is None."""
        return theta, self.move(x, y, w, pull, lr, *self.make_views(theta))


def stepping(module: fx.GraphModule, only: Ranges | None = None) -> InPlace | None:
    """Return a recorded gradient as a step in the memory of theta, which is taken after everything else.

    With ``only``, the parts in these ranges alone are computed and moved. None if the gradient is not a join of parts,
    or if the step could change a part before it is used.
    """
    graph = module.graph
    cat, parts = separate_parts(module)
    if cat is None:
        return None
    given = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(given[-1]):
        lr, pull, w = (graph.placeholder(name) for name in ("lr", "pull", "w"))  # inserted in reverse order
    with graph.inserting_before(next(node for node in graph.nodes if node.op == "output")):
        graph.call_function(pull_, (given[0], w, pull, only))
        for part in parts:
            if only is None or any(begin <= part.begin < end for begin, end in only):
                subtract_(graph, given[0], part, lr)
    return in_place(without_join(module, cat, given[0]), given[0])


def in_place(module: fx.GraphModule, theta: fx.Node) -> InPlace:
    """Split a recorded step, which returns (theta, loss, ...), into views of theta and the work of a step."""
    viewed: dict[fx.Node, fx.Node] = {}
    make_views, move, move_only = fx.Graph(), fx.Graph(), fx.Graph()
    views = views_of(theta)
    for node in module.graph.nodes:
        if node is theta or (node in views and viewed.keys() >= set(node.all_input_nodes)):
            viewed[node] = make_views.node_copy(node, viewed.__getitem__)
    shared = [node for node in viewed if any(user not in viewed for user in node.users)]
    make_views.output(tuple(viewed[node] for node in shared))
    for graph in (move, move_only):
        rest = [node for node in module.graph.nodes if node not in viewed]
        known = {node: graph.node_copy(node) for node in rest if node.op == "placeholder"}
        known |= {node: graph.placeholder(f"view_{number}") for number, node in enumerate(shared)}
        for node in (one for one in rest if one.op not in ("placeholder", "output")):
            known[node] = graph.node_copy(node, known.__getitem__)
        answer: Any = next(node for node in rest if node.op == "output").args[0]
        outputs = [known[node] for node in answer[1 if graph is move else 2 :]]
        graph.output(tuple(outputs) if len(outputs) > 1 else outputs[0] if outputs else None)
        for node in reversed(graph.nodes):
            if not node.users and node.op in ("call_function", "get_attr") and node.target not in WRITERS:
                graph.erase_node(node)
    return InPlace(*(called_directly(fx.GraphModule(module, graph)) for graph in (make_views, move, move_only)))


def subtract_(graph: fx.Graph, theta: fx.Node, part: Part, lr: fx.Node) -> None:
    """Subtract a piece of the gradient, times ``lr``, in the memory of theta."""
    shape = shape_of(part.node)[-1:] if part.product is None else shape_of(part.product)[1:]
    place = graph.call_function(place_in, (theta, part.begin, shape))
    given = (part.node,) if part.product is None else part.product.args
    graph.call_function(_subtract if part.product is None else _subtract_product, (place, *given, lr))


def separate_parts(module: fx.GraphModule) -> tuple[fx.Node | None, list[Part]]:
    """Return :func:`parts_of` a gradient if theta may be updated in place with it; otherwise None and no parts."""
    cat, parts = parts_of(module.graph)
    theta = next(node for node in module.graph.nodes if node.op == "placeholder")
    if cat is None or writes(module) or _shape_and_dtype(theta) != _shape_and_dtype(cat):
        return None, []
    own = views_of(theta)
    if any(node in own for part in parts for node in (part.node, *(part.product.args if part.product else ()))):
        return None, []
    return cat, parts


def parts_of(graph: fx.Graph) -> tuple[fx.Node | None, list[Part]]:
    """Return the node that joins the flat gradient, ``(K, P)`` of many clients or ``(P,)``, and its parts."""
    output = next(node for node in graph.nodes if node.op == "output")
    cat = output.args[0][0]
    if not isinstance(cat, fx.Node) or cat.target is not aten.cat.default or len(cat.users) > 1:
        return None, []
    last = len(shape_of(cat)) - 1
    dim: Any = cat.args[1] if len(cat.args) > 1 else 0
    if last > 1 or dim not in (last, -1):
        return None, []
    nodes: Any = cat.args[0]
    parts, begin = [], 0
    for node in nodes:
        parts.append(Part(begin, node, _product(node, shape_of(cat)[0]) if last else None))
        begin += shape_of(node)[last]
    return cat, parts


def _product(part: fx.Node, clients: int) -> fx.Node | None:
    """Return the batched matrix product, one matrix per client, that a part is a view of; None if there is none."""
    node: Any = part
    transposed = False
    while node.target in VIEWS and len(node.users) == 1:
        if node.target is aten.transpose.int:
            if sorted(d % 3 for d in node.args[1:]) != [1, 2] or node.meta["val"].ndim != 3:
                return None
            transposed = not transposed
        elif transposed:
            return None
        node = node.args[0]
    alone = node.target is aten.bmm.default and len(node.users) == 1 and not transposed and node is not part
    return node if alone and shape_of(node)[0] == clients else None


def views_of(given: fx.Node) -> set[fx.Node]:
    """Return the nodes that share the memory of a given tensor."""
    views = {given}
    for node in given.graph.nodes:
        target: Any = node.target
        is_view = target in (operator.getitem, place_in, *RESHAPES)
        if isinstance(target, torch._ops.OpOverload):
            is_view = is_view or any(argument.alias_info is not None for argument in target._schema.arguments)
        if is_view and not views.isdisjoint(node.all_input_nodes):
            views.add(node)
    return views


def without_join(module: fx.GraphModule, cat: fx.Node, whole: fx.Node) -> fx.GraphModule:
    """Replace the joined vector by ``whole``, and remove the join with its inputs."""
    cat.replace_all_uses_with(whole, delete_user_cb=lambda user: user.op == "output")
    remove(cat)
    module.recompile()
    return module


def remove(node: fx.Node) -> None:
    """Remove an unused node, and the views and products that only it used."""
    unused = [node]
    while unused:  # only these: another node without users may write in place
        node = unused.pop()
        if not node.users:
            unused += [given for given in node.all_input_nodes if given.target in (*VIEWS, aten.bmm.default)]
            node.graph.erase_node(node)


def _compute_constants(module: fx.GraphModule) -> None:
    """Replace each node that depends only on shapes, and that another node uses, by a tensor."""
    graph, known = module.graph, dict[fx.Node, Tensor]()
    operators: dict[fx.Node, Callable[..., Tensor]] = {
        node: node.target for node in graph.nodes if node.op == "call_function"
    }
    for node in list(graph.nodes):
        if node.target in OF_SHAPES_ALONE:
            like = node.meta["val"]
            fill = torch.ones if node.target is aten.ones_like.default else torch.zeros
            known[node] = fill(like.shape, dtype=like.dtype, device=like.device)
        elif node.target in OF_CONSTANTS and node.args[0] in known and not node.kwargs:
            known[node] = operators[node](known[node.args[0]], *node.args[1:])
    for number, (node, value) in enumerate(known.items()):
        if all(user in known for user in node.users):
            continue
        module.register_buffer(f"constant{number}", value, persistent=False)
        with graph.inserting_before(node):
            there = graph.get_attr(f"constant{number}")
        there.meta = dict(node.meta)
        node.replace_all_uses_with(there, delete_user_cb=lambda user: user not in known)


def _drops_summed(node: fx.Node, total: Any) -> bool:
    """Whether a view only drops the dimensions that a sum with ``keepdim`` has kept."""
    if total.target is not aten.sum.dim_IntList or total.args[2:] != (True,) or len(total.users) > 1:
        return False
    shape = shape_of(total)
    summed = {d % len(shape) for d in total.args[1]}
    return bool(summed) and shape_of(node) == tuple(size for d, size in enumerate(shape) if d not in summed)


def _undoes_transpose(node: fx.Node, before: fx.Node) -> bool:
    return before.target is aten.transpose.int and node.args[1:] == before.args[1:]


def _replace(node: fx.Node, by: fx.Node) -> None:
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def shape_of(node: Any) -> tuple[int, ...]:
    """Return the shape of a node's result."""
    return tuple(node.meta["val"].shape)


def _shape_and_dtype(node: fx.Node) -> tuple[object, ...]:
    return shape_of(node), node.meta["val"].dtype


def _put(whole: Tensor, begin: int, part: Tensor) -> None:
    whole.narrow(1, begin, part.shape[1]).copy_(part)


def _multiply_into(whole: Tensor, begin: int, a: Tensor, b: Tensor) -> None:
    rows, columns = a.shape[1], b.shape[2]
    torch.bmm(a, b, out=whole.narrow(1, begin, rows * columns).view(len(a), rows, columns))


def pull_(theta: Tensor, w: Tensor | None, pull: float, only: Ranges | None = None) -> None:
    """Move theta, or with ``only`` these ranges of it, towards ``w``, if given."""
    if w is not None and only is None:
        theta.lerp_(w, pull)
    elif w is not None:
        for begin, end in only or ():
            theta[..., begin:end].lerp_(w[..., begin:end], pull)


def place_in(theta: Tensor, begin: int, shape: tuple[int, ...]) -> Tensor:
    """Return a view of each client's values from ``begin`` on in theta."""
    return theta.narrow(-1, begin, math.prod(shape)).view(*theta.shape[:-1], *shape)


def _subtract(place: Tensor, part: Tensor, lr: float) -> None:
    place.sub_(part, alpha=lr)


def _subtract_product(place: Tensor, a: Tensor, b: Tensor, lr: float) -> None:
    if place.shape[1] * place.shape[2] < SMALL_PRODUCT:
        place.sub_(torch.bmm(a, b), alpha=lr)
    else:
        place.baddbmm_(a, b, alpha=-lr)


WRITERS = (pull_, _subtract, _subtract_product)
