"""The configuration of a run that was started from Python: what its folder says, like that of the command line.

What can be named is named: methods by name or ``module:Class``, models by name or ``module:factory``, data by the
arguments of :func:`tdpfed.make_federation`, losses and metrics by name or ``module:function``. A model or federation
that was given as an object has no such name, nor has a lambda; its entry then ends in :data:`IN_PYTHON`, and only
Python, which has the object, can resume the run.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tdpfed.algorithms import ALGORITHMS, Algorithm, Best
from tdpfed.config.sections import Config, Data, Engine, Evaluation, Model, Privacy, Robust, Run
from tdpfed.core.losses import LossFunction
from tdpfed.core.metrics import Function, Metric, named
from tdpfed.core.recipe import Optimizer
from tdpfed.core.setting import plain
from tdpfed.core.tasks import LOSSES, TaskSettings, load
from tdpfed.data.federation import Federation
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Place
from tdpfed.errors import TDPFedError

IN_PYTHON = " (given in Python)"
"""The end of the name of a model, of data or of a function that only the Python program has."""


def described(
    simulation: Simulation,
    model: nn.Module | str,
    rounds: int,
    evaluate_every: int,
    *,
    optimizer: Optimizer,
    chunk: int | None,
    attack: Attack | None,
    state: Place,
    evaluate_clients: int | None,
    loggers: Sequence[str],
    loss: str | LossFunction,
    metrics: Sequence[str | Metric | Function],
    train_loss: bool,
) -> Config:
    """Return the configuration of a simulation, with the arguments that it does not keep."""
    diagnostics, accountant = simulation.diagnostics, simulation.accountant
    hostile = {} if attack is None else {f"attack_{name}": value for name, value in plain(attack).items()}
    if attack is not None:
        hostile["attack"] = hostile.pop("attack_kind")
    method, evaluation = _method(simulation.algorithm, rounds)
    evaluation = replace(evaluation, received=simulation.recorder.received)
    return Config(
        run=Run(
            rounds=rounds,
            seed=simulation.seed,
            evaluate_every=evaluate_every,
            evaluate_clients=evaluate_clients,
            train_loss=train_loss,
            diagnostics_every=0 if diagnostics is None else diagnostics.every,
            device="cuda" if simulation.federation.device.type == "cuda" else "cpu",
            runner=simulation.runner.kind,
            threads=torch.get_num_threads(),
            chunk="auto" if chunk is None else chunk,
            precision=simulation.runner.precision,
            loggers=tuple(loggers),  # type: ignore[arg-type]  # checked by the section
        ),
        data=_data(simulation.federation),
        model=Model(name=model if isinstance(model, str) else f"{type(model).__name__}{IN_PYTHON}"),
        task=TaskSettings(loss=_named(loss), metrics=tuple(map(_named, metrics))),
        method_name=name_of(type(method)),
        method=method,
        optimizer=optimizer,
        participation=simulation.participation,
        wire=simulation.channel.wire,
        server=simulation.server_round.step,
        robust=Robust(**plain(simulation.server_round.rule), **hostile),
        privacy=Privacy() if accountant is None else Privacy(**plain(accountant.privacy)),
        evaluation=evaluation,
        engine=Engine(state=state),
    )


def check_named(config: Config) -> None:
    """Refuse a configuration whose model or data only a Python program has."""
    tasks = (("task.loss", config.task.loss), *(("task.metrics", name) for name in config.task.metrics))
    for field, name in (("model.name", config.model.name), ("data.name", config.data.name), *tasks):
        if name.endswith(IN_PYTHON):
            what = name.removesuffix(IN_PYTHON)
            raise TDPFedError(
                f"{what!r} was given in Python, as an object that the folder does not hold; resume with the same call "
                "of tdpfed.simulate(..., out=..., resume=True)",
                field=field, value=name,
            )  # fmt: skip


def name_of(method: type[Algorithm]) -> str:
    """Return the name by which a configuration finds a method."""
    return method.name if ALGORITHMS.get(method.name) is method else f"{method.__module__}:{method.__qualname__}"


def _named(given: str | Metric | LossFunction | Function) -> str:
    """Return the name by which a configuration finds a loss or metric, which may be a function."""
    if isinstance(given, str):
        return given
    if isinstance(given, Metric):
        return given.name if named(given.name) == given else f"{given.name}{IN_PYTHON}"
    built_in = next((one.name for one in LOSSES.values() if one.mean is given), None)
    if built_in is not None:
        return built_in
    spec = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__name__)}"
    try:
        found = load("task", spec)
    except TDPFedError:
        found = None
    return spec if found is given else f"{spec.partition(':')[2]}{IN_PYTHON}"


def _method(algorithm: Algorithm, rounds: int) -> tuple[Algorithm, Evaluation]:
    """Return the method, and the choice among models around it; one without an end is open in all rounds of the run."""
    if not isinstance(algorithm, Best):
        return algorithm, Evaluation()
    own = {name: getattr(algorithm, name) for name in ("validation", "alone_rate", "mixes", "margin", "choice_batches")}
    until = rounds if algorithm.choose_rounds is None else algorithm.choose_rounds
    return algorithm.method, Evaluation(personalize="best", choose_rounds=max(1, until), **own)


def _data(federation: Federation) -> Data:
    """Return the arguments of ``make_federation``; of data made otherwise, what is known about them."""
    more: dict[str, Any] = {
        "normalize": federation.normalization.kind, "augment": federation.augment,
        "validation": federation.validation,
    }  # fmt: skip
    made: dict[str, Any] = {name: value for name, value in (federation.settings or {}).items() if value is not None}
    if not made:
        name, clients = f"{federation.name}{IN_PYTHON}", federation.clients
        return Data(name=name, clients=clients, partition="natural", split="official", **more)
    return Data(name=made.pop("dataset"), **made | more)
