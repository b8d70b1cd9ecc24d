"""Who takes part in a round, where the chance is in proportion to a client's samples (Lemma 3 of the paper)."""

from typing import Any

import pytest
import torch

import small
from tdpfed.algorithms import FedAvg, Local, TDPFed
from tdpfed.core import draws
from tdpfed.core.draws import choose_by_size
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import CombinedError, TDPFedError
from tdpfed.server.participation import Participation

BY_SAMPLES = Participation(2, sampling="samples")
UNIFORM: dict[str, Any] = {**small.COMMON, "weights": "uniform"}


@pytest.mark.parametrize("sizes", [(1, 2, 3), (5, 1, 4, 2, 7, 1), (3, 3, 3, 3)])
def test_over_all_starts_a_client_is_chosen_in_proportion_to_its_size(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, in every random order of the clients; so the average without weights is right on average."""
    total, given = sum(sizes), torch.tensor(sizes)
    values = torch.randn(len(sizes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for count in range(1, total // max(sizes) + 1):
        orders = set()
        for round_ in range(5):
            times, means = torch.zeros(len(sizes), dtype=torch.int64), []
            for start in range(total):
                fixed = torch.tensor((start + 0.5) / total, dtype=torch.float64)
                monkeypatch.setattr(draws, "uniform", lambda _, fixed=fixed: fixed)
                found = choose_by_size(0, round_, given, count)
                assert found.tolist() == sorted(set(found.tolist()))
                assert len(found) == count
                times[found] += 1
                means.append(values[found].mean())
            assert torch.equal(times, count * given)
            torch.testing.assert_close(torch.stack(means).mean(), (given * values).sum() / total)
            orders.add(tuple(means))
        assert len(orders) > 1 or count == len(sizes)


def test_draws_follow_seed_round_and_attempt_and_the_frequencies_are_right() -> None:
    sizes, rounds = torch.tensor([10, 20, 30, 40, 50, 60]), 3000
    drawn = [choose_by_size(3, number, sizes, 3) for number in range(rounds)]
    assert all(torch.equal(one, choose_by_size(3, number, sizes, 3)) for number, one in enumerate(drawn[:50]))
    for other in ({"seed": 4}, {"attempt": 1}):
        options = {"seed": 3, "attempt": 0} | other
        again = [choose_by_size(options["seed"], n, sizes, 3, options["attempt"]) for n in range(50)]
        assert sum(torch.equal(a, b) for a, b in zip(again, drawn, strict=False)) < 25
    share = torch.zeros(6).index_add(0, torch.cat(drawn), torch.ones(3 * rounds)) / rounds
    expected = 3 * sizes / sizes.sum()
    assert bool(((share - expected).abs() <= 5 * (expected * (1 - expected) / rounds).sqrt()).all())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_a_round_averages_the_chosen_without_weights(runner: Any, dropout: float) -> None:
    asked = Participation(2, dropout=dropout, sampling="samples")
    simulation = Simulation(small.mlp(), small.federation(), FedAvg(**UNIFORM), participation=asked, runner=runner)
    size = simulation.federation.train_size
    for number in range(1, 6):
        everybody, _ = Participation(2, sampling="samples").draw(0, number, 5, 0, size)
        assert everybody.tolist() == choose_by_size(0, number, size, 2).tolist()
        simulation.step()
        chosen = simulation.trained
        assert set(chosen.tolist()) <= set(everybody.tolist())
        if len(chosen):
            mean = simulation.private["theta"][chosen].mean(0)
            torch.testing.assert_close(simulation.server["w"], mean, rtol=1e-10, atol=1e-12)


def test_what_cannot_be_is_refused_with_the_reason() -> None:
    def start(clients: int | None, algorithm: Any) -> Simulation:
        asked = Participation(clients, sampling="samples")
        return Simulation(small.mlp(), small.federation(), algorithm, participation=asked)

    size = small.federation().train_size
    most = int(size.sum()) // int(size.max())
    assert 1 < most < 5
    start(most, TDPFed(**small.TDPFED, weights="uniform"))
    for clients in (most + 1, None):
        words = rf"^participation\.clients: {clients} given, must be at most {most} .* client 4, which has {size.max()}"
        with pytest.raises(TDPFedError, match=words):
            start(clients, FedAvg(**UNIFORM))
    with pytest.raises(
        TDPFedError, match=r"^algorithm\.weights: 'samples' given, must be 'uniform' with participation"
    ):
        start(2, FedAvg(**small.COMMON))
    with pytest.raises(
        CombinedError, match=r"participation\.clients: 5 given(.|\n)*algorithm\.weights: 'samples' given"
    ):
        start(5, FedAvg(**small.COMMON))
    with pytest.raises(TDPFedError, match=r"^sampling: 'sample' given"):
        Participation(2, sampling="sample")  # type: ignore[arg-type]
    start(2, Local(**UNIFORM))


def test_the_default_draws_are_what_they_were() -> None:
    """With and without samples at hand."""
    size = small.federation().train_size
    for sampling in ("fixed", "poisson"):
        asked = Participation(2, sampling=sampling)
        for number in range(1, 20):
            with_, without = asked.draw(0, number, 5, 0, size), asked.draw(0, number, 5)
            assert all(torch.equal(a, b) for a, b in zip(with_, without, strict=True))
