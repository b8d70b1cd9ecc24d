"""Participation in a round: the clients that are chosen, those that train, and those that drop out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, choose, key, uniform
from tdpfed.core.setting import check, setting


@dataclass(frozen=True)
class Participation:
    """Which clients take part in a round."""

    clients: int | None = setting(None, "clients chosen per round; all by default", least=1)
    train: Literal["all", "selected"] = setting("selected", "which clients train: all, or only the chosen ones")
    dropout: float = setting(0.0, "probability that a chosen client drops out of the round", least=0, below=1)
    sampling: Literal["fixed", "poisson"] = setting(
        "fixed", "exactly this many clients, or each independently with equal probability, this many on average"
    )
    quorum: int = setting(0, "accepted uploads a round needs", least=0)
    below_quorum: Literal["repeat", "stop"] = setting(
        "repeat", "a round with too few uploads: repeat it with other draws, or stop the run"
    )
    attempts: int = setting(10, "how often a round is tried before the run stops", least=1, most=10**6)

    def __post_init__(self) -> None:
        check(self)

    def draws(self, total: int) -> bool:
        """Whether participation is random: a sample of ``total`` clients is chosen, or clients may drop out."""
        return self.dropout > 0 or (self.clients is not None and self.clients < total)

    def draw(self, seed: int, number: int, total: int, attempt: int = 0) -> tuple[Tensor, Tensor]:
        """Return which of ``total`` clients upload and which train in a round, ids ascending; lost ones do neither."""
        wanted, again = total if self.clients is None else self.clients, (attempt,) if attempt else ()
        if self.sampling == "poisson":
            everybody = torch.arange(total)
            chosen = everybody[uniform(key(seed, Stream.SELECT, number, everybody, *again)) < wanted / total]
        elif wanted == total:
            chosen = torch.arange(total)
        else:
            chosen = choose(seed, Stream.SELECT, number, total, wanted, attempt)
        trained = torch.arange(total) if self.train == "all" else chosen
        if not self.dropout:
            return chosen, trained
        lost = chosen[uniform(key(seed, Stream.DROP, number, chosen, *again)) < self.dropout]
        return chosen[~torch.isin(chosen, lost)], trained[~torch.isin(trained, lost)]
