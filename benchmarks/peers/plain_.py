"""The plain PyTorch loop of ``benchmarks/plain.py`` on the clients of ``run.py``."""

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import plain

from tdpfed.data import Federation
from tdpfed.models import build


def main() -> None:
    path, method, rounds = sys.argv[1:4]
    with np.load(path, allow_pickle=False) as given:
        owner = np.repeat(np.arange(len(given["sizes"])), given["sizes"])
        data = Federation.from_tensors(
            given["x"], given["y"], owner, test_fraction=0, normalize="none", classes=int(given["y"].max()) + 1
        )
    conv = data.input_shape[0] == 3
    model = build("vgg8" if conv else "dnn", seed=0)
    if conv:
        plain.TAU, plain.S, plain.S_PRIME = 25, 4, 15
        plain.LAM, plain.ETA, plain.ETA_P, plain.ETA_FACTORS = 14.0, 0.01, 0.03, 4e-5
    factors = [plain.initial_factors(model, 2.0)]

    def tdpfed_round() -> None:
        factors[0] = plain.tdpfed_round(factors[0], model, data)

    one: Callable[[], None] = {
        "fedavg": lambda: plain.fedavg_round(model, data),
        "pfedme": lambda: plain.pfedme_round(model, data),
        "tdpfed": tdpfed_round,
    }[method]
    seconds = []
    for _ in range(1 + int(rounds)):
        began = time.perf_counter()
        one()
        seconds.append(time.perf_counter() - began)
    print(
        json.dumps(
            {"seconds": seconds[1:], "versions": {"torch": torch.__version__, "python": platform.python_version()}}
        )
    )


if __name__ == "__main__":
    main()
