"""What some methods ask for beside minibatches: validation samples, a public sample, the numbers of samples.

All are pure functions of the turn, like minibatches, and the same in simulation and on a node.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from tdpfed.core.draws import HeldOut, Stream, batch_indices, held_out_sizes, key, length_in_pass, own_indices
from tdpfed.core.local import Batch, Extras
from tdpfed.core.permutation import permute
from tdpfed.core.state import Turn


def extras_of(
    turn: Turn,
    data: Batch,
    start: Tensor,
    size: Tensor,
    *,
    expected: int,
    batch_size: int,
    held_out: HeldOut,
    public: Batch | None,
    passing: int | None = None,
) -> Extras:
    """Return the extras of the turn's clients, whose training samples are ``size`` ``(...)`` rows from ``start`` on.

    ``expected`` minibatches are drawn together. ``passing``: the number of samples through which each of the clients
    passes in whole passes.
    """
    clients = turn.clients.reshape(-1)
    start, size = start.reshape(-1), size.reshape(-1)

    def by_step(drawn: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        @cache
        def steps(draws: int) -> Tensor:
            return drawn(draws).reshape(*turn.clients.shape, draws, batch_size).movedim(-2, 0)

        return lambda t: steps(expected * (t // expected + 1))[t]

    def own(validation: bool) -> Callable[[int], Tensor]:
        return by_step(
            lambda draws: own_indices(
                turn.seed, turn.round, clients, start, size, draws, batch_size, held_out, validation,
                by_pass=passing is not None and not validation,
            )
        )  # fmt: skip

    def common(sample: Batch) -> Callable[[int], Tensor]:
        first, count = torch.zeros_like(start), torch.full_like(size, len(sample[1]))
        return by_step(
            lambda draws: batch_indices(turn.seed, turn.round, clients, first, count, draws, batch_size, Stream.PUBLIC)
        )

    drawn, numbers = own(validation=False), start.reshape(*turn.clients.shape, 1)

    def positions(t: int) -> Tensor:
        count = batch_size if passing is None else length_in_pass(t, passing, batch_size)
        return drawn(t)[..., :count] - numbers

    return Extras(
        validation=_batches(data, own(validation=True)) if held_out.share else None,
        held_out=held_out.sizes(size).reshape(turn.clients.shape) if held_out.share else None,
        public=None if public is None else _batches(public, common(public)),
        positions=positions,
    )


def held_out_rows(seed: int, start: Tensor, size: Tensor, share: float) -> Tensor:
    """Return the rows of all clients' validation samples, client by client, ``(sum of held_out_sizes,)``."""
    held = held_out_sizes(size, share)
    client = torch.arange(len(size), device=size.device).repeat_interleave(held)
    place = torch.arange(len(client), device=size.device) + (size - held.cumsum(0))[client]
    return start[client] + permute(place, size[client], key(seed, Stream.HOLD_OUT, client))


def public_rows(seed: int, samples: int, count: int, device: torch.device) -> Tensor:
    """Return which of all clients' training samples are public, ``(count,)``: drawn once for a run."""
    place, whole = torch.arange(count, device=device), torch.full((), samples, device=device)
    return permute(place, whole, key(seed, Stream.PUBLIC).to(device))


def _batches(data: Batch, rows: Callable[[int], Tensor]) -> Callable[[int], Batch]:
    def batch(t: int) -> Batch:
        index = rows(t)
        x, y = (values.index_select(0, index.reshape(-1)) for values in data)
        return x.reshape(*index.shape, *x.shape[1:]), y.reshape(*index.shape, *y.shape[1:])

    return batch
