"""Minibatches that are drawn for several rounds at once are those of each round."""

import pytest
import torch
from torch import Tensor

from tdpfed.core.draws import batch_indices
from tdpfed.core.state import Turn
from tdpfed.fast.ahead import MOST_ROUNDS, Ahead

SIZE = torch.tensor([30, 7, 12, 100])


class Watched:
    """Draws, and remembers for how many clients."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, turn: Turn) -> Tensor:
        self.asked.append(len(turn.clients))
        sizes = SIZE[turn.clients]
        return batch_indices(turn.seed, turn.round, turn.clients, torch.zeros_like(sizes), sizes, 3, 4)


def test_rounds_drawn_ahead_are_those_drawn_alone_in_any_order() -> None:
    draw, everybody = Watched(), torch.arange(4)
    ahead = Ahead(draw)
    for number in (*range(1, 20), 4, 40, 41, 3):
        turn = Turn(5, number, everybody)
        assert torch.equal(ahead.of(turn), Watched()(turn))


def test_the_same_clients_are_drawn_once_for_several_rounds() -> None:
    draw = Watched()
    ahead = Ahead(draw)
    for number in range(1, 2 + 2 * MOST_ROUNDS):
        ahead.of(Turn(5, number, torch.arange(4)))
    assert draw.asked == [4, 4 * MOST_ROUNDS, 4 * MOST_ROUNDS]


def test_other_clients_and_seeds_are_drawn_anew() -> None:
    draw = Watched()
    ahead = Ahead(draw)
    turns = [Turn(5, 1, torch.tensor([0, 1])), Turn(5, 2, torch.tensor([0, 1])), Turn(5, 3, torch.tensor([1, 2]))]
    turns += [Turn(5, 4, torch.tensor([1, 2])), Turn(6, 5, torch.tensor([1, 2])), Turn(6, 6, torch.tensor([1, 2]))]
    turns += [Turn(torch.tensor([6, 6]), 7, torch.tensor([1, 2])), Turn(6, torch.tensor(8), torch.tensor([1, 2]))]
    for turn in turns:
        assert torch.equal(ahead.of(turn), Watched()(turn))


def test_large_rounds_are_drawn_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tdpfed.fast.ahead.DRAWN_AT_ONCE", 50)
    draw = Watched()
    ahead = Ahead(draw)
    for number in range(1, 5):
        turn = Turn(5, number, torch.arange(4))
        assert torch.equal(ahead.of(turn), Watched()(turn))
    assert max(draw.asked) == 4
