from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tdpfed.data import partition
from tdpfed.data.partition import (
    bounded,
    class_groups,
    classes,
    dirichlet,
    generator,
    iid,
    natural,
    numbered,
    split,
    split_in_time,
    split_official,
)  # fmt: skip
from tdpfed.errors import TDPFedError

seeds = st.integers(0, 2**40)


@st.composite
def labeled(draw: st.DrawFn, least: int = 40, per_class: int = 1) -> NDArray[np.int64]:
    """Labels of up to seven classes, of unequal sizes, in random order."""
    counts = draw(st.lists(st.integers(per_class, 60), min_size=1, max_size=7))
    counts[0] += least
    return np.random.default_rng(draw(seeds)).permutation(np.repeat(np.arange(len(counts)), counts))


def assert_dealt_once(parts: list[NDArray[np.int64]], samples: int) -> None:
    """Every sample is dealt, to exactly one client."""
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(samples))
    assert all(part.dtype == np.int64 for part in parts)


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


@given(labels=labeled(), clients=st.integers(1, 20), seed=seeds, skew=st.floats(0, 3), least=st.integers(1, 2))
def test_iid_deals_every_sample_once(
    labels: NDArray[np.int64], clients: int, seed: int, skew: float, least: int
) -> None:
    parts = iid(labels, clients, seed, skew, min_samples=least)
    assert len(parts) == clients
    assert_dealt_once(parts, len(labels))
    assert min(map(len, parts)) >= least
    assert same(parts, iid(labels, clients, seed, skew, min_samples=least))


@given(labels=labeled(), clients=st.integers(1, 20), seed=seeds)
def test_iid_without_skew_is_equal(labels: NDArray[np.int64], clients: int, seed: int) -> None:
    sizes = [len(part) for part in iid(labels, clients, seed)]
    assert max(sizes) - min(sizes) <= 1


def test_iid_skew_spreads_the_sizes_and_seeds_differ() -> None:
    labels = np.zeros(10_000, np.int64)
    sizes = np.log([len(part) for part in iid(labels, 200, 0, 0.8)])
    assert 0.6 < sizes.std() < 1.0
    assert not same(iid(labels, 5, 0), iid(labels, 5, 1))


@given(
    labels=labeled(per_class=21),
    clients=st.integers(1, 20),
    per_client=st.integers(1, 7),
    seed=seeds,
    skew=st.floats(0, 2),
)
def test_classes_deals_every_class_and_the_asked_number_to_each(
    labels: NDArray[np.int64], clients: int, per_client: int, seed: int, skew: float
) -> None:
    there = len(np.unique(labels))
    assume(per_client <= there <= clients * per_client)
    parts = classes(labels, clients, per_client, seed, skew)
    assert len(parts) == clients
    assert_dealt_once(parts, len(labels))
    held = [set(labels[part].tolist()) for part in parts]
    assert all(len(mine) == per_client for mine in held)
    holders = [sum(name in mine for mine in held) for name in range(there)]
    assert max(holders) - min(holders) <= 1
    assert same(parts, classes(labels, clients, per_client, seed, skew))


def test_classes_as_in_the_paper_twenty_clients_of_two_classes() -> None:
    labels = np.repeat(np.arange(10), 7_000)
    parts = classes(labels, 20, 2, seed=0)
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 70_000
    assert sizes.max() > 1.5 * sizes.min()
    assert len({frozenset(labels[part].tolist()) for part in parts}) > 5
    assert not same(parts, classes(labels, 20, 2, seed=1))
    equal = np.array([len(part) for part in classes(labels, 20, 2, seed=0, size_skew=0.0)])
    assert np.array_equal(equal, np.full(20, 3_500))


@given(labels=labeled(per_class=21), clients=st.integers(1, 20), per_client=st.integers(1, 7), seed=seeds)
def test_classes_in_turn_gives_client_k_the_kth_class_and_the_next(
    labels: NDArray[np.int64], clients: int, per_client: int, seed: int
) -> None:
    there = len(np.unique(labels))
    assume(per_client <= there <= clients + per_client - 1)
    parts = classes(labels, clients, per_client, seed, in_turn=True)
    assert_dealt_once(parts, len(labels))
    held = [set(labels[part].tolist()) for part in parts]
    assert held == [{(k + j) % there for j in range(per_client)} for k in range(clients)]
    assert same(parts, classes(labels, clients, per_client, seed, in_turn=True))


