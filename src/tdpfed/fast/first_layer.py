"""Several steps on one minibatch that update the weights of the first layer only once.

If the inputs X of a linear layer are the data themselves, a step changes its weights W only towards the anchor V and
in the row space of X: ``W' = W + pull (V - W) - lr D^T X``, where D is the gradient with respect to the outputs. So the
outputs ``Z = X W^T`` can be updated without W: ``Z' = Z + pull (X V^T - Z) - lr (X X^T) D``, where ``X X^T`` is only as
large as the minibatch. After the last step one product updates W. In exact arithmetic this equals the individual steps.
With momentum, the velocity has the same form: a multiple of ``V - W`` plus a term in the row space of X.
"""

import copy
import math
import operator
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, fx

from tdpfed.core.inner import Inner
from tdpfed.core.local import Near
from tdpfed.core.optim import nesterov, within_float32
from tdpfed.fast.graph_rewrites import (
    InPlace,
    Part,
    aten,
    called_directly,
    in_place,
    place_in,
    pull_,
    remove,
    separate_parts,
    shape_of,
    subtract_,
    views_of,
    without_join,
)
from tdpfed.fast.optim import aligned_empty

MIN_INPUTS_PER_SAMPLE = 8
"""Ratio of inputs to samples of a minibatch from which this takes less work."""


class LowRankStep(NamedTuple):
    """The first layer's weights once their initial values have decayed: ``V + slopes^T X``, a low-rank update of V."""

    begin: int  # position of the weights in theta
    slopes: Tensor  # (K, samples, outputs)
    inputs: Tensor  # (K, samples, inputs)
    anchor: "ref[Tensor]"  # V, a weak reference
    theta: "ref[Tensor]"  # the parameters that hold these weights, a weak reference


