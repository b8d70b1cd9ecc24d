"""The norm bound: what is averaged stays finite and no upload moves it by much more than the others do."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small
from tdpfed import FedAvg, FedAvgSAR, PFedMe, TDPFed
from tdpfed.algorithms import Algorithm, Scaffold
from tdpfed.algorithms.hypcluster import HypCluster
from tdpfed.algorithms.mocha import Mocha
from tdpfed.core.layout import Layout
from tdpfed.core.state import State, Turn
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.server.averages import averaged_values, robust_averages
from tdpfed.server.bound import all_allowed, contributions, longest_allowed
from tdpfed.server.gate import refusals
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import clipped_sum
from tdpfed.server.robust import Rule, clipped, krum, median, multi_krum, norm_of, trimmed_mean, weighted_mean
from tdpfed.server.round import ServerRound, initial_state
from tdpfed.wire import Wire

pytestmark = pytest.mark.hostile

QUICK: dict[str, Any] = {"tau": 2, "batch_size": 4}
METHODS: dict[str, Algorithm] = {
    "fedavg": FedAvg(**QUICK),
    "fedavg_sar": FedAvgSAR(**QUICK),
    "pfedme": PFedMe(**QUICK, beta=2.0),
    "scaffold": Scaffold(**QUICK),
    "hypcluster": HypCluster(**QUICK),
    "tdpfed": TDPFed(**QUICK, s_prime=2),
    "tdpfed act": TDPFed(**QUICK, s_prime=2, aggregation="act"),
}
LAYOUT = Layout.of(small.mlp())
TURN = Turn(0, 4, torch.arange(10))
SEEDS = st.integers(0, 2**31)
WILD = st.floats(allow_nan=False, allow_infinity=False, width=32)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(algorithm: Algorithm, rule: Rule | None = None) -> tuple[ServerRound, State, State]:
    """Return a server's half of a round, its state, and ten honest uploads."""
    bound = algorithm.bind(LAYOUT, 10)
    server, _ = initial_state(bound, drawn(0, LAYOUT.size), 5)
    sent = bound.unchanged(bound.broadcast(server, TURN))
    uploads = {
        name: value.expand(10, *value.shape[1:]) + 0.01 * drawn(1, 10, value.shape[-1]) for name, value in sent.items()
    }
    return ServerRound(bound, 5, Participation(), rule or Rule()), server, uploads


@pytest.mark.parametrize("scale", [1e3, 1e10, 1e25, 1e38])
@pytest.mark.parametrize("name", METHODS)
def test_one_huge_upload_is_refused_under_every_method_and_the_rest_counts_as_without_it(
    name: str, scale: float
) -> None:
    half, server, uploads = made(METHODS[name])
    clean = {entry: value.clone() for entry, value in uploads.items()}
    for entry, value in uploads.items():
        value[4] = (scale * drawn(9, value.shape[-1])).clamp(-3e38, 3e38) if entry != "choice" else value[4]
    passed, turn, refused = half.admitted(uploads, server, TURN)
    assert [one.client for one in refused] == [4]
    assert refused[0].rule in ("norm", "nan")
    after = half.aggregate(server, passed, torch.ones(9), turn)
    others = torch.arange(10) != 4
    assert turn.clients.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    without = half.aggregate(server, {n: v[others] for n, v in clean.items()}, torch.ones(9), turn)
    assert all(torch.equal(value, without[n]) for n, value in after.items())


@pytest.mark.parametrize("name", METHODS)
def test_honest_uploads_pass_and_are_not_touched(name: str) -> None:
    half, server, uploads = made(METHODS[name])
    passed, turn, refused = half.admitted(uploads, server, TURN)
    assert passed is uploads
    assert turn is TURN
    assert refused == []


def test_finite_factors_that_compose_no_finite_tensor_are_refused_also_without_the_bound() -> None:
    half, server, uploads = made(METHODS["tdpfed act"], Rule(bound="off"))
    uploads["factors"][2] = 1e25
    assert bool(uploads["factors"].isfinite().all())
    assert not bool(half.algorithm.plan.compose(uploads["factors"]).isfinite().all())  # type: ignore[union-attr]
    _, _, (refusal,) = half.admitted(uploads, server, TURN)
    assert (refusal.client, refusal.rule, refusal.tensor) == (2, "nan", "factors")
    plain, server, uploads = made(METHODS["tdpfed"], Rule(bound="off"))
    uploads["factors"][2] = 1e25
    assert plain.admitted(uploads, server, TURN)[2] == []  # asked for: it is finite where factors are averaged


@given(seed=SEEDS, bad=st.lists(st.floats(0, 1e30), min_size=4, max_size=4), bound=st.floats(1, 100))
def test_a_minority_moves_the_limit_only_among_honest_norms(seed: int, bad: list[float], bound: float) -> None:
    honest = drawn(seed, 5).abs().double() + 0.5
    center = torch.zeros(3)
    limit = longest_allowed([*honest.tolist(), *bad], center, bound)
    assert bound * float(honest.min()) * (1 - 1e-12) <= limit <= bound * float(honest.max()) * (1 + 1e-12)


