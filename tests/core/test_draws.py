"""Counter-based draws: permutations are bijections, draws look random, and each depends only on where it stands."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import small
from tdpfed.core import draws as draws_module
from tdpfed.core.draws import Stream, Subsets, batch_indices, choose, key, uniform
from tdpfed.core.permutation import mix, permute
from tdpfed.core.state import Turn

KEYS = st.integers(0, 2**32 - 1)
SEEDS = st.integers(0, 2**63 - 1)


def batched(values: list[int], size: int) -> list[list[int]]:
    return [values[start : start + size] for start in range(0, len(values), size)]


def whole(size: int, bits: int) -> Tensor:
    return permute(torch.arange(size), torch.tensor(size), torch.tensor(bits))


@given(KEYS)
def test_permute_is_a_bijection_of_every_small_size(bits: int) -> None:
    size, place = torch.arange(1, 201)[:, None], torch.arange(200)
    sent = torch.where(place < size, permute(place % size, size, torch.tensor(bits)), place)
    assert torch.equal(sent.sort().values, place.expand(200, 200))


@pytest.mark.parametrize("size", [257, 1000, 1023, 4097, 79_510, 100_003])
def test_permute_is_a_bijection_of_large_sizes(size: int) -> None:
    for bits in (0, 1, 12345, 2**32 - 1):
        assert torch.equal(whole(size, bits).sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [2, 3, 7, 10, 16, 23])
def test_permute_sends_every_place_everywhere_alike(size: int) -> None:
    draws = 4000
    bits = key(7, Stream.BATCH, torch.arange(draws))[:, None]
    sent = permute(torch.arange(size)[None], torch.tensor(size), bits)
    counts = torch.zeros(size, size).index_put_(
        (torch.arange(size).expand(draws, size), sent), torch.tensor(1.0), accumulate=True
    )
    expected = draws / size
    statistic = float(((counts - expected) ** 2 / expected).sum())
    free = (size - 1) ** 2
    assert abs(statistic - free) < 6 * (2 * free) ** 0.5, statistic  # mean and deviation of a chi-square


def test_permute_orders_pairs_alike() -> None:
    """All 24 orders of four things come about equally often."""
    draws = 12_000
    sent = permute(torch.arange(4)[None], torch.tensor(4), key(1, Stream.BATCH, torch.arange(draws))[:, None])
    counts = Counter(map(tuple, sent.tolist()))
    assert len(counts) == 24
    assert min(counts.values()) > 0.8 * draws / 24
    assert max(counts.values()) < 1.2 * draws / 24


SIZES = torch.tensor([1, 3, 7, 20, 64])
STARTS = SIZES.cumsum(0) - SIZES


@given(SEEDS, st.integers(1, 10**6), st.integers(1, 6), st.integers(1, 9))
def test_batches_stay_inside_and_no_sample_comes_twice_in_a_pass(
    seed: int, round_: int, draws: int, batch_size: int
) -> None:
    index = batch_indices(seed, round_, torch.arange(5), STARTS, SIZES, draws, batch_size)
    assert index.shape == (5, draws, batch_size)
    for client in range(5):
        own = index[client].reshape(-1) - STARTS[client]
        assert own.min() >= 0
        assert own.max() < SIZES[client]
        for one_pass in batched(own.tolist(), int(SIZES[client])):
            assert len(set(one_pass)) == len(one_pass)


def test_each_pass_has_an_order_of_its_own() -> None:
    first, second, third = batch_indices(0, 1, torch.tensor([0]), torch.tensor([0]), torch.tensor([50]), 3, 50)[0]
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert not torch.equal(first, torch.arange(50))


@given(SEEDS, st.permutations(range(5)), st.integers(1, 5))
def test_batches_do_not_depend_on_the_company(seed: int, order: list[int], count: int) -> None:
    everybody = batch_indices(seed, 3, torch.arange(5), STARTS, SIZES, 4, 6)
    some = torch.tensor(order[:count])
    assert torch.equal(batch_indices(seed, 3, some, STARTS[some], SIZES[some], 4, 6), everybody[some])
    longer = batch_indices(seed, 3, some, STARTS[some], SIZES[some], 7, 6)
    assert torch.equal(longer[:, :4], everybody[some])


def test_batches_depend_on_seed_round_and_client() -> None:
    clients, start, size = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([100, 100])
    base = batch_indices(0, 1, clients, start, size, 1, 30)
    assert torch.equal(base, batch_indices(0, 1, clients, start, size, 1, 30))
    assert not torch.equal(base[0], base[1])
    for other in (1, 2**32, 2**40):
        assert not torch.equal(base, batch_indices(other, 1, clients, start, size, 1, 30))
    assert not torch.equal(base, batch_indices(0, 2, clients, start, size, 1, 30))


@given(SEEDS, st.integers(1, 1000), st.integers(1, 60), st.data())
def test_choose_draws_distinct_clients_in_order(seed: int, round_: int, population: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, population))
    chosen = choose(seed, Stream.SELECT, round_, population, count).tolist()
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < population


def test_choose_is_fair_and_drawn_afresh() -> None:
    rounds = [choose(3, Stream.SELECT, round_, 20, 5) for round_ in range(1, 2001)]
    counts = torch.cat(rounds).bincount(minlength=20)
    assert counts.min() > 420  # 500 expected, deviation 19
    assert counts.max() < 580
    assert len({tuple(chosen.tolist()) for chosen in rounds[:50]}) > 45
    assert any(
        not torch.equal(chosen, choose(4, Stream.SELECT, n, 20, 5)) for n, chosen in enumerate(rounds[:3], start=1)
    )
    assert any(
        not torch.equal(chosen, choose(3, Stream.DROP, n, 20, 5)) for n, chosen in enumerate(rounds[:3], start=1)
    )


def test_keys_differ_wherever_they_stand() -> None:
    count = torch.arange(1000)
    keys = torch.stack(
        [
            key(0, Stream.BATCH, 1, count), key(1, Stream.BATCH, 1, count), key(2**32, Stream.BATCH, 1, count),
            key(0, Stream.SELECT, 1, count), key(0, Stream.BATCH, 2, count), key(0, Stream.BATCH, count, 1),
        ]
    )  # fmt: skip
    assert keys.min() >= 0
    assert keys.max() < 2**32
    assert (
        len(set(keys.flatten().tolist())) > 6000 - 10 - 1
    )  # key(0, BATCH, 1, 1) is in two rows; 32 bits collide now and then


def test_uniform_is_uniform_and_neighbors_are_unrelated() -> None:
    draws = uniform(key(5, Stream.DROP, 1, torch.arange(100_000)))
    assert draws.dtype == torch.float64
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 1 / 2) < 5 * (1 / 12 / 100_000) ** 0.5
    assert abs(float(draws.var()) - 1 / 12) < 0.002
    counts = (draws * 50).long().bincount(minlength=50)
    assert float(((counts - 2000.0) ** 2 / 2000).sum()) < 49 + 6 * 98**0.5
    for lag in (1, 2, 16):
        pair = torch.stack([draws[:-lag], draws[lag:]])
        assert abs(float(pair.corrcoef()[0, 1])) < 0.02


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_permutation_is_the_one_of_the_cpu() -> None:
    size = torch.tensor([1, 2, 3, 80, 81, 82, 1000, 12345, 2**31 - 1, 2**31, 2**32 + 1])[:, None]
    index = torch.arange(3000)[None] % size
    bits = key(5, Stream.BATCH, torch.arange(len(size))[:, None])
    ours = permute(index.cuda(), size.cuda(), bits.cuda()).cpu()
    assert torch.equal(ours, permute(index, size, bits))


def test_draws_are_those_of_every_release() -> None:
    """A run that is resumed, or repeated from its configuration, must see the same samples and clients."""
    clients, start, size = torch.tensor([0, 5]), torch.tensor([0, 50]), torch.tensor([50, 9])
    assert batch_indices(7, 3, clients, start, size, 3, 4).tolist() == [
        [[7, 9, 29, 18], [10, 30, 24, 2], [31, 11, 21, 19]],
        [[56, 50, 58, 54], [51, 57, 53, 55], [52, 57, 52, 53]],
    ]
    assert choose(3, Stream.SELECT, 2, 1000, 6).tolist() == [96, 391, 394, 610, 912, 978]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 40)])
def test_blocks_are_permuted_as_the_whole_is(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    size = torch.randint(1, 3000, (*shape[:-1], 1) if shape else (), generator=generator)
    index, bits = torch.randint(0, 10**6, shape, generator=generator) % size, torch.arange(10, 10 + (shape or (1,))[-1])
    bits = bits.reshape(shape[-1:])
    whole = permute(index, size, bits)
    assert whole.shape == shape
    monkeypatch.setattr("tdpfed.core.permutation.BLOCK", 4)
    assert torch.equal(permute(index, size, bits), whole)


def permuted_by_hand(index: int, size: int, bits: int) -> int:
    """Permute with Python's whole numbers: a network of six rounds on a grid, again until the place is inside."""
    columns = math.isqrt(size - 1) + 1
    rows = -(-size // columns)
    while True:
        left, right = divmod(index, columns)
        for turn in range(6):
            salt = mix(bits ^ (turn * 0x632BE5AB % 2**32))
            if turn % 2:
                right = (right + mix((left * 0x9E3779B1 + salt) % 2**32)) % columns
            else:
                left = (left + mix((right * 0x9E3779B1 + salt) % 2**32)) % rows
        index = left * columns + right
        if index < size:
            return index


@given(size=st.integers(1, 2**31), bits=st.lists(KEYS, min_size=1, max_size=3), seed=SEEDS)
@example(size=1, bits=[0], seed=0)
@example(size=2**31, bits=[2**32 - 1], seed=0)
def test_permute_equals_whole_numbers_by_hand(size: int, bits: list[int], seed: int) -> None:
    index = torch.randint(0, size, (20,), generator=torch.Generator().manual_seed(seed))
    expected = [[permuted_by_hand(place, size, name) for place in index.tolist()] for name in bits]
    assert permute(index, torch.tensor(size), torch.tensor(bits)[:, None]).tolist() == expected


def test_clients_with_fewer_samples_than_a_round_takes_do_not_change_the_draws_of_others() -> None:
    clients, start, size = torch.tensor([4, 1, 8]), torch.tensor([0, 30, 100]), torch.tensor([30, 12, 11])
    together = batch_indices(5, 2, clients, start, size, 3, 4)
    alone = [batch_indices(5, 2, clients[[k]], start[[k]], size[[k]], 3, 4)[0] for k in range(3)]
    assert torch.equal(together, torch.stack(alone))


def test_subsets_drawn_in_groups_are_those_drawn_together_and_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clients = torch.tensor([4, 0, 7, 2, 9])
    alone = [Subsets(50, 20).of(Turn(3, 5, one)) for one in clients]
    subsets = Subsets(50, 20)
    draws = small.watched(monkeypatch, draws_module, "permute")
    for part in (clients[:2], clients[2:4], clients[4:]):
        subsets.of(Turn(3, 5, part))
    for asked in (clients, clients.flip(0), clients[1:3]):
        found = subsets.of(Turn(3, 5, asked))
        assert [row.tolist() for row in found] == [alone[clients.tolist().index(int(one))].tolist() for one in asked]
    assert len(draws) == 3
    for turn in (Turn(3, 6, clients), Turn(4, 5, clients), Turn(3, 5, torch.tensor([4, 1]))):
        assert torch.equal(subsets.of(turn), Subsets(50, 20).of(turn))
    empty = Subsets(50, 20)
    assert empty.of(Turn(3, 5, clients[:0])).shape == (0, 20)
    assert torch.equal(empty.of(Turn(3, 5, clients)), Subsets(50, 20).of(Turn(3, 5, clients)))
    mask = subsets.mask(Turn(3, 5, clients), torch.zeros(1, dtype=torch.float64))
    assert mask.dtype == torch.float64
    assert [row.nonzero().flatten().tolist() for row in mask] == [sorted(one.tolist()) for one in alone]
