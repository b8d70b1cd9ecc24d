"""Clients with models, minibatches and both kinds of local work, for the tests of local work."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

import small
from tdpfed.core.local import Batch, FactorRule, Near
from tdpfed.core.objective import Objective
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.fast.local import FastLocal

Optimizer = Literal["adam", "gd", "adagrad", "rmsprop"]
Restart = Literal["round", "local-round", "run"]

TAU = 4
FACTOR_LR = 4e-3
PLANS = {
    2: FactorPlan.of({"w": (70, 64), "v": (9, 8), "b": (7,)}, 1.5),  # on a CPU the first is a large matrix
    3: FactorPlan.of({"w": (6, 5, 4), "b": (7,), "scale": ()}, 1.5),
    4: FactorPlan.of({"b": (7,), "w": (30, 5, 3, 3), "v": (5, 4, 3, 3)}, 1.5),
}
"""Plans by the order of their tensors."""


class Product(nn.Module):
    """Weights that are multiplied with each other, for which there are no steps in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(9, 36)), nn.Parameter(torch.empty(3, 9))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x.flatten(1) @ (self.b @ self.a).mT)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "wide": small.mlp,
    "narrow": small.mlp,
    "conv": small.convnet,
    "product": Product,
}
BATCH = {"wide": 3, "narrow": 5, "conv": 3, "product": 3}
"""Samples per minibatch: of 36 inputs those of the wide model are more than 8 times as many."""


@dataclass(frozen=True)
class Problem:
    """K clients: parameters and anchors ``(K, P)``, minibatches ``(K, B, ...)``."""

    objective: Objective
    theta: Tensor
    anchor: Tensor
    batches: list[Batch]
    recorded: RecordedGradient

    def only(self, clients: slice | int) -> "Problem":
        """Return the same for some clients, or for one without an axis."""
        batches = [(x[clients], y[clients]) for x, y in self.batches]
        return Problem(self.objective, self.theta[clients], self.anchor[clients], batches, self.recorded)

    def each(self) -> list["Problem"]:
        """Return the clients one by one."""
        return [self.only(k) for k in range(len(self.theta))]

    @property
    def plain(self) -> PlainLocal:
        objective = self.objective
        return PlainLocal(
            self._turn, TAU, self.batches.__getitem__, objective.gradient, hessian_product=objective.hessian_product,
            per_sample=objective.per_sample,
        )  # fmt: skip

    @property
    def fast(self) -> FastLocal:
        return FastLocal(self._turn, TAU, self.batches.__getitem__, self.recorded, set())

    @property
    def _turn(self) -> Turn:
        return Turn(seed=0, round=1, clients=torch.arange(len(self.theta)) if self.theta.ndim == 2 else torch.tensor(0))


@cache
def problem(model: str, clients: int = 3, dtype: torch.dtype = torch.float64) -> Problem:
    """Draw clients of a model; what is recorded of it serves all tests."""
    generator = torch.Generator().manual_seed(7)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        objective = Objective.of(MODELS[model]().to(dtype))
    theta, anchor = (
        objective.initial() + 0.2 * torch.randn(clients, objective.layout.size, dtype=dtype, generator=generator)
        for _ in range(2)
    )
    batches = []
    for _ in range(2 * TAU):
        x = torch.randn(clients, BATCH[model], *small.SHAPE, dtype=dtype, generator=generator)
        batches.append((x, torch.randint(small.CLASSES, (clients, BATCH[model]), generator=generator)))
    return Problem(objective, theta, anchor, batches, RecordedGradient(objective))


def rules() -> list[FactorRule]:
    """Every optimizer, moved together and in turn, with state that starts afresh at any time."""
    found = [FactorRule("als", FACTOR_LR), FactorRule("als", FACTOR_LR, damping=0.0)]
    optimizers: tuple[Optimizer, ...] = ("adam", "gd", "adagrad", "rmsprop")
    restarts: tuple[Restart, ...] = ("round", "local-round", "run")
    for optimizer, restart in product(optimizers, restarts):
        found.append(FactorRule(optimizer, FACTOR_LR, restart))
        if restart != "run":
            found.append(FactorRule(optimizer, FACTOR_LR, restart, alternating=True))
    return found


def named(rule: FactorRule) -> str:
    """Return a name for a test's case."""
    return f"{rule.optimizer} {rule.restart}{' alternating' * rule.alternating}"


def drawn(plan: FactorPlan, clients: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Near]]:
    """Factors, and what they come near to in four local rounds."""
    generator = torch.Generator().manual_seed(5)
    a = 0.4 * torch.randn(clients, plan.factors.size, generator=generator, dtype=dtype)
    thetas = [0.5 * torch.randn(clients, plan.dense.size, generator=generator, dtype=dtype) for _ in range(4)]
    return a, [Near(theta, theta.new_zeros(clients)) for theta in thetas]


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Both are the same up to rounding."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class Kept:
    """Tensors that nobody may change."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def keep(self, *tensors: Tensor) -> None:
        """Remember tensors as they are now."""
        self._pairs += [(tensor, tensor.clone()) for tensor in tensors]

    def check(self) -> None:
        """All are as they were."""
        assert self._pairs
        for number, (tensor, before) in enumerate(self._pairs):
            assert torch.equal(tensor, before), number


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[Kept]:
    """These tensors, and those that are kept meanwhile, are at the end as they were."""
    kept = Kept()
    kept.keep(*tensors)
    yield kept
    kept.check()
