"""A whole run in one call: a model, a federation, an algorithm and a number of rounds."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.losses import LossFunction
from tdpfed.core.metrics import Function, Metric
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.data.federation import Federation
from tdpfed.engine.attacks import Attack
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.precision import Precision
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.simulation import EVERYBODY, MEAN, Simulation
from tdpfed.engine.store import Place
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.records import Record
from tdpfed.server.robust import Rule
from tdpfed.server.step import AVERAGE, ServerStep
from tdpfed.wire import PLAIN, Wire


@dataclass(frozen=True)
class Result:
    """The result of :func:`simulate`: the records, and the final state of server and clients."""

    records: list[Record]
    simulation: Simulation

    @property
    def final(self) -> Record:
        """The record after the last round."""
        return self.records[-1]

    def personalized(self) -> list[dict[str, Tensor]]:
        """Each client's personalized model as a ``state_dict`` of the model."""
        return [self.simulation.objective.state_dict(theta) for theta in self.simulation.personalized()]

    def global_model(self) -> dict[str, Tensor] | None:
        """The server's model as a ``state_dict``; None if the method has none."""
        theta = self.simulation.global_model()
        return None if theta is None else self.simulation.objective.state_dict(theta)


def simulate(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    rounds: int,
    *,
    seed: int = 0,
    evaluate_every: int = 1,
    participation: Participation = EVERYBODY,
    runner: RunnerName = "batched",
    chunk: int | None = None,
    loss: str | LossFunction = "auto",
    metrics: Sequence[str | Metric | Function] = (),
    train_loss: bool = False,
    diagnostics: Diagnostics | None = None,
    wire: Wire = PLAIN,
    rule: Rule = MEAN,
    server_step: ServerStep = AVERAGE,
    optimizer: Optimizer = USUAL,
    attack: Attack | None = None,
    privacy: Privacy | None = None,
    precision: Precision = "float32",
    evaluate_clients: int | None = None,
    state: Place = "auto",
) -> Result:
    """Train ``model`` on ``federation`` with ``algorithm`` for ``rounds`` communication rounds.

    ``wire`` chooses what of the uploads travels, ``server_step`` how the server uses their average, ``optimizer`` how
    clients take their steps. ``loss`` and ``metrics`` are names or functions of outputs and targets; by default they
    follow the federation's targets. ``train_loss`` also evaluates models on the training samples. The model's
    parameters are the common starting point. ``seed`` determines all random draws. With many clients, accuracy can be
    measured on ``evaluate_clients`` of them. Private state is kept in memory, or on disk if it does not fit.
    """
    simulation = Simulation(
        model, federation, algorithm, seed=seed, participation=participation, runner=runner, chunk=chunk, loss=loss,
        metrics=metrics, train_loss=train_loss,
        diagnostics=diagnostics, wire=wire, rule=rule, server_step=server_step, attack=attack, privacy=privacy,
        precision=precision, evaluate_clients=evaluate_clients, state=state,
        optimizer=optimizer.over(rounds),
    )  # fmt: skip
    for note in simulation.notes:
        warnings.warn(note, stacklevel=2)
    return Result(list(simulation.run(rounds, evaluate_every)), simulation)
