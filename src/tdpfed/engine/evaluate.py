"""Evaluation of models on the clients' test data: each client's own model, or one model for all."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from tdpfed.core.metrics import ACCURACY, SURPRISE, Metric
from tdpfed.core.objective import Objective
from tdpfed.core.tasks import Task
from tdpfed.data.federation import Federation
from tdpfed.engine.runners import MIN_CLIENTS
from tdpfed.errors import TDPFedError

SUM = "sum "
"""Prefix of the names of sums among the parts of scores."""

SAMPLES_AT_ONCE = 4096
"""Samples in one forward pass, over all clients computed together, if memory allows."""

CPU_SAMPLES_PER_CLIENT = 128
"""Most samples of one client in one forward pass on a CPU."""

PARAMETERS_AT_ONCE = 1 << 25
"""Most parameters of all clients computed together."""

ACTIVATIONS_AT_ONCE = 1 << 28
"""Most activations of one forward pass."""

ONE_BY_ONE_TARGETS = 100
"""A client whose samples have this many targets is computed alone on a CPU, which is faster from there on."""


@dataclass(frozen=True)
class Score:
    """What was counted on each client's samples, ``(K, ...)`` each; all of it adds up over clients."""

    count: Tensor  # (K,) samples
    weight: Tensor  # (K,) for how much they count in a mean loss
    loss: Tensor  # (K,)
    sums: dict[str, Tensor]  # by metric, (K, S)
    outputs: Tensor | None = None  # (K, longest, ...) of all samples, and their targets, for metrics of no sums
    targets: Tensor | None = None

    @property
    def mean_loss(self) -> float | None:
        """The mean loss over all samples; None without any."""
        return float(self.loss.sum()) / float(self.weight.sum()) if self.weight.any() else None

    @property
    def accuracy(self) -> float | None:
        """Correct predictions over samples, of all clients together; None without samples."""
        return self.result(ACCURACY)

    def of(self, clients: Tensor) -> "Score":
        """Return the scores of some of the clients, by mask or position."""
        return self.mapped(lambda values: values[clients])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Score":
        """Return the scores with every tensor changed."""
        return Score.joined({name: change(value) for name, value in self.parts().items()})

    def parts(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        own = {"count": self.count, "weight": self.weight, "loss": self.loss}
        kept = {"outputs": self.outputs, "targets": self.targets}
        own |= {name: value for name, value in kept.items() if value is not None}
        return own | {f"{SUM}{name}": value for name, value in self.sums.items()}

    @classmethod
    def joined(cls, parts: Mapping[str, Tensor]) -> "Score":
        """Return the scores from :meth:`parts`."""
        sums = {name.removeprefix(SUM): value for name, value in parts.items() if name.startswith(SUM)}
        return cls(sums=sums, **{name: value for name, value in parts.items() if not name.startswith(SUM)})

    def result(self, metric: Metric) -> float | None:
        """Return a metric of all clients together; None where it is not defined."""
        if metric.result is not None:
            return _defined(metric.result(self.sums[metric.name].sum(0)))
        return self._whole(metric, slice(None))

    def per_client(self, metric: Metric = ACCURACY) -> list[float | None]:
        """Return a metric of each client; None for one without samples."""
        if metric.result is not None:
            return [_defined(one) for one in metric.result(self.sums[metric.name]).unbind()]
        return [self._whole(metric, slice(client, client + 1)) for client in range(len(self.count))]

    def _whole(self, metric: Metric, clients: slice) -> float | None:
        assert self.outputs is not None
        assert self.targets is not None
        assert metric.whole is not None
        there = torch.arange(self.outputs.shape[1]) < self.count[clients, None]
        if not there.any():
            return None
        try:
            return _defined(metric.whole(self.outputs[clients][there], self.targets[clients][there]))
        except Exception as error:  # the user's own code may raise anything
            raise TDPFedError(
                f"{metric.name!r} failed ({type(error).__name__}: {error})", field="task.metrics"
            ) from error


def _defined(value: float | Tensor) -> float | None:
    number = float(value)
    return None if math.isnan(number) else number


def samples_at_once(objective: Objective, federation: Federation) -> int:
    """Return how many samples to send through the model together."""
    return min(SAMPLES_AT_ONCE, max(1, ACTIVATIONS_AT_ONCE // objective.activation_size(federation.x[:2].clone())))


def score(
    objective: Objective,
    parameters: Callable[[slice], Tensor],
    federation: Federation,
    clients: Tensor,
    at_once: int = SAMPLES_AT_ONCE,
) -> Score:
    """Evaluate clients ``(K,)``; ``parameters`` returns those of a range of clients: ``(n, P)``, or ``(P,)`` for all.

    A few clients are evaluated at a time, so that memory does not grow with their number. On a CPU a client's score
    does not depend on the clients evaluated with it: all pieces have one width, the last one padded and masked.
    """
    longest = int(federation.test_size.max())
    widest = CPU_SAMPLES_PER_CLIENT if federation.device.type == "cpu" else at_once
    width = max(1, min(widest, longest, at_once // MIN_CLIENTS))
    together = max(MIN_CLIENTS, min(at_once // width, PARAMETERS_AT_ONCE // objective.layout.size))
    like = objective.outputs(objective.initial(), federation.x[:1].clone()), federation.y[:1]
    parts = [
        _score_together(
            objective, parameters(slice(first, first + together)), federation,
            _Tally(objective.task, federation, clients[first : first + together], like), width, at_once,
        ).parts()
        for first in range(0, len(clients), together)
    ] or [_Tally(objective.task, federation, clients, like).score.parts()]  # fmt: skip
    return Score.joined({name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def score_each(
    objective: Objective, theta: Tensor, federation: Federation, clients: Tensor, at_once: int = SAMPLES_AT_ONCE
) -> Score:
    """Evaluate each client's own parameters ``(K, P)`` on that client's test samples."""
    return score(objective, lambda some: theta[some], federation, clients, at_once)


def score_one(objective: Objective, theta: Tensor, federation: Federation, at_once: int = SAMPLES_AT_ONCE) -> Score:
    """Evaluate the same parameters ``(P,)`` on every client's test samples."""
    everybody = torch.arange(federation.clients, device=federation.device)
    return score(objective, lambda _: theta, federation, everybody, at_once)


class _Tally:
    """Adds up what is counted on the samples of some clients."""

    def __init__(self, task: Task, federation: Federation, clients: Tensor, like: tuple[Tensor, Tensor]) -> None:
        self.task, self.clients, self.device = task, clients, federation.device
        self.size, self.longest = federation.test_size[clients], int(federation.test_size.max())
        self.summed = {one.name: one.values for one in task.metrics if one.values is not None}
        self.widths = [values(*like).shape[1] for values in self.summed.values()]
        self.totals = torch.zeros(len(clients), 2 + sum(self.widths), dtype=torch.float64, device=self.device)
        collects = any(one.whole is not None for one in task.metrics)
        self.kept = [one.new_zeros(len(clients), self.longest, *one.shape[1:]) for one in like if collects]

    def add(self, rows: Tensor, done: int, outputs: Tensor, targets: Tensor) -> None:
        """Add the outputs ``(K, B, ...)`` of clients' samples from number ``done`` on, those past the end left out."""
        place = done + torch.arange(outputs.shape[1], device=self.device)
        counts = place < self.size[rows, None]
        found = self._values(outputs.flatten(0, 1), targets.flatten(0, 1)).unflatten(1, counts.shape)
        self.totals.index_add_(0, rows, found.where(counts, 0).sum(-1).T)
        for kept, new in zip(self.kept, (outputs, targets), strict=False):
            width = min(new.shape[1], self.longest - done)
            kept[rows, done : done + width] = new[:, :width]

    def add_pieces(self, pieces: Sequence["_Piece"]) -> None:
        """Add the outputs of single clients, each of samples of its own."""
        if not pieces:
            return
        outputs, targets = (torch.cat([getattr(one, name) for one in pieces]) for name in ("outputs", "targets"))
        found = self._values(outputs, targets, many=True).split([len(one.outputs) for one in pieces], 1)
        rows = torch.tensor([one.row for one in pieces], device=self.device)
        self.totals.index_add_(0, rows, torch.stack([one.sum(-1) for one in found]))
        for one in pieces:
            for kept, new in zip(self.kept, (one.outputs, one.targets), strict=False):
                kept[one.row, one.done : one.done + len(new)] = new

    def _values(self, outputs: Tensor, targets: Tensor, *, many: bool = False) -> Tensor:
        """Return what adds up over samples, ``(C, B)``: the weight, the weighted loss, the values of each metric."""
        weight = self.task.weight(targets).double()
        loss = self.task.each(outputs, targets, many=many).double() * weight
        rows = [torch.stack([weight, loss])]
        for values in self.summed.values():
            if values is SURPRISE and self.task.loss.name == "cross_entropy":  # it is the loss
                rows.append(torch.stack([loss, weight]))
            else:
                rows.append(values(outputs, targets).double().T)
        return torch.cat(rows)

    @property
    def score(self) -> Score:
        """The sums, on the CPU."""
        weight, loss, *sums = self.totals.split([1, 1, *self.widths], 1)
        named = dict(zip(self.summed, sums, strict=True))
        return Score(self.size, weight.squeeze(1), loss.squeeze(1), named, *self.kept).mapped(Tensor.cpu)


@dataclass(frozen=True)
class _Piece:
    """The outputs of one client's samples from number ``done`` on, and their targets."""

    row: int
    done: int
    outputs: Tensor
    targets: Tensor


def _score_together(
    objective: Objective, theta: Tensor, federation: Federation, tally: _Tally, width: int, at_once: int
) -> Score:
    """Evaluate some clients, together in pieces of ``width`` samples, those with many samples one by one."""
    clients, size = tally.clients, tally.size
    start = federation.test_start[clients]
    everybody = torch.arange(len(clients), device=theta.device)
    many = (size * _targets_each(federation) >= ONE_BY_ONE_TARGETS) & (theta.device.type == "cpu")
    alone = size > 0 if objective.one_by_one(theta) else many
    if bool(alone.any()):
        _score_alone(objective, theta, federation, tally, everybody[alone].tolist(), at_once)
    compute = vmap(objective.outputs)
    with torch.no_grad():
        for done in range(0, int(size.where(~alone, 0).max()), width):
            rows = everybody[(size > done) & ~alone]
            filled = rows if len(rows) >= MIN_CLIENTS else rows.repeat(MIN_CLIENTS)[:MIN_CLIENTS]
            place = done + torch.arange(width, device=theta.device)
            index = start[filled, None] + torch.minimum(place, size[filled, None] - 1)
            whole = len(rows) == len(clients) >= MIN_CLIENTS
            own = theta.expand(len(filled), -1) if theta.ndim == 1 else theta if whole else theta[filled]
            outputs = compute(own, _taken(federation.x, index, copy=objective.mutates))[: len(rows)]
            tally.add(rows, done, outputs, _taken(federation.y, index[: len(rows)]))
    return tally.score


def _score_alone(
    objective: Objective, theta: Tensor, federation: Federation, tally: _Tally, rows: Sequence[int], at_once: int
) -> None:
    """Evaluate clients one by one; what is counted is computed for ``at_once`` samples or more."""
    starts, counts = federation.test_start[tally.clients].tolist(), tally.size.tolist()
    pieces, samples = list[_Piece](), 0
    with torch.no_grad(), objective.replacing(theta) as compute:
        for row in rows:
            for done in range(0, counts[row], at_once):
                some = slice(starts[row] + done, starts[row] + min(done + at_once, counts[row]))
                inputs = federation.x[some].clone() if objective.mutates else federation.x[some]
                outputs = compute(theta if theta.ndim == 1 else theta[row], inputs)
                pieces.append(_Piece(row, done, outputs, federation.y[some]))
                samples += len(outputs)
                if samples >= at_once:
                    tally.add_pieces(pieces)
                    pieces, samples = [], 0
        tally.add_pieces(pieces)


def _targets_each(federation: Federation) -> int:
    """Return how many targets a sample has: those of a sequence are as many rows of a matrix product."""
    return max(1, federation.y[:1].numel())


def _taken(values: Tensor, index: Tensor, *, copy: bool = False) -> Tensor:
    """Return ``values[index]``; on a CPU without a copy if these are consecutive rows, unless one is asked for."""
    if index.device.type == "cpu" and index.numel():
        first = int(index[0, 0])
        if torch.equal(index.flatten(), torch.arange(first, first + index.numel())):
            rows = values[first : first + index.numel()]
            return (rows.clone() if copy else rows).reshape(*index.shape, *values.shape[1:])
    return values[index]
