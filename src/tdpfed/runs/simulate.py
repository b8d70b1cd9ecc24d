"""A whole run in one call: a model, a federation, an algorithm, a number of rounds; with ``out`` in a run folder."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.losses import LossFunction
from tdpfed.core.metrics import Function, Metric
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.data.federation import Federation
from tdpfed.engine.attacks import Attack
from tdpfed.engine.checks import check_kinds
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.precision import Precision
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.simulation import EVERYBODY, MEAN, Simulation
from tdpfed.engine.store import Place
from tdpfed.errors import TDPFedError, wrong
from tdpfed.models import from_spec
from tdpfed.runs.described import described
from tdpfed.runs.progress import no_progress, say_stopping
from tdpfed.runs.progress import progress as live_progress
from tdpfed.runs.session import Callback, Session, told
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
    folder: Path | None = None  # of the run, if it has one

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
    model: nn.Module | str,
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
    received: bool = False,
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
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    loggers: Sequence[str] = (),
) -> Result:
    """Train ``model`` on ``federation`` with ``algorithm`` for ``rounds`` communication rounds.

    ``wire`` chooses what of the uploads travels, ``server_step`` how the server uses their average, ``optimizer`` how
    clients take their steps. ``loss`` and ``metrics`` are names or functions of outputs and targets; by default they
    follow the federation's targets. ``train_loss`` also evaluates models on the training samples, ``received``
    the models with which clients begin the next round: after the server's message, before training. The model's
    parameters are the common starting point; a model may also be given by name, as in ``model.name``, and starts from
    the seed. ``seed`` determines all random draws. With many clients, accuracy can be measured on ``evaluate_clients``
    of them. Private state is kept in memory, or on disk if it does not fit.

    With ``out`` the run is written to a new folder, as by ``tdpfed run``: records, checkpoints, a summary. With
    ``resume`` the run in that folder is continued, if there is one. ``callbacks`` are called with each new record and
    the simulation; if one returns True, the run ends after that round. ``progress`` shows the rounds on standard error.
    ``loggers`` are those of ``run.loggers``.
    """
    given = model
    if isinstance(model, str):
        model = from_spec(model, federation.input_shape, federation.classes, seed=seed)
    for name, value in (("resume", resume), ("loggers", loggers)):
        if value and out is None:
            raise wrong(name, value, "given together with out, the folder of the run")
    check_kinds(model, federation, algorithm, participation, loss)
    if not isinstance(rounds, int) or rounds < 1:
        raise wrong("rounds", rounds, "a whole number of at least 1")
    method = algorithm if federation.validation else algorithm.over(rounds)
    simulation = Simulation(
        model, federation, method, seed=seed, participation=participation, runner=runner, chunk=chunk, loss=loss,
        metrics=metrics, train_loss=train_loss, received=received,
        diagnostics=diagnostics, wire=wire, rule=rule, server_step=server_step, attack=attack, privacy=privacy,
        precision=precision, evaluate_clients=evaluate_clients, state=state,
        optimizer=optimizer.over(rounds), state_folder=None if out is None else Path(out),
    )  # fmt: skip
    for note in simulation.notes:
        warnings.warn(note, stacklevel=2)
    show = live_progress if progress else no_progress
    if out is None:
        records: list[Record] = []
        with show(simulation, rounds, records) as on_round:
            for record in simulation.run(rounds, evaluate_every, on_round):
                records.append(record)
                if told(callbacks, record, simulation):
                    break
        return Result(records, simulation)
    config = described(
        simulation, given, rounds, evaluate_every, optimizer=optimizer, chunk=chunk, attack=attack, state=state,
        evaluate_clients=evaluate_clients, loggers=loggers, loss=loss, metrics=metrics, train_loss=train_loss,
    )  # fmt: skip
    try:
        session = Session.around(config, simulation, Path(out), resume=resume)
    except TDPFedError as error:
        raise error.at("out") if error.field in ("--out", "--resume") else error from None
    for warning in session.warnings:
        warnings.warn(warning, stacklevel=2)
    summary = session.run(show, say_stopping, callbacks)
    if summary["status"] == "interrupted":
        raise KeyboardInterrupt
    return Result(session.records, simulation, Path(out))
