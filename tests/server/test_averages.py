"""What a method is handed for its averages: each entry once, by its own rule and center, with noise of its own."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.errors import TDPFedError
from tdpfed.server.averages import Averages, HiddenUploads, private_averages, robust_averages
from tdpfed.server.privacy import Privacy, clipped_sum, private_average
from tdpfed.server.robust import Rule, average_for, weighted_mean

CLIENTS = 9
SIZES = {"body": 6, "head": 4}
WEIGHTS = torch.arange(1.0, CLIENTS + 1).double()
SEEDS = st.integers(0, 2**31)
WILD = st.floats(allow_nan=False, allow_infinity=False, width=32)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def uploads(seed: int = 0, clients: int = CLIENTS) -> dict[str, Tensor]:
    return {name: drawn(seed + n, clients, size) for n, (name, size) in enumerate(SIZES.items())}


def center(seed: int = 50) -> dict[str, Tensor]:
    return {name: drawn(seed + n, size) for n, (name, size) in enumerate(SIZES.items())}


def averages(rule: Rule | None = None) -> Averages:
    return robust_averages(uploads(), WEIGHTS, center(), rule or Rule())


def private(privacy: Privacy, given: dict[str, Tensor], at: dict[str, Tensor], seed: int = 3, round_: int = 2) -> Any:
    weights = torch.ones(len(next(iter(given.values()))))
    return private_averages(given, weights, at, privacy, 5.0, seed, round_)


def test_an_entry_is_averaged_once() -> None:
    average = averages()
    average("body")
    average("head")
    for entry in SIZES:
        with pytest.raises(TDPFedError, match=f"average: '{entry}' requested twice"):
            average(entry)
    hidden = private(Privacy(1.0, 1.0), uploads(), center())
    hidden("body")
    with pytest.raises(TDPFedError, match="at most once per round"):
        hidden("body")


def test_an_unknown_entry_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TDPFedError, match=r"average: unknown 'haed', did you mean 'head'\?"):
        averages()("haed")
    average = averages()
    with pytest.raises(TDPFedError, match="unknown 'w'"):
        average("w")
    assert average("head").shape == (4,)  # a mistake costs nothing


def test_the_plain_average_is_the_weighted_mean() -> None:
    average = averages()
    for entry, rows in uploads().items():
        expected = (WEIGHTS[:, None] * rows).sum(0) / WEIGHTS.sum()
        torch.testing.assert_close(average(entry), expected, rtol=1e-12, atol=1e-13)


def test_what_is_averaged_goes_through_a_function_first() -> None:
    seen: list[torch.Size] = []

    def through(rows: Tensor) -> Tensor:
        seen.append(rows.shape)
        return torch.cat([rows.square(), rows[:, :1]], -1)

    result = averages()("head", through)
    assert seen == [(CLIENTS, 4)]  # all clients at once
    expected = weighted_mean(torch.cat([uploads()["head"].square(), uploads()["head"][:, :1]], -1), WEIGHTS)
    assert torch.equal(result, expected)


def test_coordinates_that_were_not_sent_do_not_count() -> None:
    sent = (drawn(9, CLIENTS, 6) > 0).double()
    sent[:, 2], sent[:, 4] = 0, 1
    result, rows = averages()("body", sent=sent), uploads()["body"]
    for i in range(6):
        came = [k for k in range(CLIENTS) if sent[k, i]]
        total = sum(float(WEIGHTS[k] * rows[k, i]) for k in came)
        expected = total / sum(float(WEIGHTS[k]) for k in came) if came else 0.0
        assert float(result[i]) == pytest.approx(expected, rel=1e-12, abs=1e-13)
    assert float(result[2]) == 0


RULES = [Rule("median"), Rule("trimmed-mean"), Rule("krum"), Rule(clip=0.5), Rule("multi-krum", clip="median")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.clip}")
def test_each_entry_has_the_rule_and_its_own_center(rule: Rule) -> None:
    average, there = averages(rule), center()
    for entry, rows in uploads().items():
        assert torch.equal(average(entry), average_for(rule, there[entry])(rows, WEIGHTS))
    if rule.clip is not None:
        shifted = robust_averages(uploads(), WEIGHTS, {**there, "body": there["body"] + 1}, rule)
        assert torch.equal(shifted("head"), averages(rule)("head"))
        assert not torch.equal(shifted("body"), averages(rule)("body"))


# Privacy


def test_a_single_entry_gets_the_whole_clip_and_the_noise_of_one() -> None:
    rows, privacy = uploads()["body"], Privacy(0.8, 1.3)
    result = private(privacy, {"body": rows}, {"body": center()["body"]})("body")
    expected = private_average(privacy, center()["body"], 5.0, 3, 2)(rows, torch.ones(CLIENTS))
    assert torch.equal(result, expected)


def noise(privacy: Privacy, seed: int, round_: int, sizes: dict[str, int]) -> dict[str, Tensor]:
    """What a round gives in which nobody takes part, five times over."""
    nobody = {name: torch.zeros(0, size).double() for name, size in sizes.items()}
    average = private(privacy, nobody, {name: torch.zeros(size).double() for name, size in sizes.items()}, seed, round_)
    return {name: 5 * average(name) for name in reversed(sizes)}  # in any order


def test_each_entry_has_noise_of_its_own_that_can_be_drawn_again() -> None:
    privacy, sizes = Privacy(0.5, 2.0), {"body": 40_000, "head": 40_000}
    places = [(0, 1), (0, 2), (1, 1)]
    found = {place: noise(privacy, *place, sizes) for place in places}
    for place in places:
        again = noise(privacy, *place, sizes)
        assert all(torch.equal(value, again[entry]) for entry, value in found[place].items())
    everything = [value for by_entry in found.values() for value in by_entry.values()]
    for value in everything:
        assert float(value.std()) == pytest.approx(2.0 * 0.5, rel=0.015)  # of the whole clip, whatever the entries
    for one, other in itertools.combinations(everything, 2):
        assert abs(float((one * other).mean())) < 5 / 40_000**0.5


def shares(rows: dict[str, Tensor], at: dict[str, Tensor], privacy: Privacy) -> Tensor:
    """The clipped sums of all entries, one behind the other, less the noise."""
    average, nothing = private(privacy, rows, at), private(privacy, {n: r[:0] for n, r in rows.items()}, at)
    return torch.cat([5 * (average(name) - nothing(name)) for name in rows])


@given(seed=SEEDS, clip=st.floats(1e-2, 1e2), row=st.lists(WILD, min_size=10, max_size=10))
def test_no_client_moves_all_entries_together_by_more_than_the_clip(seed: int, clip: float, row: list[float]) -> None:
    rows, at, privacy = uploads(seed), center(seed + 9), Privacy(clip, 1e-3)
    values = torch.tensor(row, dtype=torch.float64)
    mine = dict(zip(SIZES, values.split(list(SIZES.values())), strict=True))
    more = {name: torch.cat([given, mine[name][None]]) for name, given in rows.items()}
    moved = shares(more, at, privacy) - shares(rows, at, privacy)
    assert float(moved.norm()) <= clip * (1 + 1e-9) + 1e-9
    alone = [clipped_sum(mine[name][None], torch.ones(1), at[name], clip / 2**0.5) for name in SIZES]
    torch.testing.assert_close(moved, torch.cat(alone), rtol=1e-7, atol=1e-7 * clip + 1e-9)


def test_the_clip_is_used_up_by_a_client_that_moves_every_entry_far() -> None:
    rows, at = {name: 1e6 * value for name, value in uploads(clients=1).items()}, center()
    assert float(shares(rows, at, Privacy(3.0, 1e-3)).norm()) == pytest.approx(3.0, rel=1e-6)


def test_uploads_are_hidden() -> None:
    hidden = HiddenUploads()
    with pytest.raises(TDPFedError, match="uploads: 'w' read, must not be"):
        hidden["w"]
    for use in (list, len, lambda one: "w" in one, lambda one: one.get("w"), lambda one: list(one.items())):
        with pytest.raises(TDPFedError, match="with privacy"):
            use(hidden)


def test_privacy_refuses_a_map_that_mixes_clients_and_partial_uploads() -> None:
    with pytest.raises(TDPFedError, match="mixes clients"):
        private(Privacy(1.0, 1.0), uploads(), center())("body", through=lambda rows: rows - rows.mean(0))
    with pytest.raises(TDPFedError, match="sent"):
        private(Privacy(1.0, 1.0), uploads(), center())("body", sent=torch.ones_like(uploads()["body"]))
    private(Privacy(1.0, 1.0), uploads(), center())("body", through=lambda rows: 2 * rows)