@given(
    norms=st.lists(st.floats(0, 1e6) | st.just(math.inf) | st.just(math.nan), max_size=8),
    center=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=3),
    bound=st.floats(1, 100) | st.just("off"),
)
def test_what_is_allowed_at_once_is_within_the_limit(norms: list[float], center: list[float], bound: Any) -> None:
    if all_allowed(norms, bound):
        assert all(norm <= longest_allowed(norms, torch.tensor(center), bound) for norm in norms)


def test_what_is_allowed_at_once() -> None:
    assert all_allowed([1.0, 2.0, 10.0], 5.0)
    assert not all_allowed([1.0, 2.0, 10.1], 5.0)
    assert not all_allowed([1.0, 2.0, math.nan], "off")
    assert all_allowed([1.0, 2.0, 1e30], "off")
    assert all_allowed([], 5.0)


def test_the_limit_by_hand() -> None:
    center, norms = torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    assert longest_allowed(norms.tolist(), center, 10.0) == 20
    assert longest_allowed((1e-3 * norms).tolist(), center, 10.0) == 0.5  # a tenth of the model is never refused
    assert longest_allowed(norms[:2].tolist(), center, 10.0) == 5e4  # two cannot tell who is wrong
    assert longest_allowed((0 * norms).tolist(), center, 10.0) == 5e4
    assert longest_allowed((1e9 * norms).tolist(), center, 10.0) == 5e4
    assert longest_allowed(norms.tolist(), center, "off") == float("inf")
    assert longest_allowed([1.0, 2.0, 3.0, torch.inf, torch.nan], 0 * center, 10.0) == 20


def test_contributions_outside_of_the_range_of_float32_are_measured_too() -> None:
    values = torch.tensor([[3e30, 4e30], [3e-30, 4e-30], [0.0, 0.0]])
    assert contributions(values, torch.zeros(2), None) == pytest.approx([5e30, 5e-30, 0.0], rel=1e-6)
    values = torch.tensor([[3.0, 4.0, torch.nan], [torch.inf, 1.0, 0.0], [6.0, 8.0, torch.inf]])
    sent = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    *known, last = contributions(values, torch.zeros(3), sent)
    assert known == [5, 1]
    assert not math.isfinite(last)
    assert contributions(torch.ones(3, 4).double(), torch.zeros(4).double(), None) == [2, 2, 2]


def test_contributions_count_what_was_sent() -> None:
    values, sent = torch.tensor([[3.0, 4.0, 1e30], [0.0, 1.0, 2.0]]), torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    assert contributions(values, torch.zeros(3), sent) == [5, pytest.approx(5**0.5)]
    assert contributions(values[:0], torch.zeros(3), None) == []


@given(rows=st.lists(st.lists(WILD, min_size=3, max_size=3), min_size=1, max_size=4), scale=st.sampled_from([1, 1e200]))
def test_norms_do_not_overflow(rows: list[list[float]], scale: float) -> None:
    values = scale * torch.tensor(rows).double()
    norms = norm_of(values)
    for row, norm in zip((values / 2.0**700).tolist(), (norms / 2.0**700).tolist(), strict=True):
        assert norm == pytest.approx(sum(v * v for v in row) ** 0.5, rel=1e-9, abs=1e-160)


