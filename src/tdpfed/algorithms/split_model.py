"""Models of two parts: one is shared and averaged, the other, ``algorithm.personal``, never leaves its client."""

from functools import cached_property

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm, Average, hyper
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.state import Entries, State, Turn
from tdpfed.errors import wrong

FIELD = "algorithm.personal"


class SplitModel(Algorithm):
    """A method that shares a part of the model; what a client does with its two parts is up to the method."""

    eta: float = hyper(0.05, "learning rate", above=0, most=1e38, rate=True)
    personal: tuple[str, ...] = hyper(
        ("last",), "patterns of the parameters that stay on the client; 'last' is the last layer, '!last' all others"
    )

    @cached_property
    def shared(self) -> Layout:
        """The parameters that are averaged."""
        return self.layout.without(self.personal, FIELD)

    @cached_property
    def own(self) -> Layout:
        """The parameters that stay on the client."""
        return self.layout.select(self.personal, FIELD)

    def down(self) -> Entries:
        """The shared part, both ways."""
        return {"shared": self.shared}

    up = down

    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Start from the shared part of the common initial parameters."""
        del generator
        return {"shared": self.layout.take(theta, self.shared)}

    def start(self, message: State, private: State) -> Tensor:
        """Return the client's model with the received values of the shared part."""
        return self.layout.merge(private["theta"], message["shared"], self.shared)

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the client's model with the received values of the shared part."""
        del local
        return self.start(message, private)

    def sent(self, theta: Tensor) -> State:
        """Return the upload: the shared part of a model."""
        return {"shared": self.layout.take(theta, self.shared)}

    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Average the shared parts."""
        del server, uploads, turn
        return {"shared": average("shared")}

    def global_model(self, server: State) -> Tensor | None:
        """Return None: the shared part alone is no model."""
        del server
        return None

    def _must_split(self) -> None:
        """Refuse an empty list of patterns, for methods that treat the two parts differently."""
        if not self.personal:
            raise wrong("personal", [], "at least one pattern: this method treats the two parts differently")
