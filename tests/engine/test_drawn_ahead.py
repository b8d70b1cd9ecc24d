"""Runs whose minibatches are drawn some rounds ahead are those whose minibatches are drawn round by round."""

from typing import Any

import pytest

import small
from tdpfed.algorithms import Best, FedAvg, FedAvgSAR
from tdpfed.engine.simulation import Simulation
from tdpfed.fast.ahead import MOST_ROUNDS
from tdpfed.server.participation import Participation

QUICK: dict[str, Any] = {"tau": 3, "batch_size": 4}
METHODS = {"fedavg": FedAvg(**QUICK), "subsets": FedAvgSAR(**QUICK), "best": Best.of(FedAvg(**QUICK))}


@pytest.mark.parametrize("participation", [Participation(), Participation(3)], ids=["everybody", "some"])
@pytest.mark.parametrize("name", METHODS)
def test_rounds_drawn_ahead_change_nothing(
    name: str, participation: Participation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> Simulation:
        return Simulation(small.mlp(), small.federation(), METHODS[name], participation=participation)

    ahead, each = begin(), begin()
    monkeypatch.setattr(each.runner._ahead, "of", each.runner._drawn)
    for _ in range(MOST_ROUNDS + 3):
        ahead.step()
        each.step()
    assert small.equal(ahead, each)


def test_the_same_clients_are_drawn_ahead_unless_samples_are_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fewer in (("fedavg", True), ("best", False)):
        run = Simulation(small.mlp(), small.federation(), METHODS[name])
        drawn = small.watched(monkeypatch, run.runner._ahead, "_draw")
        for _ in range(MOST_ROUNDS):
            run.step()
        assert (0 < len(drawn) < MOST_ROUNDS) == fewer
