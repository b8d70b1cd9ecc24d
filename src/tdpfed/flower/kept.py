"""What a client keeps from round to round: the method's private state, and what it needs for the wire.

Two things can go wrong between a node and the server, and neither loses anything:

- An upload may get lost or be refused. Its content then counts as lost, as in a simulation: it is added to the error
  and sent with the next change. A node does not know what became of its upload, so it keeps both: what it needs if the
  upload counted, and if not. The server's next message says which of its uploads was the last that counted, and that
  decides. A client that trained without uploading has nothing to decide. Of a round that was repeated, or that a
  restarted server had to repeat, everything is discarded (:mod:`tdpfed.flower.private`).
- A message may get lost. With ``wire.down = "factors"`` a node keeps its copy of the server's entries with the round of
  that copy, and ignores messages that are part of it already; a node whose copy is gone asks for the dense entries.
"""

from dataclasses import dataclass, field

import torch

from tdpfed.core.state import WIRE, State, own_entries, wire_entries

ROUND, LOST, COPY = f"{WIRE}round", f"{WIRE}lost/", f"{WIRE}copy/"
"""Names in a file: the round of the state, and prefixes of what holds without the upload, and of the copy."""


@dataclass(frozen=True)
class Kept:
    """What a client keeps after a round; before its first, that is round 0."""

    own: State
    """The method's private state."""
    wire: State = field(default_factory=dict)
    """What the client's channel keeps, if the round's upload counted."""
    lost: State = field(default_factory=dict)
    """Entries that replace those of ``wire`` if the round's upload did not count."""
    copy: State = field(default_factory=dict)
    """The server's entries as the client knows them, if it receives changes."""
    round: int = 0

    @classmethod
    def of(cls, state: State) -> "Kept":
        """Return what a file holds."""
        wire = wire_entries(state)
        round_ = int(wire.pop(ROUND, torch.tensor(0)))
        lost, copy = ({n.removeprefix(p): wire.pop(n) for n in [*wire] if n.startswith(p)} for p in (LOST, COPY))
        return cls(own_entries(state), wire, lost, copy, round_)

    @property
    def state(self) -> State:
        """The tensors of a file; without anything for the wire they are the method's."""
        lost, copy = ({p + n: v for n, v in part.items()} for p, part in ((LOST, self.lost), (COPY, self.copy)))
        found = self.wire | lost | copy
        return self.own | found | ({ROUND: torch.tensor(self.round)} if found else {})

    def resolved(self, counted: int) -> State:
        """Return what the channel has kept, given the round of the client's last upload that counted."""
        return self.wire if counted >= self.round else self.wire | self.lost
