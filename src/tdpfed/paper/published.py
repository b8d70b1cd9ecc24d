"""What the paper reports (section VII), and the settings of our run for each number.

The paper reports accuracy but does not say for which model. Its numbers for FedAvg are those of the global model, those
for pFedMe and TDPFed of the personalized models (docs/paper.md): each row names the accuracy that is compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Accuracy = Literal["personalized_accuracy", "local_accuracy", "global_accuracy"]
PERSONAL: Accuracy = "personalized_accuracy"
LOCAL: Accuracy = "local_accuracy"
GLOBAL: Accuracy = "global_accuracy"


@dataclass(frozen=True)
class Row:
    """A line of a table: its label, the run it is taken from, the paper's number, and the models it refers to."""

    label: str
    run: str
    paper: float | None  # percent; None if the paper has no such line and it is our addition
    accuracy: Accuracy = PERSONAL


@dataclass(frozen=True)
class Study:
    """The experiments on one data set: runs by name with their settings, and tables of rows by number."""

    preset: str
    model: str
    runs: Mapping[str, tuple[str, ...]]
    tables: Mapping[int, tuple[Row, ...]]
    figures: Mapping[int, Literal["accuracy", "loss"]]
    curves: Mapping[str, tuple[Row, ...]]  # the curves of the figures, by panel

    def needed(self, tables: tuple[int, ...], figures: tuple[int, ...]) -> list[str]:
        """Return the runs that these tables and figures need, in order."""
        rows = [row for number in tables for row in self.tables.get(number, ())]
        rows += [row for panel in self.curves.values() for row in panel] if figures else []
        return list(dict.fromkeys(row.run for row in rows))


RANKS = {  # Table I: rank of each layer at compression 1.5 and 2
    "dnn": {"fc1": (59, 44), "fc2": (6, 5)},
    "vgg8": {
        "conv1": (14, 11), "conv2": (120, 90), "conv3": (248, 186), "conv4": (504, 378), "conv5": (759, 569),
        "fc1": (85, 64), "fc2": (85, 64), "fc3": (6, 5),
    },
}  # fmt: skip

ROUNDS = 800
"""Number of rounds in the paper's experiments."""

TITLES = {
    1: "CP ranks",
    2: "The two aggregation strategies",
    3: "TDPFed and other methods",
    4: "Hyper-parameters",
}

METHODS = {
    "fedavg": ("algorithm.name=fedavg",),
    "pfedme": ("algorithm.name=pfedme",),
    "fedavg_sar-x1.5": ("algorithm.name=fedavg_sar", "algorithm.compression=1.5"),
    "fedavg_sar-x2": ("algorithm.name=fedavg_sar", "algorithm.compression=2"),
    "local": ("algorithm.name=local",),
    "tdpfed-x2": ("algorithm.compression=2",),
    "tdpfed-x1.5": ("algorithm.compression=1.5",),
    "tdpfed-x2-act": ("algorithm.compression=2", "algorithm.aggregation=act"),
    "tdpfed-x1.5-act": ("algorithm.compression=1.5", "algorithm.aggregation=act"),
}


OURS = "-ours"
"""The ending of the names of runs with our configuration."""

_CHANGES = ("model.name=vgg8-gn", "data.augment=flip-shift", "algorithm.batch_size=50")
_CIFAR10_OURS = {  # reaches the paper's number, unlike its text: norm, augmentation, rates, batches
    f"tdpfed-x2{OURS}": (
        *METHODS["tdpfed-x2"], *_CHANGES, "algorithm.keep_theta=true", "algorithm.lam=1", "algorithm.eta_p=0.01",
        "algorithm.eta=2e-4",
    ),
    f"fedavg{OURS}": (*METHODS["fedavg"], *_CHANGES),
    f"local{OURS}": (*METHODS["local"], *_CHANGES),
}  # fmt: skip


def _variants(*settings: str) -> dict[str, tuple[str, ...]]:
    """Return runs of TDPFed at compression 2 that differ from the baseline in one setting."""
    return {f"tdpfed-x2-{setting}": (*METHODS["tdpfed-x2"], f"algorithm.{setting}") for setting in settings}


def _panels(table: tuple[Row, ...]) -> dict[str, tuple[Row, ...]]:
    """Return the methods of Table III at each rate, and local training."""
    fedavg, pfedme, sar15, sar2, own15, own2, _, local, *_ = table
    return {"x2": (fedavg, sar2, pfedme, own2, local), "x1.5": (fedavg, sar15, pfedme, own15, local)}


