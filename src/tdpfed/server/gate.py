"""The gate that uploads pass before they are averaged.

It refuses an upload that is not finite, whose factors are too far from the broadcast ones or too small
(:mod:`tdpfed.server.gauge`), or of which what is averaged is not finite or far longer than that of other clients
(:mod:`tdpfed.server.bound`). A refused upload is reported and left out; the round continues.
"""

import math

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.state import State, Turn, layouts_of, own_entries
from tdpfed.server.averages import averaged_values
from tdpfed.server.bound import all_allowed, contributions, longest_allowed
from tdpfed.server.gauge import least_norm, reference_of, within_gauge
from tdpfed.server.robust import Rule
from tdpfed.wire import Rejected, screen
from tdpfed.wire.forms import LARGEST_CHANGE, too_large


def refusals(
    algorithm: Algorithm,
    rule: Rule,
    uploads: State,
    server: State,
    turn: Turn,
    *,
    finite: bool = False,
    private: bool = False,
) -> list[Rejected]:
    """Return the gate's refusals of the turn's uploads ``(S, n)``, at most one for each client.

    ``finite``: the uploads are known to be finite. ``private``: no upload is compared with others, because privacy
    clips each of them, and whether one is refused must not depend on the rest.
    """
    refused = [] if finite else screen(uploads, layouts_of(algorithm.up()), turn.clients)
    for check in (_out_of_gauge, *([] if private else [_out_of_bound if algorithm.averages else _far_out])):
        rest = only(uploads, turn, accepted(turn, refused)) if refused else (uploads, turn)
        refused += check(algorithm, rule, *rest, server)
    return refused


def _out_of_gauge(algorithm: Algorithm, rule: Rule, uploads: State, turn: Turn, server: State) -> list[Rejected]:
    plan, bound = algorithm.plan, rule.gauge
    if plan is None or bound is None:
        return []
    reference = reference_of(server, plan.factors)
    inside, worst = within_gauge(uploads["factors"], server["factors"], reference, plan.factors, bound)
    refused = []
    for row in (~inside).nonzero().flatten().tolist():
        tensor = f"factors/{plan.factors.names[int(worst[row])]}"
        reason = (
            f"{tensor} is farther from the broadcast factor than {bound} of the norm of such factors, or its own norm "
            f"is below {least_norm(bound):.2g} of that"
        )
        refused.append(Rejected("gauge", reason, client=int(turn.clients[row]), tensor=tensor))
    return refused


def _out_of_bound(algorithm: Algorithm, rule: Rule, uploads: State, turn: Turn, server: State) -> list[Rejected]:
    """Return refusals by what a method averages, at most one for each client."""
    if not len(turn.clients):
        return []
    found: dict[int, Rejected] = {}
    for name, entry in averaged_values(algorithm, own_entries(server), uploads, turn).items():
        norms = contributions(entry.values, entry.center, entry.sent)
        if all_allowed(norms, rule.bound):
            continue
        most = longest_allowed(norms, entry.center, rule.bound)
        for row, norm in enumerate(norms):
            if math.isfinite(norm) and norm <= most:
                continue
            client = int(turn.clients[row])
            known = Rejected("nan", f"what is averaged of {name} is not finite", client=client, tensor=name)
            if math.isfinite(norm):
                reason = (
                    f"what {name} adds to the average has norm {norm:.3g}, must be at most {most:.3g} (robust.bound)"
                )
                known = Rejected("norm", reason, client=client, tensor=name)
            found.setdefault(client, known)
    return list(found.values())


def _far_out(algorithm: Algorithm, rule: Rule, uploads: State, turn: Turn, server: State) -> list[Rejected]:
    """Return refusals for a method that averages nothing: each upload is measured by what its client received."""
    if rule.bound == "off" or not len(turn.clients):
        return []
    known = algorithm.unchanged(algorithm.broadcast(own_entries(server), turn))
    far = torch.stack([too_large(uploads[name] - value, value) for name, value in known.items()]).any(0)
    reason = f"the norm of its change is over {LARGEST_CHANGE:g} times that of what it received"
    return [Rejected("norm", reason, client=client) for client in turn.clients[far].tolist()]


def accepted(turn: Turn, refused: list[Rejected]) -> Tensor:
    """Return the mask of the turn's clients whose uploads the gate accepted."""
    rejected = {one.client for one in refused}
    return torch.tensor([client not in rejected for client in turn.clients.tolist()], dtype=torch.bool)


def only(uploads: State, turn: Turn, mask: Tensor) -> tuple[State, Turn]:
    """Return the uploads and the clients of a turn that a mask selects."""
    if bool(mask.all()):
        return uploads, turn
    mask = mask.to(turn.clients.device)
    some = {name: value[mask] for name, value in uploads.items()}
    return some, Turn(turn.seed, turn.round, turn.clients[mask])