@given(rows=st.lists(st.lists(WILD, min_size=3, max_size=3), min_size=3, max_size=6), bound=st.floats(1e-3, 1e3))
def test_clipping_finite_uploads_gives_finite_averages(rows: list[list[float]], bound: float) -> None:
    center, uploads = torch.tensor([-3e38, 0.0, 1.0]), torch.tensor(rows)
    weights = torch.ones(len(rows)).double()
    for limit in (bound, None):
        for inner in (weighted_mean, median):
            assert bool(clipped(center, limit, inner)(uploads, weights).isfinite().all())
    total = clipped_sum(torch.cat([uploads, torch.full((1, 3), torch.inf)]), torch.ones(len(rows) + 1), center, bound)
    assert bool(total.isfinite().all())
    torch.testing.assert_close(total, clipped_sum(uploads, weights, center, bound))
    assert float(total.norm()) <= len(rows) * bound * (1 + 1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_what_the_gate_measures_is_what_is_averaged(name: str) -> None:
    half, server, uploads = made(METHODS[name])
    seen: dict[str, Tensor] = {}
    averages = robust_averages(uploads, torch.ones(10).double(), half.algorithm.center(server), Rule())
    inner = averages._average

    def spied(entry: str) -> Any:
        def average(values: Tensor, weights: Tensor) -> Tensor:
            seen[entry] = values
            return inner(entry)(values, weights)

        return average

    averages._average = spied
    half.algorithm.aggregate(server, uploads, averages, TURN)
    measured = averaged_values(half.algorithm, server, uploads, TURN)
    assert measured.keys() == seen.keys()
    assert all(torch.equal(measured[entry].values, values) for entry, values in seen.items())


def test_privacy_compares_no_client_with_others() -> None:
    half, server, uploads = made(METHODS["fedavg"])
    uploads["w"][3] *= 1e9
    assert [one.client for one in refusals(half.algorithm, half.rule, uploads, server, TURN)] == [3]
    assert refusals(half.algorithm, half.rule, uploads, server, TURN, private=True) == []


def test_a_method_that_averages_nothing_refuses_what_no_training_reaches() -> None:
    linear = Layout(("fc.weight", "fc.bias"), ((3, 36), (3,)))
    bound = Mocha().bind(linear, 10)
    server, _ = initial_state(bound, drawn(0, linear.size), 5)
    half = ServerRound(bound, 5, Participation(), Rule())
    uploads = {"image": drawn(1, 10, linear.size)}
    assert half.admitted(uploads, server, TURN)[2] == []
    uploads["image"][6] = 1e25
    assert [(one.client, one.rule) for one in half.admitted(uploads, server, TURN)[2]] == [(6, "norm")]
    off = ServerRound(bound, 5, Participation(), Rule(bound="off"))
    assert off.admitted(uploads, server, TURN)[2] == []


def test_which_rules_resist_lies_about_samples() -> None:
    uploads, honest = drawn(0, 9, 6).double(), torch.ones(9).double()
    lying = honest.index_fill(0, torch.tensor([4]), 1e6)
    lied_to = {
        name
        for name, rule in {
            "mean": weighted_mean, "median": median, "trimmed-mean": trimmed_mean(0.2), "krum": krum(2),
            "multi-krum": multi_krum(2), "clip": clipped(torch.zeros(6).double(), None, weighted_mean),
        }.items()
        if not torch.equal(rule(uploads, honest), rule(uploads, lying))
    }  # fmt: skip
    assert lied_to == {"mean", "trimmed-mean", "multi-krum", "clip"}


# -- in runs

FORMS = {"dense": Wire(), "factors": Wire(update="factors", terms=2, codec="int4"), "top-k": Wire(update="top-k")}


CASES = [
    *((name, form) for name in ("fedavg", "scaffold") for form in FORMS),
    ("tdpfed", "dense"),
    ("tdpfed act", "dense"),
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_a_run_with_huge_uploads_equals_one_in_which_these_clients_never_count(name: str, form: str) -> None:
    simulation = Simulation(
        small.mlp(), small.federation(10), METHODS[name], attack=Attack("huge"), wire=FORMS[form], rule=Rule()
    )
    for _ in range(3):
        simulation.step()
        assert {one.client for one in simulation.refused} == set((~simulation.honest).nonzero().flatten().tolist())
    assert all(bool(value.isfinite().all()) for value in small.states(simulation).values())


def test_a_lie_about_samples_takes_the_mean_over_and_the_cap_takes_it_back() -> None:
    def shares(**options: Any) -> Tensor:
        simulation = Simulation(small.mlp(), small.federation(10), FedAvg(**QUICK), **options)
        sizes = simulation.uplink.declared(simulation.federation.train_size)
        weights = simulation.server_round.weights(sizes)
        return (weights / weights.sum())[~simulation.honest].sum()

    bad = Attack("samples")
    honest = shares(attack=replace(bad, strength=1.0))
    assert float(shares(attack=bad)) > 0.99
    assert float(shares(attack=bad, rule=Rule(weight_cap=3.0))) < 0.5
    assert torch.equal(shares(attack=replace(bad, strength=1.0), rule=Rule(weight_cap=3.0)), honest)
    assert float(shares(attack=bad, rule=Rule(weight_cap=1.0))) <= 0.26


def test_a_run_in_which_most_uploads_are_refused_again_and_again_stops() -> None:
    def begin(patience: int) -> Simulation:
        rule = Rule(gauge=1e-9, patience=patience)
        return Simulation(small.mlp(), small.federation(4), TDPFed(**QUICK), rule=rule)

    simulation = begin(3)
    for _ in range(2):
        simulation.step()
    before = {name: value.clone() for name, value in small.states(simulation).items()}
    with pytest.raises(QuorumError, match=r"round 3: 4 of 4 uploads refused.*3 rounds in a row.*robust\.patience"):
        simulation.step()
    assert simulation.round == 2
    assert all(torch.equal(value, before[name]) for name, value in small.states(simulation).items())
    for _ in range(8):
        (patient := begin(0)).step()
    assert patient.ledger.mostly_refused == 1


def test_refusals_of_a_few_never_stop_a_run() -> None:
    rule, bad = Rule(gauge=1.0, patience=1), Attack("zeros", 0.4)
    simulation = Simulation(small.mlp(), small.federation(10), TDPFed(**QUICK, s_prime=2), rule=rule, attack=bad)
    for _ in range(4):
        simulation.step()
    assert simulation.ledger.mostly_refused == 0
    assert simulation.ledger.rejected == 16


def test_a_server_state_that_is_not_finite_ends_the_run_and_is_not_kept() -> None:
    half, server, uploads = made(PFedMe(**QUICK, beta=2.0), Rule(bound="off"))
    uploads["w"][:] = 3e38
    with pytest.raises(TDPFedError, match=r"round 4: loss or parameters are not finite, the run diverges"):
        half.aggregate(server, uploads, torch.ones(10), TURN)
