"""Attackers do what they say, to their own uploads only; and what the gauge attack does to averaged factors."""

from statistics import NormalDist
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import small
from tdpfed.algorithms import FedAvg
from tdpfed.core.state import Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.engine.attacks import Kind, alie_deviations, attack, attackers, declared, flip_labels
from tdpfed.errors import TDPFedError
from tdpfed.server.gauge import reference_norms, within_gauge
from tdpfed.server.robust import Rule, average_for, median, weighted_mean

KINDS: list[Kind] = list(get_args(Kind))
PLAN = FactorPlan.of({"fc.weight": (8, 6), "fc.bias": (8,), "conv.weight": (6, 5, 3, 3)}, 1.5)
BAD = torch.tensor([False, True, False, False, True, False, False])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turn(seed: int = 3, round_: int = 5, clients: int = 7) -> Turn:
    return Turn(seed, round_, 10 + torch.arange(clients))


def sent(clients: int = 7) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Uploads of factors near the broadcast ones, and the broadcast."""
    broadcast = drawn(0, PLAN.factors.size)
    return {"factors": broadcast + 0.05 * drawn(1, clients, PLAN.factors.size)}, {"factors": broadcast}


def attacked(kind: Kind, mask: Tensor = BAD, when: Turn | None = None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return uploads after the attack, before it, and the broadcast."""
    uploads, broadcast = sent()
    result = attack(kind, uploads, broadcast, mask, when or turn(), plan=PLAN, **options)
    assert result.keys() == uploads.keys()
    return result["factors"], uploads["factors"], broadcast["factors"]


@pytest.mark.parametrize("kind", KINDS)
def test_only_attackers_change_and_arguments_do_not(kind: Kind) -> None:
    uploads, broadcast = sent()
    result = attack(kind, uploads, broadcast, BAD, turn(), plan=PLAN)["factors"]
    assert torch.equal(uploads["factors"], sent()[0]["factors"])
    assert torch.equal(broadcast["factors"], sent()[1]["factors"])
    changed = (result != uploads["factors"]).any(-1)
    assert changed.tolist() == ([False] * 7 if kind in ("label-flip", "samples") else BAD.tolist())
    nobody = attack(kind, uploads, broadcast, torch.zeros(7, dtype=torch.bool), turn(), plan=PLAN)
    assert torch.equal(nobody["factors"], uploads["factors"])


def test_what_is_sent_in_place_of_an_update() -> None:
    zeros, _, _ = attacked("zeros")
    assert not bool(zeros[BAD].any())
    shrunk, _, broadcast = attacked("shrink", strength=0.5)
    assert torch.equal(shrunk[BAD], (0.5 * broadcast).expand(2, -1))
    huge, _, _ = attacked("huge")
    assert bool(huge[BAD].isfinite().all())
    assert huge[BAD].std().item() == pytest.approx(1e25, rel=0.1)
    assert not torch.equal(huge[1], huge[4])


def test_a_lie_about_samples_is_the_attackers_alone() -> None:
    samples = torch.arange(1, 8)
    assert declared(samples, BAD).tolist() == [1, 2000, 3, 4, 5000, 6, 7]
    assert declared(samples, BAD, 2.0).tolist() == [1, 4, 3, 4, 10, 6, 7]


@pytest.mark.parametrize("kind", ["noise", "gauge"])
def test_draws_follow_from_seed_round_and_client_alone(kind: Kind) -> None:
    result, uploads, broadcast = attacked(kind)
    assert torch.equal(attacked(kind)[0], result)
    for other in (turn(seed=4), turn(round_=6), Turn(3, 5, torch.arange(7))):
        assert not torch.equal(attacked(kind, when=other)[0], result)
    order = torch.tensor([4, 0, 1])
    some = attack(
        kind, {"factors": uploads[order]}, {"factors": broadcast}, BAD[order], Turn(3, 5, 10 + order), plan=PLAN
    )
    assert torch.equal(some["factors"], result[order])


@pytest.mark.parametrize(("kind", "factor", "default"), [("sign-flip", -1.0, 1.0), ("scale", 1.0, 10.0)])
def test_sign_flip_and_scale(kind: Kind, factor: float, default: float) -> None:
    for strength in (None, 3.0):
        result, uploads, broadcast = attacked(kind, strength=strength)
        expected = factor * (strength or default) * (uploads - broadcast)[BAD]
        torch.testing.assert_close((result - broadcast)[BAD], expected, rtol=1e-12, atol=1e-13)


def test_each_client_is_measured_from_its_own_broadcast() -> None:
    """FedAvg (s.a.r.) sends each client other coordinates."""
    uploads, broadcast = drawn(0, 7, 20), drawn(1, 7, 20)
    result = attack("scale", {"values": uploads}, {"values": broadcast}, BAD, turn(), strength=2.0)["values"]
    torch.testing.assert_close(result[BAD], (2 * uploads - broadcast)[BAD], rtol=1e-12, atol=1e-13)


