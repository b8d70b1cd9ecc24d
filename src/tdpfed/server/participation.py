"""Participation in a round: the clients that are chosen, those that train, and those that drop out."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tdpfed.core.draws import Stream, choose, choose_by_size, key, uniform
from tdpfed.core.setting import check, setting
from tdpfed.errors import TDPFedError, wrong


@dataclass(frozen=True)
class Participation:
    """Which clients take part in a round."""

    clients: int | None = setting(None, "clients chosen per round; all by default", least=1)
    train: Literal["all", "selected"] = setting("selected", "which clients train: all, or only the chosen ones")
    dropout: float = setting(0.0, "probability that a chosen client drops out of the round", least=0, below=1)
    sampling: Literal["fixed", "poisson", "samples"] = setting(
        "fixed", "exactly this many clients; or each independently with equal probability, this many on average; or "
        "exactly this many, each with a probability in proportion to its number of training samples",
    )  # fmt: skip
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

    def refusals(self, samples: Tensor, weights: str) -> list[TDPFedError]:
        """Return errors of a sampling by ``samples`` ``(K,)``, the clients' training samples; ``weights`` of averages.

        Lemma 3 of the paper: a probability in proportion to the samples, and an average without weights.
        """
        if self.sampling != "samples":
            return []
        errors, wanted = [], len(samples) if self.clients is None else self.clients
        largest, total = int(samples.max()), int(samples.sum())
        if wanted * largest > total:
            allowed = (
                f"at most {total // largest} with sampling 'samples': with more, client {int(samples.argmax())}, which "
                f"has {largest} of {total} training samples, would have to take part more than once"
            )
            errors.append(wrong("participation.clients", self.clients, allowed))
        if weights != "uniform":
            allowed = "'uniform' with participation.sampling 'samples': otherwise a client's samples count twice"
            errors.append(wrong("algorithm.weights", weights, allowed))
        return errors

    def draw(
        self, seed: int, number: int, total: int, attempt: int = 0, samples: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return which of ``total`` clients upload and which train in a round, ids ascending; lost ones do neither.

        ``samples`` ``(total,)`` are their numbers of training samples, which only sampling by them needs.
        """
        wanted, again = total if self.clients is None else self.clients, (attempt,) if attempt else ()
        if self.sampling == "poisson":
            everybody = torch.arange(total)
            chosen = everybody[uniform(key(seed, Stream.SELECT, number, everybody, *again)) < wanted / total]
        elif wanted == total:
            chosen = torch.arange(total)
        elif self.sampling == "samples":
            assert samples is not None
            chosen = choose_by_size(seed, number, samples.cpu(), wanted, attempt)
        else:
            chosen = choose(seed, Stream.SELECT, number, total, wanted, attempt)
        trained = torch.arange(total) if self.train == "all" else chosen
        if not self.dropout:
            return chosen, trained
        lost = chosen[uniform(key(seed, Stream.DROP, number, chosen, *again)) < self.dropout]
        return chosen[~torch.isin(chosen, lost)], trained[~torch.isin(trained, lost)]
