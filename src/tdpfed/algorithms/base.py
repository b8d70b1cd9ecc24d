"""The interface of a federated method: hyper-parameters, messages, and pure functions of explicit state.

State is kept in three places: ``server``, ``private`` (kept by a client and never sent) and the messages between them,
each a dict of tensors. ``init`` and ``init_private`` give the states before round 1; a round calls ``broadcast``, each
client's ``update`` and the server's ``aggregate``. A function is written for one client, with tensors ``(P,)``; with a
leading client axis, ``(K, P)``, the same code computes K clients at once. No function changes its arguments. Local work
is done through :class:`~tdpfed.core.local.LocalWork`, the server's averages through :class:`Average`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, Self, dataclass_transform

import torch
from torch import Tensor

from tdpfed.core.draws import HeldOut
from tdpfed.core.layout import Layout
from tdpfed.core.local import LocalWork
from tdpfed.core.recipe import USUAL
from tdpfed.core.setting import check, setting, settings_of
from tdpfed.core.state import Entries, State, Turn, lengths_of, to_each
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError, wrong

CHOICE = "choice"
"""The entry ``(1,)`` of private state with the number of the candidate that a client uses; -1 if it never chose."""

RATES = (0.2, 5.0)
"""The range in which tuning searches a learning rate, as multiples of its value."""

Update = tuple[State, State, State]
"""The result of a client's round: new private state, upload, and metrics (at least ``loss``)."""


def hyper(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
    rate: bool = False,
    search: tuple[float, float] | Literal[False] | None = None,
) -> Any:
    """Declare a hyper-parameter: its default (without one it must be given), its meaning, and its range.

    ``rate`` marks a learning rate, to be lowered when a run diverges. ``search`` is the range in which tuning searches
    the value, from least to most. Without one, learning rates are searched from a fifth to five times their value and
    other keys are not; a rate with ``search=False`` is not searched either.
    """
    item = setting(default, doc, above=above, least=least, most=most, below=below)
    item.metadata = MappingProxyType({**item.metadata, "rate": rate, "search": search})
    return item


