"""Differential privacy: what one client can do to a round, the noise that hides it, and what the accountant says."""

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, cast

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.algorithms import Algorithm, FedAvg, PerFedAvg, PFedMe, TDPFed
from tdpfed.core.draws import Stream, key, uniform
from tdpfed.core.layout import Layout
from tdpfed.core.state import State, Turn
from tdpfed.errors import TDPFedError
from tdpfed.server.averages import HiddenUploads, private_averages
from tdpfed.server.privacy import Accountant, Privacy, clipped_sum, private_average
from tdpfed.server.robust import weighted_mean

SEEDS = st.integers(0, 2**31)
WILD = st.floats(allow_nan=False, allow_infinity=False, width=32)
QUIET = Privacy(clip=1.0, noise=1e-3)
NOBODY = torch.zeros(0).double()


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def noise_of(privacy: Privacy, size: int, seed: int, round_: int) -> Tensor:
    """The noise on the sum: what a round gives in which nobody takes part."""
    return private_average(privacy, torch.zeros(size).double(), 1.0, seed, round_)(
        torch.zeros(0, size).double(), NOBODY
    )


class TestSum:
    def test_it_equals_a_plain_loop(self) -> None:
        for seed in range(5):
            uploads, center = 3 * drawn(seed, 40, 6), drawn(seed + 9, 6)
            expected = [0.0] * 6
            for row in uploads.tolist():
                update = [x - c for x, c in zip(row, center.tolist(), strict=True)]
                scale = min(1.0, 6.0 / math.hypot(*update))
                expected = [total + scale * u for total, u in zip(expected, update, strict=True)]
            result = clipped_sum(uploads, torch.ones(40), center, 6.0)
            assert result.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)

    @given(seed=SEEDS, clip=st.floats(1e-3, 1e3), row=st.lists(WILD, min_size=6, max_size=6), at=st.integers(0, 40))
    def test_no_client_moves_it_by_more_than_the_clip(self, seed: int, clip: float, row: list[float], at: int) -> None:
        uploads, center = drawn(seed, 40, 6).float(), drawn(seed + 1, 6).float()
        more = torch.cat([uploads[:at], torch.tensor([row]), uploads[at:]])
        moved = clipped_sum(more, torch.ones(41), center, clip) - clipped_sum(uploads, torch.ones(40), center, clip)
        assert moved.norm().item() <= clip * (1 + 1e-12) + 1e-12 * 40 * clip

    @given(seed=SEEDS, row=st.lists(WILD, min_size=6, max_size=6), part=st.lists(st.booleans(), min_size=6, max_size=6))
    def test_nor_if_it_sends_only_a_part(self, seed: int, row: list[float], part: list[bool]) -> None:
        uploads, center = drawn(seed, 5, 6).float(), drawn(seed + 1, 6).float()
        sent = torch.cat([drawn(seed + 2, 5, 6) > 0, torch.tensor([part])])
        more = torch.cat([uploads, torch.tensor([row])])
        moved = clipped_sum(more, 7.0 * sent, center, 2.0) - clipped_sum(uploads, 7.0 * sent[:5], center, 2.0)
        assert moved.norm().item() <= 2 * (1 + 1e-9)
        assert bool((moved[~sent[5]] == 0).all())

    @given(seed=SEEDS)
    def test_what_a_client_counts_elsewhere_does_not_matter(self, seed: int) -> None:
        uploads, center, weights = drawn(seed, 8, 6), drawn(seed + 1, 6), 1e6 * drawn(seed + 2, 8).abs() + 1e-6
        assert torch.equal(clipped_sum(uploads, weights, center, 1.0), clipped_sum(uploads, weights > 0, center, 1.0))
        weights[3] = 0
        rest = torch.arange(8) != 3
        without = clipped_sum(uploads[rest], weights[rest], center, 1.0)
        torch.testing.assert_close(clipped_sum(uploads, weights, center, 1.0), without, rtol=1e-12, atol=1e-12)

    def test_a_long_update_is_cut_to_the_clip_and_one_of_zero_stays(self) -> None:
        center = torch.full((4,), -3e38)
        far = torch.full((1, 4), 3e38)  # their difference is no float32, its square far from one
        torch.testing.assert_close(clipped_sum(far, torch.ones(1), center, 2.0), torch.ones(4).double())
        assert torch.equal(clipped_sum(center[None], torch.ones(1), center, 2.0), torch.zeros(4).double())
        huge = torch.full((1, 4), 1e300, dtype=torch.float64)
        assert clipped_sum(huge, torch.ones(1), torch.zeros(4), 2.0).norm().item() <= 2 + 1e-9

    def test_it_needs_a_center_of_the_same_size(self) -> None:
        with pytest.raises(TDPFedError, match=r"clip: uploads of \(6,\) given, must be \(1,\)"):
            clipped_sum(drawn(0, 3, 6), torch.ones(3), torch.zeros(1), 1.0)


