"""Which pairs of classes are hard, and the effect of distributing classes in turn: MNIST's records by client.

Reads the packed runs of results/mnist (classes drawn at random) and results/mnist-classes-in-turn. Each client is
represented by the median of its last ten accuracies. Compared are all clients, those with a pair that is hard to
distinguish, and the pairs that occur in both partitions.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write
from pack import PACKED, read

from tdpfed.data import make_federation

RESULTS = ROOT / "results"
PLACES = {"classes": RESULTS / "mnist", "classes-in-turn": RESULTS / "mnist-classes-in-turn"}
RUNS = ("tdpfed-x2-eta=3e-4", "local")
HARD = {(3, 5), (3, 8), (4, 7), (4, 9), (5, 8), (7, 9)}
CLIENTS, SEEDS, LATE = 20, 3, 10

Pair = tuple[int, ...]


def accuracies(kind: str, run: str, root: Path | None) -> list[tuple[Pair, float]]:
    """Return the classes and the late accuracy, in percent, of every client of every seed."""
    found = []
    runs = read(PLACES[kind] / PACKED)
    for seed in range(SEEDS):
        data = make_federation("mnist", root=root, partition=kind, clients=CLIENTS, seed=seed)
        late = [record["client_accuracy"] for record in runs[f"{run}-seed{seed}"]["records"][-LATE:]]
        for client in range(CLIENTS):
            classes = tuple(data.client(client)[1].unique().tolist())
            found.append((classes, 100 * statistics.median(record[client] for record in late)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=PLACES["classes-in-turn"] / "pairs.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(0, torch.device("cpu")), "runs": {}}
    for run in RUNS:
        clients = {kind: accuracies(kind, run, options.data_root) for kind in PLACES}
        both = set.intersection(*({pair for pair, _ in found} for found in clients.values()))
        rows: dict[str, Any] = {"pairs in both": sorted(both)}
        result["runs"][run] = rows
        for kind, found in clients.items():
            of_pair = {pair: [value for other, value in found if other == pair] for pair in both}
            hard = [value for pair, value in found if pair in HARD]
            rows[kind] = {
                "clients": len(found),
                "all": statistics.mean(value for _, value in found),
                "hard clients": len(hard),
                "hard": statistics.mean(hard) if hard else None,
                "others": statistics.mean(value for pair, value in found if pair not in HARD),
                "pairs in both": statistics.mean(map(statistics.mean, of_pair.values())),
            }
            print(run, kind, {name: v if v is None else round(v, 2) for name, v in rows[kind].items()})
    write(options.out, result)


if __name__ == "__main__":
    main()
