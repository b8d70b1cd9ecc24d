"""How well models answer: each client's own model, or one model for all, on the clients' held-out data."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.core.objective import Objective
from tdpfed.data.federation import Federation
from tdpfed.engine.runners import FEWEST_TOGETHER

SAMPLES_AT_ONCE = 4096
"""Samples in one forward pass, over all clients computed together, where memory allows."""

WIDTH = 128
"""Samples of one client in one forward pass of a CPU, at most."""

PARAMETERS_AT_ONCE = 1 << 25
"""Parameters of all clients computed together."""

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


def score(
    objective: Objective,
    parameters: Callable[[slice], Tensor],
    federation: Federation,
    clients: Tensor,
    at_once: int = SAMPLES_AT_ONCE,
) -> Score:
    """Score clients ``(K,)``; ``parameters`` gives those of a range of them: ``(n, P)``, or ``(P,)`` for all the same.

    A few clients at a time, so that memory does not grow with their number. A client's score does not depend on who is
    scored with it: all have pieces of one width, the last filled up with a sample that does not count.
    """
    longest = int(federation.test_size.max())
    widest = WIDTH if federation.device.type == "cpu" else at_once  # the bits of a GPU depend on company anyway
    width = max(1, min(widest, longest, at_once // FEWEST_TOGETHER))
    together = max(FEWEST_TOGETHER, min(at_once // width, PARAMETERS_AT_ONCE // objective.layout.size))
    parts = [
        _few(
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
    """Score each client's own parameters ``(K, P)`` on that client's test samples."""
    return score(objective, lambda some: theta[some], federation, clients, at_once)


def score_one(objective: Objective, theta: Tensor, federation: Federation, at_once: int = SAMPLES_AT_ONCE) -> Score:
    """Score the same parameters ``(P,)`` on every client's test samples."""
    everybody = torch.arange(federation.clients, device=federation.device)
    return score(objective, lambda _: theta, federation, everybody, at_once)


def _few(objective: Objective, theta: Tensor, federation: Federation, clients: Tensor, width: int) -> Score:
    """Score clients that are computed together, in pieces of ``width`` samples."""
    start, size = federation.test_start[clients], federation.test_size[clients]
    correct = torch.zeros(len(clients), dtype=torch.int64, device=theta.device)
    losses = torch.zeros(len(clients), dtype=torch.float64, device=theta.device)
    everybody = torch.arange(len(clients), device=theta.device)
    alone = objective.one_by_one(theta) or (objective.convolves and int(size.sum()) >= ENOUGH_ALONE * len(clients))
    for done in range(0, int(size.max()), width):
        left = everybody[size > done]
        for rows in left.split(1 if alone else len(left)):
            filled = rows if alone or len(rows) >= FEWEST_TOGETHER else rows.repeat(FEWEST_TOGETHER)[:FEWEST_TOGETHER]
            place = done + torch.arange(width, device=theta.device)
            index = start[filled, None] + torch.minimum(place, size[filled, None] - 1)
            batch = federation.x[index], federation.y[index]
            if alone:
                own = theta if theta.ndim == 1 else theta[int(rows)]
                loss, right = (value[None] for value in objective.per_sample(own, (batch[0][0], batch[1][0])))
            else:
                whole = len(rows) == len(clients) >= FEWEST_TOGETHER
                own = theta.expand(len(filled), -1) if theta.ndim == 1 else theta if whole else theta[filled]
                loss, right = (value[: len(rows)] for value in objective.per_sample(own, batch))
            counts = place < size[rows, None]
            correct[rows] += (right & counts).sum(-1)
            losses[rows] += loss.double().where(counts, 0).sum(-1)
    return Score(correct.cpu(), size.cpu(), losses.cpu())
