"""Small models, federations and algorithm settings shared by the tests."""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tdpfed.algorithms import (
    APFL,
    Algorithm,
    Ditto,
    FedAvg,
    FedAvgSAR,
    FedBABU,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    Local,
    PerFedAvg,
    PFedMe,
    Scaffold,
    TDPFed,
)
from tdpfed.core.state import State
from tdpfed.data import Federation
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.store import Store

SHAPE, CLASSES = (1, 6, 6), 3


def newest(run: Path) -> list[Path]:
    """Return the files that belong only to the newest checkpoint of a run, or are of its round."""
    stem = max(path.name for path in (run / "checkpoints").glob("*.json")).removesuffix(".json")
    return sorted((run / "checkpoints").glob(f"{stem}*"))


EVERY = [pytest.param(False, id="sample"), pytest.param(True, id="every", marks=pytest.mark.slow)]
"""For a law that holds at every place: a sample of the places by default, all of them with ``-m slow``."""


def places(count: int, every: bool, sample: int = 40) -> Sequence[int]:
    """Return the numbers below ``count``, or the first, the last and some between them."""
    if every or count <= sample:
        return range(count)
    return [0, *sorted(Random(count).sample(range(1, count - 1), sample - 2)), count - 1]


def mlp(seed: int = 0) -> nn.Module:
    return _seeded(
        seed,
        lambda: nn.Sequential(
            OrderedDict(flat=nn.Flatten(), fc1=nn.Linear(36, 12), act=nn.Tanh(), fc2=nn.Linear(12, CLASSES))
        ),
    )


def convnet(seed: int = 0) -> nn.Module:
    """A convolution and two linear layers, all factorized by the default plan."""
    return _seeded(
        seed,
        lambda: nn.Sequential(
            OrderedDict(
                conv=nn.Conv2d(1, 5, 3, padding=1),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(2),
                flat=nn.Flatten(),
                fc1=nn.Linear(45, 12),
                act=nn.Tanh(),
                fc2=nn.Linear(12, CLASSES),
            )
        ),
    )


MODELS = {"dense": mlp, "conv": convnet}


def _seeded(seed: int, make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model: nn.Module = make()
    return model


def federation(clients: int = 5, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Federation:
    """Clients of 12, 15, 18, ... noisy samples of three patterns, a quarter of them held out."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([12 + 3 * k for k in range(clients)])
    owner = torch.arange(clients).repeat_interleave(sizes)
    y = (torch.arange(len(owner)) + owner) % CLASSES
    pattern = torch.randn(CLASSES, *SHAPE, generator=generator)
    x = pattern[y] + 0.7 * torch.randn(len(y), *SHAPE, generator=generator)
    return Federation.from_tensors(x, y, owner, classes=CLASSES, dtype=dtype, seed=seed)


COMMON: dict[str, Any] = {"tau": 3, "batch_size": 4}
TDPFED: dict[str, Any] = {**COMMON, "compression": 1.5, "s": 2, "s_prime": 3, "eta": 0.01, "eta_p": 0.05, "lam": 4.0}


def variants() -> dict[str, Algorithm]:
    """Every algorithm, and the variants of TDPFed and Per-FedAvg with different code paths."""
    return {
        "fedavg": FedAvg(**COMMON),
        "fedavg_sar": FedAvgSAR(**COMMON, compression=2.5),
        "pfedme": PFedMe(**COMMON, momentum=0.5, s=2),
        "perfedavg": PerFedAvg(**COMMON, alpha=0.05),
        "perfedavg hessian-free": PerFedAvg(**COMMON, alpha=0.05, variant="hessian-free"),
        "local": Local(**COMMON),
        "fedprox": FedProx(**COMMON, mu=2.0),
        "scaffold": Scaffold(**COMMON, eta_g=0.8),
        "ditto": Ditto(**COMMON, lam=2.0),
        "apfl": APFL(**COMMON, alpha=0.4),
        "fedper": FedPer(**COMMON),
        "fedrep": FedRep(**COMMON, head_steps=2),
        "lgfedavg": LGFedAvg(**COMMON),
        "fedbabu": FedBABU(**COMMON, fine_tune=4),
        "tdpfed": TDPFed(**TDPFED),
        "tdpfed act": TDPFed(**TDPFED, aggregation="act", beta=0.7),
        "tdpfed als": TDPFed(**TDPFED, optimizer="als"),
        "tdpfed run": TDPFed(**TDPFED, optimizer_state="run"),
        "tdpfed momentum": TDPFed(**TDPFED, momentum=0.6, momentum_state="round", proximal="implicit"),
        "tdpfed nu": TDPFed(**TDPFED | {"s": 6}, nu=0.4, momentum=0.6, momentum_state="round"),
        "tdpfed alternating": TDPFed(**TDPFED, factor_steps="alternating", optimizer="rmsprop", keep_theta=True),
    }


def watched(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    """Record the results of a module's function from now on; return the list that collects them."""
    function, given = getattr(module, name), list[Any]()

    def watch(*args: Any, **options: Any) -> Any:
        given.append(function(*args, **options))
        return given[-1]

    monkeypatch.setattr(module, name, watch)
    return given


def train(algorithm: Algorithm, rounds: int = 2, *, model: str = "dense", **options: Any) -> Simulation:
    """Return a simulation after ``rounds`` rounds on the small federation."""
    data = options.pop("data", None) or federation()
    simulation = Simulation(MODELS[model](), data, algorithm, **options)
    for _ in range(rounds):
        simulation.step()
    return simulation


def states(simulation: Simulation) -> dict[str, Tensor]:
    """Return all tensors of a run's state: the server's and the clients'."""
    server = {f"server {name}": value for name, value in simulation.server.items()}
    return server | {f"private {name}": value for name, value in simulation.private.items()}


def assert_close(left: Simulation, right: Simulation, tolerance: float) -> None:
    assert_states_close(states(left), states(right), tolerance)


def assert_states_close(a: State, b: State, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.allclose(value, b[name], rtol=tolerance, atol=tolerance), name


def equal(left: Simulation, right: Simulation) -> bool:
    """Whether the states of two runs are equal to the bit."""
    a, b = states(left), states(right)
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def carries(total: int, messages: int, values: int) -> bool:
    """Whether ``total`` bytes fit ``messages`` messages of ``values`` float32 values, with a header each."""
    return messages * 4 * values <= total <= messages * (4 * values + 700)


SUMS = ("previous", "sha256", "files")
"""The keys under which the files of a run hold checksums."""


def lines(path: Path, *without: str) -> list[dict[str, Any]]:
    """Return the JSON objects in a file of lines, without their checksums and other keys; none if there is no file."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{key: value for key, value in line.items() if key not in (*SUMS, *without)} for line in found]


def summary(path: Path) -> dict[str, Any]:
    """Return a summary in a file, without its checksums."""
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in SUMS}


def store(values: dict[str, Tensor]) -> Store:
    """Return a store that contains the given rows, all in use."""
    start = {name: value.new_zeros(value.shape[1:]) for name, value in values.items()}
    made = Store(start, len(next(iter(values.values()), ())))
    made.put(torch.arange(made.clients), values)
    return made
