"""From text to typed values: the lines of ``metrics.jsonl`` and ``refusals.jsonl``, and ``summary.json``.

Invalid JSON and values of a wrong type raise a :class:`ValueError`; missing values become None. Unknown keys are
ignored, because other versions of the package may write them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ACCURACIES = ("personalized_accuracy", "local_accuracy", "global_accuracy")
LOSSES = ("loss", "personalized_loss", "global_loss")
FIELDS = ("round", *ACCURACIES, *LOSSES, "uplink_bytes", "downlink_bytes", "seconds", "rejected", "epsilon")
"""Quantities of a record; each has one value per evaluated round."""
FIGURES = (
    *ACCURACIES, "best_personalized_accuracy", "worst_decile_accuracy", "train_loss", "uplink_bytes", "downlink_bytes",
    "seconds", "rounds", "rejected_uploads", "compression_rate", "epsilon", "delta",
)  # fmt: skip
"""Numbers of a summary."""
TEXTS = ("status", "algorithm", "dataset", "model", "device")

Number = float | None


@dataclass(frozen=True)
class Refusal:
    """A rejected upload: its round and client, the rule and the reason."""

    round: int
    client: int | None
    rule: str
    reason: str


@dataclass(frozen=True)
class Summary:
    """The summary of a run: numbers, texts and software versions."""

    figures: dict[str, Number]
    texts: dict[str, str]
    versions: dict[str, str]


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; the last line may be incomplete."""
    yield from enumerate(text.removesuffix("\n").split("\n") if text else (), 1)


def record(text: str) -> dict[str, Any]:
    """Return the parts of a record that a report uses."""
    line = _object(text)
    clients, diagnostics = line.get("client_accuracy") or [], line.get("diagnostics") or {}
    if not isinstance(clients, list) or not isinstance(diagnostics, dict):
        raise ValueError("not a record")
    return {
        **{field: _number(line.get(field)) for field in FIELDS},
        "round": _round(line),
        "client_accuracy": [_number(accuracy) for accuracy in clients],
        "diagnostics": {name: _number(value) for name, value in diagnostics.items()},
    }


def refusal(text: str) -> Refusal:
    """Return the rejected upload that a line describes."""
    line = _object(text)
    client = line.get("client")
    return Refusal(
        round=_round(line),
        client=client if type(client) is int else None,
        rule=str(line.get("rule")),
        reason=str(line.get("reason")),
    )


def summary(text: str) -> Summary:
    """Return the parts of a summary that a report uses."""
    values = _object(text)
    versions = values.get("versions")
    words = {**(versions if isinstance(versions, dict) else {}), "commit": values.get("commit")}.items()
    return Summary(
        figures={key: _number(values.get(key)) for key in FIGURES},
        texts={key: values[key] for key in TEXTS if isinstance(values.get(key), str)},
        versions={name: word for name, word in words if isinstance(word, str)},
    )


def _object(text: str) -> dict[str, Any]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} given, must be a number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError:
        raise ValueError("no whole JSON object") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("no whole JSON object")
    return value


def _round(line: dict[str, Any]) -> int:
    value = line.get("round")
    if type(value) is not int or not 0 < value < 2**53:
        raise ValueError(f"round {str(value)[:40]!r} given, must be a whole number above 0")
    return value


def _number(value: Any) -> Number:
    if value is None:
        return None
    # Rejects NaN and numbers that would overflow in arithmetic.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise ValueError(f"{str(value)[:40]!r} given, must be a number")
    return value
