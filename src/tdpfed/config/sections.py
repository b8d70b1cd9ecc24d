"""The sections of a configuration, and the whole.

What a setting means and which values it takes is declared once, beside the code that uses it: who takes part, how the
server averages and what privacy costs in ``server``, a method's hyper-parameters in its class. Here are the settings
of a run as such, and how the others are put together.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch

from tdpfed.algorithms import DEFAULT, Algorithm, find
from tdpfed.core.setting import check, plain, same, setting
from tdpfed.data.build import Partition, Split
from tdpfed.data.federation import Augment, Normalize
from tdpfed.engine.attacks import Attack, Kind
from tdpfed.engine.precision import Precision
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.store import Place
from tdpfed.errors import TDPFedError
from tdpfed.server import privacy
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule
from tdpfed.wire import Codec


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the configuration."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """How long and where to run."""

    rounds: int = setting(50, "communication rounds", least=1)
    seed: int = setting(0, "every random draw follows from it", least=0, below=2**63)
    seeds: int = setting(
        1, "how many runs, with seeds from run.seed on; on a GPU they are computed together", least=1, most=1000
    )
    evaluate_every: int = setting(1, "evaluate after every so many rounds, and after the last", least=1)
    evaluate_clients: int | None = setting(None, "evaluate only so many clients, drawn by the seed", least=1)
    diagnostics_every: int = setting(0, "measure the paper's convergence quantities; 0: never", least=0)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes a GPU if there is one")
    runner: RunnerName = setting("batched", "all clients at once, or one after another")
    threads: int | Literal["auto"] = setting(
        "auto", "CPU threads; auto: all, but one where the model is too small to share", least=1, most=1024
    )
    chunk: int | Literal["auto"] = setting(
        "auto", "clients computed together, on a CPU by each thread; auto: as many as fit", least=1
    )
    precision: Precision = setting(
        "float32", "how matrices are multiplied; tf32: on a GPU with 10 bits, bf16: the model's own layers with 7"
    )
    loggers: tuple[Literal["tensorboard", "mlflow"], ...] = setting((), "where else records go, as a list")


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """Which data, and how they are dealt to clients."""

    name: str = setting("digits", "a data set of the package, or a path to an .npz or .parquet file")
    options: dict[str, Any] = setting({}, "options of the data set, as alpha and beta of synthetic")
    clients: int | None = setting(None, "number of clients; 20, or all natural ones", least=1)
    partition: Partition | None = setting(
        None, "how samples are dealt; natural where the data have clients, otherwise classes, drawn at random"
    )
    per_client: int = setting(2, "classes and classes-in-turn: how many classes a client holds", least=1)
    alpha: float = setting(0.5, "dirichlet: concentration; smaller is less alike", above=0, most=1e6)
    size_skew: float | None = setting(
        None, "iid, classes and classes-in-turn: how unequal the shares are; 0 is equal", least=0, most=10
    )
    min_samples: int = setting(1, "least number of samples per client", least=1)
    max_samples: int | None = setting(None, "cap on samples per client, to study scarce data", least=2)
    split: Split | None = setting(
        None, "hold out a part of each client, or the official one; a file's own test_mask if it has one"
    )
    test_fraction: float = setting(0.25, "client split: share held out", above=0, below=1)
    normalize: Normalize = setting(
        "standard",
        "scaling of the inputs: mean 0, variance 1 by channel (standard) or pixel (feature); unit: 0 to 1",
    )
    augment: Augment = setting(
        "none", "training images as they are drawn: mirrored at random, and moved by up to 4 pixels"
    )
    seed: int | None = setting(None, "seed of the partition; run.seed by default", least=0)


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """Which model the clients train."""

    name: str = setting("dnn", "a model of the package, or your own as package.module:factory")


@dataclass(frozen=True, kw_only=True)
class Wire(Section):
    """How uploads travel."""

    codec: Codec = setting("float32", "numbers of an upload; int8 has a scale per factor column and rounds at random")


@dataclass(frozen=True, kw_only=True)
class Robust(Rule):
    """What the server does against bad uploads, and which it meets in simulation."""

    attack: Kind | None = same(Attack, "kind", None)
    attack_fraction: float = same(Attack, "fraction")
    attack_strength: float | None = same(Attack, "strength")

    @property
    def rule(self) -> Rule:
        """How the server averages."""
        return Rule(**{item.name: getattr(self, item.name) for item in fields(Rule)})

    @property
    def attacked(self) -> Attack | None:
        """Which clients are hostile, and how; None: none is."""
        return None if self.attack is None else Attack(self.attack, self.attack_fraction, self.attack_strength)


@dataclass(frozen=True, kw_only=True)
class Privacy(Section):
    """Client-level differential privacy; on where clip and noise are given."""

    clip: float | None = same(privacy.Privacy, "clip", None)
    noise: float | None = same(privacy.Privacy, "noise", None)
    delta: float = same(privacy.Privacy, "delta")
    epsilon: float | None = same(privacy.Privacy, "epsilon")

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in ("clip", "noise") if getattr(self, name) is None]
        if len(missing) == 1:
            raise TDPFedError("none given, clip and noise belong together", field=missing[0])
        if missing and self.epsilon is not None:
            raise TDPFedError(f"{self.epsilon} given, but no clip and no noise; give both", field="epsilon")

    @property
    def asked(self) -> privacy.Privacy | None:
        """What the server does; None without privacy."""
        if self.clip is None or self.noise is None:
            return None
        return privacy.Privacy(self.clip, self.noise, self.delta, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """How a run survives being killed."""

    every: int = setting(10, "save the state after every so many rounds, and after the last; 0: never", least=0)
    keep: int = setting(2, "how many of the newest checkpoints to keep", least=1)


@dataclass(frozen=True, kw_only=True)
class Engine(Section):
    """Where the state of many clients lies; the numbers of a run do not depend on it."""

    state: Place = setting(
        "auto",
        "what clients keep between rounds: in memory, or in a memory-mapped file beside the run folder; auto: in "
        "memory if it takes at most half of what is free",
    )


ALGORITHM = "algorithm"
"""The section of the method: its name, and the hyper-parameters that its class declares."""

SECTIONS: dict[str, type] = {
    "run": Run, "data": Data, "model": Model, ALGORITHM: Algorithm, "participation": Participation, "wire": Wire,
    "robust": Robust, "privacy": Privacy, "checkpoint": Checkpoint, "engine": Engine,
}  # fmt: skip
"""The sections by name, in the order in which they are listed and written."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole configuration, checked."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    method_name: str = DEFAULT  # as it was given: module:Class for a method of the user's own
    method: Algorithm = field(default_factory=find(DEFAULT))
    participation: Participation = Participation()
    wire: Wire = Wire()
    robust: Robust = Robust()
    privacy: Privacy = Privacy()
    checkpoint: Checkpoint = Checkpoint()
    engine: Engine = Engine()
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # full keys that were written out

    @cached_property
    def algorithm(self) -> dict[str, Any]:
        """The method's name and its hyper-parameters as plain values."""
        return {"name": self.method_name, **plain(self.method)}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return all values by section and key."""
        return {name: self.algorithm if name == ALGORITHM else plain(getattr(self, name)) for name in SECTIONS}

    def make_algorithm(self) -> Algorithm:
        """Return the chosen algorithm with its hyper-parameters."""
        return self.method

    def device(self) -> torch.device:
        """Return where to compute."""
        if self.run.device == "cuda" and not torch.cuda.is_available():
            raise TDPFedError("'cuda' given, but PyTorch sees no GPU; allowed here: auto, cpu", field="run.device")
        wanted = "cuda" if self.run.device == "auto" and torch.cuda.is_available() else self.run.device
        return torch.device("cpu" if wanted == "auto" else wanted)
