"""Methods as a user of the package would write them, whose messages look like those of no built-in one."""

import torch
from torch import Tensor

from tdpfed.algorithms import Algorithm, Average, FedAvg, Update, hyper
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn


class Changes(FedAvg):
    """FedAvg whose clients send how far they moved; the server keeps a last change that does not travel."""

    name = "changes"

    def down(self) -> Entries:
        return {"model": self.layout}

    def up(self) -> Entries:
        return {"delta": self.layout}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        return {"model": theta, "last": torch.zeros_like(theta)}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        theta, loss = local.descend(message["model"], lr=self.eta)
        return {"theta": theta}, {"delta": theta - message["model"]}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        change = average("delta")
        return {"model": server["model"] + change, "last": change}

    def global_model(self, server: State) -> Tensor:
        return server["model"]


class Halves(FedAvg):
    """FedAvg whose uploads have two entries: the layers but the last with their layout, the last as plain values."""

    name = "halves"

    def up(self) -> Entries:
        body = Layout(self.layout.names[:-2], self.layout.shapes[:-2])
        return {"body": body, "head": self.layout.size - body.size}

    def parts(self, theta: Tensor) -> State:
        """Cut parameters ``(..., P)`` into the entries of an upload."""
        body, head = self.up().values()
        assert isinstance(body, Layout)
        assert isinstance(head, int)
        return dict(zip(("body", "head"), theta.split([body.size, head], dim=-1), strict=True))

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        theta, loss = local.descend(message["w"], lr=self.eta)
        return {"theta": theta}, self.parts(theta), {"loss": loss}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        head = average("head")  # in no particular order
        return {"w": torch.cat([average("body"), head])}

    def center(self, server: State) -> State:
        return self.parts(server["w"])

    def unchanged(self, message: State) -> State:
        return self.parts(message["w"])


class Thirsty(FedAvg):
    """FedAvg that takes ``more`` steps than ``tau``, and expects to need ``expected`` minibatches."""

    name = "thirsty"

    more: int = hyper(4, "steps beyond tau", least=0)
    expected: int = hyper(1, "minibatches drawn beforehand", least=1)

    @property
    def draws(self) -> int:
        return self.expected

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        theta, _ = local.descend(message["w"], lr=self.eta)
        theta, loss = local.descend(theta, lr=self.eta, steps=self.more, first=self.tau)
        return {"theta": theta}, {"w": theta}, {"loss": loss}


class Undeclared(FedAvg):
    """FedAvg that does not send what it says."""

    name = "undeclared"

    fault: str = hyper("name", "what is wrong: a name, an entry too many or too few, a length, no loss")

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        kept, upload, metrics = super().update(message, private, local)
        w = upload["w"]
        wrong: dict[str, State] = {
            "name": {"v": w}, "more": {"w": w, "v": w}, "none": {}, "length": {"w": w[..., 1:]}, "loss": {"w": w},
        }  # fmt: skip
        return kept, wrong[self.fault], {} if self.fault == "loss" else metrics


OWN: dict[str, type[Algorithm]] = {method.name: method for method in (Changes, Halves, Thirsty, Undeclared)}
