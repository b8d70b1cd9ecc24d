"""Rules of aggregation: each against a plain implementation, and what no minority of clients can do to it."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.errors import TDPFedError
from tdpfed.server.robust import (
    Rule,
    VectorAverage,
    average_for,
    clipped,
    krum,
    median,
    multi_krum,
    trimmed_mean,
    weighted_mean,
)

Rows = list[list[float]]

RULES: dict[str, VectorAverage] = {
    "mean": weighted_mean,
    "median": median,
    "trimmed mean": trimmed_mean(0.2),
    "krum": krum(2),
    "multi-krum": multi_krum(2, 4),
    "clipped": clipped(torch.zeros(6).double(), 1.5, weighted_mean),
    "clipped by the median": clipped(torch.ones(6).double(), None, trimmed_mean(0.1)),
}
SEEDS = st.integers(0, 2**31)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def weights_for(seed: int, clients: int) -> Tensor:
    return torch.randint(1, 50, (clients,), generator=torch.Generator().manual_seed(seed)).double()


def plain_mean(rows: Rows, weights: list[float]) -> list[float]:
    return [sum(w * row[i] for row, w in zip(rows, weights, strict=True)) / sum(weights) for i in range(len(rows[0]))]


def plain_median(rows: Rows, weights: list[float]) -> list[float]:
    return [statistics.median(values) for values in zip(*rows, strict=True)]


def plain_trimmed(fraction: float) -> Callable[[Rows, list[float]], list[float]]:
    def average(rows: Rows, weights: list[float]) -> list[float]:
        cut = next(n for n in range(len(rows)) if n >= fraction * len(rows) - 1e-9 or 2 * n >= len(rows) - 2)
        out = []
        for values in zip(*rows, strict=True):
            kept = sorted(zip(values, weights, strict=True))[cut : len(rows) - cut]
            out.append(sum(v * w for v, w in kept) / sum(w for _, w in kept))
        return out

    return average


def plain_krum(byzantine: int, keep: int) -> Callable[[Rows, list[float]], list[float]]:
    def average(rows: Rows, weights: list[float]) -> list[float]:
        scores = []
        for i, row in enumerate(rows):
            others = sorted(math.dist(row, other) ** 2 for j, other in enumerate(rows) if j != i)
            scores.append(sum(others[: len(rows) - byzantine - 2]))
        best = sorted(range(len(rows)), key=scores.__getitem__)[:keep]
        return plain_mean([rows[i] for i in best], [weights[i] for i in best])

    return average


def plain_clipped(center: list[float], bound: float | None) -> Callable[[Rows, list[float]], list[float]]:
    def average(rows: Rows, weights: list[float]) -> list[float]:
        norms = [math.dist(row, center) for row in rows]
        limit = statistics.median(norms) if bound is None else bound
        near = [
            [c + min(1.0, limit / norm) * (x - c) for x, c in zip(row, center, strict=True)]
            for row, norm in zip(rows, norms, strict=True)
        ]
        return plain_mean(near, weights)

    return average


PLAIN: list[tuple[VectorAverage, Callable[[Rows, list[float]], list[float]]]] = [
    (weighted_mean, plain_mean),
    (median, plain_median),
    (trimmed_mean(0.0), plain_mean),
    (trimmed_mean(0.1), plain_trimmed(0.1)),
    (trimmed_mean(0.3), plain_trimmed(0.3)),
    (krum(0), plain_krum(0, 1)),
    (krum(2), plain_krum(2, 1)),
    (multi_krum(1, 3), plain_krum(1, 3)),
    (clipped(torch.ones(6).double(), 2.0, weighted_mean), plain_clipped([1.0] * 6, 2.0)),
    (clipped(torch.ones(6).double(), None, weighted_mean), plain_clipped([1.0] * 6, None)),
]


@pytest.mark.parametrize(("rule", "plain"), PLAIN)
@pytest.mark.parametrize("clients", [7, 10, 11])
def test_rules_equal_plain_implementations(
    rule: VectorAverage, plain: Callable[[Rows, list[float]], list[float]], clients: int
) -> None:
    for seed in range(5):
        uploads, weights = drawn(seed, clients, 6), weights_for(seed, clients)
        expected = torch.tensor(plain(uploads.tolist(), weights.tolist())).double()
        torch.testing.assert_close(rule(uploads, weights), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(seed=SEEDS)
def test_the_order_of_clients_does_not_matter(rule: VectorAverage, seed: int) -> None:
    uploads, weights = drawn(seed, 9, 6), weights_for(seed, 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(rule(uploads[order], weights[order]), rule(uploads, weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_vectors_that_agree_are_the_result(rule: VectorAverage) -> None:
    one = drawn(1, 6) / 10 + 0.5
    torch.testing.assert_close(rule(one.expand(8, 6), weights_for(2, 8)), one, rtol=1e-14, atol=1e-15)
    assert torch.equal(median(one.expand(8, 6), weights_for(2, 8)), one)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_uploads_are_left_as_they_were(rule: VectorAverage) -> None:
    uploads, weights = drawn(1, 9, 6), weights_for(1, 9)
    before = uploads.clone(), weights.clone()
    rule(uploads, weights)
    assert torch.equal(uploads, before[0])
    assert torch.equal(weights, before[1])


def test_by_hand() -> None:
    column = torch.tensor([[5.0], [1.0], [2.0], [100.0], [4.0]])
    weights = torch.tensor([1.0, 9.0, 3.0, 9.0, 1.0])
    assert median(column, weights).item() == 4
    assert median(column[:4], weights[:4]).item() == 3.5
    assert trimmed_mean(0.2)(column, weights).item() == (5 * 1 + 2 * 3 + 4 * 1) / 5
    assert trimmed_mean(0.4)(column, weights).item() == 4
    assert krum(1)(column, weights).item() == 2  # scores 10, 10, 5, much, 5
    line = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clip = clipped(torch.zeros(2), 1.0, weighted_mean)
    torch.testing.assert_close(clip(line, torch.ones(3)), torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(clip(1e30 * line[:1], torch.ones(1)), torch.tensor([0.6, 0.8]))  # squares overflow


finite = st.floats(-(2.0**120), 2.0**120, width=32)


@given(
    honest=st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=2, max_size=9),
    bad=st.lists(st.lists(finite, min_size=3, max_size=3), max_size=8),
    seed=SEEDS,
)
def test_a_minority_cannot_leave_the_honest_range(honest: Rows, bad: Rows, seed: int) -> None:
    assume(len(bad) < len(honest))
    clients = len(honest) + len(bad)
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
    uploads, weights = torch.tensor([*honest, *bad])[order], weights_for(seed, clients).float()
    low, high = torch.tensor(honest).amin(0) - 1e-5, torch.tensor(honest).amax(0) + 1e-5
    rules: list[VectorAverage] = [median]
    if 2 * len(bad) < clients - 1:
        rules.append(trimmed_mean(len(bad) / clients))
    for rule in rules:
        result = rule(uploads, weights)
        assert bool(((low <= result) & (result <= high)).all())


@pytest.mark.parametrize("rule", [median, trimmed_mean(0.3), krum(3), multi_krum(3)])
def test_at_the_breakdown_point_the_rules_do_break(rule: VectorAverage) -> None:
    """The bounds above are sharp: with enough colluding clients every rule follows them."""
    uploads = torch.cat([drawn(0, 4, 6), 1000 + 0.01 * drawn(1, 6, 6)])
    assert bool((rule(uploads, torch.ones(10).double()) > 100).all())


@given(seed=SEEDS, far=st.floats(20, 1e25))
def test_krum_takes_an_honest_upload(seed: int, far: float) -> None:
    honest, bad = drawn(seed, 7, 6).float(), far * drawn(seed + 1, 3, 6).sign().float()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
    uploads, weights = torch.cat([honest, bad])[order], weights_for(seed, 10).float()
    assert any(torch.equal(krum(3)(uploads, weights), row) for row in honest)
    mean = multi_krum(3)(uploads, weights)
    torch.testing.assert_close(mean, weighted_mean(uploads[order < 7], weights[order < 7]))


def test_krum_of_long_vectors() -> None:
    """Longer than what distances are summed over at a time, and what tells the clients apart at the very end."""
    uploads = torch.cat([drawn(0, 1, 70_000).expand(7, -1), torch.eye(7).double() * torch.arange(7)], -1)
    weights = torch.ones(7).double()
    assert torch.equal(krum(1)(uploads, weights), uploads[0])
    assert torch.equal(krum(1)(uploads.flip(0), weights), uploads[0])


def test_equal_scores_of_krum_go_by_order() -> None:
    uploads = torch.tensor([[0.0], [1.0], [5.0]])
    assert krum(0)(uploads, torch.ones(3)).item() == 0
    assert krum(0)(uploads.flip(0), torch.ones(3)).item() == 1


@given(seed=SEEDS, bound=st.floats(1e-3, 1e3), bad=st.lists(finite, min_size=6, max_size=6))
def test_clipping_bounds_what_a_client_can_do(seed: int, bound: float, bad: list[float]) -> None:
    center, uploads = drawn(seed, 6).float(), drawn(seed + 1, 5, 6).float()
    weights = weights_for(seed, 6).float()
    rule = clipped(center, bound, weighted_mean)
    moved = rule(torch.cat([uploads, torch.tensor([bad])]), weights) - rule(torch.cat([uploads, center[None]]), weights)
    share = float(weights[5] / weights.sum())
    assert moved.norm().item() <= share * bound * (1 + 1e-4) + 1e-5


@given(seed=SEEDS, far=st.floats(1, 1e30))
def test_the_median_of_the_norms_is_an_honest_bound(seed: int, far: float) -> None:
    center, honest = drawn(seed, 6), drawn(seed + 1, 5, 6)
    seen: list[Tensor] = []

    def inner(uploads: Tensor, weights: Tensor) -> Tensor:
        seen.append(uploads)
        return weighted_mean(uploads, weights)

    clipped(center, None, inner)(torch.cat([honest, far * drawn(seed + 2, 4, 6)]), torch.ones(9).double())
    longest = (honest - center).norm(dim=1).max()
    assert bool(((seen[0] - center).norm(dim=1) <= longest * (1 + 1e-9)).all())


def test_clipping_leaves_short_updates_alone_to_the_bit() -> None:
    uploads, weights = drawn(0, 5, 6), weights_for(0, 5)
    assert torch.equal(clipped(drawn(1, 6), 1e3, weighted_mean)(uploads, weights), weighted_mean(uploads, weights))
    still = drawn(1, 6).expand(5, 6)
    assert torch.equal(clipped(drawn(1, 6), None, median)(still, weights), still[0])  # norms and bound are 0


def test_clipping_needs_a_center_of_the_same_size() -> None:
    with pytest.raises(TDPFedError, match=r"clip: uploads of \(6,\) given, must be \(1,\)"):
        clipped(torch.zeros(1), 1.0, weighted_mean)(drawn(0, 3, 6), torch.ones(3))


class TestPartsSent:
    """Weights ``(K, P)``: each coordinate over the clients that sent it."""

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    def test_everything_sent_is_the_same_as_a_weight_each(self, rule: VectorAverage) -> None:
        uploads, weights = drawn(3, 9, 6), weights_for(3, 9)
        torch.testing.assert_close(rule(uploads, weights[:, None].expand(9, 6)), rule(uploads, weights))

    @pytest.mark.parametrize(
        ("rule", "plain"),
        [(weighted_mean, plain_mean), (median, plain_median), (trimmed_mean(0.3), plain_trimmed(0.3))],
    )
    def test_each_coordinate_is_averaged_over_its_senders(
        self, rule: VectorAverage, plain: Callable[[Rows, list[float]], list[float]]
    ) -> None:
        for seed in range(5):
            uploads, weights, sent = drawn(seed, 12, 30), weights_for(seed, 12), drawn(seed + 9, 12, 30) > 0.3
            sent[:, 4] = False
            sent[:3, 5], sent[3:, 5] = True, False
            garbage = uploads.where(sent, 1e9)
            result = rule(garbage, weights[:, None] * sent)
            for i in range(30):
                own = sent[:, i]
                if own.any():
                    expected = plain(uploads[own, i, None].tolist(), weights[own].tolist())[0]
                    assert result[i].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
            assert result[4].item() == 0

    @pytest.mark.parametrize("senders", [1, 2])
    def test_a_coordinate_of_few_senders_keeps_its_middle(self, senders: int) -> None:
        uploads = drawn(0, 9, 2)
        weights = torch.ones(9, 2).double()
        weights[senders:, 0] = 0
        for rule in (median, trimmed_mean(0.4)):
            assert rule(uploads, weights)[0].item() == pytest.approx(uploads[:senders, 0].mean().item())

    def test_krum_compares_what_both_sent(self) -> None:
        sent = torch.rand(8, 200, generator=torch.Generator().manual_seed(0)) < 0.5
        uploads = (0.1 * drawn(0, 8, 200)).where(sent, 1e6)
        uploads[2] = uploads[2].where(~sent[2], 3.0)
        mean = multi_krum(1)(uploads, sent.double())
        expected = weighted_mean(uploads[torch.arange(8) != 2], sent[torch.arange(8) != 2].double())
        torch.testing.assert_close(mean, expected)

    def test_who_sent_little_is_not_near_for_that(self) -> None:
        uploads, sent = drawn(0, 8, 200), torch.ones(8, 200, dtype=torch.bool)
        uploads[5] = 4.0
        sent[5, 10:] = False  # ten differences of 4 sum to less than two hundred of 1.4
        result = multi_krum(1)(uploads, sent.double())
        torch.testing.assert_close(result, uploads[torch.arange(8) != 5].mean(0))

    def test_clipping_measures_what_was_sent(self) -> None:
        uploads = torch.tensor([[3.0, 4.0, 99.0], [3.0, 4.0, 12.0]])
        weights = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        result = clipped(torch.zeros(3), 6.5, weighted_mean)(uploads, weights)
        torch.testing.assert_close(result, torch.tensor([2.25, 3.0, 6.0]))

    def test_clients_without_weight_have_no_vote(self) -> None:
        uploads, weights = drawn(0, 9, 6), torch.ones(9).double()
        weights[[1, 5]] = 0
        heard = weights > 0
        for name, rule in RULES.items():
            torch.testing.assert_close(rule(uploads, weights), rule(uploads[heard], weights[heard]), msg=name)


@pytest.mark.parametrize(
    ("rule", "clients", "least"),
    [
        (krum(1), 4, 5),
        (krum(3), 8, 9),
        (multi_krum(2, 1), 6, 7),
        (trimmed_mean(0.3), 2, 3),
        (trimmed_mean(0.45), 9, 11),
    ],
)
def test_too_few_clients_are_told(rule: VectorAverage, clients: int, least: int) -> None:
    with pytest.raises(
        TDPFedError, match=rf"{clients} clients given, must be (at least|more than) ({least}|{least - 1})"
    ):
        rule(drawn(0, clients, 4), torch.ones(clients).double())
    assert rule(drawn(0, least, 4), torch.ones(least).double()).shape == (4,)


def test_multi_krum_keeps_no_more_than_the_good() -> None:
    with pytest.raises(TDPFedError, match="keep: 5 given, must be 1 to 4 of 5 clients"):
        multi_krum(1, 5)(drawn(0, 5, 4), torch.ones(5).double())


@pytest.mark.parametrize("weights", [torch.zeros(3), torch.zeros(3, 4)])
def test_nobody_to_average_is_an_error(weights: Tensor) -> None:
    for rule in (weighted_mean, median):
        with pytest.raises(TDPFedError, match="sum over 3 clients is 0"):
            rule(torch.ones(3, 4), weights)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("name", "medan", "did you mean 'median'"),
        ("fraction", 0.5, "below 0.5"),
        ("fraction", -0.1, "at least 0"),
        ("fraction", math.nan, "at least 0"),
        ("byzantine", -1, "at least 0"),
        ("keep", 0, "at least 1"),
        ("clip", 0.0, "finite number above 0 or 'median'"),
        ("clip", math.inf, "finite"),
        ("clip", "mean", "'median'"),
        ("gauge", -1.0, "above 0"),
        ("gauge", math.nan, "finite"),
    ],
)
def test_a_rule_refuses_what_makes_no_sense(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(TDPFedError, match=allowed) as caught:
        Rule(**{field: value})
    assert str(caught.value).startswith(f"{field}: ")
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "make", [lambda: trimmed_mean(0.5), lambda: krum(-1), lambda: clipped(torch.ones(1), 0, median)]
)
def test_rules_refuse_settings_out_of_range(make: Callable[[], VectorAverage]) -> None:
    with pytest.raises(TDPFedError, match="given, must be"):
        make()


@pytest.mark.parametrize(
    ("rule", "average"),
    [
        (Rule(), weighted_mean),
        (Rule("median"), median),
        (Rule("trimmed-mean", fraction=0.3), trimmed_mean(0.3)),
        (Rule("krum", byzantine=2), krum(2)),
        (Rule("multi-krum", byzantine=2), multi_krum(2)),
        (Rule("multi-krum", byzantine=2, keep=3), multi_krum(2, 3)),
        (Rule(clip=1.0), clipped(torch.ones(6).double(), 1.0, weighted_mean)),
        (Rule("median", clip="median"), clipped(torch.ones(6).double(), None, median)),
    ],
)
def test_a_rule_names_its_average(rule: Rule, average: VectorAverage) -> None:
    uploads, weights = drawn(0, 9, 6), weights_for(0, 9)
    center = torch.ones(6).double()
    assert torch.equal(average_for(rule, center)(uploads, weights), average(uploads, weights))
    others = {Rule(), Rule("median"), Rule("krum", byzantine=2), Rule(clip=0.5)} - {rule}
    for other in others:
        assert not torch.equal(average_for(other, center)(uploads, weights), average(uploads, weights))
