"""What a method declares is what it does: messages, uploads and private state are checked in every runner."""

from typing import Any

import pytest
import torch

import small
from tdpfed import Average, Entries, FedAvg, LocalWork, State, Turn, Update
from tdpfed.errors import TDPFedError


class Extra(FedAvg):
    """Keeps an entry that it did not declare."""

    name = "extra"

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        new, upload, metrics = super().update(message, private, local)
        return {**new, "more": new["theta"]}, upload, metrics


class Forgets(FedAvg):
    """Keeps nothing."""

    name = "forgets"

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        _, upload, metrics = super().update(message, private, local)
        return {}, upload, metrics


class OneLoss(FedAvg):
    """Reports one loss for all clients."""

    name = "oneloss"

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        new, upload, metrics = super().update(message, private, local)
        return new, upload, {"loss": metrics["loss"].mean()[None, None]}


class Secret(FedAvg):
    """Sends more down than it declares."""

    name = "secret"

    def broadcast(self, server: State, turn: Turn) -> State:
        message = super().broadcast(server, turn)
        return {**message, "secret": message["w"]}


class Short(FedAvg):
    """Declares less than it sends."""

    name = "short"

    def down(self) -> Entries:
        return {"w": 1}


class Renamed(FedAvg):
    """The server's state has another name than the messages, and no center is given."""

    name = "renamed"

    def down(self) -> Entries:
        return {"model": self.layout}

    up = down

    def broadcast(self, server: State, turn: Turn) -> State:
        return {"model": super().broadcast({**server, "model": server["w"]}, turn)["model"]}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        new, upload, metrics = super().update({"w": message["model"]}, private, local)
        return new, {"model": upload["w"]}, metrics

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        return {"w": average("model")}


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("method", [Extra, Forgets, OneLoss, Secret, Short], ids=lambda method: method.name)
def test_what_is_not_as_declared_is_refused(method: Any, runner: Any) -> None:
    with pytest.raises(TDPFedError, match=method.name):
        small.train(method(tau=2, batch_size=4), rounds=1, runner=runner)


def test_a_server_entry_of_another_name_needs_a_center() -> None:
    with pytest.raises(TDPFedError, match="center"):
        small.train(Renamed(tau=2, batch_size=4), rounds=1)


def test_learning_rates_are_marked() -> None:
    class Own(FedAvg):
        name = "own"

    assert Own(eta=0.1).rates == {"eta": 0.1}
    assert torch.equal(torch.tensor(list(Own().rates.values())), torch.tensor([0.05]))