class TestAverage:
    def test_it_is_the_mean_of_short_updates_and_the_noise(self) -> None:
        uploads, center = 0.01 * drawn(0, 9, 6), drawn(1, 6) * 0.01
        result = private_average(QUIET, center, 9, 4, 2)(uploads, torch.ones(9))
        expected = weighted_mean(uploads, torch.ones(9).double()) + noise_of(QUIET, 6, 4, 2) / 9
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)

    @given(seed=SEEDS, lost=st.integers(0, 10))
    def test_whoever_is_missing_changes_neither_noise_nor_denominator(self, seed: int, lost: int) -> None:
        uploads, center, privacy = drawn(seed, 10, 6), drawn(seed + 1, 6), Privacy(clip=0.5, noise=2.0)
        average = private_average(privacy, center, 10, seed, 3)
        came = average(uploads[lost:], torch.ones(10 - lost))
        total = clipped_sum(uploads[lost:], torch.ones(10 - lost), center, 0.5)
        torch.testing.assert_close(came, center + (total + noise_of(privacy, 6, seed, 3)) / 10, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("present", [10, 7, 0])
    def test_the_noise_is_as_strong_as_it_says(self, present: int) -> None:
        privacy, size = Privacy(clip=0.3, noise=1.7), 400_000
        center, updates = drawn(1, size), 1e-3 * drawn(2, 10, size)
        result = private_average(privacy, center, 10, 5, 1)(center + updates[:present], torch.ones(present))
        rest = result - center - clipped_sum(center + updates[:present], torch.ones(present), center, 0.3) / 10
        assert rest.std().item() == pytest.approx(1.7 * 0.3 / 10, rel=0.005)
        assert abs(rest.mean().item()) < 5 * 0.051 / math.sqrt(size)
        for deviations in (0.5, 1, 2, 3):
            share = (rest.abs() < deviations * 0.051).double().mean().item()
            assert share == pytest.approx(math.erf(deviations / math.sqrt(2)), abs=0.004)

    def test_seed_and_round_name_the_noise(self) -> None:
        places = [(0, 1), (0, 2), (1, 1), (2**62, 1), (0, 799)]
        noises = [noise_of(Privacy(1.0, 1.0), 40_000, *place) for place in places]
        for place, noise in zip(places, noises, strict=True):
            assert torch.equal(noise, noise_of(Privacy(1.0, 1.0), 40_000, *place))
        for one, other in itertools.combinations(noises, 2):
            assert abs(float((one * other).mean())) < 5 / math.sqrt(40_000)

    def test_precisions_differ_by_rounding_only(self) -> None:
        uploads, center = drawn(0, 9, 50), drawn(1, 50)
        double = private_average(Privacy(1.0, 1.0), center, 4.5, 0, 1)(uploads, torch.ones(9))
        single = private_average(Privacy(1.0, 1.0), center.float(), 4.5, 0, 1)(uploads.float(), torch.ones(9))
        assert (double.dtype, single.dtype) == (torch.float64, torch.float32)
        torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=1e-6)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_devices_differ_by_rounding_only(self) -> None:
        uploads, center, weights = drawn(0, 9, 50), drawn(1, 50), torch.ones(9)
        here = private_average(Privacy(1.0, 1.0), center, 4.5, 0, 1)(uploads, weights)
        there = private_average(Privacy(1.0, 1.0), center.cuda(), 4.5, 0, 1)(uploads.cuda(), weights.cuda())
        torch.testing.assert_close(there.cpu(), here, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("share", [1.0, 0.5])
    def test_over_rounds_it_is_the_mean_of_all_clients(self, share: float) -> None:
        clients, rate, rounds = 12, 0.4, 3000
        uploads, center = 0.2 * drawn(0, clients, 4), 0.1 * drawn(1, 4)
        everybody, results = torch.arange(clients), []
        for number in range(1, rounds + 1):
            here = uniform(key(3, Stream.SELECT, number, everybody)) < rate
            sent = uniform(key(3, Stream.SUBSET, number, everybody[:, None], torch.arange(4))) < share
            weights = sent[here].double() if share < 1 else torch.ones(int(here.sum()))
            results.append(private_average(QUIET, center, rate * clients * share, 3, number)(uploads[here], weights))
        seen = torch.stack(results)
        error = (seen.mean(0) - uploads.mean(0)).abs() / (seen.std(0) / math.sqrt(rounds))
        assert error.max().item() < 4

    @pytest.mark.parametrize("cohort", [0, -1.0, math.inf, math.nan])
    def test_a_cohort_must_be_a_number_of_clients(self, cohort: float) -> None:
        with pytest.raises(TDPFedError, match=r"cohort: .* given, must be finite and above 0"):
            private_average(QUIET, torch.zeros(3), cohort, 0, 1)


@pytest.mark.parametrize(
    "algorithm",
    [FedAvg(), PerFedAvg(), PFedMe(beta=0.7), TDPFed(), TDPFed(aggregation="act", beta=0.5)],
    ids=lambda algorithm: f"{algorithm.name} {getattr(algorithm, 'aggregation', '')}",
)
def test_clients_that_changed_nothing_are_as_good_as_nobody(algorithm: Algorithm) -> None:
    layout = Layout(("conv", "fc", "bias"), ((4, 2, 3, 3), (6, 16), (6,)))
    bound = algorithm.bind(layout, 5)
    server = bound.init(drawn(0, layout.size), torch.Generator().manual_seed(0))
    states = []
    for count in (0, 3):
        turn = Turn(0, 1, torch.arange(count))
        uploads, center = bound.unchanged(bound.broadcast(server, turn)), bound.center(server)
        average = private_averages(uploads, torch.ones(count), center, Privacy(1.0, 0.1), 5, 0, 1)
        states.append(bound.aggregate(server, cast(State, HiddenUploads()), average, turn))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-9)
        assert not torch.equal(value, server[name])


