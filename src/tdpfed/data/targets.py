"""What the targets of samples are: classes, labels, numbers or sequences of tokens, and whether they are valid."""

import torch
from torch import Tensor

from tdpfed.core.losses import IGNORED
from tdpfed.core.tasks import Kind
from tdpfed.data.formats import count_classes
from tdpfed.errors import TDPFedError


def kind_of(y: Tensor) -> Kind:
    """Return what targets ``(N, ...)`` are.

    A whole number for each sample is its class, and so is a truth value. Several columns of 0 and 1 are labels, other
    whole numbers tokens. Everything else is numbers.
    """
    if y.ndim == 1:
        return "numbers" if y.is_floating_point() else "classes"
    if y.ndim == 2 and bool(((y == 0) | (y == 1)).all()):
        return "labels"
    return "numbers" if y.is_floating_point() else "tokens"


def count_outputs(y: Tensor, kind: Kind) -> int:
    """Return how many outputs a model needs: for classes and tokens one more than the largest, else one for each."""
    if kind in ("classes", "tokens"):
        return count_classes(y.long().numpy(force=True))
    return y[:1].numel()


def checked_targets(y: Tensor, kind: Kind, classes: int, dtype: torch.dtype) -> Tensor:
    """Return targets in the type in which a loss takes them; refuse those that are not of their kind."""
    whole, shape = not y.is_floating_point(), tuple(y.shape)
    if kind == "classes":
        if not whole or y.ndim != 1:
            raise TDPFedError(f"{y.dtype} of shape {shape}; allowed for classes: whole numbers (samples,)", field="y")
        y = y.long()
        if not 0 <= int(y.min()) <= int(y.max()) < classes:
            raise TDPFedError(f"labels from {y.min()} to {y.max()}; allowed: 0 to {classes - 1}", field="y")
        return y
    if kind == "tokens":
        if not whole or y.ndim != 2 or not y.shape[1]:
            raise TDPFedError(
                f"{y.dtype} of shape {shape}; allowed for tokens: whole numbers (samples, length)", field="y"
            )
        y = y.long()
        counted = y[y != IGNORED]
        if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
            found = f"tokens from {counted.min()} to {counted.max()}"
            raise TDPFedError(f"{found}; allowed: 0 to {classes - 1}, and {IGNORED} for none", field="y")
        return y
    if y.numel() != len(y) * classes:
        raise TDPFedError(f"shape {shape}; allowed: {classes} values for each sample", field="y")
    if kind == "labels":
        if y.ndim != 2 or not bool(((y == 0) | (y == 1)).all()):
            raise TDPFedError(f"shape {shape}; allowed for labels: 0 and 1 of shape (samples, labels)", field="y")
    elif not bool(torch.isfinite(y.to(torch.promote_types(dtype, torch.float32))).all()):
        raise TDPFedError(f"NaN, infinite or beyond {dtype}; allowed: finite numbers", field="y")
    return y.to(dtype)
