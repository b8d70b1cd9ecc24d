"""How the server makes one vector of many: ``(K, P)`` uploads and ``(K,)`` weights to ``(P,)``."""

from collections.abc import Callable

from torch import Tensor

Average = Callable[[Tensor, Tensor], Tensor]


def weighted_mean(uploads: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of ``uploads`` over clients, each counted by its share of ``weights``."""
    return (weights / weights.sum()).to(uploads.dtype) @ uploads
