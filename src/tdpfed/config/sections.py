"""The sections of a configuration, and the complete configuration.

The meaning and allowed values of a setting are declared once, next to the code that uses it: participation, robust
averaging and privacy in ``server``, a method's hyper-parameters in its class. This module declares the settings of a
run and combines the others.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

import torch

from tdpfed.algorithms import DEFAULT, Algorithm, Best, find
from tdpfed.core.recipe import Optimizer
from tdpfed.core.setting import check, plain, same, setting
from tdpfed.core.tasks import TaskSettings
from tdpfed.data.build import Partition, Split
from tdpfed.data.federation import Augment
from tdpfed.data.normalization import Normalize
from tdpfed.engine.attacks import Attack, Kind
from tdpfed.engine.precision import Precision
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.store import Place
from tdpfed.errors import TDPFedError
from tdpfed.server import privacy
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule
from tdpfed.server.step import ServerStep
from tdpfed.wire import Wire


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the configuration."""

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class Run(Section):
    """How long and where to run."""

    rounds: int = setting(50, "communication rounds", least=1)
    seed: int = setting(0, "seed of all random draws", least=0, below=2**63)
    seeds: int = setting(
        1, "number of runs, with consecutive seeds from run.seed; computed together on a GPU", least=1, most=1000
    )
    evaluate_every: int = setting(1, "rounds between evaluations; the last round is always evaluated", least=1)
    evaluate_clients: int | None = setting(None, "number of clients to evaluate, drawn with the seed", least=1)
    train_loss: bool = setting(
        False, "also evaluate the personalized and the global models on all training samples, which takes its time"
    )
    diagnostics_every: int = setting(0, "rounds between measurements for the paper's analysis; 0: never", least=0)
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto: a GPU if available")
    runner: RunnerName = setting("batched", "compute all clients at once, or one after another")
    threads: int | Literal["auto"] = setting(
        "auto", "CPU threads; auto: all, or one if the model is too small to benefit", least=1, most=1024
    )
    chunk: int | Literal["auto"] = setting(
        "auto", "clients computed together (on a CPU, by each thread); auto: as many as fit", least=1
    )
    precision: Precision = setting(
        "float32", "of matrix products; tf32: 10-bit mantissa on a GPU, bf16: 7-bit mantissa in the model's layers"
    )
    loggers: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = setting(
        (), "additional destinations of the records"
    )


@dataclass(frozen=True, kw_only=True)
class Data(Section):
    """The data, and how they are distributed to clients."""

    name: str = setting("digits", "a data set of the package, or a path to an .npz or .parquet file")
    options: dict[str, Any] = setting({}, "options of the data set, such as alpha and beta of synthetic")
    clients: int | None = setting(None, "number of clients; default: 20, or all natural clients", least=1)
    partition: Partition | None = setting(
        None, "how samples are distributed; default: natural if the data have clients, otherwise classes at random"
    )
    per_client: int = setting(2, "all kinds of classes: number of classes per client", least=1)
    alpha: float = setting(0.5, "dirichlet: concentration; smaller means more different clients", above=0, most=1e6)
    capped: bool = setting(
        False, "dirichlet: a client that has as many samples as the average gets none of further classes"
    )
    size_skew: float | None = setting(
        None, "iid, classes and classes-in-turn: how unequal the shares are; 0 is equal", least=0, most=10
    )
    min_samples: int = setting(1, "minimum number of samples per client", least=1)
    max_samples: int | None = setting(None, "maximum number of samples per client, to study scarce data", least=2)
    split: Split | None = setting(
        None,
        "test samples: some of each client's (client), its last ones (time), or the official ones; default: official "
        "for a file with test_mask, time for text, otherwise client",
    )
    test_fraction: float = setting(0.25, "client and time split: fraction held out", above=0, below=1)
    normalize: Normalize = setting(
        "standard",
        "scaling of the inputs: mean 0, variance 1 by channel (standard) or pixel (feature); unit: 0 to 1; symmetric: "
        "-1 to 1",
    )
    augment: Augment = setting(
        "none", "random changes of training images: mirrored, or mirrored and shifted by up to 4 pixels"
    )
    validation: float = setting(
        0.0, "share of each client's training samples that is held out for validation, at least one", least=0, below=1
    )
    seed: int | None = setting(None, "seed of the partition; default: run.seed", least=0)


@dataclass(frozen=True, kw_only=True)
class Model(Section):
    """The model that the clients train."""

    name: str = setting("dnn", "a model of the package, or your own as package.module:factory")


@dataclass(frozen=True, kw_only=True)
class Robust(Rule):
    """Robust aggregation on the server, and simulated attacks."""

    attack: Kind | None = same(Attack, "kind", None)
    attack_fraction: float = same(Attack, "fraction")
    attack_strength: float | None = same(Attack, "strength")

    @property
    def rule(self) -> Rule:
        """The aggregation rule."""
        return Rule(**{item.name: getattr(self, item.name) for item in fields(Rule)})

    @property
    def attacked(self) -> Attack | None:
        """The simulated attack; None: no client is hostile."""
        return None if self.attack is None else Attack(self.attack, self.attack_fraction, self.attack_strength)