class FirstLayer(NamedTuple):
    """A recorded gradient without its first layer, and the position of that layer's weights in theta."""

    step: InPlace  # steps all of theta except W, given z; also returns the gradient in z
    gradient: fx.GraphModule  # (theta, x, y, z) -> (loss, gradient in z, gradients before and after W, if any)
    begin: int
    outputs: int
    inputs: int

    def steps(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        w: Tensor,
        pull: float,
        lr: float,
        count: int,
        *,
        used_up: bool = False,
    ) -> Near:
        """Take ``count`` steps ``theta + pull (w - theta) - lr g``; ``used_up``: in the memory of theta."""
        inputs, moved = x.reshape(*x.shape[:2], self.inputs), theta if used_up else self._with_others_of(theta)
        weights, anchor = (self._weights(flat) for flat in (theta, w))
        z, aim, gram = (torch.bmm(inputs, other.mT) for other in (weights, anchor, inputs))
        slopes, views = torch.zeros_like(z), self.step.make_views(moved)
        for _ in range(count - 1):
            in_z = self.step.move_only(x, y, z, w, pull, lr, *views)
            z = torch.lerp(z, aim, pull).baddbmm_(gram, in_z, alpha=-lr)
            slopes.mul_(1 - pull).add_(in_z)
        loss, in_z = self.step.move(x, y, z, w, pull, lr, *views)
        slopes.mul_(1 - pull).add_(in_z)
        kept = math.prod([1 - pull] * count)
        slopes.mul_(-lr)
        new = torch.lerp(weights, anchor, within_float32(1 - kept), out=self._weights(moved))
        new.baddbmm_(slopes.mT, inputs)
        return Near(moved, loss, self._low_rank(kept, slopes, inputs, w, moved))

    def steps_with_momentum(
        self,
        theta: Tensor,
        x: Tensor,
        y: Tensor,
        inner: Inner,
        count: int,
        velocity: Tensor | None = None,
        *,
        used_up: bool = False,
    ) -> Near:
        """Take ``count`` Nesterov steps on ``f + lam/2 ||theta - w||^2``, from rest or from a velocity U.

        The weights always have the form ``W + share (V - W) + along U + slopes^T X``, and their velocity is of the same
        form without W: the update rule is applied to the share, to ``along``, the slopes and the other parameters.
        ``used_up``: the result is written to the memory of theta.
        """
        w, lam, lr, momentum = inner
        inputs, moved = x.reshape(*x.shape[:2], self.inputs), theta if used_up else self._with_others_of(theta)
        weights, anchor = (self._weights(flat) for flat in (theta, w))
        start, aim, gram = (torch.bmm(inputs, other.mT) for other in (weights, anchor, inputs))
        others, towards = self._others(moved), self._others(w)
        z, share, share_speed, slopes = start, 0.0, 0.0, torch.zeros_like(start)
        speeds = [torch.zeros_like(part) for part in (slopes, *others)]
        first, along, along_speed = None, 0.0, 1.0
        if velocity is not None:
            first = self._weights(velocity)
            in_first, speeds[1:] = torch.bmm(inputs, first.mT), [part.clone() for part in self._others(velocity)]
        for step in range(count):
            loss, in_z, *gradients = self.gradient(moved, x, y, z)
            pulls = [torch.sub(a, b).mul_(lam).add_(g) for a, b, g in zip(others, towards, gradients, strict=True)]
            pulls.insert(0, torch.add(in_z, slopes, alpha=lam))
            share, share_speed = nesterov(share, lam * (share - 1), share_speed, lr, momentum)
            share = within_float32(share)
            along, along_speed = nesterov(along, lam * along, along_speed, lr, momentum)
            for part, g, speed in zip((slopes, *others), pulls, speeds, strict=True):
                nesterov(part, g, speed, lr, momentum, out=part)
            if step < count - 1:
                z = torch.lerp(start, aim, share).baddbmm_(gram, slopes)
                if first is not None:
                    z.add_(in_first, alpha=within_float32(along))
        difference = None if first is None else torch.sub(anchor, weights)  # which the next line may overwrite
        new = torch.lerp(weights, anchor, share, out=self._weights(moved)).baddbmm_(slopes.mT, inputs)
        if first is None or difference is None:
            return Near(moved, loss, self._low_rank(1 - share, slopes, inputs, w, moved))
        new.add_(first, alpha=within_float32(along))
        faster = aligned_empty(moved)
        for part, speed in zip(self._others(faster), speeds[1:], strict=True):
            part.copy_(speed)
        speed = difference.mul_(within_float32(share_speed))
        speed.add_(first, alpha=within_float32(along_speed)).baddbmm_(speeds[0].mT, inputs)
        self._weights(faster).copy_(speed)
        return Near(moved, loss, velocity=faster)

    def _low_rank(self, kept: float, slopes: Tensor, inputs: Tensor, w: Tensor, moved: Tensor) -> LowRankStep | None:
        lost_in_rounding = abs(kept) <= torch.finfo(slopes.dtype).eps
        return LowRankStep(self.begin, slopes, inputs, ref(w), ref(moved)) if lost_in_rounding else None

    def _with_others_of(self, theta: Tensor) -> Tensor:
        """Return a new tensor with a copy of theta except for the first layer's weights, which are written last."""
        moved = aligned_empty(theta)
        for new, old in zip(self._others(moved), self._others(theta), strict=True):
            new.copy_(old)
        return moved

    def _others(self, flat: Tensor) -> list[Tensor]:
        """Return the parameters before and after the weights, if any."""
        end = self.begin + self.outputs * self.inputs
        return [part for part in (flat[:, : self.begin], flat[:, end:]) if part.shape[1]]

    def _weights(self, flat: Tensor) -> Tensor:
        size = self.outputs * self.inputs
        return flat.narrow(1, self.begin, size).view(len(flat), self.outputs, self.inputs)


def first_layer(module: fx.GraphModule) -> FirstLayer | None:
    """Return a recorded gradient cut at its first layer; None if that is not a linear layer with many inputs."""
    before = copy.deepcopy(module)  # _opened modifies the module
    stepped = _opened(module)
    opened = None if stepped is None else _opened(before)
    if stepped is None or opened is None:
        return None
    wide = shape_of(stepped.inputs)[2]
    outputs = shape_of(stepped.first.node)[1] // wide
    return FirstLayer(_stepping(stepped), _giving_gradients(opened), stepped.first.begin, outputs, wide)


