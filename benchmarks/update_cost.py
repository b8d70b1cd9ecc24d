"""What compressing uploads costs: seconds of a FedAvg round in each form of an upload, over those of a dense one.

The round is that of the paper's MNIST experiment (20 clients, DNN 784-100-10, 23 steps of 20 samples), on random data
of its shapes. The forms take turns, so that noise affects all of them equally; a ratio is of the fastest quarters.

    python benchmarks/update_cost.py --rounds 40
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import provenance, write

from tdpfed import FedAvg, Federation, Wire
from tdpfed.engine.simulation import Simulation
from tdpfed.models import build

FORMS = {
    "dense": Wire(),
    "int8": Wire(codec="int8"),
    "int4, feedback": Wire(codec="int4"),
    "top-k": Wire(update="top-k"),
    "1 term": Wire(update="factors", terms=1),
    "4 terms": Wire(update="factors", terms=4),
    "8 terms": Wire(update="factors", terms=8),
    "4 terms, 8 down": Wire(update="factors", terms=4, down="factors"),
}
CLIENTS, SAMPLES, WARM_UP = 20, 10_000, 3


def seconds(simulation: Simulation) -> float:
    """Return the time of a round."""
    on_gpu = simulation.federation.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    simulation.step()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(SAMPLES, 1, 28, 28, generator=generator)
    y = torch.randint(0, 10, (SAMPLES,), generator=generator)
    federation = Federation.from_tensors(x, y, torch.arange(SAMPLES) % CLIENTS, classes=10).to(device)
    runs = {
        name: Simulation(build("dnn", (1, 28, 28), 10, seed=0), federation, FedAvg(tau=23, eta=0.05), wire=wire)
        for name, wire in FORMS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(WARM_UP + options.rounds):
        for name, simulation in runs.items():
            took = seconds(simulation)
            if turn >= WARM_UP:
                times[name].append(took)
    fast = {name: statistics.mean(sorted(own)[: max(1, len(own) // 4)]) for name, own in times.items()}
    rows: list[dict[str, Any]] = [
        {
            "form": name,
            "seconds": fast[name],
            "median": statistics.median(times[name]),
            "ratio": fast[name] / fast["dense"],
        }
        for name in runs
    ]
    for row in rows:
        print(f"{row['form']:18} {1e3 * row['seconds']:8.2f} ms  {row['ratio']:.2f}")
    out = options.out or Path(__file__).parent / "results" / f"update-cost-{device.type}.json"
    write(out, {"provenance": provenance(0, device), "rounds": options.rounds, "rows": rows})


if __name__ == "__main__":
    main()
