"""Rounds per minute of `tdpfed flower demo`, and the share of this package in that time.

``python benchmarks/flower.py --rounds 6`` starts a SuperLink and three SuperNodes on loopback and writes
``results/flower.json``. The package's share is measured as in the demo: in each round, the time of the server app
outside of calls to Flower, and the longest time of a node between receiving a message and creating its reply. The time
of a node's imports, PyTorch and this package, is reported separately. The rest is Flower: a process for each message,
its own imports and waiting.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write

from tdpfed.flower.demo import Demo, run_demo
from tdpfed.flower.envelope import ENVELOPE

TIMED = """
import time
import flwr.clientapp, flwr.app
began = time.perf_counter()
import torch
middle = time.perf_counter()
import tdpfed.flower
print(middle - began, time.perf_counter() - middle)
"""


def imports(repeats: int = 5) -> dict[str, float]:
    """Return the median seconds that a fresh process needs to import PyTorch, and then this package."""
    runs = [
        subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(repeats)
    ]
    torch_, own = (statistics.median(float(run[column]) for run in runs) for column in (0, 1))
    return {"torch": torch_, "tdpfed": own}


def measured(demo: Demo) -> dict[str, Any]:
    summary = run_demo(demo, print, lambda line: print(f"round {line['round']}: {line['seconds']:.1f} s"))
    text = (demo.run / "rounds.jsonl").read_text(encoding="utf-8")
    rounds = [json.loads(line) for line in text.splitlines()]
    loaded = imports()
    whole = statistics.mean(line["train_seconds"] for line in rounds)
    own = {
        "server": statistics.mean(line["server_seconds"] for line in rounds),
        "slowest_node": statistics.mean(line["client_seconds"] for line in rounds),
    }
    return {
        "algorithm": demo.algorithm,
        "nodes": demo.nodes,
        "rounds": demo.rounds,
        "seconds_per_round": whole,
        "rounds_per_minute": 60 / whole,
        "own_seconds_per_round": own,
        "own_share": summary["own_share"],
        "import_seconds_on_a_node": loaded,
        "uplink_bytes": summary["uplink_bytes"],
        "envelope_bytes_per_upload": ENVELOPE,
        "per_round": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--algorithm", default="tdpfed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        demo = Demo(Path(folder) / "demo", given.nodes, given.rounds, given.algorithm)
        result = measured(demo)
    result = {"provenance": provenance(0, torch.device("cpu")), **result}
    write(ROOT / "benchmarks" / "results" / "flower.json", result)
    print(f"{result['rounds_per_minute']:.1f} rounds per minute, own share {100 * result['own_share']:.1f} %")


if __name__ == "__main__":
    main()
