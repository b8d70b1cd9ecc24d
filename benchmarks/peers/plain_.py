"""The plain PyTorch loop of ``benchmarks/plain.py`` on the clients of ``run.py``.

``--loaders`` imitates research code such as PFLlib: each client's samples are a list of pairs in a ``DataLoader``,
instead of slices of a tensor.
"""

import copy
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))

import plain

from tdpfed.data import Federation
from tdpfed.models import build

CONV_STEPS = 5


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """A list of pairs."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.pairs = list(zip(x, y, strict=True))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]


def loaders(data: Federation) -> Callable[[Federation, int], Iterator[tuple[Tensor, Tensor]]]:
    """Return minibatches from a DataLoader over pairs, as many samples as a round needs."""
    count = plain.TAU * plain.BATCH
    parts = [data.client(k) for k in range(data.clients)]
    made: list[Any] = [
        DataLoader(Pairs(x[:count], y[:count]), plain.BATCH, drop_last=True, shuffle=True) for x, y, _, _ in parts
    ]
    return lambda _, client: itertools.islice(itertools.cycle(made[client]), plain.TAU)


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
        plain.TAU, plain.S, plain.S_PRIME = CONV_STEPS, 4, 15
        plain.LAM, plain.ETA, plain.ETA_P, plain.ETA_FACTORS = 14.0, 0.01, 0.03, 4e-5
    plain.MOMENTUM = 0.5 if method == "tdpfed-momentum" else 0.0  # as in the presets
    if "--loaders" in sys.argv:
        plain.minibatches = loaders(data)  # type: ignore[assignment]
    factors = [plain.initial_factors(model, 2.0)]

    def tdpfed_round() -> None:
        factors[0] = plain.tdpfed_round(factors[0], model, data)

    own = [copy.deepcopy(model) for _ in range(data.clients)] if method == "ditto" else []
    one: Callable[[], None] = {
        "fedavg": lambda: plain.fedavg_round(model, data),
        "fedprox": lambda: plain.fedprox_round(model, data),
        "ditto": lambda: plain.ditto_round(model, own, data),
        "pfedme": lambda: plain.pfedme_round(model, data),
        "tdpfed": tdpfed_round,
        "tdpfed-momentum": tdpfed_round,
    }[method]
    seconds = []
    for _ in range(2 + int(rounds)):
        began = time.perf_counter()
        one()
        seconds.append(time.perf_counter() - began)
    print(
        json.dumps(
            {"seconds": seconds[2:], "versions": {"torch": torch.__version__, "python": platform.python_version()}}
        )
    )


if __name__ == "__main__":
    main()