def accountant(rate: float, noise: float, delta: float = 1e-5) -> Accountant:
    return Accountant(Privacy(clip=1.0, noise=noise, delta=delta), rate)


def library(make: Callable[[], Any], rate: float, noise: float, rounds: int, delta: float) -> float:
    event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    return float(make().compose(event, rounds).get_epsilon(delta))


def gaussian(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian mechanism by its exact delta (Balle and Wang, 2018, theorem 8), bisected."""

    def below(x: float) -> float:
        return math.erfc(-x / math.sqrt(2)) / 2

    def exceeds(epsilon: float) -> bool:
        near, far = 1 / (2 * noise), epsilon * noise
        return below(near - far) - math.exp(epsilon) * below(-near - far) > delta

    low, high = 0.0, 700.0
    if not exceeds(0.0):
        return 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    return high


SETTINGS = [
    (rate, noise, (1, 10, 100, 800)[i % 4], (1e-5, 1e-3, 1e-8)[i % 3])
    for i, (rate, noise) in enumerate(itertools.product([0.002, 0.05, 0.3, 1.0], [0.5, 1.0, 2.5, 8.0, 40.0]))
]


class TestAccountant:
    @pytest.mark.parametrize(("rate", "noise", "rounds", "delta"), SETTINGS)
    def test_it_says_what_the_library_says(self, rate: float, noise: float, rounds: int, delta: float) -> None:
        ours = accountant(rate, noise, delta)
        theirs = library(lambda: PLDAccountant(value_discretization_interval=ours.interval), rate, noise, rounds, delta)
        assert ours.epsilon(rounds) == pytest.approx(theirs, rel=0, abs=1e-6)

    @pytest.mark.parametrize(
        ("rate", "noise", "rounds"), [(0.01, 1.0, 800), (0.1, 1.0, 100), (0.1, 5.0, 800), (0.5, 2.0, 30), (1.0, 4.0, 9)]
    )
    def test_a_finer_grid_says_nearly_the_same_and_no_more(self, rate: float, noise: float, rounds: int) -> None:
        ours = accountant(rate, noise)
        fine = library(
            lambda: PLDAccountant(value_discretization_interval=ours.interval / 5), rate, noise, rounds, 1e-5
        )
        assert fine * (1 - 1e-9) <= ours.epsilon(rounds) <= fine * (1 + 2e-4)

    @pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 20.0, 300.0])
    @pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
    def test_without_sampling_it_is_the_gaussian_mechanism(self, noise: float, delta: float) -> None:
        ours = accountant(1.0, noise, delta)
        for rounds in (1, 7, 60, 800):
            if rounds / noise**2 < 300:
                exact = gaussian(noise / math.sqrt(rounds), delta)
                assert exact <= ours.epsilon(rounds) <= exact * (1 + 1e-3) + 1e-5

    @pytest.mark.parametrize(("rate", "noise", "rounds"), [(0.01, 1.0, 500), (0.1, 2.0, 100), (1.0, 5.0, 10)])
    def test_it_is_tighter_than_renyi_accounting(self, rate: float, noise: float, rounds: int) -> None:
        renyi = library(RdpAccountant, rate, noise, rounds, 1e-5)
        assert 0.6 * renyi < accountant(rate, noise).epsilon(rounds) < renyi

    def test_more_rounds_less_noise_and_more_clients_cost_more(self) -> None:
        def rises(values: list[float]) -> bool:
            return all(one < other for one, other in itertools.pairwise(values))

        assert rises([accountant(0.1, 2.0).epsilon(0)] + [accountant(0.1, 2.0).epsilon(n) for n in range(1, 40)])
        assert rises([accountant(0.1, noise).epsilon(50) for noise in (20.0, 8.0, 3.0, 2.0, 1.5, 1.0, 0.7, 0.4)])
        assert rises([accountant(rate, 2.0).epsilon(50) for rate in (0.001, 0.003, 0.01, 0.05, 0.2, 0.6, 0.9, 1.0)])
        assert rises([accountant(0.1, 2.0, delta).epsilon(50) for delta in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)])

    def test_nothing_costs_nothing(self) -> None:
        assert accountant(0.1, 1.0).epsilon(0) == 0

    @pytest.mark.parametrize("rounds", [1, 2, 37, 100])
    def test_the_budget_is_spent_to_the_last_round(self, rounds: int) -> None:
        ours = accountant(0.2, 3.0)
        budget = ours.epsilon(rounds)
        assert ours.rounds_within(budget) == rounds
        assert ours.rounds_within(budget * (1 - 1e-9)) == rounds - 1
        assert ours.rounds_within(budget, most=rounds) == rounds
        assert ours.rounds_within(budget, most=rounds + 1) == rounds
        assert ours.rounds_within(10 * budget, most=rounds) == rounds

    def test_a_search_equals_a_scan(self) -> None:
        ours = accountant(0.05, 1.5)
        costs = [ours.epsilon(n) for n in range(1, 65)]
        for budget in (0.01, 0.2, 0.5, 0.8, 1.0):
            assert accountant(0.05, 1.5).rounds_within(budget, most=64) == sum(cost <= budget for cost in costs)

    def test_each_number_of_rounds_is_composed_once(self) -> None:
        ours = accountant(0.1, 2.0)
        composed: list[int] = []

        class Counting:
            def __init__(self, inner: Any) -> None:
                self.inner = inner

            def self_compose(self, rounds: int) -> Any:
                composed.append(rounds)
                return self.inner.self_compose(rounds)

        vars(ours)["_one_round"] = Counting(ours._one_round)
        for _ in range(3):
            ours.rounds_within(2.0, most=800)
            ours.epsilon(5)
        assert len(composed) == len(set(composed)) <= 11

    @pytest.mark.parametrize("noise", [1e-3, 1e6])
    @pytest.mark.parametrize("rate", [1e-4, 1.0])
    def test_the_ends_of_the_range_can_be_computed(self, noise: float, rate: float) -> None:
        epsilon = accountant(rate, noise).epsilon(30)
        assert math.isfinite(epsilon)
        assert (epsilon > 1e5) == (noise < 1)

    @pytest.mark.parametrize("rate", [0, -0.1, 1.1, math.nan, "half"])
    def test_a_rate_out_of_range_is_told(self, rate: Any) -> None:
        with pytest.raises(TDPFedError, match=rf"sampling rate: {rate!r} given, must be above 0 and at most 1"):
            accountant(rate, 1.0)

    @pytest.mark.parametrize("rounds", [-1, 2.5, "two"])
    def test_rounds_must_be_counted(self, rounds: Any) -> None:
        with pytest.raises(TDPFedError, match=rf"rounds: {rounds!r} given, must be a whole number of at least 0"):
            accountant(0.1, 1.0).epsilon(rounds)

    @pytest.mark.parametrize("budget", [0, -1.0, math.inf])
    def test_a_budget_must_be_one(self, budget: float) -> None:
        with pytest.raises(TDPFedError, match=r"budget: .* given, must be finite and above 0"):
            accountant(0.1, 1.0).rounds_within(budget)

    def test_what_is_not_installed_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)
        with pytest.raises(TDPFedError, match=r"dp-accounting, .*pip install 'tdpfed\[privacy\]'"):
            accountant(0.1, 1.0)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("clip", 0.0, "finite number above 0"),
        ("clip", -1.0, "finite number above 0"),
        ("clip", math.inf, "finite number above 0"),
        ("clip", "median", "finite number above 0"),
        ("noise", 0.0, "at least 0.001 and at most 1,000,000"),
        ("noise", 9e-4, "at least 0.001"),
        ("noise", 2e6, "at most 1,000,000"),
        ("noise", math.nan, "at least 0.001"),
        ("delta", 0.0, "at least 1e-10 and below 1"),
        ("delta", 1e-11, "at least 1e-10"),
        ("delta", 1.0, "below 1"),
        ("epsilon", 0.0, "finite number above 0"),
        ("epsilon", math.inf, "finite number above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(TDPFedError, match=allowed) as caught:
        Privacy(**{"clip": 1.0, "noise": 1.0, field: value})
    assert str(caught.value).startswith(f"{field}: {value!r} given, must be ")
