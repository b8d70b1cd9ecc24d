"""Factors on their way through a round: those of plain local work, whichever way they are moved."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import local_work
import small
from local_work import FACTOR_LR, PLANS, close, drawn, named, rules
from tdpfed.core.local import FactorRule, Factors, Near
from tdpfed.core.state import State
from tdpfed.cp.plan import FactorPlan
from tdpfed.fast import transposed
from tdpfed.fast.first_layer import LowRankStep

LR, LAM = 0.05, 3.0


def row(near: Near, k: int) -> Near:
    return Near(near.theta[k], near.loss[k])


def plain_one(one: tuple[Tensor, State], rule: FactorRule) -> tuple[Tensor, FactorRule, State]:
    return one[0], rule, one[1]


@pytest.mark.parametrize("order", PLANS)
@pytest.mark.parametrize("rule", rules(), ids=named)
def test_factors_are_the_plain_ones(order: int, rule: FactorRule) -> None:
    """Two rounds of two local rounds each; clients may bring different numbers of steps."""
    plan, clients = PLANS[order], 5
    a, nears = drawn(plan, clients)
    whole = local_work.problem("narrow", clients)
    private = {name: value.repeat(clients, 1) for name, value in rule.start(plan.factors.size, a[0]).items()}
    if "steps" in private:  # one client has been trained before
        private["steps"][1], private["moment1"][1] = 7, 0.2
    plainly = [(a[k], {name: value[k] for name, value in private.items()}) for k in range(clients)]
    for round_ in (nears[:2], nears[2:]):
        factors = whole.fast.factors(plan, a, rule, private)
        singles = [one.fast.factors(plan, *plain_one(plainly[k], rule)) for k, one in enumerate(whole.each())]
        twins = [one.plain.factors(plan, *plain_one(plainly[k], rule)) for k, one in enumerate(whole.each())]
        for near in round_:
            close(factors.composed, torch.stack([twin.composed for twin in twins]), 1e-8)
            factors = factors.towards(near, LAM, 3)
            singles = [one.towards(row(near, k), LAM, 3) for k, one in enumerate(singles)]
            twins = [twin.towards(row(near, k), LAM, 3) for k, twin in enumerate(twins)]
            for k, twin in enumerate(twins):
                close(factors.value[k], twin.value, 1e-8)
                close(singles[k].value, twin.value, 1e-8)
                close(singles[k].composed, twin.composed, 1e-8)
        for k, twin in enumerate(twins):
            for found in ({name: value[k] for name, value in factors.state.items()}, singles[k].state):
                assert found.keys() == twin.state.keys()
                for name, value in twin.state.items():
                    close(found[name], value, 1e-8)
        assert not torch.allclose(factors.value, a, atol=1e-3)
        a, private = factors.value, factors.state
        plainly = [(twin.value, twin.state) for twin in twins]


def test_an_optimizer_that_continues_starts_afresh_where_nothing_was_kept() -> None:
    plan, rule = PLANS[2], FactorRule("adam", FACTOR_LR, "run")
    a, nears = drawn(plan, 3)
    local = local_work.problem("narrow").fast
    zeros = {name: value.repeat(3, 1) for name, value in rule.start(plan.factors.size, a[0]).items()}
    ends = [local.factors(plan, a, rule, private).towards(nears[0], LAM, 3) for private in ({}, zeros)]
    assert torch.equal(ends[0].value, ends[1].value)
    assert ends[0].state.keys() == ends[1].state.keys() == zeros.keys()
    assert all(torch.equal(value, ends[1].state[name]) for name, value in ends[0].state.items())


@pytest.mark.usefixtures("any_matrix_is_large")
@pytest.mark.parametrize("way", ["anchor is composed", "another anchor", "towards it twice", "composed anew"])
def test_what_is_known_of_theta_counts_only_where_it_was_held_near_the_factors(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where lr lam is 1 theta is the anchor plus something of low rank, which makes steps of the factors cheaper."""
    used = small.watched(monkeypatch, transposed, "_stacked")
    whole, rule = local_work.problem("wide"), FactorRule("adam", FACTOR_LR)
    plan = FactorPlan.of(dict(zip(whole.objective.layout.names, whole.objective.layout.shapes, strict=True)), 6.0)
    a, _ = drawn(plan, 3)
    ends = []
    for local in (whole.fast, whole.plain):
        factors = local.factors(plan, a, rule, {})
        anchor = whole.anchor if way == "another anchor" else factors.composed
        if way == "composed anew":
            assert torch.equal(factors.composed, anchor)
        near = local.proximal(whole.theta, local.batch(0), anchor=anchor, lam=1 / LR, lr=LR, steps=3)
        factors = factors.towards(near, LAM, 3)
        if way == "towards it twice":
            factors = factors.towards(near, LAM, 3)
        ends.append((near, factors.value))
    (found, ours), (_, twin) = ends
    assert isinstance(found.low_rank, LowRankStep)
    close(ours, twin, 1e-8)
    if way != "composed anew":  # which is slower for it, and right
        assert len(used) == (way != "another anchor")


@pytest.mark.parametrize("order", PLANS)
@pytest.mark.parametrize("rule", rules(), ids=named)
def test_bits_of_a_clients_factors_do_not_depend_on_the_others(order: int, rule: FactorRule) -> None:
    plan = PLANS[order]
    a, nears = drawn(plan, 7, torch.float32)
    start = {name: value.repeat(7, 1) for name, value in rule.start(plan.factors.size, a[0]).items()}
    ends: list[Factors] = []
    for rows in (slice(7), slice(2, 5)):
        local = local_work.problem("narrow", 7, torch.float32).only(rows).fast
        factors = local.factors(plan, a[rows], rule, {name: value[rows] for name, value in start.items()})
        for near in nears:
            factors = factors.towards(Near(near.theta[rows], near.loss[rows]), LAM, 3)
        ends.append(factors)
    assert torch.equal(ends[0].value[2:5], ends[1].value)
    assert torch.equal(ends[0].composed[2:5], ends[1].composed)
    for name, value in ends[1].state.items():
        assert torch.equal(ends[0].state[name][2:5], value)


@pytest.mark.parametrize(
    ("optimizer", "alternating", "moved"),
    [("adam", False, True), ("adam", True, False), ("gd", False, False), ("als", False, False)],
)
@pytest.mark.parametrize("restart", ["round", "run"])
def test_factors_that_have_moved_on_say_so(
    optimizer: Any, alternating: bool, moved: bool, restart: Literal["round", "run"]
) -> None:
    """Where steps are taken in their memory; elsewhere they stay as they were."""
    continues = restart if optimizer != "als" and not alternating else "round"
    plan, rule = PLANS[2], FactorRule(optimizer, FACTOR_LR, continues, alternating)
    a, nears = drawn(plan, 3)
    private = {name: value.repeat(3, 1) for name, value in rule.start(plan.factors.size, a[0]).items()}
    first = local_work.problem("narrow").fast.factors(plan, a, rule, private)
    value, composed = first.value, first.composed
    latest = first.towards(nears[0], LAM, 2)

    def towards(factors: Factors) -> Factors:
        return factors.towards(nears[1], LAM, 2)

    if moved:
        for use in (lambda: first.value, lambda: first.composed, lambda: first.state, lambda: towards(first)):
            with pytest.raises(RuntimeError, match="overwritten"):
                use()
    else:
        assert torch.equal(first.value, value)
        assert torch.equal(first.composed, composed)
        assert torch.equal(towards(first).value, towards(first).value)
    assert not torch.equal(latest.value, value)
