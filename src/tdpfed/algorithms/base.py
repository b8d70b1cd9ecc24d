"""What a federated algorithm is: hyper-parameters and eight pure functions over explicit state.

State has three places: ``server``, ``private`` (what a client keeps and never sends) and the messages between them.
Each is a dict of tensors. A function is written for one client, tensors ``(P,)``; with a leading client axis,
``(K, P)``, the same lines compute K clients at once. No function changes its arguments.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import Field, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from tdpfed.algorithms.hyper import check_hyper as check_hyper
from tdpfed.algorithms.hyper import hyper as hyper
from tdpfed.core.layout import Layout
from tdpfed.core.objective import Batch
from tdpfed.core.objective import Grad as Grad
from tdpfed.core.setting import settings_of
from tdpfed.cp.plan import FactorPlan
from tdpfed.server.robust import Average

State = dict[str, Tensor]
Batches = Callable[[int], Batch]


@dataclass(frozen=True)
class Turn:
    """Which round it is and which clients are computed: together with the seed the place of every random draw."""

    seed: int | Tensor  # (K,) where clients of several runs are computed together
    round: int | Tensor  # a scalar tensor where the computation is recorded for any round
    clients: Tensor  # (K,) ids, or () for one client


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Hyper-parameters all algorithms share, and the functions each defines."""

    name: ClassVar[str]
    communicates: ClassVar[bool] = True
    """Whether anything travels between clients and server."""
    shared_seed: ClassVar[bool] = False
    """Whether what is sent depends on a seed that clients and server both know."""

    tau: int = hyper(20, "local rounds (minibatches) per communication round", least=1, most=10**6)
    batch_size: int = hyper(20, "samples per minibatch", least=1, most=10**6)
    weights: Literal["samples", "uniform"] = hyper(
        "samples", "what a client counts in the average: its number of training samples, or the same for all"
    )
    layout: Layout | None = field(default=None, repr=False, metadata={"bound": True})

    def __post_init__(self) -> None:
        check_hyper(self)

    @classmethod
    def hyper_parameters(cls) -> list[Field[Any]]:
        """Return the fields a user sets."""
        return settings_of(cls)

    def bind(self, layout: Layout) -> Self:
        """Return this algorithm for models of ``layout``."""
        return replace(self, layout=layout)

    @property
    def steps_alone(self) -> bool:
        """Whether local rounds are hardly more than several plain steps on one minibatch."""
        return False

    @property
    def layouts(self) -> dict[str, Layout | None]:
        """The layout of each entry a message may have; None for plain values."""
        return {"w": self.layout}

    @property
    def uploaded(self) -> tuple[str, ...]:
        """The entries of a client's upload."""
        return tuple(self.layouts)

    def center(self, server: State) -> Tensor:
        """Return what a client that changed nothing would add to the average."""
        return server["w"]

    @property
    def draws(self) -> int:
        """How many minibatches a client needs per communication round."""
        return self.tau

    @abstractmethod
    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Return the server's state before round 1, from the common initial parameters ``(P,)``."""

    @abstractmethod
    def broadcast(self, server: State, turn: Turn) -> State:
        """Return exactly what goes down to the turn's clients, tensors ``(..., n)``."""

    def init_private(self, theta: Tensor) -> State:
        """Return what a client keeps before its first round, from the common initial parameters ``(P,)``."""
        return {"theta": theta}

    @abstractmethod
    def update(
        self, message: State, private: State, batches: Batches, grad: Grad, turn: Turn
    ) -> tuple[State, State, State]:
        """Compute a client's round: the new private state, the upload, and metrics (``loss`` at least)."""

    @abstractmethod
    def aggregate(self, server: State, uploads: State, weights: Tensor, turn: Turn, average: Average) -> State:
        """Return the server's next state from uploads ``(S, ...)`` and their weights ``(S,)``."""

    def personalized(self, private: State) -> Tensor:
        """Return the parameters a client would use."""
        return private["theta"]

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the dense parameters of what a client reports to the server."""
        del upload
        return private["theta"]

    @abstractmethod
    def global_model(self, server: State) -> Tensor | None:
        """Return the parameters the server would ship; None if there are none."""

    @property
    def summable(self) -> bool:
        """Whether the server needs no more of the uploads than their weighted sum."""
        return self.communicates and not self.shared_seed

    @property
    def plan(self) -> FactorPlan | None:
        """Which parameters are uploaded as CP factors; None for a method without factors."""
        return None

    @property
    def rates(self) -> tuple[str, ...]:
        """The names of its learning rates."""
        return tuple(item.name for item in self.hyper_parameters() if item.name.startswith(("eta", "alpha")))

    @property
    def learning_rates(self) -> dict[str, float]:
        """The rates to lower when a run diverges."""
        return {name: getattr(self, name) for name in self.rates}

    def compression_met(self) -> tuple[float, float, str] | None:
        """Return the compression rate asked for, the one the model allows, and why; None where none is asked for."""
        return None


def to_each(state: State, turn: Turn) -> State:
    """Return the same message for each of the turn's clients: views with their leading axis."""
    return {name: value.expand(*turn.clients.shape, *value.shape) for name, value in state.items()}
