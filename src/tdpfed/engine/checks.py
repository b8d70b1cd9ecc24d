"""Checks of a simulation: types, settings, privacy, whether the model fits the data, and divergence."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.draws import held_out_sizes
from tdpfed.core.dropout import Drops
from tdpfed.core.local import Batch
from tdpfed.core.objective import Objective
from tdpfed.core.setting import plain
from tdpfed.core.state import Turn
from tdpfed.data.federation import Federation
from tdpfed.engine.attacks import Attack
from tdpfed.engine.precision import Precision
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.updates import FINITE, Updates
from tdpfed.errors import TDPFedError, raise_all, unknown, wrong
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule
from tdpfed.server.round import diverged

LIMITS = torch.finfo(torch.float32)


def check_kinds(model: object, federation: object, algorithm: object, participation: object, loss: object) -> None:
    """Refuse arguments of the wrong type."""
    kinds = {
        "model": (model, nn.Module), "federation": (federation, Federation), "algorithm": (algorithm, Algorithm),
        "participation": (participation, Participation),
    }  # fmt: skip
    for field, (given, kind) in kinds.items():
        if not isinstance(given, kind):
            raise TDPFedError(f"{field}: {_short(given)} given, must be an instance of {kind.__name__}")
    if not callable(loss) and not isinstance(loss, str):
        raise TDPFedError(f"loss: {loss!r} given, must be a name or a function of outputs and targets")
    check_numbers(algorithm)


def check_numbers(settings: object) -> None:
    """Refuse numbers that float32, in which a method computes, cannot hold; all errors are reported together."""
    given = plain(settings).items()
    raise_all(
        [
            wrong(name, value, f"0, or from {LIMITS.tiny:.3g} to {LIMITS.max:.3g} in size, the range of float32")
            for name, value in given
            if isinstance(value, float) and value and not LIMITS.tiny <= abs(value) <= LIMITS.max
        ]
    )


def _short(given: object) -> str:
    """Return the value as text, or its type if the text is long."""
    return text if len(text := repr(given)) <= 60 and "\n" not in text else f"a {type(given).__name__}"


def check_settings(
    seed: int,
    runner: str,
    chunk: int | None,
    precision: str,
    participation: Participation,
    rule: Rule,
    clients: int,
    evaluate_clients: int | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Refuse settings outside their range or impossible with this number of clients; all errors together."""
    errors: list[TDPFedError] = [
        unknown(field, given, allowed)
        for field, given, allowed in (
            ("runner", runner, get_args(RunnerName)), ("precision", precision, get_args(Precision)),
        )
        if given not in allowed
    ]  # fmt: skip
    most = clients if participation.clients is None else participation.clients
    whole = isinstance(chunk, int) and not isinstance(chunk, bool)
    evaluated = clients if evaluate_clients is None else evaluate_clients
    for field, value, bad, allowed in (
        ("seed", seed, not 0 <= seed < 2**63, "0 or more"),
        (
            "chunk", chunk, chunk is not None and not (whole and chunk >= 1),
            "a whole number of at least 1, or None for as many as fit",
        ),
        (
            "run.evaluate_clients", evaluate_clients, not 1 <= evaluated <= clients,
            f"at least 1 and at most {clients}, the number of clients",
        ),
        (
            "participation.clients", participation.clients, most > clients,
            f"at most {clients}, the number of clients",
        ),
        (
            "participation.quorum", participation.quorum, participation.quorum > most,
            f"at most {most}, the clients chosen per round",
        ),
    ):  # fmt: skip
        if bad:
            errors.append(wrong(field, value, allowed))
    if ranks.world > clients:
        errors.append(
            TDPFedError(
                f"{ranks.world} processes given, must be at most {clients}, the number of clients", field="torchrun"
            )
        )
    if not rule.enough(most):
        errors.append(
            TDPFedError(
                f"{rule.name!r} given, which with fraction {rule.fraction:g}, byzantine {rule.byzantine} and "
                f"keep {rule.keep} cannot work with the {most} clients of a round",
                field="robust.name", value=rule.name,
            )
        )  # fmt: skip
    raise_all(errors)


