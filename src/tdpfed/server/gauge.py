"""The gauge check: whether uploaded CP factors are near enough to the broadcast ones, and not too small.

Factors of the same tensor may be far apart, and averaged with others they ruin the model: only a distance shows it.
Distances and norms are relative to reference norms in the server's state. These follow the broadcast factors upward at
once, and downward only slowly: uploads that shrink the broadcast factors do not make those of honest clients look far.
"""

import torch
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.core.state import GATE, State
from tdpfed.server.robust import VectorAverage

NORMS = f"{GATE}norms"
"""The entry of the server's state with the reference norm of each factor, ``(E,)``."""

SHRINKS = 0.98
"""The share of a reference norm that is left after a round in which the factor became smaller."""


def reference_norms(factors: Tensor, layout: Layout) -> Tensor:
    """Return the norm of each entry of the broadcast factors ``(Q,)``, ``(E,)``."""
    return torch.stack([part.norm() for part in layout.split(factors)])


def moved_reference(reference: Tensor, factors: Tensor, layout: Layout) -> Tensor:
    """Return the reference norms after a round that ended with these factors."""
    return torch.maximum(SHRINKS * reference, reference_norms(factors, layout))


def reference_of(server: State, layout: Layout) -> Tensor:
    """Return the reference norms in the server's state; the norms of its factors if there are none."""
    return server[NORMS] if NORMS in server else reference_norms(server["factors"], layout)


def factor_distances(uploads: Tensor, broadcast: Tensor, reference: Tensor, layout: Layout) -> Tensor:
    """Return distances of the entries of uploads ``(K, Q)`` to the broadcast ``(Q,)``, ``(K, E)``.

    They are relative to the reference norms. If such a norm is below the average for an entry of this size, as for a
    bias that starts at 0, the average is used.
    """
    sizes = torch.tensor(layout.sizes, dtype=reference.dtype, device=reference.device)
    typical = reference.square().sum().sqrt() * (sizes / layout.size).sqrt()
    moved = [torch.linalg.vector_norm(part.flatten(1), dim=1) for part in layout.split(uploads - broadcast)]
    return torch.stack(moved, dim=-1) / torch.maximum(reference, typical)


def least_norm(bound: float) -> float:
    """Return the least norm of an uploaded factor, relative to its reference.

    It is stricter than the distance: training moves factors a long way, but hardly ever makes them smaller.
    """
    return 1 / (1 + bound / 4)


def with_median_norms(inner: VectorAverage, layout: Layout) -> VectorAverage:
    """Return ``inner`` with each matrix scaled to the median norm of the uploads.

    A few clients that send slightly smaller factors round after round bias even a robust average towards zero, in every
    coordinate; the median of the norms they can move only among those of honest clients.
    """

    def average(uploads: Tensor, weights: Tensor) -> Tensor:
        found, heard = inner(uploads, weights), uploads[weights.reshape(len(weights), -1).amax(-1) > 0]
        parts = []
        for part, rows in zip(layout.split(found), layout.split(heard), strict=True):
            norm, wanted = part.norm(), torch.linalg.vector_norm(rows.flatten(1), dim=1).median()
            parts.append(part if part.ndim < 2 else part * torch.where(norm > 0, wanted / norm, 1))
        return layout.join(parts)

    return average


def within_gauge(
    uploads: Tensor, broadcast: Tensor, reference: Tensor, layout: Layout, bound: float
) -> tuple[Tensor, Tensor]:
    """Return a mask ``(K,)`` of clients with every entry within ``bound``, and the entry of each that is worst.

    The norm of a matrix must also be at least :func:`least_norm` of the reference. It is at most ``1 + bound`` times as
    long anyway. A vector, such as a bias, may become 0.
    """
    far = factor_distances(uploads, broadcast, reference, layout) / bound
    matrix = torch.tensor([len(shape) > 1 for shape in layout.shapes], device=uploads.device)
    norms = torch.stack([torch.linalg.vector_norm(part.flatten(1), dim=1) for part in layout.split(uploads)], dim=-1)
    least = torch.where(matrix, least_norm(bound) * reference, 0)
    small = torch.where(norms < least, least / norms, 0)
    worst, entry = torch.maximum(far, small).max(-1)
    return worst <= 1, entry
