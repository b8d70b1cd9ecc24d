"""The gauge check: distances and norms relative to a reference that clients cannot move at will."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small
from tdpfed import TDPFed
from tdpfed.core.layout import Layout
from tdpfed.engine.attacks import Attack
from tdpfed.engine.simulation import Simulation
from tdpfed.server.gauge import (
    NORMS,
    SHRINKS,
    factor_distances,
    least_norm,
    moved_reference,
    reference_norms,
    with_median_norms,
    within_gauge,
)
from tdpfed.server.robust import Rule, trimmed_mean, weighted_mean

LAYOUT = Layout(("fc.A1", "fc.A2", "bias"), ((4, 2), (3, 2), (5,)))
SEEDS = st.integers(0, 2**31)
QUICK: dict[str, Any] = {"tau": 2, "batch_size": 4}


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def broadcast() -> Tensor:
    return drawn(0, 19) + torch.tensor([2.0] * 14 + [0.5] * 5)


def inside(uploads: Tensor, sent: Tensor, bound: float = 1.0, reference: Tensor | None = None) -> list[bool]:
    norms = reference_norms(sent, LAYOUT) if reference is None else reference
    mask: list[bool] = within_gauge(uploads, sent, norms, LAYOUT, bound)[0].tolist()
    return mask


def test_distances_by_hand() -> None:
    sent, uploads = broadcast(), drawn(1, 3, 19)
    distances = factor_distances(uploads, sent, reference_norms(sent, LAYOUT), LAYOUT)
    assert distances.shape == (3, 3)
    typical = math.sqrt(sum(v * v for v in sent.tolist()) / 19)
    for k, (e, where) in itertools.product(range(3), enumerate([range(8), range(8, 14), range(14, 19)])):
        norm = math.sqrt(sum(sent[i].item() ** 2 for i in where))
        far = math.sqrt(sum((uploads[k, i] - sent[i]).item() ** 2 for i in where))
        assert distances[k, e].item() == pytest.approx(far / max(norm, typical * math.sqrt(len(where))))


def test_a_bias_of_zero_has_a_distance() -> None:
    sent = broadcast().index_fill(0, torch.arange(14, 19), 0.0)
    distances = factor_distances(sent[None] + 0.01, sent, reference_norms(sent, LAYOUT), LAYOUT)
    assert bool((distances < 0.02).all())
    assert bool((distances > 0).all())


def test_who_is_outside_and_where() -> None:
    sent = broadcast()
    uploads = sent + 0.01 * drawn(2, 4, 19)
    uploads[1, 8:14] *= 3
    uploads[3, :8] *= -1
    found, entry = within_gauge(uploads, sent, reference_norms(sent, LAYOUT), LAYOUT, 1.0)
    assert found.tolist() == [True, False, True, False]
    assert [LAYOUT.names[entry[k]] for k in (1, 3)] == ["fc.A2", "fc.A1"]


@given(seed=SEEDS, bound=st.floats(0.05, 20))
def test_zeros_are_refused_although_their_distance_is_the_norm(seed: int, bound: float) -> None:
    sent = drawn(seed, 19) + 0.1
    norms = reference_norms(sent, LAYOUT)
    zeros = torch.zeros(1, 19).double()
    assert factor_distances(zeros, sent, norms, LAYOUT).max().item() == pytest.approx(1)
    assert inside(zeros, sent, bound) == [False]
    assert inside(sent[None], sent, bound) == [True]
    assert inside(sent.index_fill(0, torch.arange(14, 19), 0.0)[None], sent, max(bound, 1.01)) == [True]  # a bias may


@given(seed=SEEDS, bound=st.floats(0.1, 5), scale=st.floats(0, 4))
def test_the_norm_of_a_matrix_is_bounded_from_both_sides(seed: int, bound: float, scale: float) -> None:
    sent = drawn(seed, 19) + 0.1
    if inside(scale * sent[None], sent, bound)[0]:
        assert least_norm(bound) - 1e-9 <= scale <= 1 + bound + 1e-9


@given(seed=SEEDS, shrunk=st.floats(0.6, 1))
def test_a_smaller_broadcast_does_not_make_honest_uploads_look_far(seed: int, shrunk: float) -> None:
    """The attack: shrink the broadcast, so that distances relative to it grow."""
    before = drawn(seed, 19) + 0.5
    step = 0.3 * drawn(seed + 1, 19) * before.norm() / 19**0.5
    reference = moved_reference(reference_norms(before, LAYOUT), shrunk * before, LAYOUT)
    assert bool((reference >= SHRINKS * reference_norms(before, LAYOUT) - 1e-12).all())
    relative = factor_distances((shrunk * before + step)[None], shrunk * before, reference, LAYOUT)
    old = factor_distances((before + step)[None], before, reference_norms(before, LAYOUT), LAYOUT)
    assert bool((relative * SHRINKS <= old + 1e-9).all())


@pytest.mark.parametrize("average", [weighted_mean, trimmed_mean(0.2)], ids=["mean", "trimmed mean"])
@pytest.mark.parametrize("attack", ["zeros", "shrinking", "least that is accepted"])
def test_shrinking_over_many_rounds_neither_wins_nor_turns_the_check_against_honest_clients(
    attack: str, average: Any
) -> None:
    """Eight clients train towards a target, two shrink what they received, each round as far as the attack can."""
    target, weights = broadcast(), torch.ones(10).double()
    sent = target + 0.1 * drawn(5, 19)
    reference = reference_norms(sent, LAYOUT)
    refused = 0
    for number in range(200):
        honest = sent + 0.3 * (target - sent) + 0.05 * drawn(number, 8, 19)
        least = torch.cat(
            [(least_norm(1.0) * r + 1e-9).expand(n) for r, n in zip(reference, LAYOUT.sizes, strict=True)]
        )
        norms = torch.cat(
            [r.expand(n) for r, n in zip(reference_norms(sent, LAYOUT), LAYOUT.sizes, strict=True)]
        ).clamp_min(1e-12)
        bad = {"zeros": 0 * sent, "shrinking": 0.9 * sent, "least that is accepted": sent / norms * least}[attack]
        uploads = torch.cat([honest, bad.expand(2, -1)])
        passed, _ = within_gauge(uploads, sent, reference, LAYOUT, 1.0)
        assert bool(passed[:8].all()), f"round {number}"
        refused += int((~passed[8:]).sum())
        sent = average(uploads[passed], weights[passed])
        reference = moved_reference(reference, sent, LAYOUT)
    assert (refused == 400) == (attack == "zeros")
    assert float((sent - target).norm() / target.norm()) < (0.05 if attack == "zeros" else 0.2)


def test_the_reference_is_kept_in_the_servers_state_and_only_with_the_check() -> None:
    algorithm = TDPFed(**QUICK, s_prime=2)
    assert NORMS not in Simulation(small.mlp(), small.federation(), algorithm).server
    simulation = Simulation(small.mlp(), small.federation(), algorithm, rule=Rule(gauge=1.0))
    layout = simulation.algorithm.plan.factors if simulation.algorithm.plan else LAYOUT
    expected = reference_norms(simulation.server["factors"], layout)
    assert torch.equal(simulation.server[NORMS], expected)
    for _ in range(3):
        simulation.step()
        expected = torch.maximum(SHRINKS * expected, reference_norms(simulation.server["factors"], layout))
        assert torch.equal(simulation.server[NORMS], expected)
    plain = Simulation(small.mlp(), small.federation(), algorithm)
    for _ in range(3):
        plain.step()
    assert torch.equal(plain.server["factors"], simulation.server["factors"])  # nobody was refused


@pytest.mark.parametrize("rule", [Rule(gauge=1.0), Rule("trimmed-mean", gauge=1.0)], ids=["mean", "trimmed mean"])
@pytest.mark.parametrize("attack", [Attack("zeros"), Attack("shrink"), Attack("huge")], ids=lambda one: one.kind)
def test_in_a_run_only_hostile_uploads_are_refused_and_the_model_keeps_its_size(attack: Attack, rule: Rule) -> None:
    algorithm = TDPFed(**{**small.TDPFED, "eta": 0.003})

    def after(attack: Attack | None) -> Simulation:
        simulation = Simulation(small.mlp(), small.federation(10), algorithm, rule=rule, attack=attack)
        hostile = set((~simulation.honest).nonzero().flatten().tolist())
        for _ in range(12):
            simulation.step()
            assert {one.client for one in simulation.refused} <= hostile
        return simulation

    attacked, free = after(attack), after(None)
    assert free.ledger.rejected == 0
    assert attacked.ledger.rejected == 24 or attack.kind == "shrink"
    ratio = attacked.server["factors"].norm() / free.server["factors"].norm()
    assert 0.7 < float(ratio) < 1.25


@given(seed=SEEDS, share=st.floats(0, 1))
def test_median_norms_are_those_of_honest_clients_and_the_direction_is_that_of_the_rule(
    seed: int, share: float
) -> None:
    honest = broadcast() + 0.1 * drawn(seed, 8, 19)
    uploads, weights = torch.cat([honest, (share * broadcast()).expand(2, -1)]), torch.ones(10).double()
    plain, kept = (rule(uploads, weights) for rule in (trimmed_mean(0.2), with_median_norms(trimmed_mean(0.2), LAYOUT)))
    for before, after, rows in zip(*(LAYOUT.split(x) for x in (plain, kept, honest)), strict=True):
        if before.ndim == 1:
            assert torch.equal(before, after)
            continue
        norms = rows.flatten(1).norm(dim=1)
        assert float(norms.min()) - 1e-9 <= float(after.norm()) <= float(norms.max()) + 1e-9
        torch.testing.assert_close(after / after.norm(), before / before.norm())


def test_factors_that_agree_are_the_average_also_with_median_norms() -> None:
    same = broadcast().expand(5, -1)
    torch.testing.assert_close(
        with_median_norms(weighted_mean, LAYOUT)(same, torch.ones(5).double()), broadcast(), rtol=1e-12, atol=0
    )
    assert not bool(with_median_norms(weighted_mean, LAYOUT)(0 * same, torch.ones(5).double()).any())
