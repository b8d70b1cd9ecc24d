"""The recipe of local training: which optimizer takes a client's steps, and how its rate changes over the rounds.

A setting of local work, so it holds for every method whose clients train by ``LocalWork.descend``. The rules are those
of ``torch.optim`` at its default settings. An optimizer's state begins afresh with every descent, so at least in every
round: nothing of it is kept or sent.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

import torch
from torch import Tensor

from tdpfed.core import optim
from tdpfed.core.optim import Moments
from tdpfed.core.setting import check, setting
from tdpfed.errors import raise_all, wrong

TINY = 1e-6
"""Added to a gradient's norm before it divides the bound, as in ``torch.nn.utils.clip_grad_norm_``."""

OF_THE_RATE = ("schedule", "rounds", "every", "factor")
"""The settings that change only the learning rate."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How clients take their steps; the learning rate itself belongs to the method."""

    name: Literal["sgd", "adam", "adamw"] = setting(
        "sgd", "the rule of a step; its state begins afresh in every round. adamw: weight decay apart from the gradient"
    )
    momentum: float = setting(0.0, "sgd: momentum", least=0, below=1)
    nesterov: bool = setting(False, "sgd: Nesterov's momentum, which looks ahead")
    weight_decay: float = setting(0.0, "pull of the parameters towards 0; adamw: times the learning rate", least=0)
    clip: float | None = setting(None, "most norm of a client's gradient, which is scaled down to it", above=0)
    schedule: Literal["constant", "cosine", "step"] = setting(
        "constant", "how the learning rate falls from round to round: not, along a cosine to 0, or in steps"
    )
    rounds: int | None = setting(None, "cosine: the number of rounds until the rate is 0; default: run.rounds", least=1)
    every: int = setting(10, "step: rounds between two steps of the rate", least=1)
    factor: float = setting(0.1, "step: what the rate is multiplied by", above=0, most=1)

    def __post_init__(self) -> None:
        check(self)
        errors = []
        if self.name != "sgd" and self.momentum:
            errors.append(wrong("momentum", self.momentum, f"0 with name {self.name!r}, which has its own"))
        if self.nesterov and not self.momentum:
            errors.append(wrong("nesterov", True, "false without momentum"))
        raise_all(errors)

    @property
    def plain(self) -> bool:
        """Whether every step is a rate times the gradient."""
        return self.name == "sgd" and not self.momentum and not self.weight_decay and self.clip is None

    def over(self, rounds: int) -> Self:
        """Return the same recipe for a run of so many rounds."""
        return replace(self, rounds=rounds) if self.schedule == "cosine" and self.rounds is None else self

    def check_for(self, method: str, follows: Literal["any", "rate", "none"]) -> None:
        """Refuse what a method cannot follow, and a cosine without its end; all errors are reported together."""
        errors = []
        if self.schedule == "cosine" and self.rounds is None:
            errors.append(wrong("optimizer.rounds", None, "a whole number of at least 1 with schedule 'cosine'"))
        allowed = {"any": [item.name for item in fields(self)], "rate": OF_THE_RATE, "none": ()}[follows]
        for item in fields(self):
            value = getattr(self, item.name)
            if value != item.default and item.name not in allowed:
                errors.append(wrong(f"optimizer.{item.name}", value, f"{item.default!r} with {method!r}, whose steps "
                                    "have a rule of their own"))  # fmt: skip
        raise_all(errors)

    def rate(self, lr: float, round_: int | Tensor) -> float | Tensor:
        """Return the learning rate of a round, from 1; a tensor on a GPU, where a computation serves any round."""
        if self.schedule == "constant":
            return lr
        if isinstance(round_, Tensor) and round_.is_cuda:
            return lr * self.share(round_.double() - 1)
        return lr * float(self.share(torch.tensor(int(round_) - 1.0, dtype=torch.float64)))

    def share(self, done: Tensor) -> Tensor:
        """Return what is left of the learning rate after so many rounds."""
        if self.schedule == "cosine":
            return (1 + torch.cos(math.pi * (done / (self.rounds or 1)).clamp_max(1))) / 2
        return torch.pow(self.factor, torch.floor(done / self.every))

    def rule(self, lr: float | Tensor) -> optim.Optimizer:
        """Return the rule of a step, without clipping."""
        decay, momentum = self.weight_decay, self.momentum
        if self.name == "sgd":

            def descend(a: Tensor, g: Tensor, state: Moments, count: int) -> tuple[Tensor, Moments]:
                g = g + decay * a if decay else g
                if not momentum:
                    return a - lr * g, state
                velocity = g if count == 1 else momentum * state[0] + g
                return a - lr * (g + momentum * velocity if self.nesterov else velocity), (velocity,)

            return optim.Optimizer(lambda _: (), descend)
        adam = optim.adam(1.0)

        def step(a: Tensor, g: Tensor, state: Moments, count: int) -> tuple[Tensor, Moments]:
            coupled = self.name == "adam" and decay > 0
            moved, state = adam.step(torch.zeros_like(a), g + decay * a if coupled else g, state, count)
            a = a - lr * decay * a if self.name == "adamw" and decay else a
            return a + lr * moved, state

        return optim.Optimizer(adam.init, step)

    def clipped(self, g: Tensor) -> Tensor:
        """Return gradients ``(..., P)``, those beyond the norm ``clip`` scaled down to it."""
        if self.clip is None:
            return g
        norm: Tensor = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        return g * (self.clip / (norm + TINY)).clamp_max(1)


USUAL = Optimizer()
"""Plain gradient steps at one constant rate."""
