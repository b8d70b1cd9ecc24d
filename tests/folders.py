"""Run folders for the tests: written by the package's own writer, with made-up numbers that a test can foresee."""

import json
import math
from pathlib import Path
from typing import Any

from tdpfed.config.loading import load_config, to_toml
from tdpfed.data.normalization import RAW
from tdpfed.runs.data_card import DataCard
from tdpfed.runs.folder import RunFolder
from tdpfed.server.records import Record, worst_decile

VERSIONS = {"tdpfed": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}


def record(round_: int, level: float = 0.9, *, clients: int = 10, up: int = 300_000, **more: Any) -> Record:
    """A record on a curve that climbs to ``level``."""
    accuracy = level * (1 - math.exp(-round_ / 4))
    values: dict[str, Any] = {
        "round": round_,
        "minibatch_loss": 2 * math.exp(-round_ / 6) + 0.1,
        "personalized_accuracy": accuracy,
        "local_accuracy": accuracy - 0.01,
        "global_accuracy": accuracy - 0.1,
        "personalized_loss": 1.5 * math.exp(-round_ / 6) + 0.2,
        "global_loss": 2.2 * math.exp(-round_ / 8) + 0.3,
        "client_accuracy": [max(0.0, accuracy - 0.01 * k) for k in range(clients)],
        "uplink_bytes": up * round_,
        "downlink_bytes": up * round_,
        "participants": clients,
        "seconds": 0.25 * round_,
    }
    return Record(**values | more)


def summary(records: list[Record], *, status: str = "finished", seed: int = 0, **more: Any) -> dict[str, Any]:
    last = records[-1] if records else None
    accuracies = [one.personalized_accuracy for one in records if one.personalized_accuracy is not None]
    values = {
        "status": status,
        "algorithm": "tdpfed",
        "dataset": "digits",
        "model": "dnn",
        "rounds": last.round if last else 0,
        "seed": seed,
        "clients": 10,
        "parameters": 7510,
        "personalized_accuracy": last and last.personalized_accuracy,
        "local_accuracy": last and last.local_accuracy,
        "global_accuracy": last and last.global_accuracy,
        "best_personalized_accuracy": max(accuracies, default=None),
        "worst_decile_accuracy": worst_decile(last.client_accuracy) if last else None,
        "minibatch_loss": last and last.minibatch_loss,
        "uplink_bytes": last.uplink_bytes if last else 0,
        "downlink_bytes": last.downlink_bytes if last else 0,
        "bytes_per_client_round": 0.0,
        "rejected_uploads": last.rejected if last else 0,
        "compression_rate": 1.9,
        "seconds": last and last.seconds,
        "device": "cpu (x86_64, 1 threads)",
        "versions": VERSIONS,
    }
    return values | more


def make(
    path: Path,
    *settings: str,
    level: float = 0.9,
    rounds: int = 20,
    seed: int = 0,
    status: str | None = "finished",
    preset: str = "digits",
    up: int = 300_000,
    every: dict[str, Any] | None = None,
) -> Path:
    """Write a run folder of so many evaluated rounds; without a status it is in progress."""
    config = load_config(preset, [f"run.rounds={max(20, rounds)}", f"run.seed={seed}", *settings])
    folder = RunFolder.create(path, to_toml(config))
    records = [record(t, level, up=up, **(every or {})) for t in range(1, rounds + 1)]
    lines = "".join(json.dumps(one.as_dict()) + "\n" for one in records)
    (path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if status is not None:
        name = config.algorithm["name"]
        folder.finish(summary(records, status=status, seed=seed, algorithm=name, dataset=config.data.name))
    return path


def with_data(path: Path, seed: int = 0, **values: Any) -> Path:
    """Give a made-up run a card: by default ten clients with ids, and three classes."""
    ids = values.pop("ids", tuple(f"ward-{k}" for k in range(10)))
    counts = tuple((k % 7, seed, 2) for k in range(len(ids)))
    sizes = tuple(sum(row) - 1 for row in counts)
    card = DataCard(
        name="digits", digest=f"{seed}", input_shape=(4,), classes=3, class_names=("ill", "<b>well</b>", "3"), ids=ids,
        train_size=sizes, test_size=(1,) * len(ids), normalization=RAW, class_counts=values.get("counts", counts),
    )  # fmt: skip
    (path / "federation.json").write_text(card.as_text())
    return path
