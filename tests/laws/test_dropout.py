"""Clients lost at random, up to half of them per round: the server goes on with the plain mean of those left."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest
import torch
from torch import Tensor

import small
from tdpfed.algorithms import Algorithm, Ditto, FedAvg, FedPer, PFedMe, TDPFed
from tdpfed.core.state import Turn
from tdpfed.engine.simulation import Simulation
from tdpfed.server.participation import Participation

CLIENTS, CHOSEN, ROUNDS, SEED = 6, 3, 200, 4
ALGORITHMS: dict[str, Algorithm] = {
    "fedavg": FedAvg(tau=1, batch_size=4),
    "pfedme": PFedMe(tau=1, batch_size=4, s=1),
    "ditto": Ditto(tau=1, batch_size=4),
    "fedper": FedPer(tau=1, batch_size=4),
    "tdpfed": TDPFed(tau=1, batch_size=4, s=1, s_prime=1, eta=0.01, lam=4.0, compression=1.5),
}


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Turn a hang into an error."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def uploads_of_all(simulation: Simulation) -> dict[str, Tensor]:
    """What each client would send in the next round if none were lost, ``(K, n)``."""
    turn = Turn(SEED, simulation.round + 1, torch.arange(CLIENTS))
    return simulation.runner.run(simulation.server, simulation.private, turn).upload


def plain_mean(rows: Tensor, samples: list[int], clients: list[int]) -> Tensor:
    total = torch.zeros(rows.shape[-1], dtype=torch.float64)
    for client in clients:
        total += samples[client] * rows[client]
    return total / sum(samples[client] for client in clients)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rounds_aggregate_is_the_mean_of_the_survivors(name: str, dropout: float) -> None:
    """Survivors are those whose own model has changed; a round that has none changes nothing at all."""
    lossy = Participation(CHOSEN, dropout=dropout)
    simulation = Simulation(small.mlp(), small.federation(CLIENTS), ALGORITHMS[name], seed=SEED, participation=lossy)
    samples = simulation.federation.train_size.tolist()
    assert len(set(samples)) == CLIENTS
    left: Counter[int] = Counter()
    with no_longer_than(120):
        for number in range(1, ROUNDS + 1):
            uploads, own = uploads_of_all(simulation), simulation.private["theta"].clone()
            before, sent = dict(simulation.server), simulation.ledger.uploads
            simulation.step()
            survivors = (simulation.private["theta"] != own).any(-1).nonzero().flatten().tolist()
            left[len(survivors)] += 1
            assert simulation.round == number
            assert simulation.ledger.uploads - sent == len(survivors)
            for entry, value in simulation.server.items():
                if survivors:
                    mean = plain_mean(uploads[entry], samples, survivors)
                    torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)
                    assert not torch.equal(value, before[entry])
                else:
                    assert torch.equal(value, before[entry])
    kept, drawn = sum(count * rounds for count, rounds in left.items()), CHOSEN * ROUNDS
    assert abs(kept - drawn * (1 - dropout)) <= 4 * (drawn * dropout * (1 - dropout)) ** 0.5
    assert max(left) == CHOSEN
    assert left[0] or dropout < 0.2, "no round lost everybody"