class _Opened(NamedTuple):
    """A recorded gradient that takes the first layer's outputs as an input."""

    module: fx.GraphModule
    given: tuple[fx.Node, ...]  # theta, x, y, z
    cat: fx.Node
    parts: list[Part]
    first: Part  # the first layer's weights
    inputs: fx.Node
    in_outputs: fx.Node  # the gradient with respect to the first layer's outputs


def _opened(module: fx.GraphModule) -> _Opened | None:
    """Remove the first layer if it is a linear layer with many inputs."""
    graph = module.graph
    cat, parts = separate_parts(module)
    theta, x, y = (node for node in graph.nodes if node.op == "placeholder")
    data = views_of(x)
    found = next((cut for part in parts if (cut := _cut(theta, part, data)) is not None), None)
    if cat is None or found is None:
        return None
    first, outputs, in_outputs = found
    inputs: Any = outputs.args[0]
    (_, samples, wide) = shape_of(inputs)
    if wide < MIN_INPUTS_PER_SAMPLE * samples:
        return None
    with graph.inserting_after(y):
        z = graph.placeholder("z")
    z.meta = dict(outputs.meta)
    outputs.replace_all_uses_with(z)
    remove(outputs)
    return _Opened(module, (theta, x, y, z), cat, parts, first, inputs, in_outputs)


def _stepping(opened: _Opened) -> InPlace:
    """Return a step on all parameters except the first layer's weights, in the memory of theta."""
    graph, (theta, _, _, z), first = opened.module.graph, opened.given, opened.first
    with graph.inserting_after(z):
        lr, pull, w = (graph.placeholder(name) for name in ("lr", "pull", "w"))  # inserted in reverse order
    end = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        for start, stop in ((0, first.begin), (first.begin + shape_of(first.node)[1], shape_of(theta)[1])):
            if start < stop:
                place = graph.call_function(place_in, (theta, start, (stop - start,)))
                graph.call_function(
                    pull_, (place, graph.call_function(torch.narrow, (w, 1, start, stop - start)), pull)
                )
        for part in opened.parts:
            if part is not first:
                subtract_(graph, theta, part, lr)
    answer: Any = end.args[0]
    end.args = ((opened.cat, answer[1], opened.in_outputs),)
    return in_place(without_join(opened.module, opened.cat, theta), theta)


def _giving_gradients(opened: _Opened) -> fx.GraphModule:
    """Return the gradients with respect to the parameters before and after the first layer's weights."""
    graph, first = opened.module.graph, opened.first
    end = next(node for node in graph.nodes if node.op == "output")
    before = [part.node for part in opened.parts if part.begin < first.begin]
    after = [part.node for part in opened.parts if part.begin > first.begin]
    with graph.inserting_before(end):
        sides = [graph.call_function(torch.cat, (nodes, 1)) for nodes in (before, after) if nodes]
    answer: Any = end.args[0]
    end.args = ((answer[1], opened.in_outputs, *sides),)
    remove(opened.cat)
    opened.module.recompile()
    return called_directly(opened.module)


def _cut(theta: fx.Node, part: Part, data: set[fx.Node]) -> tuple[Part, fx.Node, fx.Node] | None:
    """Return a part, the layer's outputs and their gradient, if the part is the weights of a layer on the data."""
    if part.product is None:
        return None
    transposed: Any
    transposed, inputs = part.product.args
    if inputs not in data or not _is_transposed(transposed):
        return None
    weights = _slice_at(theta, part.begin)
    for target in (aten.view.default, aten.transpose.int, aten.bmm.default):
        if weights is None or len(weights.users) != 1:
            return None
        weights = next(iter(weights.users))
        if weights.target is not target:
            return None
    assert weights is not None
    if weights.args[0] is not inputs or not _is_transposed(weights.args[1]):
        return None
    return part, weights, transposed.args[0]


def _slice_at(theta: fx.Node, begin: int) -> fx.Node | None:
    """Return the piece of theta that starts at ``begin``."""
    for split in theta.users:
        if split.target is not aten.split_with_sizes.default or split.args[2:] != (1,):
            continue
        sizes: Any = split.args[1]
        for piece in split.users:
            if piece.target is operator.getitem and sum(sizes[: piece.args[1]]) == begin:
                return piece
    return None


def _is_transposed(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.transpose.int and node.args[1:] == (1, 2)
