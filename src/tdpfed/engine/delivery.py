"""The uploads of a round on their way: sent by the clients, judged by the server's gate, kept by clients if refused."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tdpfed.core.state import State, Turn
from tdpfed.engine.uplink import Uplink
from tdpfed.server.gate import accepted, only
from tdpfed.server.round import ServerRound
from tdpfed.wire import Rejected
from tdpfed.wire.downlink import Downlink


@dataclass(frozen=True)
class Delivered:
    """What came of a round's uploads."""

    uploads: State
    senders: Turn
    """The clients whose uploads were accepted."""
    kept: State
    """What the turn's clients of this process keep for the wire."""
    refused: list[Rejected]


@dataclass(frozen=True)
class Delivery:
    """The path of a round's uploads; ``known`` are the server's entries as clients know them."""

    uplink: Uplink
    downlink: Downlink
    server_round: ServerRound
    server: State
    known: State

    def deliver(self, uploads: State, turn: Turn, reported: Tensor, kept: State) -> Delivered:
        """Return the uploads of those of the turn's clients that the mask ``reported`` names.

        ``kept`` are the rows that this process's clients keep for the wire; what a refused upload sent returns to them.
        """
        sent, senders = only(uploads, turn, reported)
        mine = self.uplink.ranks.part({"mine": reported}, turn.clients)["mine"]
        all_report = bool(mine.all())
        before = kept if all_report else {name: value[mine.to(value.device)] for name, value in kept.items()}
        seen, after, far = self.uplink.transmit(sent, self.known, before, senders)
        finite = seen is sent or self.uplink.channel.changes  # already checked
        passed, accepted_turn, refused = self._admitted(seen, senders, far, finite)
        if refused:
            lost = ~torch.isin(senders.clients, accepted_turn.clients)
            after = self.uplink.returned(after, seen, self.known, senders, lost)
        if not all_report:
            for name, value in after.items():
                kept[name][mine.to(value.device)] = value
            after = kept
        return Delivered(passed, accepted_turn, after, refused)

    def _admitted(
        self, uploads: State, senders: Turn, far: list[Rejected], finite: bool
    ) -> tuple[State, Turn, list[Rejected]]:
        """Return the uploads that pass the gate, with what the server has and clients do not know, and the refusals."""
        if far:
            uploads, senders = only(uploads, senders, accepted(senders, far))
        for name, difference in self.downlink.difference(self.server, self.known).items():
            uploads = uploads | {name: uploads[name] + difference}
        found, turn, refused = self.server_round.admitted(uploads, self.server, senders, finite=finite)
        return found, turn, far + refused
