"""How well models answer: each client's own model, or one model for all, on every client's held-out data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.data.federation import Federation
from tdpfed.objective import Objective

SAMPLES_AT_ONCE = 4096
"""Samples in one forward pass, over all clients computed together."""


@dataclass(frozen=True)
class Score:
    """Correct answers, answers and summed loss of each client, ``(K,)`` each."""

    correct: Tensor
    count: Tensor
    loss: Tensor

    @property
    def accuracy(self) -> float | None:
        """All correct answers over all answers; None without test samples."""
        return int(self.correct.sum()) / int(self.count.sum()) if self.count.any() else None

    @property
    def mean_loss(self) -> float | None:
        """The mean over all samples; None without test samples."""
        return float(self.loss.sum()) / int(self.count.sum()) if self.count.any() else None

    def per_client(self) -> list[float | None]:
        """Each client's accuracy; None for a client without test samples."""
        pairs = zip(self.correct.tolist(), self.count.tolist(), strict=True)
        return [correct / count if count else None for correct, count in pairs]


def score_each(objective: Objective, theta: Tensor, federation: Federation, clients: Tensor) -> Score:
    """Score each client's own parameters ``(K, P)`` on that client's test samples."""
    start, size = federation.test_start[clients], federation.test_size[clients]
    correct = torch.zeros(len(clients), dtype=torch.int64, device=theta.device)
    losses = torch.zeros(len(clients), dtype=torch.float64, device=theta.device)
    width = max(1, SAMPLES_AT_ONCE // len(clients))
    for offset in range(0, int(size.max()), width):
        position = offset + torch.arange(width, device=theta.device)
        inside = position < size[:, None]
        # Past a client's end its last sample stands in, or the one before its start if it has none; neither is counted.
        index = start[:, None] + position.minimum(size[:, None] - 1)
        loss, right = objective.per_sample(theta, (federation.x[index], federation.y[index]))
        correct += (right & inside).sum(-1)
        losses += torch.where(inside, loss.double(), 0.0).sum(-1)
    return Score(correct.cpu(), size.cpu(), losses.cpu())


def score_one(objective: Objective, theta: Tensor, federation: Federation) -> Score:
    """Score the same parameters ``(P,)`` on every client's test samples."""
    first, last = int(federation.test_start[0]), int(federation.test_start[-1] + federation.test_size[-1])
    owner = torch.arange(federation.clients, device=theta.device).repeat_interleave(federation.test_size)
    correct = torch.zeros(federation.clients, dtype=torch.int64, device=theta.device)
    losses = torch.zeros(federation.clients, dtype=torch.float64, device=theta.device)
    for begin in range(first, last, SAMPLES_AT_ONCE):
        part = slice(begin, min(begin + SAMPLES_AT_ONCE, last))
        loss, right = objective.per_sample(theta, (federation.x[part], federation.y[part]))
        who = owner[part.start - first : part.stop - first]
        correct.index_add_(0, who, right.long())
        losses.index_add_(0, who, loss.double())
    return Score(correct.cpu(), federation.test_size.cpu(), losses.cpu())