def test_noise_is_normal_and_as_strong_as_said() -> None:
    size, mask = 40_000, torch.tensor([True, True, False])
    broadcast = drawn(0, size)
    uploads = broadcast + 0.2 * drawn(1, 3, size)
    result = attack("noise", {"w": uploads}, {"w": broadcast}, mask, turn(clients=3), strength=4.0)["w"]
    noise = (result - uploads)[mask] / (4 * (uploads - broadcast)[mask].square().mean(-1, keepdim=True).sqrt())
    assert noise.mean(-1).abs().max() < 0.02  # the deviation of a mean is 0.005
    assert (noise.std(-1) - 1).abs().max() < 0.02
    for quantile in (0.05, 0.3, 0.9):
        share = (noise < NormalDist().inv_cdf(quantile)).double().mean(-1)
        assert (share - quantile).abs().max() < 0.01
    assert abs(float((noise[0] * noise[1]).mean())) < 0.02
    assert abs(float((noise[:, 1:] * noise[:, :-1]).mean())) < 0.02


def test_alie_sends_the_honest_mean_less_some_deviations() -> None:
    for strength in (None, 1.5):
        result, uploads, _ = attacked("alie", strength=strength)
        honest = uploads[~BAD]
        z = NormalDist().inv_cdf(3 / 5) if strength is None else strength  # 2 of 5 honest make a majority of 4 of 7
        expected = honest.mean(0) - z * honest.std(0, correction=0)
        torch.testing.assert_close(result[BAD], expected.expand(2, -1), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("clients", "bad", "z"),
    [(50, 12, 0.3360), (50, 24, 1.4261), (20, 4, 0.1573), (10, 2, 0.0), (10, 1, 0.0), (10, 6, 3.0), (4, 4, 3.0)],
)
def test_alie_deviations(clients: int, bad: int, z: float) -> None:
    assert alie_deviations(clients, bad) == pytest.approx(z, abs=2e-4)


def test_alie_without_honest_clients_stays_finite() -> None:
    result, uploads, _ = attacked("alie", torch.ones(7, dtype=torch.bool))
    torch.testing.assert_close(result[0], uploads.mean(0) - 3 * uploads.std(0, correction=0))


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.25, 0.5, 1.0])
def test_attackers_are_the_share_that_was_asked_for(fraction: float) -> None:
    mask = attackers(0, 20, fraction)
    assert mask.shape == (20,)
    assert int(mask.sum()) == round(20 * fraction)
    assert torch.equal(mask, attackers(0, 20, fraction))


def test_attackers_differ_by_seed_and_are_spread() -> None:
    counts = torch.stack([attackers(seed, 10, 0.2) for seed in range(400)]).sum(0)
    assert counts.sum() == 800
    assert counts.min() > 45  # 80 expected, deviation 8
    assert counts.max() < 115


def test_flipped_labels() -> None:
    data, mask = small.federation(), torch.tensor([True, False, False, True, False])
    flipped = flip_labels(data, mask)
    for k in range(5):
        (x, y, x_test, y_test), (new_x, new_y, new_x_test, new_y_test) = data.client(k), flipped.client(k)
        assert torch.equal(new_y, 2 - y if mask[k] else y)
        assert torch.equal(new_y_test, y_test)
        assert torch.equal(new_x, x)
        assert torch.equal(new_x_test, x_test)
    assert not torch.equal(data.y, flipped.y)
    assert torch.equal(data.y, small.federation().y)


@pytest.mark.parametrize("model", small.MODELS)
@given(seed=st.integers(0, 2**31), c=st.sampled_from([1.0, 7.0, 100.0]))
def test_the_gauge_attack_leaves_the_composed_tensor(model: str, seed: int, c: float) -> None:
    plan = FactorPlan.of(small.MODELS[model](), 1.5)
    a = drawn(seed, 3, plan.factors.size)
    mask = torch.tensor([True, False, True])
    uploads = attack("gauge", {"factors": a}, {"factors": a[0]}, mask, turn(seed, clients=3), plan=plan, strength=c)
    torch.testing.assert_close(plan.compose(uploads["factors"]), plan.compose(a), rtol=1e-9, atol=1e-9)


