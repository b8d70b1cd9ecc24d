"""How many bytes the messages of a round take: exactly, headers included, and without making one."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from tdpfed.algorithms.base import Algorithm, State, Turn
from tdpfed.core.layout import Layout
from tdpfed.wire import Codec, Kind, encoded_size

Header = tuple[int, int]
"""What differs between the messages of a round: the client, and how many samples it has."""

Sizes = tuple[int, int]
"""Bytes of all messages to the clients, and of all from them."""


@dataclass(frozen=True)
class Meter:
    """Measures the rounds of one federation."""

    algorithm: Algorithm
    codec: Codec  # of uploads
    samples: Tensor  # (K,) training samples of every client
    _known: dict[tuple[object, ...], Sizes] = field(default_factory=dict, repr=False)

    def sizes(self, message: State, uploads: State, turn: Turn, reported: Tensor, *, everybody: bool) -> Sizes:
        """Return the bytes of a round, down and up.

        ``message`` is that of any client; of the turn's ``n`` clients those send who ``reported``, a mask ``(n,)``.
        Rounds in which ``everybody`` takes part are measured once.
        """
        if not everybody:
            return self._measured(message, uploads, turn, reported)
        digits = len(str(int(turn.round)))  # of a header's numbers only this one changes then
        kind = (digits, *(tuple(_lengths(state).items()) for state in (message, uploads)))
        if kind not in self._known:
            self._known[kind] = self._measured(message, uploads, turn, reported)
        return self._known[kind]

    def _measured(self, message: State, uploads: State, turn: Turn, reported: Tensor) -> Sizes:
        clients, held = turn.clients.cpu(), self.samples[turn.clients].cpu()
        down = [(client, 0) for client in clients.tolist()]
        up = list(zip(clients[reported].tolist(), held[reported].tolist(), strict=True))
        return self._sum(message, "down", "float32", turn, down), self._sum(uploads, "up", self.codec, turn, up)

    def _sum(self, state: State, kind: Kind, codec: Codec, turn: Turn, headers: list[Header]) -> int:
        size = partial(encoded_size, _lengths(state), self.algorithm.layouts, codec, kind=kind, round_=int(turn.round))
        digits = [tuple(len(str(number)) for number in header) for header in headers]
        example = dict(zip(digits, headers, strict=True))  # headers of as many digits are as long
        return sum(
            count * size(client=example[key][0], samples=example[key][1]) for key, count in Counter(digits).items()
        )


def dense_bytes(layout: Layout) -> int:
    """Return the bytes of a message with the dense model."""
    return encoded_size({"w": layout.size}, {"w": layout}, "float32", kind="up", round_=1, client=0, samples=1)


def _lengths(state: State) -> dict[str, int]:
    return {name: value.shape[-1] for name, value in state.items()}
