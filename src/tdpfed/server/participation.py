"""Who takes part in a round: the chosen, those who train, and those who are lost on the way."""

from dataclasses import dataclass
from typing import Literal, get_args, get_type_hints

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, choose, key, uniform
from tdpfed.errors import TDPFedError, unknown


@dataclass(frozen=True)
class Participation:
    """Who takes part in a round, and how many must."""

    clients: int | None = None  # S: clients chosen per round; None: all
    train: Literal["all", "selected"] = "selected"  # whether the others train too (Algorithm 1), or only the chosen
    dropout: float = 0.0  # chance that a chosen client is lost for the round
    sampling: Literal["fixed", "poisson"] = "fixed"  # exactly S, or each client by itself with chance S / K
    quorum: int = 0  # accepted uploads a round needs
    below_quorum: Literal["repeat", "stop"] = "repeat"  # what happens to a round with fewer
    attempts: int = 10  # how often a round is tried in all

    def __post_init__(self) -> None:
        if self.clients is not None and self.clients < 1:
            raise TDPFedError(f"participation.clients: {self.clients} given, must be at least 1")
        for field in ("sampling", "train", "below_quorum"):
            words = get_args(get_type_hints(Participation)[field])
            if getattr(self, field) not in words:
                raise unknown(f"participation.{field}", getattr(self, field), words)
        if not 0 <= self.dropout < 1:
            raise TDPFedError(f"participation.dropout: {self.dropout} given, must be at least 0 and below 1")
        for field, least in (("quorum", 0), ("attempts", 1)):
            if getattr(self, field) < least:
                raise TDPFedError(f"participation.{field}: {getattr(self, field)} given, must be at least {least}")

    def draws(self, total: int) -> bool:
        """Whether anything is left to chance: who is chosen of ``total``, or who is lost."""
        return self.dropout > 0 or (self.clients is not None and self.clients < total)

    def draw(self, seed: int, number: int, total: int, attempt: int = 0) -> tuple[Tensor, Tensor]:
        """Return who of ``total`` reports and who trains in a round, ids ascending; the lost do neither."""
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
