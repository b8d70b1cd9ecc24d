"""The results of a run: a record for each evaluated round, and the ledger of bytes sent."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """The state of a run after a round; accuracies are fractions, None if there is no such model or no data."""

    round: int
    loss: float | None
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

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values for JSON; values that are not finite become None."""
        return {name: _finite(value) for name, value in asdict(self).items()}


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


def due(round_: int, every: int, last: bool) -> bool:
    """Return whether something is due after a round: every ``every`` rounds and after the last; never if 0."""
    return every > 0 and (last or round_ % every == 0)


def worst_decile(accuracies: Sequence[float | None]) -> float | None:
    """Return the mean accuracy of the worst tenth of the clients (at least one)."""
    known = sorted(accuracy for accuracy in accuracies if accuracy is not None)
    worst = known[: max(1, len(known) // 10)]
    return sum(worst) / len(worst) if worst else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
