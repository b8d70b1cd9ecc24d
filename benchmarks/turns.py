"""Compare two versions of the package: seconds per round of each method, and their ratio.

    python benchmarks/turns.py --before OTHER_CHECKOUT/src --repeats 15

Each version runs in its own process and waits while the other one computes, so that noise affects both equally.
Workloads are those of ``engine.py`` and of the peers: the paper's MNIST experiment, and VGG8 on CIFAR-10's shapes;
random numbers of these shapes replace the data. The result is the ratio of the fastest quarter of the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import provenance, write

WORKLOADS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "FedAvg", "options": {"tau": 23}},
    "fedavg_sar": {"method": "FedAvgSAR", "options": {"tau": 23}},
    "pfedme": {"method": "PFedMe", "options": {}},
    "pfedme, momentum": {"method": "PFedMe", "options": {"momentum": 0.5}},
    "perfedavg": {"method": "PerFedAvg", "options": {"tau": 23}},
    "local": {"method": "Local", "options": {"tau": 23}},
    "tdpfed": {"method": "TDPFed", "options": {"momentum": 0.0}},
    "tdpfed, momentum": {"method": "TDPFed", "options": {}},
    "tdpfed, act": {"method": "TDPFed", "options": {"momentum": 0.0, "aggregation": "act"}},
    "fedavg, digits": {"method": "FedAvg", "options": {"tau": 10}, "shape": (1, 8, 8), "clients": 10},
    "pfedme, digits": {"method": "PFedMe", "options": {"tau": 10}, "shape": (1, 8, 8), "clients": 10},
    "tdpfed, digits": {
        "method": "TDPFed", "options": {"tau": 10, "s_prime": 10}, "shape": (1, 8, 8), "clients": 10,
    },
    "fedavg, vgg8": {"method": "FedAvg", "options": {"tau": 2}, "model": "vgg8", "shape": (3, 32, 32), "clients": 4},
    "pfedme, vgg8": {"method": "PFedMe", "options": {"tau": 1}, "model": "vgg8", "shape": (3, 32, 32), "clients": 4},
    "tdpfed, vgg8": {"method": "TDPFed", "options": {"tau": 1}, "model": "vgg8", "shape": (3, 32, 32), "clients": 4},
}  # fmt: skip


def simulation(workload: dict[str, Any], device: str) -> Any:
    """Build a simulation with whichever version of the package is imported."""
    import tdpfed
    from tdpfed.models import build

    try:
        from tdpfed.engine.simulation import Simulation
    except ImportError:  # before the modules moved
        from tdpfed.engine.simulate import Simulation  # type: ignore[import-not-found,no-redef]
    shape, clients = workload.get("shape", (1, 28, 28)), workload.get("clients", 20)
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(clients).repeat_interleave(400)
    y = (owner + torch.randint(0, 2, owner.shape, generator=generator)) % 10
    x = torch.randn(len(y), *shape, generator=generator)
    federation = tdpfed.Federation.from_tensors(x, y, owner, classes=10).to(device)
    method = getattr(tdpfed, workload["method"])(**workload["options"])
    precision: Any = "tf32" if device == "cuda" else "float32"
    return Simulation(build(workload.get("model", "dnn"), shape, 10, seed=0), federation, method, precision=precision)


def work(device: str) -> None:
    """Answer requests on standard input: start a workload, or run rounds of it and print the seconds per round."""
    current: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "start" in asked:
            current = simulation(WORKLOADS[asked["start"]], device)
            for _ in range(4):
                current.step()
            seconds = 0.0
        else:
            began = time.perf_counter()
            for _ in range(asked["rounds"]):
                current.step()
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / asked["rounds"]
        print(json.dumps(seconds), flush=True)


class Version:
    """A process with one version of the package."""

    def __init__(self, source: Path, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", "--device", device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(source)},
        )  # fmt: skip

    def ask(self, **asked: Any) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return float(json.loads(self.process.stdout.readline()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="the src folder of the other version")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", help="workloads whose names contain this")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.device)
    sources = {"before": options.before, "now": Path(__file__).parents[1] / "src"}
    versions = {name: Version(source, options.device) for name, source in sources.items()}
    result: dict[str, Any] = {"provenance": provenance(0, torch.device(options.device)), "workloads": {}}
    for name in (one for one in WORKLOADS if options.only in one):
        for version in versions.values():
            version.ask(start=name)
        once = max(version.ask(rounds=1) for version in versions.values())
        rounds = max(1, round(0.2 / once))
        times: dict[str, list[float]] = {which: [] for which in versions}
        for turn in range(options.repeats):
            order = list(versions.items())
            for which, version in order if turn % 2 else reversed(order):
                times[which].append(version.ask(rounds=rounds))
        best = {
            which: statistics.mean(sorted(seconds)[: max(1, len(seconds) // 4)]) for which, seconds in times.items()
        }
        ratio = best["now"] / best["before"]
        result["workloads"][name] = {**best, "ratio": ratio, "seconds": times}
        print(f"{name:18} before {best['before']:.4f} s, now {best['now']:.4f} s, ratio {ratio:.3f}", flush=True)
    if options.out is not None:
        write(options.out, result)
    return None


if __name__ == "__main__":
    main()
