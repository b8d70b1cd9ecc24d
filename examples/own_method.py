"""Two methods of your own, Ditto and FedPer, beside the package's: ``python examples/own_method.py --rounds 20``.

The same classes work by name on the command line, from the folder that holds this file:
``tdpfed run --set algorithm.name=own_method:Ditto --set algorithm.lam=0.5``.
"""

import argparse

import torch
from torch import Tensor

from tdpfed import (
    Algorithm,
    Average,
    Entries,
    FedAvg,
    Local,
    LocalWork,
    State,
    Turn,
    Update,
    hyper,
    make_federation,
    models,
    simulate,
)


class Ditto(FedAvg):
    """Ditto (Li et al., 2021): beside FedAvg every client trains a model of its own, pulled towards the global one."""

    name = "ditto"
    lam: float = hyper(1.0, "pull towards the global model", least=0)

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Train the global model for the server, and the own model for oneself."""
        shared, loss = local.descend(message["w"], lr=self.eta)
        own, _ = local.descend(private["theta"], lr=self.eta, anchor=message["w"], lam=self.lam)
        return {"theta": own}, {"w": shared}, {"loss": loss}


class FedPer(Algorithm):
    """FedPer (Arivazhagan et al., 2019): the body is shared, the head never leaves its client."""

    name = "fedper"
    eta: float = hyper(0.05, "learning rate", above=0)
    personal: tuple[str, ...] = hyper(("last",), "patterns of the parameters that stay; 'last' is the last layer")

    def down(self) -> Entries:
        """The body travels, both ways."""
        return {"body": self.layout.without(self.personal, "personal")}

    up = down

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """The server holds the body alone."""
        del generator
        return {"body": self.layout.take(theta, self.layout.without(self.personal))}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Put the received body under the own head, and train both."""
        body = self.layout.without(self.personal)
        theta, loss = local.descend(self.layout.merge(private["theta"], message["body"], body), lr=self.eta)
        return {"theta": theta}, {"body": self.layout.take(theta, body)}, {"loss": loss}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the bodies."""
        del server, uploads, turn
        return {"body": average("body")}

    def global_model(self, server: State) -> None:
        """A body without a head is no model."""
        del server


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    federation = make_federation("digits", clients=10, partition="dirichlet", alpha=0.3, max_samples=60)
    for method in (Ditto(tau=10, lam=0.5), FedPer(tau=10), FedAvg(tau=10), Local(tau=10)):
        result = simulate(models.build("dnn", (1, 8, 8), 10), federation, method, parser.parse_args().rounds)
        accuracy, sent = result.final.personalized_accuracy, result.final.uplink_bytes / 1e6
        print(f"{method.name:8} personalized {100 * (accuracy or 0):.1f} %, {sent:.2f} MB uploaded")