@dataclass(frozen=True, kw_only=True)
class Privacy(Section):
    """Client-level differential privacy; enabled if clip and noise are given."""

    clip: float | None = same(privacy.Privacy, "clip", None)
    noise: float | None = same(privacy.Privacy, "noise", None)
    delta: float = same(privacy.Privacy, "delta")
    epsilon: float | None = same(privacy.Privacy, "epsilon")

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [name for name in ("clip", "noise") if getattr(self, name) is None]
        if len(missing) == 1:
            raise TDPFedError("none given, clip and noise must be given together", field=missing[0])
        if missing and self.epsilon is not None:
            raise TDPFedError(f"{self.epsilon} given, but no clip and no noise; give both", field="epsilon")

    @property
    def asked(self) -> privacy.Privacy | None:
        """The privacy settings of the server; None without privacy."""
        if self.clip is None or self.noise is None:
            return None
        return privacy.Privacy(self.clip, self.noise, self.delta, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Section):
    """Checkpoints, from which a run can be resumed."""

    every: int = setting(10, "rounds between checkpoints, which are also saved after the last round; 0: never", least=0)
    keep: int = setting(2, "number of latest checkpoints to keep", least=1)


@dataclass(frozen=True, kw_only=True)
class Engine(Section):
    """Where the state of the clients is stored; results do not depend on it."""

    state: Place = setting(
        "auto",
        "state that clients keep between rounds: in memory, or in a memory-mapped file next to the run folder; auto: "
        "in memory if it takes at most half of the free memory",
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation(Section):
    """Which models of a client are evaluated, and which counts as its personalized one."""

    personalize: Literal["own", "best"] = setting(
        "own",
        "own: the method's personalized model; best: whichever validates best of it, one trained alone, and mixtures",
    )
    received: bool = setting(
        False,
        "also evaluate the models with which clients begin the next round: after the server's message, before training",
    )
    validation: float = same(Best, "validation")
    choose_rounds: int | None = same(Best, "choose_rounds")
    alone_rate: float = same(Best, "alone_rate")
    mixes: tuple[float, ...] = same(Best, "mixes")
    margin: float = same(Best, "margin")
    choice_batches: int = same(Best, "choice_batches")


ALGORITHM = "algorithm"
"""The section of the method: its name, and the hyper-parameters that its class declares."""

SECTIONS: dict[str, type] = {
    "run": Run, "data": Data, "model": Model, "task": TaskSettings, ALGORITHM: Algorithm, "optimizer": Optimizer,
    "participation": Participation, "wire": Wire, "server": ServerStep, "robust": Robust, "privacy": Privacy,
    "evaluation": Evaluation, "checkpoint": Checkpoint, "engine": Engine,
}  # fmt: skip
"""The sections by name, in the order in which they are listed and written."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A complete, validated configuration."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    task: TaskSettings = TaskSettings()
    method_name: str = DEFAULT  # as given: module:Class for a user's own method
    method: Algorithm = field(default_factory=find(DEFAULT))
    optimizer: Optimizer = Optimizer()
    participation: Participation = Participation()
    wire: Wire = Wire()
    server: ServerStep = ServerStep()
    robust: Robust = Robust()
    privacy: Privacy = Privacy()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    engine: Engine = Engine()
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # full keys given explicitly

    @cached_property
    def algorithm(self) -> dict[str, Any]:
        """The method's name and its hyper-parameters as plain values; with epochs there is no tau."""
        values = plain(self.method)
        if self.method.epochs is not None:
            del values["tau"]
        return {"name": self.method_name, **values}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return all values by section and key."""
        return {name: self.algorithm if name == ALGORITHM else plain(getattr(self, name)) for name in SECTIONS}

    def make_algorithm(self) -> Algorithm:
        """Return the chosen algorithm with its hyper-parameters, and the choice of models around it if there is one."""
        settings = plain(self.evaluation)
        del settings["received"]
        if settings.pop("personalize") == "own":
            return self.method
        if self.data.validation:  # held out to the end, so that records can tell the accuracy on it
            return Best.of(self.method, **settings | {"validation": self.data.validation})
        return Best.of(self.method, **settings).over(self.run.rounds)

    def device(self) -> torch.device:
        """Return the device to compute on."""
        if self.run.device == "cuda" and not torch.cuda.is_available():
            raise TDPFedError("'cuda' given, but PyTorch sees no GPU; allowed here: auto, cpu", field="run.device")
        wanted = "cuda" if self.run.device == "auto" and torch.cuda.is_available() else self.run.device
        return torch.device("cpu" if wanted == "auto" else wanted)
