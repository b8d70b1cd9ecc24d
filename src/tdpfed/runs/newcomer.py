"""A model for a client that was not in training, by the method's own functions.

The newcomer starts as every client does, from the server's model after training, and takes rounds of the method's local
work on its own samples; nothing is uploaded, and the server's state stays as it is. What that means follows from the
method: FedAvg fine-tunes the global model, Ditto trains a model of its own near it, FedPer a head for the shared body,
training alone trains alone. Inputs are normalized with the statistics of the run, as the server's model expects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.inputs import Inputs
from tdpfed.core.recipe import OF_THE_RATE, USUAL, Optimizer
from tdpfed.core.state import State, Turn, own_entries
from tdpfed.data.federation import Federation, Values
from tdpfed.data.normalization import RANGES
from tdpfed.engine import evaluate
from tdpfed.engine.checks import check_finite, checked_model
from tdpfed.engine.runners import Runner
from tdpfed.errors import TDPFedError, wrong
from tdpfed.runs.described import IN_PYTHON
from tdpfed.runs.raw_model import RawModel

if TYPE_CHECKING:
    from tdpfed.runs.trained import TrainedRun

Raw = Values | Mapping[str, Values] | tuple[Values, ...]
"""Raw samples ``(N, ...)``: a tensor, or several by name or position."""

ROUNDS = 10
"""The rounds of local work by default."""


@dataclass(frozen=True)
class Personalized:
    """The model of a newcomer, and the main metric on the samples that it held out, before and after."""

    model: RawModel  # takes raw inputs
    start: str  # which model the newcomer began with: "global", or "initial" if the method has no global one
    metric: str  # the main one of the run
    before: float | None  # its value for that model; None if no samples were held out
    after: float | None
    train_samples: int
    test_samples: int
    rounds: int


def personalize(
    run: "TrainedRun",
    x: Raw,
    y: Values,
    *,
    rounds: int,
    test_mask: Values | None,
    test_fraction: float,
    seed: int | None,
    hyper: Mapping[str, Any],
) -> Personalized:
    """Return a model for the owner of raw samples; ``hyper`` are hyper-parameters that differ from the run's."""
    if not isinstance(rounds, int) or rounds < 1:
        raise wrong("rounds", rounds, "a whole number of at least 1")
    seed = run.settings.run.seed if seed is None else seed
    federation = _one_client(run, x, y, test_mask, test_fraction, seed)
    method = _method(run, federation, rounds, hyper)
    objective, _ = checked_model(run.objective, federation)
    server, precision = own_entries(run.snapshot.server), run.settings.run.precision
    shared = method.global_model(server)
    private = own_entries(run.snapshot.private.start) if shared is None else method.init_private(shared)
    start = method.personalized(private) if shared is None else shared
    steady = _steady(run.settings.optimizer)
    runner = Runner(method, objective, federation, "loop", precision=precision, optimizer=steady)
    rows: State = {name: value[None] for name, value in private.items()}
    for number in range(rounds):
        turn = Turn(seed, run.round + 1 + number, torch.zeros(1, dtype=torch.int64))
        updates = runner.run(server, rows, turn)
        check_finite(updates, turn, method, None)
        rows = updates.private
    theta = method.personalized({name: value[0] for name, value in rows.items()})
    main = objective.task.main
    before, after = (evaluate.score_one(objective, one, federation).result(main) for one in (start, theta))
    return Personalized(
        run.as_model(theta), "initial" if shared is None else "global", main.name, before, after,
        int(federation.train_size), int(federation.test_size), rounds,
    )  # fmt: skip


