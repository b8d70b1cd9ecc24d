"""The summary of a run, simulated or deployed: the content of ``summary.json``."""

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import tdpfed
from tdpfed.core.layout import Layout
from tdpfed.engine.simulation import Simulation
from tdpfed.server.records import HIGHER, OPTIONAL, Ledger, Record, best, worst_decile
from tdpfed.wire.forms import dense_bytes


@dataclass(frozen=True)
class Facts:
    """The content of a summary apart from the numbers in the records."""

    algorithm: str
    dataset: str
    model: str
    rounds: int  # completed so far
    seed: int
    clients: int
    layout: Layout
    ledger: Ledger
    device: str
    clients_trained: int | None = None  # None: unknown, and left out of the summary
    honest: Sequence[int] | None = None  # ids of the clients that count in mean accuracies; None: all
    epsilon: float | None = None
    delta: float | None = None


def facts_of(simulation: Simulation, model: str) -> Facts:
    """Return the facts about a simulation; ``model`` is the name of its model."""
    federation, accountant = simulation.federation, simulation.accountant
    return Facts(
        algorithm=simulation.algorithm.name,
        dataset=federation.name,
        model=model,
        rounds=simulation.round,
        seed=simulation.seed,
        clients=federation.clients,
        layout=simulation.objective.layout,
        ledger=simulation.ledger,
        device=device_name(federation.device),
        clients_trained=int(simulation.store.touched.sum()),
        honest=simulation.honest.nonzero().flatten().tolist(),
        epsilon=simulation.epsilon,
        delta=None if accountant is None else accountant.privacy.delta,
    )


def summarize(facts: Facts, records: Sequence[Record], status: str) -> dict[str, Any]:
    """Return the summary as plain values; accuracies are fractions, None before the first evaluation."""
    last, ledger, trained = records[-1] if records else None, facts.ledger, facts.clients_trained
    personal = [r.personalized_accuracy for r in records if r.personalized_accuracy is not None]
    honest = range(facts.clients) if facts.honest is None else facts.honest
    return {
        "status": status,
        "algorithm": facts.algorithm,
        "dataset": facts.dataset,
        "model": facts.model,
        "rounds": facts.rounds,
        "seed": facts.seed,
        "clients": facts.clients,
        **({} if trained is None else {"clients_trained": trained}),
        **({} if len(honest) == facts.clients else {"hostile_clients": sorted({*range(facts.clients)} - {*honest})}),
        "parameters": facts.layout.size,
        "personalized_accuracy": last.personalized_accuracy if last else None,
        "local_accuracy": last.local_accuracy if last else None,
        "global_accuracy": last.global_accuracy if last else None,
        "best_personalized_accuracy": best(personal),
        "worst_decile_accuracy": worst_decile([last.client_accuracy[k] for k in honest]) if last else None,
        **_received(records),
        **_validated(last),
        **_metrics(records, honest),
        "minibatch_loss": last.minibatch_loss if last else None,
        **_train_losses(last),
        "uplink_bytes": ledger.uplink,
        "downlink_bytes": ledger.downlink,
        "bytes_per_client_round": ledger.per_client_round,
        "rejected_uploads": ledger.rejected,
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "compression_rate": ledger.compression_rate(dense_bytes(facts.layout)),
        "dense_uplink_bytes": ledger.uploads * dense_bytes(facts.layout),
        "seconds": last.seconds if last else None,
        "device": facts.device,
        "commit": source_commit(),
        "versions": {"tdpfed": tdpfed.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _received(records: Sequence[Record]) -> dict[str, Any]:
    """Return the accuracy of received models, in the last round and in the best; nothing where it is not recorded."""
    found = [one.received_accuracy for one in records]
    if not found or best(found) is None:
        return {}
    return {"received_accuracy": found[-1], "best_received_accuracy": best(found)}


def _validated(last: Record | None) -> dict[str, Any]:
    """Return the validation accuracy and how many clients use which model; nothing where these are not recorded."""
    found: dict[str, Any] = {}
    if last is not None and last.validation_accuracy is not None:
        found["validation_accuracy"] = last.validation_accuracy
    if last is not None and last.client_choice is not None:
        found["choices"] = dict(sorted(Counter(one for one in last.client_choice if one is not None).items()))
    return found


def _metrics(records: Sequence[Record], honest: Sequence[int]) -> dict[str, Any]:
    """Return the metrics of the last record, each with its best round and its worst clients; nothing if there are none.

    The first is the main one.
    """
    if not records or not records[-1].metrics:
        return {}
    found: dict[str, Any] = {}
    for name, last in records[-1].metrics.items():
        higher = last["better"] == HIGHER
        curve = [one.metrics.get(name, {}).get("personalized") for one in records if one.metrics]
        found[name] = {key: value for key, value in last.items() if key != "clients"} | {
            "best_personalized": best(curve, higher),
            "worst_decile": worst_decile([last["clients"][k] for k in honest], higher),
        }
    return {"metrics": found}


def _train_losses(last: Record | None) -> dict[str, Any]:
    """Return the losses on all training samples; nothing where they are not evaluated."""
    found = {} if last is None else {name: getattr(last, name) for name in OPTIONAL if name.endswith("_loss")}
    return {name: value for name, value in found.items() if value is not None}


@cache
def source_commit() -> str | None:
    """Return the commit of the source tree, if the package is run from one; ``+`` marks uncommitted changes.

    ``$TDPFED_COMMIT`` takes precedence: it names the commit of a copy without its history.
    """
    here = Path(tdpfed.__file__).parent
    if commit := os.environ.get("TDPFED_COMMIT"):
        return commit

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # the package is installed inside another project's tree
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def device_name(device: torch.device) -> str:
    """Return a readable name of a device: the GPU's, or the processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
