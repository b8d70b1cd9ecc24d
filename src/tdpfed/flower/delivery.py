"""The server's messages to each node, the uploads it gets back, and what it remembers of both.

With ``wire.down = "factors"`` a node receives the messages of all rounds that it missed, or the dense entries if these
are shorter. The server therefore remembers the newest message of each node that replied, and the messages of recent
rounds: never more bytes than the dense entries have, because beyond that the dense entries are sent. Both are in its
checkpoints. It also remembers each client's last upload that counted, for the client's next round
(:mod:`tdpfed.flower.kept`).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from flwr.app import Message

from tdpfed.core.state import WIRE, State, Turn
from tdpfed.flower import envelope
from tdpfed.flower.node import Side
from tdpfed.wire import Expected, Rejected, decode, packed, validate, whole_parts, with_header
from tdpfed.wire.downlink import ROUNDS

RECENT = f"{WIRE}down.recent"
"""The entry of a checkpoint with the payloads of recent rounds, ``(rounds, bytes)``."""


class Delivery:
    """The messages of one federation, round by round."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.counted: dict[int, int] = {}  # by client: the round of its last upload that counted
        self.without_copy: set[int] = set()  # clients that have said so: they receive the dense entries
        self._recent: dict[int, bytes] = {}  # by round: the payload of its message in factors

    def begin(self, server: State, number: int) -> None:
        """Prepare the messages of a round; a round that is repeated has the same."""
        self._number, self._server = number, server
        self._broadcast = self.side.downlink.send(server)
        self._difference = self.side.downlink.difference(server, self._broadcast.known)
        self._dense: bytes | None = None
        if self._changes:
            self._recent[number] = packed([part[0] for part in self._broadcast.parts], self.side.downlink.form)
            self._recent = {n: payload for n, payload in self._recent.items() if n > number - self._most}

    def down(self, client: int) -> bytes | None:
        """Return the round's message to a client, None if the method sends none; it may consist of several."""
        side, number = self.side, self._number
        if not side.algorithm.communicates:
            return None
        if self._changes and client not in self.without_copy:
            missed = range(int(self._server[ROUNDS][client]) + 1, number + 1)
            if len(missed) <= self._most and all(n in self._recent for n in missed):
                form = side.downlink.form
                return b"".join(
                    with_header(self._recent[n], form, kind="down", round_=n, client=client, samples=0) for n in missed
                )
        if self._dense is None or not side.algorithm.same_for_all:
            self._dense = self._payload(client)
        return with_header(self._dense, side.downlink.dense, kind="down", round_=number, client=client, samples=0)

    def up(self, client: int, answer: Message, samples: int, seen: Collection[int]) -> State:
        """Return the validated upload in a reply: the entries of a dense upload, up to what the form loses."""
        side, form, number = self.side, self.side.channel.form, self._number
        message = decode(envelope.wire_of(answer, form.bytes, client), form.bytes)
        unchanged = None
        if side.channel.changes:
            unchanged = side.algorithm.unchanged(side.broadcast(self._broadcast.known, number, client))
        upload = validate(
            message,
            Expected(
                kind="up", round=number, form=form, clients={client}, seen=seen, samples={client: samples},
                unchanged=unchanged,
            ),
        )  # fmt: skip
        return upload | {name: upload[name] + value for name, value in self._difference.items()}

    def shipped(self, server: State, number: int) -> Callable[[int], bytes] | None:
        """Return the message to each client that evaluates after a round: the global model, if there is one."""
        side = self.side
        if side.algorithm.global_model(server) is None or not side.algorithm.communicates:
            return None
        state, form = side.shipped(server)
        parts = whole_parts(state, form, kind="down", round_=number, client=0, seed=side.config.run.seed)
        payload = packed(parts, form)
        return lambda client: with_header(payload, form, kind="down", round_=number, client=client, samples=0)

    def lacks_copy(self, client: int, answer: Message) -> bool:
        """Whether a reply says that the node has no copy to which it could add changes; it gets the dense entries."""
        if not envelope.fields_of(answer).get(envelope.LACKS):
            return False
        if not self._changes:
            raise Rejected("header", f"{envelope.LACKS!r} without wire.down = 'factors'", client=client)
        self.without_copy.add(client)
        return True

    def complete(self, server: State, received: Collection[int], counted: Collection[int]) -> State:
        """Return the server's state after a round, with what it remembers of the clients that received and uploaded."""
        self.counted |= dict.fromkeys(counted, self._number)
        self.without_copy -= set(received)
        clients = torch.tensor(sorted(received), dtype=torch.int64)
        return server | self.side.downlink.received(self._broadcast.memory, clients, self._number)

    def saved(self) -> tuple[State, dict[str, Any]]:
        """Return what a restarted server needs: tensors and plain values."""
        rows = [torch.frombuffer(bytearray(payload), dtype=torch.uint8) for payload in self._recent.values()]
        counted = {str(client): round_ for client, round_ in sorted(self.counted.items())}
        return {RECENT: torch.stack(rows)} if rows else {}, {"counted": counted}

    def restore(self, round_: int, recent: torch.Tensor | None, meta: Mapping[str, Any]) -> None:
        """Resume after a round."""
        self.counted = {int(client): int(number) for client, number in meta["counted"].items()}
        rows = () if recent is None else recent
        self._recent = {round_ - len(rows) + 1 + n: row.numpy().tobytes() for n, row in enumerate(rows)}

    @property
    def _changes(self) -> bool:
        return self.side.downlink.changes

    @property
    def _most(self) -> int:
        """How many messages in factors are shorter than the dense entries."""
        return (self.side.downlink.dense.bytes - 1) // self.side.downlink.form.bytes

    def _payload(self, client: int) -> bytes:
        """Return the dense entries for a client."""
        side, known = self.side, self._broadcast.known
        down = side.algorithm.down()
        entries = {name: known[name] for name in down} if self._changes else side.broadcast(known, self._number, client)
        form, seed = side.downlink.dense, side.config.run.seed
        return packed(whole_parts(entries, form, kind="down", round_=self._number, client=client, seed=seed), form)


def stacked(uploads: Mapping[int, State], seed: int, number: int) -> tuple[State, Turn]:
    """Return a round's uploads stacked along a client axis, ordered by client and not by arrival."""
    clients = sorted(uploads)
    names = uploads[clients[0]]
    state = {name: torch.stack([uploads[client][name] for client in clients]) for name in names}
    return state, Turn(seed, number, torch.tensor(clients))


def with_client(client: int, refusal: Rejected) -> Rejected:
    """Return a refusal with the client that sent the message according to Flower, whatever the message claims."""
    if refusal.client == client:
        return refusal
    return Rejected(refusal.rule, refusal.reason, client=client, tensor=refusal.tensor)
