"""What a federated method is: hyper-parameters, what it sends, and eight pure functions over explicit state.

State has three places: ``server``, ``private`` (what a client keeps and never sends) and the messages between them,
each a dict of tensors. A function is written for one client, tensors ``(P,)``; with a leading client axis, ``(K, P)``,
the same lines compute K clients at once. No function changes its arguments. Local work goes through
:class:`~tdpfed.core.local.LocalWork`, the server's averages through :class:`Average`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, Self, dataclass_transform

import torch
from torch import Tensor

from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.setting import check, setting, settings_of
from tdpfed.core.state import Entries, State, Turn, lengths_of, to_each
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError

Update = tuple[State, State, State]
"""What a client's round gives: its new private state, its upload, and metrics (``loss`` at least)."""


def hyper(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a hyper-parameter: its default (without one it must be given), its meaning, and its range."""
    return setting(default, doc, above=above, least=least, most=most, below=below)


class Average(Protocol):
    """The server's average of an uploaded entry, plain, robust or private; asked at most once per entry and round."""

    def __call__(
        self, entry: str, through: Callable[[Tensor], Tensor] | None = None, sent: Tensor | None = None
    ) -> Tensor:
        """Return the average ``(n,)`` of an entry over the clients that sent it.

        ``through`` maps the uploads ``(S, m)`` to what is averaged, ``(S, n)``. ``sent`` ``(S, n)`` is 1 where a client
        sent a coordinate and 0 where it did not; a coordinate that nobody sent averages to 0.
        """


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A method: what all have in common, and what each defines. Subclasses are frozen dataclasses by themselves."""

    name: ClassVar[str]
    communicates: ClassVar[bool] = True
    """Whether anything travels between clients and server."""
    shared_seed: ClassVar[bool] = False
    """Whether what is sent depends on draws that clients repeat, so that they know the run's seed."""
    has_envelope: ClassVar[bool] = False
    """Whether the quantities of the paper's convergence analysis are defined for it: it then has ``local_rounds``."""

    tau: int = hyper(20, "local rounds (minibatches) per communication round", least=1, most=10**6)
    batch_size: int = hyper(20, "samples per minibatch", least=1, most=10**6)
    weights: Literal["samples", "uniform"] = hyper(
        "samples", "what a client counts in the average: its number of training samples, or the same for all"
    )
    bound_layout: Layout | None = field(default=None, repr=False, metadata={"bound": True})
    population: int = field(default=0, repr=False, metadata={"bound": True})
    """How many clients the federation has; 0 before the method is bound to one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def hyper_parameters(cls) -> list[Field[Any]]:
        """Return the fields a user sets."""
        found = settings_of(cls)
        for item in found:
            if "doc" not in item.metadata:
                raise TDPFedError(
                    f"{cls.__name__}.{item.name}: declare it with hyper(default, meaning), and do not decorate the "
                    "class as a dataclass: it is one"
                )
        return found

    def bind(self, layout: Layout, population: int) -> Self:
        """Return this method for models of ``layout`` in a federation of so many clients."""
        return replace(self, bound_layout=layout, population=population)

    @property
    def layout(self) -> Layout:
        """The layout of the model's parameters."""
        if self.bound_layout is None:
            raise TDPFedError(f"algorithm: {self.name!r} is not bound to a model yet; call bind(layout, population)")
        return self.bound_layout

    # -- what travels, and what can be done with it

    def down(self) -> Entries:
        """Return what goes down to a client that trains: the layout of each entry, or its length."""
        return {"w": self.layout}

    def up(self) -> Entries:
        """Return what comes up from a client."""
        return {"w": self.layout}

    def center(self, server: State) -> State:
        """Return for each uploaded entry what a client that changed nothing would add to its average, ``(n,)``.

        By default that is the server's entry of the same name. An upload of another name is taken for a change: 0.
        """
        like = next(iter(server.values()))
        return {n: server[n] if n in server else like.new_zeros(k) for n, k in lengths_of(self.up()).items()}

    def unchanged(self, message: State) -> State:
        """Return what a client that changed nothing would send, ``(..., n)``, given what came down to it."""
        like = next(iter(message.values()))
        sizes = lengths_of(self.up()).items()
        return {n: message[n] if n in message else like.new_zeros(*like.shape[:-1], k) for n, k in sizes}

    @property
    def summable(self) -> bool:
        """Whether a weighted sum of the uploads is all that the server needs, as under secure aggregation."""
        return self.communicates and not self.shared_seed

    @property
    def plan(self) -> FactorPlan | None:
        """The plan of the uploaded entry ``factors``, if the method sends CP factors."""
        return None

    def compression_reached(self) -> tuple[float, float, str] | None:
        """Return the compression asked for, the one reached and why they may differ; None if none is asked for."""
        return None

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates, to be lowered when a run diverges."""
        names = [item.name for item in self.hyper_parameters() if item.name.startswith(("eta", "alpha"))]
        return {name: getattr(self, name) for name in names}

    @property
    def draws(self) -> int:
        """How many minibatches a client is expected to need per round; more are drawn if a method asks for them."""
        return self.tau

    # -- the functions

    @abstractmethod
    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Return the server's state before round 1, from the common initial parameters ``(P,)``."""

    def broadcast(self, server: State, turn: Turn) -> State:
        """Return what goes down to the turn's clients, tensors ``(..., n)``; by default the server's own entries."""
        return to_each({name: server[name] for name in self.down()}, turn)

    def init_private(self, theta: Tensor) -> State:
        """Return what a client keeps before its first round, from the common initial parameters ``(P,)``."""
        return {"theta": theta}

    @abstractmethod
    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Compute a client's round: the new private state, the upload, and metrics (``loss`` at least)."""

    def checked(self, update: Update) -> Update:
        """Return what :meth:`update` gave if it is what the method declares."""
        _, upload, metrics = update
        declared = lengths_of(self.up())
        given = {name: value.shape[-1] for name, value in upload.items()}
        if given != declared or "loss" not in metrics:
            raise TDPFedError(
                f"{self.name}: update returned uploads {given} and metrics {sorted(metrics)}, "
                f"must return uploads {declared} as up() declares, and a loss"
            )
        return update

    @abstractmethod
    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Return the server's next state; ``uploads`` ``(S, n)`` of the turn's clients are hidden by privacy."""

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
