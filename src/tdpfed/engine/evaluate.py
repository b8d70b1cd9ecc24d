"""How well models answer: each client's own model, or one model for all, on every client's held-out data."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.data.federation import Federation
from tdpfed.objective import Objective

SAMPLES_AT_ONCE = 4096
"""Samples in one forward pass, over all clients computed together, where memory allows."""

VALUES_AT_ONCE = 1 << 28
"""Activations one forward pass may hold."""


ENOUGH_ALONE = 100
"""Samples per client from which a GPU is better at one client's convolutions after another's than at all of them."""


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

    def of(self, clients: Tensor) -> "Score":
        """Return the scores of some of the clients, by mask or position."""
        return Score(self.correct[clients], self.count[clients], self.loss[clients])

    def per_client(self) -> list[float | None]:
        """Each client's accuracy; None for a client without test samples."""
        pairs = zip(self.correct.tolist(), self.count.tolist(), strict=True)
        return [correct / count if count else None for correct, count in pairs]


def samples_at_once(objective: Objective, federation: Federation) -> int:
    """Return how many samples to send through the model together."""
    return min(SAMPLES_AT_ONCE, max(1, VALUES_AT_ONCE // objective.activation_size(federation.x[:2])))


def score_each(
    objective: Objective, theta: Tensor, federation: Federation, clients: Tensor, at_once: int = SAMPLES_AT_ONCE
) -> Score:
    """Score each client's own parameters ``(K, P)`` on that client's test samples."""
    start, size = federation.test_start[clients], federation.test_size[clients]
    correct = torch.zeros(len(clients), dtype=torch.int64, device=theta.device)
    losses = torch.zeros(len(clients), dtype=torch.float64, device=theta.device)
    everybody = torch.arange(len(clients), device=theta.device)
    alone = objective.one_by_one(theta) or (objective.convolves and int(size.sum()) >= ENOUGH_ALONE * len(clients))
    for group in everybody.unbind() if alone else [everybody]:
        done = 0
        while (left := group[size[group] > done]).numel():
            # As many samples as every client of the group still has: nothing is computed that does not count.
            width = min(max(1, at_once // left.numel()), int(size[left].min()) - done)
            rows = left if group.ndim else group
            index = (start[rows] + done).unsqueeze(-1) + torch.arange(width, device=theta.device)
            some = theta if len(left) == len(theta) > 1 and group.ndim else theta[rows]
            loss, right = objective.per_sample(some, (federation.x[index], federation.y[index]))
            correct[rows] += right.sum(-1)
            losses[rows] += loss.double().sum(-1)
            done += width
    return Score(correct.cpu(), size.cpu(), losses.cpu())


def score_one(objective: Objective, theta: Tensor, federation: Federation, at_once: int = SAMPLES_AT_ONCE) -> Score:
    """Score the same parameters ``(P,)`` on every client's test samples."""
    first, last = int(federation.test_start[0]), int(federation.test_start[-1] + federation.test_size[-1])
    owner = torch.arange(federation.clients, device=theta.device).repeat_interleave(federation.test_size)
    correct = torch.zeros(federation.clients, dtype=torch.int64, device=theta.device)
    losses = torch.zeros(federation.clients, dtype=torch.float64, device=theta.device)
    for begin in range(first, last, at_once):
        part = slice(begin, min(begin + at_once, last))
        loss, right = objective.per_sample(theta, (federation.x[part], federation.y[part]))
        who = owner[part.start - first : part.stop - first]
        correct.index_add_(0, who, right.long())
        losses.index_add_(0, who, loss.double())
    return Score(correct.cpu(), federation.test_size.cpu(), losses.cpu())