def check_privacy(
    algorithm: Algorithm, participation: Participation, rule: Rule, attack: Attack | None, clients: int
) -> None:
    """Refuse what the accounting of differential privacy does not cover, and say why; all errors together."""
    errors = []
    few = participation.clients is not None and participation.clients < clients
    for field, value, bad, allowed, why in (
        ("algorithm.name", algorithm.name, not algorithm.communicates, "one that uploads", "this one releases nothing"),
        (
            "algorithm.name", algorithm.name, algorithm.shared_seed, "another",
            "its clients know the seed of the draws, and so of the noise",
        ),
        (
            "algorithm.name", algorithm.name, algorithm.counts_clients, "another",
            "its server computes with the number of participants, which is a secret",
        ),
        (
            "algorithm.name", algorithm.name, algorithm.communicates and not algorithm.averages_all, "another",
            "its server does more with an upload than to average all of them",
        ),
        (
            "algorithm.name", algorithm.name, algorithm.public_samples > 0, "another",
            "its public sample shows data of clients as they are",
        ),
        (
            "algorithm.weights", algorithm.weights, algorithm.weights != "uniform", "'uniform'",
            "every client must have the same influence on the average",
        ),
        (
            "participation.sampling", participation.sampling, few and participation.sampling != "poisson", "'poisson'",
            "with a fixed number, whether one client takes part depends on the others",
        ),
        (
            "participation.quorum", participation.quorum, participation.quorum > 0, "0",
            "the number of participants is a secret, and the noise does not depend on it",
        ),
        ("robust.name", rule.name, rule.name != "mean", "'mean'", "the others do not bound one client's influence"),
        ("robust.clip", rule.clip, rule.clip is not None, "unset", "privacy.clip already clips"),
        (
            "robust.attack", attack and attack.kind, attack is not None and attack.kind == "alie", "another",
            "its uploads depend on those of honest clients",
        ),
    ):  # fmt: skip
        if bad:
            errors.append(wrong(field, value, f"{allowed} with privacy: {why}"))
    raise_all(errors)


def check_needs(
    algorithm: Algorithm, federation: Federation, rule: Rule, objective: Objective, participation: Participation
) -> None:
    """Refuse settings that a method or its data cannot work with; all errors together."""
    errors = participation.refusals(federation.train_size, algorithm.weights if algorithm.averages else "uniform")
    loss = objective.task.loss.name
    if algorithm.own_loss and (loss != "cross_entropy" or federation.targets != "classes"):
        errors.append(wrong("algorithm.name", algorithm.name, f"another with task.loss {loss!r} and targets that are "
                            f"{federation.targets}: it has a loss of its own, for classes"))  # fmt: skip
    if algorithm.own_loss and objective.drops:
        errors.append(wrong("algorithm.name", algorithm.name, "another with dropout: it does not call the model"))
    if not algorithm.averages and rule != Rule():
        allowed = f"'mean' without clipping: the server of {algorithm.name!r} averages no uploads"
        errors.append(wrong("robust.name", rule.name, allowed))
    held = held_out_sizes(federation.train_size, algorithm.held_out)
    if not federation.validation and bool((held >= federation.train_size).any()):
        client = int(federation.train_size.argmin())
        allowed = f"left out, or data with at least 2 training samples for every client: client {client} has 1"
        section = "evaluation" if algorithm.candidates else "algorithm"
        errors.append(wrong(f"{section}.validation", algorithm.held_out, allowed))
    raise_all(errors)