_MNIST_METHODS = (
    Row("FedAvg", "fedavg", 96.78, GLOBAL),
    Row("pFedMe", "pfedme", 98.64),
    Row("FedAvg (s.a.r.), x1.5", "fedavg_sar-x1.5", 96.15, GLOBAL),
    Row("FedAvg (s.a.r.), x2", "fedavg_sar-x2", 95.80, GLOBAL),
    Row("TDPFed, x1.5, eta = 3e-4", "tdpfed-x1.5-eta=3e-4", 99.04),
    Row("TDPFed, x2, eta = 3e-4", "tdpfed-x2-eta=3e-4", 99.16),
    Row("FedAvg, fine-tuned (ours)", "fedavg", None, LOCAL),
    Row("local only (ours)", "local", None),
)
_CIFAR10_METHODS = (
    Row("FedAvg", "fedavg", 83.43, GLOBAL),
    Row("pFedMe", "pfedme", 91.41),
    Row("FedAvg (s.a.r.), x1.5", "fedavg_sar-x1.5", 61.00, GLOBAL),
    Row("FedAvg (s.a.r.), x2", "fedavg_sar-x2", 55.51, GLOBAL),
    Row("TDPFed, x1.5", "tdpfed-x1.5", 91.16),
    Row("TDPFed, x2", "tdpfed-x2", 91.01),
    Row("FedAvg, fine-tuned (ours)", "fedavg", None, LOCAL),
    Row("local only (ours)", "local", None),
    Row("TDPFed, x2, our configuration (ours)", "tdpfed-x2-ours", None),
    Row("FedAvg, fine-tuned, our configuration (ours)", "fedavg-ours", None, LOCAL),
    Row("local only, our configuration (ours)", "local-ours", None),
)

STUDIES = {
    "mnist": Study(
        "mnist-paper",
        "dnn",
        METHODS
        | _variants("lam=8", "lam=10", "beta=1.4", "beta=1.8", "s=2", "s=8", "s_prime=12", "s_prime=22", "eta=3e-4")
        | {"tdpfed-x1.5-eta=3e-4": (*METHODS["tdpfed-x1.5"], "algorithm.eta=3e-4")},
        {
            2: (
                Row("AFM, x2", "tdpfed-x2", 98.97),
                Row("ACT, x2", "tdpfed-x2-act", 99.07),
                Row("AFM, x1.5", "tdpfed-x1.5", 99.08),
                Row("ACT, x1.5", "tdpfed-x1.5-act", 98.07),
            ),
            3: _MNIST_METHODS,
            4: (
                Row("baseline", "tdpfed-x2", 98.97),
                Row("lambda = 8", "tdpfed-x2-lam=8", 98.77),
                Row("lambda = 10", "tdpfed-x2-lam=10", 98.91),
                Row("beta = 1.4", "tdpfed-x2-beta=1.4", 98.95),
                Row("beta = 1.8", "tdpfed-x2-beta=1.8", 99.11),
                Row("s = 2", "tdpfed-x2-s=2", 97.79),
                Row("s = 8", "tdpfed-x2-s=8", 97.85),
                Row("s' = 12", "tdpfed-x2-s_prime=12", 98.94),
                Row("s' = 22", "tdpfed-x2-s_prime=22", 98.88),
            ),
        },
        {2: "accuracy", 3: "loss"},
        _panels(_MNIST_METHODS),
    ),
    "cifar10": Study(
        "cifar10-paper",
        "vgg8",
        METHODS
        | _CIFAR10_OURS
        | _variants("lam=10", "lam=18", "beta=1.4", "beta=1.8", "s=2", "s=6", "s_prime=10", "s_prime=20"),
        {
            2: (
                Row("AFM, x2", "tdpfed-x2", 91.01),
                Row("ACT, x2", "tdpfed-x2-act", 74.80),
                Row("AFM, x1.5", "tdpfed-x1.5", 91.16),
                Row("ACT, x1.5", "tdpfed-x1.5-act", 77.31),
            ),
            3: _CIFAR10_METHODS,
            4: (
                Row("baseline", "tdpfed-x2", 91.01),
                Row("lambda = 10", "tdpfed-x2-lam=10", 90.16),
                Row("lambda = 18", "tdpfed-x2-lam=18", 90.44),
                Row("beta = 1.4", "tdpfed-x2-beta=1.4", 90.77),
                Row("beta = 1.8", "tdpfed-x2-beta=1.8", 91.36),
                Row("s = 2", "tdpfed-x2-s=2", 90.58),
                Row("s = 6", "tdpfed-x2-s=6", 89.64),
                Row("s' = 10", "tdpfed-x2-s_prime=10", 90.20),
                Row("s' = 20", "tdpfed-x2-s_prime=20", 90.65),
            ),
        },
        {4: "accuracy", 5: "loss"},
        _panels(_CIFAR10_METHODS),
    ),
}
