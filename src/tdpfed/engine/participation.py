"""Who takes part in a round: the chosen, those who train, and those who are lost on the way."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tdpfed.engine.sampling import Stream, choose, key, uniform
from tdpfed.errors import TDPFedError, unknown


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round."""

    clients: int | None = None  # S: clients chosen per round; None: all
    train: Literal["all", "selected"] = "selected"  # whether the others train too (Algorithm 1), or only the chosen
    dropout: float = 0.0  # chance that a chosen client is lost for the round

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise TDPFedError(f"participation.clients: {self.clients} given, must be at least 1")
        if self.train not in ("all", "selected"):
            raise unknown("participation.train", self.train, ("all", "selected"))
        if not 0 <= self.dropout < 1:
            raise TDPFedError(f"participation.dropout: {self.dropout} given, must be at least 0 and below 1")

    def draw(self, seed: int, number: int, total: int) -> tuple[Tensor, Tensor]:
        """Return who of ``total`` reports and who trains in a round, ids ascending; the lost do neither."""
        everybody = torch.arange(total)
        few = self.clients is not None and self.clients < total
        chosen = choose(seed, Stream.SELECT, number, total, self.clients or total) if few else everybody
        kept = uniform(key(seed, Stream.DROP, number, everybody)) >= self.dropout
        trained = everybody if self.train == "all" else chosen
        lost = ~kept & torch.isin(everybody, chosen)
        return chosen[~lost[chosen]], trained[~lost[trained]]
