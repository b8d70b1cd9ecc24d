"""The server's half of a round by itself: who is let in, what each counts, and what it says when it cannot."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from tdpfed.algorithms import Algorithm, FedAvg, Local, PFedMe, TDPFed
from tdpfed.core.layout import Layout
from tdpfed.core.state import State, Turn
from tdpfed.errors import QuorumError, TDPFedError
from tdpfed.server.gate import accepted, only, refusals
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Accountant, Privacy
from tdpfed.server.robust import Rule
from tdpfed.server.round import ServerRound, diverged, initial_state, is_finite

LAYOUT = Layout.of(small.mlp())
TURN = Turn(0, 4, torch.tensor([2, 3, 7, 8]))
SAMPLES = torch.tensor([10, 20, 30, 40])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(algorithm: Algorithm, rule: Rule | None = None, **options: Any) -> tuple[ServerRound, State, State]:
    """Return the half of a server of ten clients, its state, and uploads of four clients near it."""
    bound = algorithm.bind(LAYOUT, 10)
    server, _ = initial_state(bound, drawn(0, LAYOUT.size), 5)
    sent = bound.unchanged(bound.broadcast(server, TURN))
    uploads = {name: value + 0.01 * drawn(1, *value.shape) for name, value in sent.items()}
    asked = options.pop("participation", Participation())
    return ServerRound(bound, 5, asked, rule or Rule(), **options), server, uploads


def test_the_first_state_depends_on_the_seed_alone_and_both_sides_start_from_its_model() -> None:
    theta = drawn(0, LAYOUT.size)
    bound = TDPFed().bind(LAYOUT, 10)
    (server, start), (again, _), (other, _) = (initial_state(bound, theta, seed) for seed in (1, 1, 2))
    assert torch.equal(server["factors"], again["factors"])
    assert not torch.equal(server["factors"], other["factors"])
    assert torch.equal(start, bound.plan.compose(server["factors"]))
    assert initial_state(Local().bind(LAYOUT, 10), theta, 1) == ({}, theta)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_clients_count_by_their_samples_or_alike(weights: Any) -> None:
    half, server, uploads = made(FedAvg(weights=weights))
    share = SAMPLES.double() / 100 if weights == "samples" else torch.full((4,), 0.25, dtype=torch.float64)
    mean = share @ uploads["w"].double()
    torch.testing.assert_close(half.aggregate(server, uploads, SAMPLES, TURN)["w"].double(), mean, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_or_out_of_gauge_is_left_out_and_named() -> None:
    half, server, uploads = made(TDPFed(), Rule(gauge=0.5))
    uploads["factors"][0, 5] = torch.nan
    uploads["factors"][2] *= 100
    passed, turn, refused = half.admitted(uploads, server, TURN)
    assert turn.clients.tolist() == [3, 8]
    assert (turn.seed, turn.round) == (TURN.seed, TURN.round)
    assert torch.equal(passed["factors"], uploads["factors"][[1, 3]])
    assert sorted((one.client, one.rule) for one in refused) == [(2, "nan"), (7, "gauge")]
    assert accepted(TURN, refused).tolist() == [False, True, False, True]
    uploads["factors"][0, 5] = uploads["factors"][1, 5]
    assert [one.client for one in refusals(half.algorithm, half.rule, uploads, server, TURN, finite=True)] == [7]


def test_nobody_refused_copies_nothing() -> None:
    half, server, uploads = made(PFedMe())
    passed, turn, refused = half.admitted(uploads, server, TURN)
    assert passed is uploads
    assert turn is TURN
    assert refused == []
    assert only(uploads, TURN, torch.ones(4, dtype=torch.bool)) == (uploads, TURN)


@pytest.mark.parametrize("algorithm", [FedAvg(), TDPFed(), TDPFed(aggregation="act")], ids=str)
def test_a_round_with_nobody_changes_nothing_without_privacy_and_adds_noise_with_it(algorithm: Algorithm) -> None:
    half, server, _ = made(algorithm)
    uploads, turn = half.no_uploads(server, TURN)
    assert {name: value.shape[0] for name, value in uploads.items()} == dict.fromkeys(half.algorithm.up(), 0)
    assert half.aggregate(server, uploads, SAMPLES[:0], turn) is server
    private = made(algorithm, accountant=Accountant(Privacy(1.0, 1.0), 0.5))[0]
    noisy = private.aggregate(server, uploads, SAMPLES[:0], turn)
    assert all(not torch.equal(value, server[name]) for name, value in noisy.items())


def test_the_cohort_is_the_rate_of_the_population() -> None:
    """Four uploads came of the five that are expected of ten clients: the sum is divided by five."""
    privacy = Privacy(1e4, 1e-3)
    half, server, uploads = made(FedAvg(weights="uniform"), accountant=Accountant(privacy, 0.5))
    released = half.aggregate(server, uploads, SAMPLES, TURN)["w"]
    noise = half.aggregate(server, *_without(half, server))["w"] - server["w"]
    expected = server["w"] + (uploads["w"] - server["w"]).sum(0) / 5 + noise
    torch.testing.assert_close(released, expected, rtol=1e-4, atol=1e-4)


def _without(half: ServerRound, server: State) -> tuple[State, Tensor, Turn]:
    uploads, turn = half.no_uploads(server, TURN)
    return uploads, SAMPLES[:0], turn


def test_enough_uploads_and_the_error_where_there_are_too_few() -> None:
    half = made(FedAvg(), Rule("krum", byzantine=1), participation=Participation(quorum=3))[0]
    assert [half.enough(count) for count in (2, 3, 4, 5, 6)] == [False, False, False, True, True]
    for count, words in ((2, r"participation\.quorum requires 3"), (4, r"robust\.name 'krum' needs more")):
        with pytest.raises(QuorumError, match=rf"round 9: {count} uploads accepted in the last of 3 attempts, {words}"):
            raise half.below_quorum(9, 3, count, [])


def test_divergence_names_the_rates() -> None:
    error = diverged(PFedMe(eta=0.5, eta_p=0.25), 7, 3, ", or stop")
    assert isinstance(error, TDPFedError)
    assert str(error) == (
        "round 7: loss or parameters of client 3 are not finite, the run diverges; "
        "lower the learning rates (eta=0.5, eta_p=0.25), or stop"
    )
    assert "parameters are" in str(diverged(FedAvg(), 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_state_is_finite_if_all_its_numbers_are(dtype: torch.dtype) -> None:
    fine = {"a": torch.tensor([-3.0, 2.0], dtype=dtype), "none": torch.empty(0), "counts": torch.tensor([7])}
    assert is_finite(fine)
    assert is_finite({})
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 1):
            value = fine["a"].clone()
            value[place] = bad
            assert not is_finite({**fine, "a": value})
            assert not is_finite({"first": value.double(), **fine})
