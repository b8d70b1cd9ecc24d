"""The exact size of the messages of a round, headers included, without encoding them."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.layout import Layout
from tdpfed.core.state import Entries, Turn, layouts_of, lengths_of
from tdpfed.wire import Codec, Kind, encoded_size

Header = tuple[int, int]
"""What differs between the messages of a round: the client, and its number of samples."""

Sizes = tuple[int, int]
"""Bytes of all messages to the clients, and of all from them."""


@dataclass(frozen=True)
class Meter:
    """Measures the messages of one federation."""

    algorithm: Algorithm
    codec: Codec  # of uploads
    samples: Tensor  # (K,) training samples of every client
    _known: dict[int, Sizes] = field(default_factory=dict, repr=False)

    def sizes(self, turn: Turn, reported: Tensor, *, everybody: bool) -> Sizes:
        """Return the bytes of a round, down and up.

        ``reported`` is the mask of the turn's clients that upload. Rounds with ``everybody`` are measured once for each
        number of digits of the round: nothing else in their headers changes in size.
        """
        if not everybody:
            return self._measured(turn, reported)
        digits = len(str(int(turn.round)))
        if digits not in self._known:
            self._known[digits] = self._measured(turn, reported)
        return self._known[digits]

    def _measured(self, turn: Turn, reported: Tensor) -> Sizes:
        clients, held = turn.clients.cpu(), self.samples[turn.clients].cpu()
        down = [(client, 0) for client in clients.tolist()]
        up = list(zip(clients[reported].tolist(), held[reported].tolist(), strict=True))
        return (
            self._sum(self.algorithm.down(), "down", "float32", turn, down),
            self._sum(self.algorithm.up(), "up", self.codec, turn, up),
        )

    def _sum(self, entries: Entries, kind: Kind, codec: Codec, turn: Turn, headers: list[Header]) -> int:
        form = lengths_of(entries), layouts_of(entries)
        size = partial(encoded_size, *form, codec, kind=kind, round_=int(turn.round))
        digits = [tuple(len(str(number)) for number in header) for header in headers]
        example = dict(
            zip(digits, headers, strict=True)
        )  # headers with the same numbers of digits have the same length
        return sum(
            count * size(client=example[key][0], samples=example[key][1]) for key, count in Counter(digits).items()
        )


def dense_bytes(layout: Layout) -> int:
    """Return the bytes of a message with the dense model."""
    return encoded_size({"w": layout.size}, {"w": layout}, "float32", kind="up", round_=1, client=0, samples=1)
