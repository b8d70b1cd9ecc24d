"""Losses: the mean over a batch of outputs and targets, as functions of ``(B, ...)`` and ``(B, ...)``."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LossFunction = Callable[[Tensor, Tensor], Tensor]

IGNORED = -100
"""A target in a sequence that does not count, as in PyTorch: short sequences end in it."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``(B, C)`` and class numbers ``(B,)``, with fewer operators than PyTorch's.

    Of sequences, ``(B, T, C)`` and ``(B, T)``, the mean is over all positions that have a target.
    """
    if targets.ndim == 1:
        return functional.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).mean().neg()
    counted = targets != IGNORED
    return _at_positions(outputs, targets, counted).sum() / counted.sum().clamp_min(1)


def each_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each sample, ``(B,)``; of a sequence, the mean over its positions."""
    if targets.ndim == 1:
        return functional.log_softmax(outputs, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1).neg()
    counted = targets != IGNORED
    return _at_positions(outputs, targets, counted).sum(-1) / counted.sum(-1).clamp_min(1)


def many_cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each of many samples, ``(B,)``, with few classes faster, and equal up to rounding."""
    return outputs.logsumexp(-1) - outputs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def positions(targets: Tensor) -> Tensor:
    """Return how many positions of each sequence ``(B, T)`` have a target, ``(B,)``."""
    return (targets != IGNORED).sum(-1)


def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of logits and targets of 0 and 1, over samples and labels."""
    return functional.binary_cross_entropy_with_logits(outputs, alike(targets, outputs))


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, over samples and values."""
    return functional.mse_loss(outputs, alike(targets, outputs))


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean Huber loss with delta 1: squared near 0, linear beyond, so that outliers count less."""
    return functional.huber_loss(outputs, alike(targets, outputs))


def alike(targets: Tensor, outputs: Tensor) -> Tensor:
    """Return targets as floats in the shape of the outputs: ``(B,)`` and ``(B, 1)`` would silently broadcast."""
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _at_positions(outputs: Tensor, targets: Tensor, counted: Tensor) -> Tensor:
    """Return the cross-entropy at each position, ``(B, T)``; 0 where there is no target."""
    at = torch.where(counted, targets, 0).unsqueeze(-1)
    return torch.where(counted, functional.log_softmax(outputs, -1).gather(-1, at).squeeze(-1).neg(), 0)