def test_the_gauge_attack_scales_flips_and_permutes_columns() -> None:
    """Column by column: each is one of the old ones times 1 or +-c or +-1/c, with one order for all factors."""
    result, uploads, _ = attacked("gauge", strength=100.0)
    new, old = PLAN.factors.unflatten(result[BAD]), PLAN.factors.unflatten(uploads[BAD])
    assert torch.equal(new["fc.bias"], old["fc.bias"])
    modes: set[tuple[int, ...]] = set()
    flips: list[bool] = []
    shuffled: list[bool] = []
    for client, (layer, count) in ((k, layer) for k in range(2) for layer in (("fc", 2), ("conv", 4))):
        orders, signs, sizes = [], [], []
        for n in range(1, count + 1):
            one, other = new[f"{layer}.A{n}"][client], old[f"{layer}.A{n}"][client]
            cosine = torch.nn.functional.normalize(one, dim=0).T @ torch.nn.functional.normalize(other, dim=0)
            order = cosine.abs().argmax(1)
            ratio = one.norm(dim=0) / other[:, order].norm(dim=0)
            sign = cosine.gather(1, order[:, None])[:, 0]
            torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio))
            torch.testing.assert_close(sign.abs(), torch.ones_like(sign))
            orders.append(order.tolist())
            signs.append(sign.sign())
            sizes.append(round(float(ratio[0]), 6))
        assert sorted(sizes) == [0.01, *[1.0] * (count - 2), 100.0]
        assert all(order == orders[0] for order in orders)
        assert sorted(orders[0]) == list(range(len(orders[0])))
        shuffled.append(orders[0] != sorted(orders[0]))
        assert torch.equal(torch.stack(signs).prod(0), torch.ones_like(signs[0]))
        moved = [signs[n] for n in range(count) if sizes[n] != 1]
        assert torch.equal(moved[0], moved[1])
        flips += (moved[0] < 0).tolist()
        modes.add((sizes.index(100.0), sizes.index(0.01)))
    assert len(modes) > 1  # which two factors is drawn as well
    assert set(flips) == {True, False}
    assert any(shuffled)  # two columns may well keep their order


def test_one_gauge_attacker_of_ten_wrecks_the_mean_of_factors() -> None:
    """EVIDENCE: an error of 8.9 by averaged factors; median, gauge check and clipping hold."""
    plan = FactorPlan.of({"fc1.weight": (100, 64), "fc1.bias": (100,), "fc2.weight": (10, 100)}, 2.0)
    broadcast = plan.init(0.1 * drawn(0, plan.dense.size), torch.Generator().manual_seed(0))
    honest = broadcast + 0.03 * broadcast.std() * drawn(1, 10, plan.factors.size)
    mask, weights = attackers(0, 10, 0.1), torch.ones(10).double()
    uploads = attack("gauge", {"factors": honest}, {"factors": broadcast}, mask, turn(clients=10), plan=plan)["factors"]
    truth = plan.compose(weighted_mean(honest, weights))

    def error(factors: Tensor) -> float:
        return float((plan.compose(factors) - truth).norm() / truth.norm())

    assert error(weighted_mean(uploads, weights)) > 5
    assert error(median(uploads, weights)) < 0.1
    inside, entry = within_gauge(uploads, broadcast, reference_norms(broadcast, plan.factors), plan.factors, 1.0)
    assert torch.equal(inside, ~mask)
    assert plan.factors.names[int(entry[mask])] in ("fc1.A1", "fc1.A2", "fc2.A1", "fc2.A2")
    assert error(weighted_mean(uploads[inside], weights[inside])) < 0.05
    for rule in (Rule("trimmed-mean", fraction=0.1), Rule("krum"), Rule("multi-krum"), Rule(clip="median")):
        assert error(average_for(rule, broadcast)(uploads, weights)) < 0.2, rule
    dense = weighted_mean(plan.compose(uploads), weights)  # ACT averages these
    assert float((dense - truth).norm() / truth.norm()) < 0.05


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "noise"])
def test_attacks_change_what_a_server_makes_of_real_uploads(kind: Kind) -> None:
    """On the uploads of a real round: the mean is led away, the median less so."""
    simulation = small.train(FedAvg(**small.COMMON, eta=0.02), rounds=0, data=small.federation(9))
    who = turn(0, 1, 9)
    who = Turn(who.seed, who.round, who.clients - 10)
    outcome = simulation.runner.run(simulation.server, simulation.private, who)
    message = simulation.algorithm.broadcast(simulation.server, who)
    mask, weights = attackers(0, 9, 0.2), torch.ones(9).double()
    bad = attack(kind, outcome.upload, message, mask, who, strength=50.0)
    truth = weighted_mean(outcome.upload["w"][~mask], weights[~mask])
    start = float((simulation.server["w"] - truth).norm())
    assert float((weighted_mean(bad["w"], weights) - truth).norm()) > 2 * start
    assert float((median(bad["w"], weights) - truth).norm()) < start


@pytest.mark.parametrize("plan", [None, FactorPlan.of({"b": (19,)}), FactorPlan.of({"fc.weight": (8, 8)})])
def test_without_factors_there_is_no_gauge_to_attack(plan: FactorPlan | None) -> None:
    uploads = {"w": drawn(0, 7, 19)}
    with pytest.raises(TDPFedError, match=r"'gauge' given, .*no CP factors"):
        attack("gauge", uploads, uploads, BAD, turn(), plan=plan)


def test_bad_settings_are_told() -> None:
    uploads, broadcast = sent()
    wrong: Any = "sign_flip"
    with pytest.raises(TDPFedError, match=r"attack\.kind: unknown 'sign_flip', did you mean 'sign-flip'"):
        attack(wrong, uploads, broadcast, BAD, turn())
    for strength in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TDPFedError, match=r"attack\.strength: .* must be finite and above 0"):
            attack("scale", uploads, broadcast, BAD, turn(), strength=strength)
    for fraction in (-0.1, 1.1, float("nan")):
        with pytest.raises(TDPFedError, match=r"attack\.fraction: .* at most 1"):
            attackers(0, 10, fraction)
