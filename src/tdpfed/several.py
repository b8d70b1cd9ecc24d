"""Several steps on one minibatch, in which the weights of the first layer are touched once.

Where a linear layer's inputs X are the data themselves, a step moves its weights W towards V and along X alone:
``W' = W + pull (V - W) - lr D^T X``, where D is the gradient in its outputs. So these, ``Z = X W^T``, follow without W:
``Z' = Z + pull (X V^T - Z) - lr (X X^T) D``. Here ``X X^T`` is as small as the minibatch. After the last step one
product brings W up to date. In exact arithmetic these are the steps themselves.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from tdpfed.rewriting import (
    Part,
    aten,
    called_directly,
    pull_,
    remove,
    separate_parts,
    shape_of,
    subtract_,
    views_of,
    without_join,
)

WIDE = 8
"""Inputs per sample of a minibatch from which it is less work."""


class FirstLayer(NamedTuple):
    """A recorded gradient without its first layer, and where the weights of that lie in theta."""

    graph: fx.GraphModule  # (theta, x, y, z, w, pull, lr) to (theta, loss, gradient in z)
    begin: int
    outputs: int
    inputs: int

    def steps(
        self, theta: Tensor, x: Tensor, y: Tensor, w: Tensor, pull: float, lr: float, count: int
    ) -> tuple[Tensor, Tensor]:
        """Take ``count`` steps ``theta + pull (w - theta) - lr g`` in the memory of ``theta``; return the last loss."""
        inputs = x.reshape(*x.shape[:2], self.inputs)
        weights, anchor = (self._weights(flat) for flat in (theta, w))
        z, aim, gram = (torch.bmm(inputs, other.mT) for other in (weights, anchor, inputs))
        along = torch.zeros_like(z)
        for _ in range(count):
            theta, loss, in_z = self.graph(theta, x, y, z, w, pull, lr)
            z = torch.lerp(z, aim, pull).baddbmm_(gram, in_z, alpha=-lr)
            along.mul_(1 - pull).add_(in_z)
        weights.lerp_(anchor, 1 - (1 - pull) ** count).baddbmm_(along.mT, inputs, alpha=-lr)
        return theta, loss

    def _weights(self, flat: Tensor) -> Tensor:
        size = self.outputs * self.inputs
        return flat.narrow(1, self.begin, size).view(len(flat), self.outputs, self.inputs)


def first_layer(module: fx.GraphModule) -> FirstLayer | None:
    """Return a recorded gradient cut at its first layer; None where that is no linear layer of many inputs."""
    graph = module.graph
    cat, parts = separate_parts(module)
    theta, x, y = (node for node in graph.nodes if node.op == "placeholder")
    data = views_of(x)
    found = next((cut for part in parts if (cut := _cut(theta, part, data)) is not None), None)
    if cat is None or found is None:
        return None
    first, outputs, in_outputs = found
    (_, samples, wide), size = shape_of(outputs.args[0]), shape_of(first.node)[1]
    if wide < WIDE * samples:
        return None
    with graph.inserting_after(y):
        lr, pull, w, z = (graph.placeholder(name) for name in ("lr", "pull", "w", "z"))  # each before the last one
    z.meta = dict(outputs.meta)
    outputs.replace_all_uses_with(z)
    remove(outputs)
    end = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        for start, stop in ((0, first.begin), (first.begin + size, shape_of(theta)[1])):
            if start < stop:
                graph.call_function(_pull_within, (theta, start, stop, w, pull))
        for part in parts:
            if part is not first:
                subtract_(graph, theta, part, lr)
    loss: Any = end.args[0]
    end.args = ((cat, loss[1], in_outputs),)
    return FirstLayer(called_directly(without_join(module, cat, theta)), first.begin, size // wide, wide)


def _cut(theta: fx.Node, part: Part, data: set[fx.Node]) -> tuple[Part, fx.Node, fx.Node] | None:
    """Return a part with the layer's outputs and the gradient in them, if it is the weights of one that sees data."""
    if part.product is None:
        return None
    turned: Any
    turned, inputs = part.product.args
    if inputs not in data or not _is_turned(turned):
        return None
    weights = _slice_at(theta, part.begin)
    for target in (aten.view.default, aten.transpose.int, aten.bmm.default):
        if weights is None or len(weights.users) != 1:
            return None
        weights = next(iter(weights.users))
        if weights.target is not target:
            return None
    assert weights is not None
    if weights.args[0] is not inputs or not _is_turned(weights.args[1]):
        return None
    return part, weights, turned.args[0]


def _slice_at(theta: fx.Node, begin: int) -> fx.Node | None:
    """Return the piece of theta that begins there."""
    for split in theta.users:
        if split.target is not aten.split_with_sizes.default or split.args[2:] != (1,):
            continue
        sizes: Any = split.args[1]
        for piece in split.users:
            if piece.target is operator.getitem and sum(sizes[: piece.args[1]]) == begin:
                return piece
    return None


def _is_turned(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.transpose.int and node.args[1:] == (1, 2)


def _pull_within(theta: Tensor, start: int, stop: int, w: Tensor, pull: float) -> None:
    pull_(theta.narrow(1, start, stop - start), w.narrow(1, start, stop - start), pull)