def _one_client(
    run: "TrainedRun",
    x: Raw,
    y: Values,
    test_mask: Values | None,
    test_fraction: float,
    seed: int,
) -> Federation:
    """Return a federation of the newcomer alone, its inputs normalized as those of the run."""
    card, data = run.card, run.settings.data
    raw = _rows(x, card.inputs)
    inputs = raw if card.tokens else card.normalization.apply(raw.to(card.normalization.mean.dtype))
    low, high = RANGES.get(card.normalization.kind, (-torch.inf, torch.inf))
    if inputs.numel() and not low <= inputs.min() <= inputs.max() <= high:
        raise TDPFedError(
            f"values that become {inputs.min():g} to {inputs.max():g} by the run's normalization "
            f"{card.normalization.kind!r}; allowed: raw inputs as in the run, which become {low:g} to {high:g}",
            field="x",
        )
    made = Federation.from_tensors(
        card.inputs.unpack(inputs), y, np.zeros(len(raw), dtype=np.int64), test_mask=test_mask,
        test_fraction=test_fraction, classes=card.classes, targets=card.targets, normalize="none", seed=seed,
        name=card.name,
    )  # fmt: skip
    return made.with_augment(data.augment).with_validation(data.validation)


def _rows(x: Raw, inputs: Inputs) -> Tensor:
    """Return raw samples as one tensor ``(N, ...)``; samples of another shape than the run's are refused."""
    if isinstance(x, Mapping) != bool(inputs.parts and inputs.parts[0].name):
        raise TDPFedError(f"a {type(x).__name__}; allowed: what the run's models take: {_takes(inputs)}", field="x")
    given = [x[part.name] for part in inputs.parts if part.name in x] if isinstance(x, Mapping) else x
    several = list(given) if isinstance(given, list | tuple) else [given]
    tensors = [
        one.detach() if isinstance(one, Tensor) else torch.from_numpy(np.require(one, requirements=["C", "W"]))
        for one in several
    ]
    shapes = [part.shape for part in inputs.parts] or [inputs.shape]
    if [tuple(one.shape[1:]) for one in tensors] != shapes:
        found = ", ".join(str(tuple(one.shape[1:])) for one in tensors)
        raise TDPFedError(f"samples of shape {found}; allowed: {_takes(inputs)}, as in the run", field="x")
    return inputs.pack(tensors) if inputs.parts else tensors[0]


def _takes(inputs: Inputs) -> str:
    return ", ".join(f"{part.name} {part.shape}".strip() for part in inputs.parts) or str(inputs.shape)


def _method(run: "TrainedRun", federation: Federation, rounds: int, hyper: Mapping[str, Any]) -> Algorithm:
    """Return the run's method with other hyper-parameters, for the newcomer; one that cannot serve it is refused."""
    inner = run.settings.method
    known = {item.name for item in inner.hyper_parameters()}
    for name in hyper:
        if name not in known:
            raise wrong(f"algorithm.{name}", hyper[name], f"a hyper-parameter of {inner.name!r}", known)
    if hyper.get("epochs") is not None:
        hyper = {"tau": type(inner).tau, **hyper}
    named = (run.settings.task.loss, *run.settings.task.metrics)
    if any(one.endswith(IN_PYTHON) for one in named):
        raise TDPFedError(
            f"{', '.join(named)}: a function that was given in Python, which the folder does not hold; give "
            "simulate(...) a function of a module",
            field="task",
        )
    try:
        evaluation = replace(run.settings.evaluation, choose_rounds=run.round + max(1, rounds // 2))
        changed = replace(run.settings, method=replace(inner, **hyper), evaluation=evaluation).make_algorithm()
    except TDPFedError as error:
        raise error.within("algorithm") from None
    method = changed.bind(run.objective.layout, len(run.ids), int(federation.train_size))
    why = None
    if not method.takes_newcomers:
        why = "its server keeps a state for each client of the training, and none for others"
    elif method.public_samples:
        why = "its clients also train on a public sample, which the run folder does not keep"
    if why is not None:
        raise TDPFedError(f"{method.name!r} has no model for a new client: {why}", field="algorithm.name")
    return method


def _steady(optimizer: Optimizer) -> Optimizer:
    """Return a recipe at its full rate: the newcomer begins, whatever is left of the run's schedule."""
    return replace(optimizer, **{name: getattr(USUAL, name) for name in OF_THE_RATE})
