"""Shared by the scripts of other packages; runs in their environments, so it uses NumPy but not tdpfed.

Each is called as ``PACKAGE_.py DATA METHOD ROUNDS`` and prints one line of JSON: seconds of each round after the
warm-up, and versions. A client's data are limited to the samples of its 23 steps, for packages that count epochs.
"""

import json
import platform
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

STEPS, BATCH, INNER = 23, 20, 5
ETA, ETA_P, LAM = 0.05, 0.08, 12.0
WARM_UP = 2


def arguments() -> tuple[str, str, int]:
    path, method, rounds = sys.argv[1:4]
    return path, method, int(rounds)


@cache
def clients(path: str) -> list[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Return each client's flat inputs and labels, exactly the samples of one round."""
    with np.load(path, allow_pickle=False) as given:
        ends = np.cumsum(given["sizes"])
        x, y = given["x"].reshape(len(given["y"]), -1), given["y"]
    parts = zip(np.split(x, ends[:-1]), np.split(y, ends[:-1]), strict=True)
    return [(np.resize(a, (STEPS * BATCH, a.shape[1])), np.resize(b, STEPS * BATCH)) for a, b in parts]


def unsupported(method: str) -> None:
    """Exit with an error message: the package does not have this method."""
    sys.exit(f"error: no {method} in this package")


def timed(one_round: Callable[[], object], rounds: int) -> list[float]:
    """Return the seconds of each round after the warm-up."""
    seconds = []
    for _ in range(WARM_UP + rounds):
        began = time.perf_counter()
        one_round()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP:]


def report(seconds: list[float], packages: list[str], note: str | None = None) -> None:
    versions = {"python": platform.python_version(), **{name: version(name) for name in packages}}
    print(json.dumps({"seconds": seconds, "versions": versions, **({"note": note} if note else {})}))
