"""From text to typed values: the lines of ``metrics.jsonl`` and ``refusals.jsonl``, and ``summary.json``.

Invalid JSON, wrong checksums and values of a wrong type raise a :class:`ValueError`; missing values become None.
Unknown keys are ignored, because other versions of the package may write them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tdpfed.runs.folder import CONFIG, FEDERATION, FILES, FROZEN
from tdpfed.runs.seals import Tail, is_sealed
from tdpfed.server.records import renamed

ACCURACIES = ("personalized_accuracy", "local_accuracy", "global_accuracy")
LOSSES = (
    "minibatch_loss", "personalized_loss", "global_loss", "personalized_train_loss", "global_train_loss",
)  # fmt: skip
FIELDS = (
    "round", *ACCURACIES, "received_accuracy", "validation_accuracy", *LOSSES, "uplink_bytes", "downlink_bytes",
    "seconds", "rejected", "epsilon",
)  # fmt: skip
"""Quantities of a record; each has one value per evaluated round."""
FIGURES = (
    *ACCURACIES, "best_personalized_accuracy", "received_accuracy", "best_received_accuracy", "worst_decile_accuracy",
    "minibatch_loss", "uplink_bytes", "downlink_bytes", "seconds", "rounds", "rejected_uploads", "compression_rate",
    "epsilon", "delta",
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
    """The summary of a run: numbers, texts, software versions, and the checksums of the other files."""

    figures: dict[str, Number]
    texts: dict[str, str]
    versions: dict[str, str]
    whole: dict[str, str] = field(default_factory=dict)  # sums of files by name; none in one of an older version
    tails: dict[str, Tail] = field(default_factory=dict)  # the ends of files of lines


def record(text: str) -> dict[str, Any]:
    """Return the parts of a record that a report uses."""
    line = renamed(_object(text))
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
    values = renamed(_object(text))
    versions = values.get("versions")
    words = {**(versions if isinstance(versions, dict) else {}), "commit": values.get("commit")}.items()
    sums = values.get(FILES)
    if (sums is None) != (is_sealed(text) is None):
        raise ValueError("its checksum is missing")
    whole, tails = _sums(sums) if isinstance(sums, Mapping) else ({}, {})
    return Summary(
        figures={key: _number(values.get(key)) for key in FIGURES},
        texts={key: values[key] for key in TEXTS if isinstance(values.get(key), str)},
        versions={name: word for name, word in words if isinstance(word, str)},
        whole=whole,
        tails=tails,
    )


def _sums(files: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Tail]]:
    try:
        tails = {str(n): Tail(int(one["lines"]), str(one["sha256"])) for n, one in files.items() if "lines" in one}
        whole = {str(name): str(one["sha256"]) for name, one in files.items() if name not in tails}
    except (KeyError, TypeError, ValueError):
        whole, tails = {}, {}
    if CONFIG not in whole or not {*whole} <= {CONFIG, FEDERATION, FROZEN}:
        raise ValueError(f"{FILES} given, must be checksums by file")
    return whole, tails


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
    if is_sealed(text) is False:
        raise ValueError("its checksum is wrong: it was damaged or changed")
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