def checked_model(objective: Objective, data: Federation) -> tuple[Objective, list[str]]:
    """Try the model on two samples, so that a mismatch is reported before any work.

    Return the objective and notes: a model that cannot be computed for several clients at once is computed for one
    after another.
    """
    theta, y = objective.initial(), data.y[:2]
    with torch.inference_mode(False):  # a tensor that was made in inference mode has no version
        x = data.x[:2].clone()
    untouched = x._version
    try:
        with Drops(None) as seen:
            outputs = objective.outputs(theta, x)
    except Exception as error:  # the user's own code may raise anything
        raise TDPFedError(f"model: cannot take {_described(data)} ({error}){_hint(data)}") from error
    if not torch.is_tensor(outputs):
        raise TDPFedError(f"model: returns a {type(outputs).__name__}, must return a tensor of outputs")
    objective.task.check_outputs(outputs, y, data.classes)
    attends, mutates = objective.attends or seen.attends, x._version != untouched
    objective = replace(objective, attends=attends, mutates=mutates)
    training = objective.keyed(lambda _: (x, y), Turn(0, 1, torch.zeros((), dtype=torch.int64, device=x.device)))
    batch = training(0)
    _check_draws(objective, theta, batch)
    try:
        objective.value(theta, *batch)
    except Exception as error:
        raise TDPFedError(
            f"loss: cannot take outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)} ({error})"
        ) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*batching rule")  # such an operator would loop over the clients
            torch.func.vmap(objective.value)(
                theta.expand(2, -1), *(values[None].expand(2, *values.shape) for values in batch)
            )
    except Exception as error:  # a layer without a batching rule, or a branch that depends on values
        return _one_after_another(objective, theta, batch, error)
    return objective, []


def _check_draws(objective: Objective, theta: torch.Tensor, batch: Batch) -> None:
    """Refuse a forward pass that draws random numbers: its results could not be repeated."""
    device = theta.device
    before = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    with torch.no_grad():
        objective.outputs(theta, batch[0])
    after = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    if any(one is not None and other is not None and not torch.equal(one, other)
           for one, other in zip(before, after, strict=True)):  # fmt: skip
        raise TDPFedError(
            "model: its forward draws random numbers, which are not reproducible; must not, apart from nn.Dropout"
        )


def _one_after_another(
    objective: Objective, theta: torch.Tensor, batch: Batch, why: Exception
) -> tuple[Objective, list[str]]:
    reason = (str(why).splitlines() or [type(why).__name__])[0]
    if missing := re.search(r"(?i)batching rule\b.*?\baten::(\w+)", reason):
        reason = f"PyTorch has no rule for {missing[1]}"
    try:
        objective.gradient(theta, batch)
    except Exception:
        raise TDPFedError(f"model: cannot be trained ({reason})") from why
    layers = [type(layer).__name__ for layer in objective.model.modules() if isinstance(layer, nn.RNNBase)]
    what = f"{layers[0]} layers" if layers else f"a model that vmap cannot compute ({reason})"
    note = f"clients are computed one after another, which takes longer: {what} cannot be computed for several at once"
    return replace(objective, alone=True), [note]


def _described(data: Federation) -> str:
    if not data.parts:
        return f"inputs of shape {data.input_shape}"
    return "inputs " + ", ".join(
        f"{part.name or number} of shape {part.shape}" for number, part in enumerate(data.parts)
    )


def _hint(data: Federation) -> str:
    if data.parts or data.x.is_floating_point():
        return ""
    return "; inputs of int64 and int32 are token ids: if they are numbers, give them as floats"


def check_finite(updates: Updates, turn: Turn, algorithm: Algorithm, attack: Attack | None) -> None:
    """Stop a run that diverges; the error names the round, a client and the learning rates to lower."""
    _check(updates.metrics[FINITE].cpu(), turn, algorithm, attack)


@contextmanager
def finite(updates: Updates | None, turn: Turn, algorithm: Algorithm, attack: Attack | None) -> Iterator[None]:
    """Check updates as :func:`check_finite` before the block; on a GPU after it, so that it need not wait."""
    flags = torch.ones(0, dtype=torch.bool) if updates is None else updates.metrics[FINITE]
    if not flags.is_cuda:
        _check(flags, turn, algorithm, attack)
        yield
        return
    try:
        yield
    except Exception:  # it may come from values that are not finite
        _check(flags.cpu(), turn, algorithm, attack)
        raise
    _check(flags.cpu(), turn, algorithm, attack)


def _check(flags: Tensor, turn: Turn, algorithm: Algorithm, attack: Attack | None) -> None:
    if not bool(flags.all()):
        hint = f", or use a [robust] rule that withstands robust.attack {attack.kind!r}" if attack else ""
        raise diverged(algorithm, int(turn.round), int(turn.clients.cpu()[~flags][0]), hint)
