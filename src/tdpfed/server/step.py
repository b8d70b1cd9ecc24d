"""The server's step: how the clients' average changes the global model (Reddi et al., 2021).

The change from the server's state to the average is a pseudo-gradient for an optimizer: SGD with momentum (FedAvgM),
Adam (FedAdam) or Yogi (FedYogi). At rate 1 without momentum SGD is plain averaging, to the bit. The optimizer's moments
are entries of the server's state, under names of their own.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tdpfed.algorithms.base import Algorithm
from tdpfed.core.setting import check, setting
from tdpfed.core.state import STEP, State
from tdpfed.errors import wrong


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """How the server moves towards the clients' average."""

    optimizer: Literal["average", "sgd", "adam", "yogi"] = setting(
        "average", "take the clients' average, or use the change to it as a gradient: FedAvgM (sgd), FedAdam, FedYogi"
    )
    rate: float = setting(1.0, "sgd, adam and yogi: learning rate of the server; 1 with sgd is the average", above=0)
    momentum: float = setting(
        0.0, "sgd: momentum; adam and yogi: decay of the mean of changes, 0.9 in the paper", least=0, below=1
    )
    decay: float = setting(0.99, "adam and yogi: decay of the mean of squared changes", least=0, below=1)
    floor: float = setting(1e-3, "adam and yogi: added to the root of the mean of squares", above=0)

    def __post_init__(self) -> None:
        check(self)

    @property
    def plain(self) -> bool:
        """Whether the step is the average itself."""
        return self.optimizer == "average" or (self.optimizer == "sgd" and self.rate == 1 and self.momentum == 0)

    def check(self, algorithm: Algorithm) -> None:
        """Refuse an optimizer for a method whose server does not average."""
        if self.optimizer != "average" and not algorithm.averaged:
            raise wrong(
                "server.optimizer", self.optimizer, f"'average': the server of {algorithm.name!r} does not keep an "
                "average of the uploads",
            )  # fmt: skip

    def start(self, server: State, algorithm: Algorithm) -> State:
        """Return the optimizer's moments before round 1."""
        if self.plain:
            return {}
        needed = ("mean", "square") if self.optimizer != "sgd" else ("mean",) if self.momentum else ()
        return {
            f"{STEP}{name}.{moment}": torch.full_like(server[name], self.floor**2 if moment == "square" else 0)
            for name in algorithm.averaged
            for moment in needed
        }

    def after(self, server: State, averaged: State, algorithm: Algorithm) -> State:
        """Return the server's next state: ``averaged`` with the optimizer's step in place of the average."""
        if self.plain:
            return averaged
        state = dict(averaged)
        for name in algorithm.averaged:
            moments = {m: server[key] for m in ("mean", "square") if (key := f"{STEP}{name}.{m}") in server}
            change = averaged[name] - server[name]
            moved, moments = self._step(change, moments)
            state[name] = server[name] + moved
            state |= {f"{STEP}{name}.{moment}": value for moment, value in moments.items()}
        return state

    def _step(self, change: Tensor, moments: State) -> tuple[Tensor, State]:
        if self.optimizer == "sgd":
            if not moments:
                return self.rate * change, {}
            mean = self.momentum * moments["mean"] + change
            return self.rate * mean, {"mean": mean}
        mean = self.momentum * moments["mean"] + (1 - self.momentum) * change
        old, new = moments["square"], change.square()
        if self.optimizer == "adam":
            square = self.decay * old + (1 - self.decay) * new
        else:
            square = old - (1 - self.decay) * new * torch.sign(old - new)
        return self.rate * mean / (square.sqrt() + self.floor), {"mean": mean, "square": square}


AVERAGE = ServerStep()
"""The clients' average itself."""
