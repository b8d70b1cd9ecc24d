"""Seconds of each method's round per gradient that it computes, relative to FedAvg's.

    python benchmarks/method_cost.py

Random numbers of MNIST's shapes, MLP 784-100-10 (``logistic`` for MOCHA and the FedAvg it is compared with), 20
clients, 23 local steps of 20 samples. Methods take turns with FedAvg, so that noise affects both equally: the ratio is
the median over the turns of the time of one round over that of the FedAvg round next to it, divided by the work of a
step. Work is counted in multiply-adds of matrix products, and a minibatch gradient of the model is 1: the gradient of
low-rank factors includes the products that compose the parameters, a forward pass is a third of a gradient, and MOCHA's
dual steps include the products of samples with each other.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from floor import operations

from tdpfed.algorithms import ALGORITHMS, Algorithm
from tdpfed.core.layout import Layout
from tdpfed.data import Federation
from tdpfed.engine.simulation import Simulation
from tdpfed.models import build

TAU, BATCH, CLIENTS, CLASSES = 23, 20, 20, 10
LIMIT = 2.0
BASE = "fedavg"
FORWARD = 1 / 3


def work(method: Any, layout: Layout) -> float:
    """Return how many gradients a client computes in a round."""
    tau, weights = method.tau, sum(math.prod(shape) for shape in layout.shapes if len(shape) > 1)

    def choices(models: int) -> float:
        return float(FORWARD * models * method.choice_batches)

    def hadamard() -> float:
        """Composing takes a product for each of two groups of factors, their gradients two more."""
        ranks = [(math.prod(s), r) for s, r in zip(layout.shapes, method.hadamard.ranks, strict=True) if r]
        return float(tau * (1 + sum(2 * size * rank * 2 * 3 for size, rank in ranks) / (3 * 2 * BATCH * weights)))

    counts: dict[str, Callable[[], float]] = {
        "pfedme": lambda: tau * method.s,
        "fedmac": lambda: tau * method.s,
        "tdpfed": lambda: tau * operations("tdpfed") / operations("fedavg"),
        "fedpara": hadamard,
        "pfedpara": hadamard,
        "perfedavg": lambda: 2 * tau + 1,
        "ditto": lambda: 2 * tau,
        "apfl": lambda: 2 * tau,
        "dapper": lambda: 2 * tau,
        "fedrep": lambda: tau + method.head_steps,
        "fedbabu": lambda: tau + method.fine_tune,
        "finetune": lambda: tau + method.tune_steps,
        "fedala": lambda: tau + method.weight_steps,
        "hypcluster": lambda: tau + choices(method.clusters),
        "mapper": lambda: tau * (1 + sum(lam > 0 for lam in method.mixes)) + choices(len(method.mixes)),
        "mocha": lambda: tau * (2 + BATCH / CLASSES) / 2,
    }
    return float(counts[method.name]() if method.name in counts else tau)


def simulation(method: Algorithm, model: str) -> Simulation:
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(CLIENTS).repeat_interleave(400)
    y = (owner + torch.randint(0, 2, owner.shape, generator=generator)) % 10
    x = torch.randn(len(y), 1, 28, 28, generator=generator)
    data = Federation.from_tensors(x, y, owner, classes=CLASSES)
    return Simulation(build(model, (1, 28, 28), CLASSES, seed=0), data, method)


def seconds(one: Simulation) -> float:
    began = time.perf_counter()
    one.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(name for name in ALGORITHMS if name != BASE))
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "method-cost.json")
    options = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for name in options.methods.split(","):
        model = "logistic" if name == "mocha" else "dnn"
        bases = simulation(ALGORITHMS[BASE](tau=TAU, batch_size=BATCH), model)
        method = ALGORITHMS[name](tau=TAU, batch_size=BATCH)
        other = simulation(method, model)
        for one in (bases, other):
            for _ in range(2):
                one.step()
        pairs = [(seconds(bases), seconds(other)) for _ in range(options.turns)]
        count = work(other.algorithm, other.objective.layout) / TAU
        ratio = statistics.median(mine / base for base, mine in pairs)
        found[name] = {
            "seconds": statistics.median(mine for _, mine in pairs),
            "fedavg_seconds": statistics.median(base for base, _ in pairs),
            "gradients_per_step": count, "ratio": ratio, "per_gradient": ratio / count,
        }  # fmt: skip
        print(f"{name:12} {ratio:6.2f}x FedAvg, {count:5.2f} gradients per step: {ratio / count:5.2f}", flush=True)
    slow = [name for name, one in found.items() if one["per_gradient"] > LIMIT]
    print(f"above {LIMIT:g} times FedAvg per gradient: {', '.join(slow) or 'none'}")
    result = {
        "provenance": provenance(0, torch.device("cpu")), "turns": options.turns, "limit": LIMIT, "above": slow,
        "methods": found,
    }  # fmt: skip
    write(options.out, result)


if __name__ == "__main__":
    main()
