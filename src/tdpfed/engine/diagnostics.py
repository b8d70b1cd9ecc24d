"""The quantities of the paper's convergence analysis, measured on a run (Theorem 1, Lemmas 2 and 4).

With ``F_k(A) = min_theta f_k(theta) + lam/2 ||theta - [[A]]||^2`` on a client's whole training data, the envelope
theorem gives ``grad F_k(A) = lam * residual_grad(A, theta_k)`` at the minimizer theta_k, which gradient descent finds.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.local import Factors, LocalWork, Near
from tdpfed.core.state import State, Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.engine.runners import Runner
from tdpfed.errors import TDPFedError, wrong


@dataclass(frozen=True)
class Diagnostics:
    """How often to measure, and how precisely to solve each client's inner problem."""

    every: int = 10
    steps: int = 200
    tol: float = 1e-6  # relative gradient norm at which the inner problem counts as solved

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 1), ("steps", self.steps, 1), ("tol", self.tol, 0)):
            if value < least:
                raise TDPFedError(f"diagnostics.{name}: {value} given, must be at least {least}")


class Enveloped(Protocol):
    """A method to which the analysis applies."""

    lam: float
    eta_p: float
    tau: int

    @property
    def plan(self) -> FactorPlan:
        """Which parameters are factorized, and how."""

    def broadcast(self, server: State, turn: Turn) -> State:
        """Return the message to each client."""

    def local_rounds(self, message: State, private: State, local: LocalWork) -> Iterator[tuple[Near, Factors]]:
        """Yield theta and the factors after each local round."""


def defined_for(algorithm: Algorithm) -> Enveloped:
    """Return the algorithm if the analysis applies to it; otherwise raise an error."""
    if not algorithm.has_envelope:
        raise TDPFedError(f"diagnostics: the convergence quantities are not defined for {algorithm.name!r}")
    if algorithm.epochs is not None:
        raise wrong("algorithm.epochs", algorithm.epochs, "left out with diagnostics: clients must take equal steps")
    return cast(Enveloped, algorithm)


def diagnose(
    runner: Runner, server: State, private: State, turn: Turn, weights: Tensor, settings: Diagnostics
) -> dict[str, float]:
    """Return the quantities of the analysis at the server's factors, for the turn's clients, their rows and weights.

    ``gradient_norm``: squared norm of the gradient of F in the factors (Theorem 1a). ``distance``: mean squared
    distance of the personalized models to the global tensorized model (Theorem 1b). ``diversity``: mean squared
    distance of the clients' gradients to the global one (Lemma 2). ``drift``: mean squared distance of the gradients
    along the local rounds to the one at their start (Lemma 4).
    """
    algorithm = defined_for(runner.algorithm)
    share = (weights / weights.sum()).double()
    a = server["factors"].expand(len(turn.clients), -1)
    _, gradients = envelope(runner, a, turn, settings)
    mean = share @ gradients.double()
    message = algorithm.broadcast(server, turn)
    drift, before = torch.zeros_like(share), a
    for near, factors in algorithm.local_rounds(message, private, runner.local(turn, runner.batches(turn))):
        along = algorithm.lam * algorithm.plan.residual_grad(before.contiguous(), near.theta)
        drift += (along - gradients).double().square().sum(-1) / algorithm.tau
        before = factors.value
    distance = (near.theta - algorithm.plan.compose(a)).double().square().sum(-1)
    return {
        "gradient_norm": float(mean.square().sum()),
        "distance": float(share @ distance),
        "diversity": float(share @ (gradients.double() - mean).square().sum(-1)),
        "drift": float(share @ drift),
    }


def envelope(runner: Runner, a: Tensor, turn: Turn, settings: Diagnostics) -> tuple[Tensor, Tensor]:
    """Return each client's minimizer theta_k ``(K, P)`` and ``grad F_k`` ``(K, Q)`` at factors ``(K, Q)``."""
    algorithm, data = defined_for(runner.algorithm), runner.federation
    gradient = torch.func.grad_and_value(runner.objective.value)  # not recorded: every client's data differ in size
    solutions = []
    for row, client in enumerate(turn.clients.tolist()):
        x, y, _, _ = data.client(client)
        w = algorithm.plan.compose(a[row])
        theta, lr = w, algorithm.eta_p
        previous = torch.full((), torch.inf, dtype=w.dtype, device=w.device)
        for _ in range(settings.steps):
            g = gradient(theta, x, y)[0] + algorithm.lam * (theta - w)
            norm = torch.linalg.vector_norm(g)
            if norm <= settings.tol * torch.linalg.vector_norm(theta):
                break
            if norm > previous:
                lr *= 0.5  # the step was too long for this client's curvature
            previous = norm
            theta = theta - lr * g
        solutions.append(theta)
    solved = torch.stack(solutions)
    return solved, algorithm.lam * algorithm.plan.residual_grad(a.contiguous(), solved)
