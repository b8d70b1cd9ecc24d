"""Minibatches drawn for several rounds at once: the overhead of a draw can be longer than the draw of a small round."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tdpfed.core.state import Turn

DRAWN_AT_ONCE = 1 << 16
"""About as many samples are drawn in one call."""

MOST_ROUNDS = 8
"""The largest number of rounds that are drawn in one call."""


class Ahead:
    """Caches ``draw``, which returns the draws ``(K, ...)`` of a turn.

    When the same clients train again, several rounds are drawn in one call.
    The draws must be those of :mod:`tdpfed.core.draws`, where rounds can be drawn together.
    """

    def __init__(self, draw: Callable[[Turn], Tensor]) -> None:
        self._draw = draw
        self._seen: Turn | None = None
        self._size = 1  # of the draws of its clients in a round
        self._first, self._rounds = 0, torch.empty(0)

    def of(self, turn: Turn) -> Tensor:
        """Return the draws of a turn."""
        if isinstance(turn.round, Tensor) or isinstance(turn.seed, Tensor):
            return self._draw(turn)
        if self._seen is None or self._seen.seed != turn.seed or not torch.equal(self._seen.clients, turn.clients):
            drawn = self._draw(turn)
            self._seen, self._size, self._rounds = turn, max(1, drawn.numel()), torch.empty(0)
            return drawn
        if not self._first <= turn.round < self._first + len(self._rounds):
            self._first, self._rounds = turn.round, self._from(turn, turn.round)
        return self._rounds[turn.round - self._first]

    def _from(self, turn: Turn, first: int) -> Tensor:
        clients, count = len(turn.clients), max(1, min(MOST_ROUNDS, DRAWN_AT_ONCE // self._size))
        rounds = torch.arange(first, first + count).repeat_interleave(clients)
        drawn = self._draw(replace(turn, round=rounds[:, None], clients=turn.clients.repeat(count)))
        return drawn.reshape(count, clients, *drawn.shape[1:])