def test_classes_in_turn_share_their_samples_by_the_seed() -> None:
    labels = np.repeat(np.arange(10), 700)
    one, other = (classes(labels, 20, 2, seed, in_turn=True) for seed in (0, 1))
    assert [len(part) for part in one] != [len(part) for part in other]
    with pytest.raises(TDPFedError, match=r"8 with 2 classes each in turn leave .*; allowed: 9 clients or more"):
        classes(labels, 8, 2, 0, in_turn=True)


def test_class_groups_are_dealt_in_order() -> None:
    """Ten classes, twenty clients, two each: four clients share classes 0 and 1, the next four 2 and 3, and so on."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 700))
    parts = class_groups(labels, 20, 2, seed=0)
    assert_dealt_once(parts, len(labels))
    assert [set(labels[part].tolist()) for part in parts] == [{2 * (k // 4), 2 * (k // 4) + 1} for k in range(20)]
    sizes = np.array([[(labels[part] == c).sum() for c in sorted(set(labels[part].tolist()))] for part in parts])
    first, last = sizes.reshape(5, 4, 2)[:, :3], sizes.reshape(5, 4, 2)[:, 3]
    assert first.min() >= 17
    assert first.max() < 175
    assert last.min() >= 175  # they get what is left
    assert same(parts, class_groups(labels, 20, 2, seed=0))
    assert not same(parts, class_groups(labels, 20, 2, seed=1))


@given(labels=labeled(per_class=21), clients=st.integers(1, 20), per_client=st.integers(1, 7), seed=seeds)
def test_class_groups_of_any_size(labels: NDArray[np.int64], clients: int, per_client: int, seed: int) -> None:
    there = len(np.unique(labels))
    assume(per_client <= there)
    each = -(-clients * per_client // there)
    if -(-clients // each) * per_client != there:  # every group of clients takes as many classes
        with pytest.raises(TDPFedError, match="clients: "):
            class_groups(labels, clients, per_client, seed)
        return
    parts = class_groups(labels, clients, per_client, seed)
    assert_dealt_once(parts, len(labels))
    held = [set(labels[part].tolist()) for part in parts]
    assert all(len(one) == per_client for one in held)
    assert all(sum(c in one for one in held) <= each for c in range(there))


@pytest.mark.parametrize(
    ("clients", "per_client", "message"),
    [
        (4, 2, r"clients: 4 with 2 classes each in groups of 1 leave class 8"),
        (7, 3, r"clients: 7 with 3 classes each in groups of 3 leave class 9 without a client"),
        (4, 11, "classes per client: 11; allowed: 1 to 10"),
        (30, 2, "clients: 30 put 6 clients on class 0"),
    ],
)
def test_class_groups_that_cannot_be_dealt(clients: int, per_client: int, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        class_groups(np.repeat(np.arange(10), 5), clients, per_client, 0)


def test_capped_dirichlet_gives_no_more_classes_to_a_client_with_an_average_share() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 700))
    for seed in range(5):
        parts = dirichlet(labels, 20, 0.1, seed, capped=True)
        assert_dealt_once(parts, len(labels))
        counts = np.array([[(labels[part] == c).sum() for c in range(10)] for part in parts])
        before = np.cumsum(counts, 1) - counts
        assert not (counts[before >= 350]).any()
        free = np.array([len(part) for part in dirichlet(labels, 20, 0.1, seed)])
        assert np.std(counts.sum(1)) < np.std(free)
    assert_dealt_once(dirichlet(labels, 5, 1e-3, 0, capped=True), len(labels))


def test_classes_reaches_the_least_number_under_strong_skew() -> None:
    labels = np.repeat(np.arange(4), 100)
    assert min(len(part) for part in classes(labels, 8, 2, 0, 4.0)) < 21
    assert min(len(part) for part in classes(labels, 8, 2, 0, 4.0, min_samples=21)) >= 21


@pytest.mark.parametrize(
    ("clients", "per_client", "message"),
    [
        (4, 2, r"clients: 4 with 2 classes each .*; allowed: 5 clients"),
        (4, 11, "classes per client: 11; allowed: 1 to 10"),
        (4, 0, "classes per client: 0; allowed: 1 to 10"),
        (4, 2.5, r"classes per client: 2\.5; allowed: 1 to 10"),
        (30, 2, "clients: 30 put 6 clients on class 0"),
    ],
)
def test_classes_that_cannot_be_dealt(clients: int, per_client: Any, message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        classes(np.repeat(np.arange(10), 5), clients, per_client, 0)


@given(labels=labeled(), clients=st.integers(1, 8), alpha=st.floats(0.3, 100), seed=seeds)
def test_dirichlet_deals_every_sample_once(labels: NDArray[np.int64], clients: int, alpha: float, seed: int) -> None:
    parts = dirichlet(labels, clients, alpha, seed)
    assert len(parts) == clients
    assert_dealt_once(parts, len(labels))
    assert min(map(len, parts)) >= 1
    assert same(parts, dirichlet(labels, clients, alpha, seed))


def test_dirichlet_alpha_sets_how_uneven_the_classes_are() -> None:
    labels = np.repeat(np.arange(10), 500)

    def largest_share(alpha: float) -> float:
        parts = dirichlet(labels, 10, alpha, 0)
        return float(np.mean([np.bincount(labels[part]).max() / len(part) for part in parts]))

    assert largest_share(1000) < 0.13
    assert largest_share(0.05) > 0.6


def test_dirichlet_redraws_for_the_least_number_and_gives_up() -> None:
    labels = np.repeat(np.arange(10), 100)
    assert min(map(len, dirichlet(labels, 10, 0.5, 1, 1))) < 60
    assert min(map(len, dirichlet(labels, 10, 0.5, 1, 60))) >= 60
    with pytest.raises(TDPFedError, match=r"min_samples: 99 not reached in 100 draws .* client \d got \d+"):
        dirichlet(labels, 10, 0.5, 1, 99)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_dirichlet_alpha_out_of_range(alpha: float) -> None:
    with pytest.raises(TDPFedError, match=r"dirichlet alpha: .*allowed: a number above 0"):
        dirichlet(np.zeros(9, np.int64), 2, alpha, 0)


def test_dirichlet_with_a_tiny_alpha_still_deals_all() -> None:
    labels = np.repeat(np.arange(40), 25)
    assert_dealt_once(dirichlet(labels, 3, 1e-3, 0), 1000)


@given(owner=st.lists(st.integers(-3, 3), min_size=1, max_size=40))
def test_natural_gives_each_its_own(owner: list[int]) -> None:
    ids = np.array(owner)
    parts = natural(ids)
    assert_dealt_once(parts, len(owner))
    assert [set(ids[part].tolist()) for part in parts] == [{name} for name in sorted(set(owner))]


def test_ids_may_be_strings_but_not_fractions() -> None:
    assert numbered(np.array(["ward b", "ward a", "ward b"])).tolist() == [1, 0, 1]
    with pytest.raises(TDPFedError, match="client ids: float64; allowed"):
        natural(np.array([0.5, np.nan]))


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8), cap=st.integers(1, 30), seed=seeds)
def test_bounded_draws_from_those_that_have_more(sizes: list[int], cap: int, seed: int) -> None:
    parts = natural(np.repeat(np.arange(len(sizes)), sizes))
    capped = bounded(parts, seed, max_samples=cap)
    for before, after in zip(parts, capped, strict=True):
        assert len(after) == min(len(before), cap)
        assert set(after.tolist()) <= set(before.tolist())
        assert len(set(after.tolist())) == len(after)
    assert same(capped, bounded(parts, seed, max_samples=cap))
    assert same(parts, bounded(parts, seed))


def test_bounded_draws_by_the_seed() -> None:
    parts = [np.arange(1000)]
    assert not same(bounded(parts, 0, max_samples=10), bounded(parts, 1, max_samples=10))


def test_bounded_names_the_client_that_has_too_few() -> None:
    parts = [np.arange(5), np.arange(2)]
    with pytest.raises(TDPFedError, match="min_samples: client 1 has 2 samples"):
        bounded(parts, 0, min_samples=3)
    with pytest.raises(TDPFedError, match=r"max_samples: 2; allowed: 3 \(min_samples\) or more"):
        bounded(parts, 0, min_samples=3, max_samples=2)
    with pytest.raises(TDPFedError, match="min_samples: 0; allowed: 1 or more"):
        bounded(parts, 0, min_samples=0)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    fraction=st.floats(0, 1, exclude_max=True),
    seed=seeds,
)
def test_split_parts_each_client(sizes: list[int], fraction: float, seed: int) -> None:
    parts = natural(np.repeat(np.arange(len(sizes)), sizes))
    pairs = split(parts, fraction, seed)
    for part, (train, test) in zip(parts, pairs, strict=True):
        assert np.array_equal(np.sort(np.concatenate([train, test])), part)
        assert len(train) >= 1
        assert len(test) >= 1 or len(part) == 1 or fraction == 0
        assert abs(len(test) - fraction * len(part)) <= 1
    again = split(parts, fraction, seed)
    assert all(same(list(p), list(q)) for p, q in zip(pairs, again, strict=True))


def test_split_is_a_quarter_by_default_and_drawn_by_the_seed() -> None:
    ((train, test),) = split([np.arange(400)])
    assert (len(train), len(test)) == (300, 100)
    assert not np.array_equal(test, split([np.arange(400)], seed=1)[0][1])
    # Two clients of equal size do not hold out the same positions.
    first, second = split([np.arange(400), np.arange(400)])
    assert not np.array_equal(first[1], second[1])


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=5), fraction=st.floats(0, 0.99))
def test_a_split_in_time_takes_as_many_samples_as_one_at_random_and_the_last(sizes: list[int], fraction: float) -> None:
    parts = [np.arange(size) * 3 + 1 for size in sizes]
    for part, (train, test), (_, drawn) in zip(
        parts, split_in_time(parts, fraction), split(parts, fraction), strict=True
    ):
        assert np.concatenate([train, test]).tolist() == part.tolist()
        assert len(test) == len(drawn)


def test_split_official_follows_the_mark() -> None:
    marked = np.array([False, True, False, True])
    pairs = split_official([np.array([0, 1]), np.array([2, 3])], marked)
    assert [(train.tolist(), test.tolist()) for train, test in pairs] == [([0], [1]), ([2], [3])]
    with pytest.raises(TDPFedError, match="client 1: 0 training and 2 test samples"):
        split_official([np.array([0, 2]), np.array([1, 3])], marked)


def test_bad_split() -> None:
    with pytest.raises(TDPFedError, match="client 0: 0 training"):
        split([np.arange(0)])
    for fraction in (1.0, -0.1, float("nan")):
        with pytest.raises(TDPFedError, match=r"test_fraction: .*allowed: 0 or more, below 1"):
            split([np.arange(4)], fraction)


@pytest.mark.parametrize(
    "deal", [iid, lambda y, k, s, **o: classes(y, k, 1, s, **o), lambda y, k, s, **o: dirichlet(y, k, 1.0, s, **o)]
)
def test_more_clients_than_samples(deal: Any) -> None:
    labels = np.zeros(8, np.int64)
    with pytest.raises(TDPFedError, match="clients: 9; allowed: 1 to 8"):
        deal(labels, 9, 0)
    with pytest.raises(TDPFedError, match="clients: 3; allowed: 1 to 2"):
        deal(labels, 3, 0, min_samples=4)
    with pytest.raises(TDPFedError, match="clients: 0; allowed"):
        deal(labels, 0, 0)
    with pytest.raises(TDPFedError, match="min_samples: 0; allowed: 1 or more"):
        deal(labels, 2, 0, min_samples=0)


def test_bad_skew_and_seed() -> None:
    for skew in (-0.1, float("nan"), 11):
        with pytest.raises(TDPFedError, match=r"size_skew: .*allowed: 0"):
            iid(np.zeros(8, np.int64), 2, 0, skew)
    with pytest.raises(TDPFedError, match="seed: -1; allowed: 0 or more"):
        iid(np.zeros(8, np.int64), 2, -1)


def test_streams_of_a_seed_differ_and_global_randomness_stays_untouched() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index]  # noqa: NPY002
    drawn = [generator(7, *stream).integers(2**60) for stream in ((), (1,), (2,), (1, 0), (1, 1))]
    assert len(set(drawn)) == len(drawn)
    assert drawn[0] == np.random.Generator(np.random.Philox(7)).integers(2**60)
    partition.iid(np.zeros(8, np.int64), 2, 0)
    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]  # noqa: NPY002


@pytest.mark.parametrize(("clients", "per_client", "classes"), [(3, 2, 3), (10, 3, 4)])
def test_class_groups_that_leave_a_client_with_fewer_classes_are_refused(
    clients: int, per_client: int, classes: int
) -> None:
    with pytest.raises(TDPFedError) as error:
        class_groups(np.arange(600) % classes, clients, per_client, seed=0)
    assert error.value.field == "clients"
