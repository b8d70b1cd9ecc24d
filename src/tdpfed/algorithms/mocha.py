"""MOCHA (Smith et al., 2017): a linear support vector machine for every client, and how the clients are related.

``min_{W, Sigma} sum_k sum_i hinge(w_k; x_i, y_i) + lam/2 tr(W Sigma^-1 W^T)``: clients take dual coordinate steps, the
server forms ``W = V Sigma / lam`` from the dual images ``v_k = sum_i alpha_i x_i``, and ``Sigma = (W^T W)^(1/2)`` over
its trace, mixed with a little of the identity. Each class has a machine that tells it from the rest.
"""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from tdpfed.algorithms.base import Algorithm, Average, Update, hyper
from tdpfed.core.dual_ascent import as_flat, as_matrix, as_rows, hinge_steps
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.errors import wrong


class Mocha(Algorithm):
    """Federated multi-task learning of linear models."""

    name = "mocha"
    title = "MOCHA"
    follows = "none"
    averages = averages_all = same_for_all = summable = takes_newcomers = False
    per_sample = own_loss = True

    lam: float = hyper(0.1, "lambda: strength of the regularization", above=0, most=1e38, search=(0.01, 10.0))
    ridge: float = hyper(0.1, "share of the identity in Sigma, by which no client loses its influence", above=0, most=1)
    relation_every: int = hyper(1, "rounds between updates of Sigma", least=1, most=10**6)

    def bind(self, layout: Layout, population: int, most_samples: int = 0) -> Self:
        """Bind to a model of one linear layer."""
        kinds, outputs = [len(shape) for shape in layout.shapes], {shape[0] for shape in layout.shapes}
        if kinds not in ([2], [2, 1]) or len(outputs) > 1:
            allowed = "another, or model.name 'logistic': it trains one linear layer only"
            raise wrong("algorithm.name", self.name, allowed)
        return super().bind(layout, population, most_samples)

    def down(self) -> Entries:
        """The client's model, the dual image the server knows, and the scales of a dual step."""
        return {"w": self.layout, "image": self.layout, "scales": 2}

    def up(self) -> Entries:
        """The client's dual image."""
        return {"image": self.layout}

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from dual variables of 0 and unrelated clients."""
        del generator
        images = theta.new_zeros(self.population, self.layout.size)
        relation = torch.eye(self.population, dtype=theta.dtype, device=theta.device) / self.population
        return {"image": images, "w": images, "relation": relation}

    def init_private(self, theta: Tensor) -> State:
        """Keep the dual variables of all samples and classes, and their image."""
        alpha = theta.new_zeros(self.most_samples, self.layout.shapes[0][0])
        return {"theta": theta, "alpha": alpha, "image": 0 * theta}

    def broadcast(self, server: State, turn: Turn) -> State:
        """Send each client its own column of W and V."""
        own = server["relation"].diagonal()
        safe = (server["relation"].abs().sum(-1) / own).max() * own  # sigma': all clients move at once
        scales = torch.stack([own, safe], -1)[turn.clients] / self.lam
        return {"w": server["w"][turn.clients], "image": server["image"][turn.clients], "scales": scales}

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Take dual coordinate steps on ``tau`` minibatches, sample after sample."""
        (scale, safe), alpha = message["scales"].split(1, -1), private["alpha"]
        start = self.received(message, private, local)
        w, change = as_matrix(self.layout, start), 0 * as_matrix(self.layout, start)
        for t, (inputs, y) in enumerate(local.batches()):
            x, place = as_rows(self.layout, inputs, y), local.positions(t)
            sign = 2 * one_hot(y, w.shape[-2]).to(x) - 1
            scores = x @ (w + safe[..., None] * change).mT
            loss = (1 - sign * scores).clamp_min(0).sum(-1).mean(-1)
            moves, alpha = hinge_steps(alpha, scores, sign, x, place, safe)
            change = change + (moves * sign).mT @ x
        moved = as_flat(self.layout, change)
        theta, image = start + scale * moved, private["image"] + moved
        return {"theta": theta, "alpha": alpha, "image": image}, {"image": image}, {"loss": loss}

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the received machines, with what of the client's own part did not arrive at the server."""
        del local
        return message["w"] + message["scales"][..., :1] * (private["image"] - message["image"])

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Take over the images; form the models, and from them the relations."""
        del average
        images, relation = server["image"].index_copy(0, turn.clients, uploads["image"]), server["relation"]
        w = relation @ images / self.lam
        if int(turn.round) % self.relation_every == 0 and bool(w.any()):
            values, vectors = torch.linalg.eigh((w @ w.mT).double())
            root = values.clamp_min(0).sqrt()
            shares = (1 - self.ridge) * root / root.sum() + self.ridge / len(root)
            relation = ((vectors * shares) @ vectors.mT).to(w)
            w = relation @ images / self.lam
        return {"image": images, "w": w, "relation": relation}

    def global_model(self, server: State) -> None:
        """There is none."""
