"""The results of a run: a record for each evaluated round, and the ledger of bytes sent."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import UnionType
from typing import Any, NamedTuple, Self, get_args, get_origin, get_type_hints

LOWER, HIGHER = "lower", "higher"
"""Which values of a metric are better."""

OPTIONAL = ("received_accuracy", "personalized_train_loss", "global_train_loss", "metrics")
"""Keys of a record that are left out if they have no value."""

NEW_NAMES = {"loss": "minibatch_loss", "train_loss": "minibatch_loss"}
"""Keys of a record or a summary that had another name."""


class Main(NamedTuple):
    """The main metric of a task: its name, whether higher is better, its value of each kind of model, and by client."""

    name: str
    higher: bool
    personalized: float | None
    local: float | None
    common: float | None
    clients: Sequence[float | None]


@dataclass(frozen=True)
class Record:
    """The state of a run after a round; accuracies are fractions, None if there is no such model or no data."""

    round: int
    minibatch_loss: float | None  # mean over clients, each on its last minibatch of the round before its last step
    personalized_accuracy: float | None
    local_accuracy: float | None
    global_accuracy: float | None
    personalized_loss: float | None
    global_loss: float | None
    client_accuracy: list[float | None]
    uplink_bytes: int
    downlink_bytes: int
    participants: int
    seconds: float
    diagnostics: dict[str, float] | None = None
    rejected: int = 0  # uploads refused so far
    epsilon: float | None = None  # spent so far; None without differential privacy
    client_change: list[float | None] | None = None  # personalized minus global accuracy, if the method reports it
    validation_accuracy: float | None = None  # of personalized models on held-out training samples, if there are any
    client_choice: list[str | None] | None = None  # which model each client uses, if it chooses
    received_accuracy: float | None = None  # of the models with which clients begin the next round, if asked for
    personalized_train_loss: float | None = None  # on all training samples, if asked for
    global_train_loss: float | None = None
    metrics: dict[str, dict[str, Any]] | None = None  # by name, the main one first; None: accuracy is the only one

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values for JSON; values that are not finite become None.

        Training losses, metrics and the accuracy of received models are left out where there are none.
        """
        values = asdict(self).items()
        return {name: _finite(value) for name, value in values if value is not None or name not in OPTIONAL}

    @property
    def main(self) -> Main:
        """The main metric."""
        if not self.metrics:
            values = self.personalized_accuracy, self.local_accuracy, self.global_accuracy
            return Main("accuracy", True, *values, self.client_accuracy)
        name, found = next(iter(self.metrics.items()))
        own, local, common = (found.get(model) for model in ("personalized", "local", "global"))
        return Main(name, found.get("better") != LOWER, own, local, common, found.get("clients", []))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the record from :meth:`as_dict`; keys of other versions are ignored.

        A value of another type than declared is a ValueError, as damaged JSON is.
        """
        types = get_type_hints(cls)
        known = {name: value for name, value in renamed(values).items() if name in types}
        if not all(_fits(value, types[name]) for name, value in known.items()):
            raise ValueError("a value of a record has the wrong type")
        return cls(**known)


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value from JSON is of a type. In a dict, None stands for a number that was not finite."""
    inner = get_args(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in inner)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(one is None or _fits(one, inner[1]) for one in value.values())
    if kind is float:
        return type(value) in (int, float)
    return kind is Any or type(value) is kind


@dataclass
class Ledger:
    """Bytes sent so far, all clients together."""

    uplink: int = 0
    downlink: int = 0
    client_rounds: int = 0
    rejected: int = 0
    uploads: int = 0
    mostly_refused: int = 0  # rounds in a row, up to the latest, in which more uploads were refused than accepted

    @property
    def per_client_round(self) -> float:
        """Mean bytes, up and down, of one client in one round."""
        return (self.uplink + self.downlink) / max(1, self.client_rounds)

    def compression_rate(self, dense: int) -> float | None:
        """Return ``dense``, the bytes of a dense upload, over the mean bytes of an upload; None if there was none."""
        return dense * self.uploads / self.uplink if self.uplink else None


def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record or a summary of any version with today's names."""
    return {NEW_NAMES.get(name, name): value for name, value in values.items()}


def due(round_: int, every: int, last: bool) -> bool:
    """Return whether something is due after a round: every ``every`` rounds and after the last; never if 0."""
    return every > 0 and (last or round_ % every == 0)


def best(values: Sequence[float | None], higher: bool = True) -> float | None:
    """Return the best of the values that there are; None without any."""
    known = [value for value in values if value is not None]
    return (max if higher else min)(known, default=None)


def worst_decile(accuracies: Sequence[float | None], higher: bool = True) -> float | None:
    """Return the mean over the worst tenth of the clients (at least one); ``higher`` says which values are better."""
    known = sorted((accuracy for accuracy in accuracies if accuracy is not None), reverse=not higher)
    worst = known[: max(1, len(known) // 10)]
    return sum(worst) / len(worst) if worst else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
