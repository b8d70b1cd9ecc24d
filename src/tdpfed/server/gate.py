"""The gate that uploads pass before they are averaged.

It refuses an upload that is not finite or whose factors are too far from the broadcast ones (the CP gauge: factors of
an unchanged tensor can ruin an average). A refused upload is reported and left out; the round continues.
"""

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.errors import wrong
from tdpfed.server.robust import Rule, within_gauge
from tdpfed.wire import Rejected, screen


def refusals(
    algorithm: Algorithm, rule: Rule, uploads: State, server: State, turn: Turn, *, finite: bool = False
) -> list[Rejected]:
    """Return the gate's refusals of the turn's uploads ``(S, n)``, at most one for each client.

    ``finite``: the uploads are known to be finite, and only the gauge is checked.
    """
    refused = [] if finite else screen(uploads, layouts_of(algorithm.up()), turn.clients)
    plan, bound = algorithm.plan, rule.gauge
    if plan is not None and bound is not None:
        inside, farthest = within_gauge(uploads["factors"], server["factors"], plan.factors, bound)
        for row in (accepted(turn, refused) & ~inside.cpu()).nonzero().flatten().tolist():
            tensor = f"factors/{plan.factors.names[int(farthest[row])]}"
            reason = f"{tensor} is farther from the broadcast factor than {bound} of its norm"
            refused.append(Rejected("gauge", reason, client=int(turn.clients[row]), tensor=tensor))
    return refused


def accepted(turn: Turn, refused: list[Rejected]) -> Tensor:
    """Return the mask of the turn's clients whose uploads the gate accepted."""
    rejected = {one.client for one in refused}
    return torch.tensor([client not in rejected for client in turn.clients.tolist()], dtype=torch.bool)


def check_gauge(algorithm: Algorithm, rule: Rule) -> None:
    """Refuse a bound on the gauge for a method that sends no factors."""
    if rule.gauge is not None and algorithm.plan is None:
        raise wrong("robust.gauge", rule.gauge, f"left out: {algorithm.name!r} sends no CP factors")
