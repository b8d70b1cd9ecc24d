"""Evaluation of models on the clients' test data: each client's own model, or one model for all."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.core.objective import Objective
from tdpfed.data.federation import Federation
from tdpfed.engine.runners import MIN_CLIENTS

SAMPLES_AT_ONCE = 4096
"""Samples in one forward pass, over all clients computed together, if memory allows."""

CPU_SAMPLES_PER_CLIENT = 128
"""Most samples of one client in one forward pass on a CPU."""

PARAMETERS_AT_ONCE = 1 << 25
"""Most parameters of all clients computed together."""

ACTIVATIONS_AT_ONCE = 1 << 28
"""Most activations of one forward pass."""

ONE_BY_ONE_SAMPLES = 100
"""From this many samples per client on, convolutions run faster one client at a time than for all together."""


@dataclass(frozen=True)
class Score:
    """Number of correct predictions, number of test samples and summed loss of each client, ``(K,)`` each."""

    correct: Tensor
    count: Tensor
    loss: Tensor

    @property
    def accuracy(self) -> float | None:
        """Correct predictions over test samples, of all clients together; None without test samples."""
        return int(self.correct.sum()) / int(self.count.sum()) if self.count.any() else None

    @property
    def mean_loss(self) -> float | None:
        """The mean loss over all test samples; None without any."""
        return float(self.loss.sum()) / int(self.count.sum()) if self.count.any() else None

    def of(self, clients: Tensor) -> "Score":
        """Return the scores of some of the clients, by mask or position."""
        return Score(self.correct[clients], self.count[clients], self.loss[clients])

    def per_client(self) -> list[float | None]:
        """Each client's accuracy; None for a client without test samples."""
        pairs = zip(self.correct.tolist(), self.count.tolist(), strict=True)
        return [correct / count if count else None for correct, count in pairs]


def samples_at_once(objective: Objective, federation: Federation) -> int:
    """Return how many samples to send through the model together."""
    return min(SAMPLES_AT_ONCE, max(1, ACTIVATIONS_AT_ONCE // objective.activation_size(federation.x[:2])))


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
    parts = [
        _score_together(
            objective, parameters(slice(first, first + together)), federation, clients[first : first + together], width
        )
        for first in range(0, len(clients), together)
    ]
    none = torch.zeros(0, dtype=torch.int64)
    parts.append(Score(none, none, none.double()))
    return Score(*(torch.cat([getattr(part, name) for part in parts]) for name in ("correct", "count", "loss")))


def score_each(
    objective: Objective, theta: Tensor, federation: Federation, clients: Tensor, at_once: int = SAMPLES_AT_ONCE
) -> Score:
    """Evaluate each client's own parameters ``(K, P)`` on that client's test samples."""
    return score(objective, lambda some: theta[some], federation, clients, at_once)


def score_one(objective: Objective, theta: Tensor, federation: Federation, at_once: int = SAMPLES_AT_ONCE) -> Score:
    """Evaluate the same parameters ``(P,)`` on every client's test samples."""
    everybody = torch.arange(federation.clients, device=federation.device)
    return score(objective, lambda _: theta, federation, everybody, at_once)


def _score_together(objective: Objective, theta: Tensor, federation: Federation, clients: Tensor, width: int) -> Score:
    """Evaluate clients that are computed together, in pieces of ``width`` samples."""
    start, size = federation.test_start[clients], federation.test_size[clients]
    correct = torch.zeros(len(clients), dtype=torch.int64, device=theta.device)
    losses = torch.zeros(len(clients), dtype=torch.float64, device=theta.device)
    everybody = torch.arange(len(clients), device=theta.device)
    alone = objective.one_by_one(theta) or (
        objective.convolves and int(size.sum()) >= ONE_BY_ONE_SAMPLES * len(clients)
    )
    for done in range(0, int(size.max()), width):
        left = everybody[size > done]
        for rows in left.split(1 if alone else len(left)):
            filled = rows if alone or len(rows) >= MIN_CLIENTS else rows.repeat(MIN_CLIENTS)[:MIN_CLIENTS]
            place = done + torch.arange(width, device=theta.device)
            index = start[filled, None] + torch.minimum(place, size[filled, None] - 1)
            batch = federation.x[index], federation.y[index]
            if alone:
                own = theta if theta.ndim == 1 else theta[int(rows)]
                loss, right = (value[None] for value in objective.per_sample(own, (batch[0][0], batch[1][0])))
            else:
                whole = len(rows) == len(clients) >= MIN_CLIENTS
                own = theta.expand(len(filled), -1) if theta.ndim == 1 else theta if whole else theta[filled]
                loss, right = (value[: len(rows)] for value in objective.per_sample(own, batch))
            counts = place < size[rows, None]
            correct[rows] += (right & counts).sum(-1)
            losses[rows] += loss.double().where(counts, 0).sum(-1)
    return Score(correct.cpu(), size.cpu(), losses.cpu())
