"""The synthetic(alpha, beta) clients of FedProx and pFedMe: different logistic models on different inputs.

``alpha`` is the variance of the mean of a client's weights, ``beta`` of the mean of its inputs. As published, the mean
of the weights is one number for all classes: it shifts all logits of a sample equally, so ``alpha`` does not affect the
labels, and clients differ by their own weights and by ``beta``. Every client draws from its own random stream,
regardless of the number of clients.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tdpfed.data.partition import generator
from tdpfed.errors import TDPFedError

MOST = 1_000_000
"""Most clients, features and classes."""


def synthetic(
    alpha: float = 1.0, beta: float = 1.0, clients: int = 20, dimension: int = 60, classes: int = 10, seed: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Return x (N, dimension), y (N,) and the client of each sample (N,)."""
    given: dict[str, Any] = {
        "alpha": alpha,
        "beta": beta,
        "clients": clients,
        "dimension": dimension,
        "classes": classes,
    }
    for field, value in given.items():
        whole = field not in ("alpha", "beta")
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise TDPFedError(f"{value!r}; allowed: a {'whole ' if whole else ''}number", field=f"options.{field}")
    for field, variance in (("alpha", alpha), ("beta", beta)):
        if not 0 <= variance < np.inf:
            raise TDPFedError(f"{variance!r}; allowed: a variance of 0 or more", field=f"options.{field}")
    for field, count, least in (("clients", clients, 1), ("dimension", dimension, 1), ("classes", classes, 2)):
        if not least <= count <= MOST:
            raise TDPFedError(f"{count!r}; allowed: {least} to {MOST:,}", field=f"options.{field}")
    parts = [_client(generator(seed, k), alpha, beta, dimension, classes) for k in range(clients)]
    owner = np.repeat(np.arange(clients), [len(y) for _, y in parts])
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owner


def _client(
    rng: np.random.Generator, alpha: float, beta: float, dimension: int, classes: int
) -> tuple[NDArray[np.float32], NDArray[Any]]:
    size = 50 + int(rng.lognormal(4.0, 2.0))
    u, B = rng.normal(0.0, np.sqrt(alpha)), rng.normal(0.0, np.sqrt(beta))
    W, b = rng.normal(u, 1.0, (dimension, classes)), rng.normal(u, 1.0, classes)
    v = rng.normal(B, 1.0, dimension)
    spread = np.arange(1, dimension + 1) ** -0.6  # standard deviations: the variances are j^-1.2
    x = rng.normal(v, spread, (size, dimension))
    return x.astype(np.float32), np.argmax(x @ W + b, axis=1)