class Average(Protocol):
    """The server's average of an uploaded entry, plain, robust or private; used at most once per entry and round."""

    def __call__(
        self, entry: str, through: Callable[[Tensor], Tensor] | None = None, sent: Tensor | None = None
    ) -> Tensor:
        """Return the average ``(n,)`` of an entry over the clients that sent it.

        ``through`` maps the uploads ``(S, m)`` to the values ``(S, n)`` to average. ``sent`` ``(S, n)`` is 1 where a
        client sent a coordinate and 0 elsewhere; the average of a coordinate that no client sent is 0.
        """


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A federated method. Subclasses become frozen dataclasses automatically."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The name as people write it, for reports; that of the class by default."""
    communicates: ClassVar[bool] = True
    """Whether clients and server exchange messages."""
    shared_seed: ClassVar[bool] = False
    """Whether messages depend on draws that clients repeat, so that clients know the run's seed."""
    same_for_all: ClassVar[bool] = True
    """Whether all clients of a round receive the same message."""
    counts_clients: ClassVar[bool] = False
    """Whether the server computes with the number of clients that took part, which is a secret with privacy."""
    averages: ClassVar[bool] = True
    """Whether the server averages uploads, so that robust rules apply."""
    averages_all: ClassVar[bool] = True
    """Whether all clients of a round count in the same average; differential privacy needs that."""
    per_sample: ClassVar[bool] = False
    """Whether private state holds values for each of a client's training samples, ``most_samples`` of them."""
    own_loss: ClassVar[bool] = False
    """Whether the method has a loss of its own, for classes, instead of the task's."""
    takes_newcomers: ClassVar[bool] = True
    """Whether a client that was not in training can be served by the server's state after it."""
    reports_change: ClassVar[bool] = False
    """Whether records say by how much each client's accuracy is above that of the global model."""
    follows: ClassVar[Literal["any", "rate", "none"]] = "any"
    """Which settings of ``[optimizer]`` the method uses: ``any`` if its steps are taken by ``local.descend``, ``rate``
    if only its learning rates follow the schedule (``local.rate``), ``none`` if it refuses all but the default."""
    has_envelope: ClassVar[bool] = False
    """Whether the paper's convergence analysis by Moreau envelopes applies; such a method has ``local_rounds``."""

    tau: int = hyper(20, "local rounds (minibatches) per communication round", least=1, most=10**6)
    epochs: float | None = hyper(
        None, "instead of tau: passes over a client's own training samples per communication round; may be a fraction",
        above=0, most=10**6,
    )  # fmt: skip
    batch_size: int = hyper(20, "samples per minibatch", least=1, most=10**6)
    weights: Literal["samples", "uniform"] = hyper(
        "samples", "weight of a client in the average: its number of training samples, or the same for all"
    )
    bound_layout: Layout | None = field(default=None, repr=False, metadata={"bound": True})
    population: int = field(default=0, repr=False, metadata={"bound": True})
    """Number of clients in the federation; 0 before the method is bound to one."""
    most_samples: int = field(default=0, repr=False, metadata={"bound": True})
    """The most training samples that a client has; 0 where it is not known."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.title = vars(cls).get("title", cls.__name__)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        check(self)
        if self.epochs is not None and self.tau != getattr(type(self), "tau", None):
            raise wrong("epochs", self.epochs, f"left out if tau is given (here {self.tau}): one of the two")

    @classmethod
    def hyper_parameters(cls) -> list[Field[Any]]:
        """Return the fields a user sets."""
        found = settings_of(cls)
        for item in found:
            if "doc" not in item.metadata:
                raise TDPFedError(
                    f"{cls.__name__}.{item.name}: must be declared with hyper(default, meaning), in a class without a "
                    "dataclass decorator"
                )
        return found

    def bind(self, layout: Layout, population: int, most_samples: int = 0) -> Self:
        """Return this method for models of ``layout`` in a federation of ``population`` clients."""
        return replace(self, bound_layout=layout, population=population, most_samples=most_samples)

    def over(self, rounds: int) -> Self:
        """Return this method for a run of so many rounds."""
        del rounds
        return self

    def of_size(self, samples: int) -> Self:
        """Return this method for a client that trains on so many samples: ``epochs`` become its own ``tau``.

        These are the minibatches of one pass times ``epochs``, rounded to a whole number of at least 1.
        """
        if self.epochs is None:
            return self
        steps = math.floor(self.epochs * math.ceil(samples / self.batch_size) + 0.5)
        return replace(self, tau=max(1, steps), epochs=None)

    @property
    def layout(self) -> Layout:
        """The layout of the model's parameters."""
        if self.bound_layout is None:
            raise TDPFedError(f"algorithm: {self.name!r} is not bound to a model yet; call bind(layout, population)")
        return self.bound_layout

    # -- messages and their properties

    def down(self) -> Entries:
        """Return the entries of a message to a client: the layout of each, or its length."""
        return {"w": self.layout}

    def up(self) -> Entries:
        """Return the entries of a client's upload."""
        return {"w": self.layout}

    def center(self, server: State) -> State:
        """Return what a client that changed nothing adds to the average of each uploaded entry, ``(n,)``.

        By default the server's entry of the same name, or 0 where it has none: such an entry is taken for a change.
        """
        like, down = next(iter(server.values()), torch.zeros(0)), self.down()
        for name in self.up():
            if name in down and name not in server:
                raise TDPFedError(f"{self.name}: the server has no entry {name!r}, so center() must be defined")
        return {n: server[n] if n in server else like.new_zeros(k) for n, k in lengths_of(self.up()).items()}

    def unchanged(self, message: State) -> State:
        """Return the upload of a client that changed nothing, ``(..., n)``, given the message to it."""
        like = next(iter(message.values()), torch.zeros(0))
        sizes = lengths_of(self.up()).items()
        return {n: message[n] if n in message else like.new_zeros(*like.shape[:-1], k) for n, k in sizes}

    @property
    def summable(self) -> bool:
        """Whether the server needs only a weighted sum of the uploads, as in secure aggregation."""
        return self.communicates and not self.shared_seed

    @property
    def averaged(self) -> tuple[str, ...]:
        """The server's entries that are averages of uploads: a server optimizer may step on them instead."""
        return tuple(name for name in self.up() if name in self.down()) if self.averages and self.summable else ()

    @property
    def plan(self) -> FactorPlan | None:
        """The plan of the uploaded entry ``factors``, if the method sends CP factors."""
        return None

    def compression_reached(self) -> tuple[float, float, str] | None:
        """Return the requested compression, the actual one and why they may differ; None if none is requested."""
        return None

    @property
    def rates(self) -> dict[str, float]:
        """The learning rates by name, for the error of a run that diverges."""
        return {item.name: getattr(self, item.name) for item in self.hyper_parameters() if item.metadata.get("rate")}

    @property
    def search(self) -> dict[str, tuple[float, float]]:
        """The ranges in which tuning searches for better hyper-parameters, by name."""
        declared = {item.name: item.metadata.get("search") for item in self.hyper_parameters()}
        rates = {name: (rate * RATES[0], rate * RATES[1]) for name, rate in self.rates.items()}
        found = {name: rates.get(name) if limits is None else limits for name, limits in declared.items()}
        return {name: limits for name, limits in found.items() if limits}

    @property
    def draws(self) -> int:
        """The expected number of minibatches per client and round; more are drawn on request."""
        return self.tau

    @property
    def held_out(self) -> float:
        """The share of each client's training samples that is kept for validation."""
        return 0.0

    @property
    def held_out_until(self) -> int | None:
        """The last round in which samples are held out; later ones train on all of them. None: held out to the end."""
        return None

    @property
    def public_samples(self) -> int:
        """The number of samples that all clients have in common."""
        return 0

    @property
    def candidates(self) -> tuple[str, ...]:
        """The names of the models that a client chooses from; private state then has its number as ``CHOICE``."""
        return ()

    # -- the functions

    @abstractmethod
    def init(self, theta: Tensor, generator: torch.Generator) -> State:
        """Return the server's state before round 1, from the common initial parameters ``(P,)``."""

    def broadcast(self, server: State, turn: Turn) -> State:
        """Return the message to the turn's clients, tensors ``(..., n)``; by default the server's entries."""
        return to_each({name: server[name] for name in self.down()}, turn)

    def init_private(self, theta: Tensor) -> State:
        """Return a client's private state before its first round, from the common initial parameters ``(P,)``."""
        return {"theta": theta}

    @abstractmethod
    def update(self, message: State, private: State, local: LocalWork) -> Update:
        """Compute a client's round: new private state, upload, and metrics (at least ``loss``)."""

    def checked_update(self, message: State, private: State, local: LocalWork) -> Update:
        """Return the result of :meth:`update`; refuse messages and states that are not as declared."""
        self._check("broadcast", message, "down()", {n: (k,) for n, k in lengths_of(self.down()).items()}, local.turn)
        new, upload, metrics = self.update(message, private, local)
        if local.optimizer != USUAL and self.follows != "rate" and not local.descended:
            allowed = f"the default with {self.name!r}, which takes no step by local.descend"
            raise wrong("optimizer", local.optimizer, allowed)
        axes = local.turn.clients.ndim
        kept = {name: tuple(value.shape[axes:]) for name, value in private.items()}
        self._check("update: private state", new, "init_private()", kept, local.turn)
        self._check("update: upload", upload, "up()", {n: (k,) for n, k in lengths_of(self.up()).items()}, local.turn)
        if "loss" not in metrics or metrics["loss"].shape != local.turn.clients.shape:
            raise TDPFedError(f"{self.name}.update: metrics {sorted(metrics)} returned, must hold a loss per client")
        return new, upload, metrics

    def _check(self, what: str, state: State, source: str, declared: Mapping[str, tuple[int, ...]], turn: Turn) -> None:
        given = {name: tuple(value.shape) for name, value in state.items()}
        wanted = {name: (*turn.clients.shape, *shape) for name, shape in declared.items()}
        if given != wanted:
            raise TDPFedError(f"{self.name}.{what} {given} returned, must be {wanted} as {source} declares")

    @abstractmethod
    def aggregate(self, server: State, uploads: State, average: Average, turn: Turn) -> State:
        """Return the server's next state, from the ``uploads`` ``(S, n)`` of the turn's clients.

        Under differential privacy only their averages can be read. The server may call it first without using the
        result, to see what would be averaged and check that.
        """

    def personalized(self, private: State) -> Tensor:
        """Return the parameters of a client's personalized model."""
        return private["theta"]

    def received(self, message: State, private: State, local: LocalWork) -> Tensor:
        """Return the parameters that a client uses once it has the server's message and before it trains again.

        By default those of its personalized model, which methods that keep one between rounds do not change.
        """
        del message, local
        return self.personalized(private)

    def local_model(self, private: State, upload: State) -> Tensor:
        """Return the dense parameters of the model that a client uploads."""
        del upload
        return private["theta"]

    @abstractmethod
    def global_model(self, server: State) -> Tensor | None:
        """Return the parameters of the global model; None if there is none."""


def held_out_of(algorithm: Algorithm, validation: float) -> HeldOut:
    """Return which training samples are held out: always the share that the data names, or what the method asks for."""
    return HeldOut(validation) if validation else HeldOut(algorithm.held_out, algorithm.held_out_until)
