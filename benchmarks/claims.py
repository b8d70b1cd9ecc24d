"""Two claims of the paper, tested on records that exist: faster convergence, and a linear speedup.

Convergence: the first evaluated round at which a method's accuracy reaches a level, and what its clients had uploaded
by then, from the 800 rounds of results/mnist and results/mnist-classes-in-turn. Speedup: the same with more clients in
a round, from results/digits-participants; S times as many clients should need 1/S as many rounds.
Writes results/claims/README.md and results.json.
"""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write
from pack import PACKED, read

from tdpfed.server.records import renamed

RESULTS = ROOT / "results"
MNIST = {"classes at random": "mnist", "classes in turn": "mnist-classes-in-turn"}
LEVELS = (90.0, 95.0, 97.0, 98.0)
METHODS = {
    "TDPFed, x2, eta = 3e-4": ("tdpfed-x2-eta=3e-4", "personalized_accuracy"),
    "TDPFed, x2, eta = 8e-4": ("tdpfed-x2", "personalized_accuracy"),
    "pFedMe": ("pfedme", "personalized_accuracy"),
    "FedAvg, global model": ("fedavg", "global_accuracy"),
    "FedAvg, clients' own models": ("fedavg", "local_accuracy"),
    "training alone": ("local", "personalized_accuracy"),
}
PARTICIPANTS = "digits-participants"
SPEEDUP_LEVELS = (80.0, 85.0, 90.0)


def reached(records: Sequence[dict[str, Any]], field: str, level: float) -> dict[str, Any] | None:
    """Return the first record at which an accuracy is at least ``level`` percent."""
    lines = map(renamed, records)
    return next((line for line in lines if line[field] is not None and 100 * line[field] >= level), None)


def stat(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean and deviation over seeds; None if a seed has no value."""
    found = [value for value in values if value is not None]
    if not found or len(found) < len(values):
        return None
    return {"mean": statistics.mean(found), "sd": statistics.stdev(found) if len(found) > 1 else None}


def convergence(study: str, run: str, field: str) -> dict[str, Any]:
    """Return rounds and megabytes uploaded per client until each level."""
    packed = read(RESULTS / study / PACKED)
    runs = [packed[name]["records"] for name in sorted(packed) if name.rpartition("-seed")[0] == run]
    clients = 20
    found: dict[str, Any] = {}
    for level in LEVELS:
        lines = [reached(records, field, level) for records in runs]
        found[f"{level:g}"] = {
            "rounds": stat([None if line is None else line["round"] for line in lines]),
            "megabytes": stat([None if line is None else line["uplink_bytes"] / clients / 1e6 for line in lines]),
            "seeds": len(lines),
        }
    return found


def speedup() -> dict[str, Any]:
    """Return rounds until each level of the global accuracy, by kind of run, clients per round and seed."""
    found: dict[str, Any] = {}
    for run in read(RESULTS / PARTICIPANTS / PACKED).values():
        cell = run["cell"]
        clients = int(cell["row"].split()[0])
        for level in SPEEDUP_LEVELS:
            line = reached(run["records"], "global_accuracy", level)
            place = found.setdefault(cell["column"], {}).setdefault(f"{level:g}", {}).setdefault(str(clients), {})
            place[str(cell["seed"])] = line and line["round"]
    for by_level in found.values():
        for by_clients in by_level.values():
            for clients, by_seed in by_clients.items():
                by_clients[clients] = {"rounds": stat(list(by_seed.values())), "seeds": len(by_seed)}
            base = min(by_clients, key=int)
            first = by_clients[base]["rounds"]
            for clients, one in by_clients.items():
                both = first is not None and one["rounds"] is not None
                one["faster"] = first["mean"] / one["rounds"]["mean"] if both else None
                one["linear"] = int(clients) / int(base)
    return found


def number(value: dict[str, Any] | None, decimals: int = 0) -> str:
    if value is None:
        return "-"
    return f"{value['mean']:,.{decimals}f}" + ("" if value["sd"] is None else f" ± {value['sd']:,.{decimals}f}")


def page(rows: dict[str, Any], result: dict[str, Any]) -> str:
    parts = [
        "# Two claims of the paper: faster convergence, linear speedup\n",
        "Made from records of other studies, without new training. A round counts when it is evaluated: every tenth on "
        "MNIST, every one on digits. Mean ± standard deviation over seeds; - if a seed does not get there.\n",
    ]
    for kind, study in MNIST.items():
        heads = " | ".join(f"{level:g} %" for level in LEVELS)
        parts += [
            f"## Rounds until an accuracy, MNIST, {kind}\n",
            f"In brackets: megabytes that a client uploaded until then. Runs: [{study}](../{study}/README.md).\n",
            f"| | {heads} |\n| --- |{' --- |' * len(LEVELS)}",
            *(
                f"| {name} | "
                + " | ".join(f"{number(one['rounds'])} ({number(one['megabytes'], 1)})" for one in of.values())
                + " |"
                for name, of in rows[kind].items()
            ),
            "",
        ]
    if "speedup" in rows:
        parts.append("## Rounds until a global accuracy, by clients per round, digits\n")
        parts.append(
            "In brackets: how many times fewer rounds than with the fewest clients, and what a linear speedup would "
            f"give. Runs: [{PARTICIPANTS}](../{PARTICIPANTS}/README.md).\n"
        )
    for column, by_level in rows.get("speedup", {}).items():
        counts = sorted({int(count) for of in by_level.values() for count in of})
        parts.append(f"| {column} | " + " | ".join(f"{count} clients" for count in counts) + " |")
        parts.append(f"| --- |{' --- |' * len(counts)}")
        for level, of in by_level.items():
            cells = []
            for count in counts:
                one = of[str(count)]
                faster = "-" if one["faster"] is None else f"{one['faster']:.1f}"
                cells.append(f"{number(one['rounds'])} ({faster}; {one['linear']:.1f})")
            parts.append(f"| {level} % | " + " | ".join(cells) + " |")
        parts.append("")
    told = result["provenance"]
    parts.append(f"Command: `{told['command']}`. Commit {str(told['commit'])[:12]}, {told['date'][:10]}.\n")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "claims")
    options = parser.parse_args()
    rows: dict[str, Any] = {
        kind: {name: convergence(study, *of) for name, of in METHODS.items()} for kind, study in MNIST.items()
    }
    if (RESULTS / PARTICIPANTS / "results.json").exists():  # written when all its runs are there
        rows["speedup"] = speedup()
    result = {"provenance": provenance(0, torch.device("cpu")), "rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    write(options.out / "results.json", result)
    (options.out / "README.md").write_text(page(rows, result), encoding="utf-8")


if __name__ == "__main__":
    main()
