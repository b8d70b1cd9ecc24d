"""Changed training images: each is one of the changes that are allowed, drawn from its place alone."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import small
from tdpfed import make_federation
from tdpfed.config.loading import load_config
from tdpfed.data.federation import AUGMENT
from tdpfed.engine.augment import MAX_SHIFT_PIXELS, augmented
from tdpfed.errors import TDPFedError
from tdpfed.runs.prepare import prepare

CLIENTS, BATCH, SHAPE = 3, 50, (2, 5, 7)


def images(*leading: int) -> Tensor:
    return torch.randn(*leading, *SHAPE, generator=torch.Generator().manual_seed(3))


def changed(image: Tensor, mirrored: bool, down: int, right: int) -> Tensor:
    """The slow twin: what one change makes of one image."""
    image = image.flip(-1) if mirrored else image
    # A mirrored image is moved the other way, as the index is mirrored first.
    right = -right if mirrored else right
    height, width = image.shape[-2:]
    top, left = MAX_SHIFT_PIXELS + down, MAX_SHIFT_PIXELS + right
    framed = pad(image, (MAX_SHIFT_PIXELS,) * 4)
    return framed[..., top : top + height, left : left + width]


@pytest.mark.parametrize("kind", ["flip", "flip-shift"])
def test_every_image_is_changed_in_an_allowed_way_and_all_ways_come(kind: str) -> None:
    x, clients = images(CLIENTS, BATCH), torch.arange(CLIENTS)
    moves = range(-MAX_SHIFT_PIXELS, MAX_SHIFT_PIXELS + 1) if kind == "flip-shift" else [0]
    seen = set()
    for step in range(4):
        y = augmented(x, kind, 1, 2, clients, step)
        assert y.shape == x.shape
        for before, after in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True):
            ways = itertools.product([False, True], moves, moves)
            found = [way for way in ways if torch.equal(changed(before, *way), after)]
            assert len(found) == 1 or not after.any()  # an image that moved out of sight altogether
            seen.update(found[:1])
    assert {way[0] for way in seen} == {False, True}
    assert {way[1] for way in seen} == {way[2] for way in seen} == set(moves)


def test_no_change_by_default() -> None:
    x = images(CLIENTS, BATCH)
    assert augmented(x, "none", 1, 2, torch.arange(CLIENTS), 0) is x
    assert make_federation("digits").augment == "none"


def test_a_change_depends_on_its_place_alone() -> None:
    x, clients = images(CLIENTS, BATCH), torch.tensor([4, 7, 9])
    whole = augmented(x, "flip-shift", 1, 2, clients, 5)
    alone = [augmented(x[k], "flip-shift", 1, 2, client, 5) for k, client in enumerate(clients)]
    assert torch.equal(whole, torch.stack(alone))
    assert torch.equal(whole, augmented(x, "flip-shift", torch.ones(3).long(), torch.tensor(2), clients, 5))
    for seed, round_, step in ((2, 2, 5), (1, 3, 5), (1, 2, 6)):
        assert not torch.equal(whole, augmented(x, "flip-shift", seed, round_, clients, step))
    same = images(1, BATCH).expand(CLIENTS, -1, -1, -1, -1)
    one, two, _ = augmented(same, "flip-shift", 1, 2, clients, 5)
    assert not torch.equal(one, two)


def test_runs_agree_with_the_loop_and_in_chunks_to_the_bit() -> None:
    algorithm, data = small.variants()["tdpfed"], small.federation().with_augment("flip-shift")
    whole = small.train(algorithm, model="conv", data=data)
    assert small.equal(whole, small.train(algorithm, model="conv", data=data, chunk=3))
    small.assert_close(whole, small.train(algorithm, model="conv", data=data, runner="loop"), 1e-9)
    assert not small.equal(whole, small.train(algorithm, model="conv"))


@pytest.mark.parametrize("kind", AUGMENT)
def test_the_configuration_says_it(kind: str) -> None:
    federation = prepare(load_config("digits", [f"data.augment={kind}", "run.device=cpu"])).federation
    assert (federation.augment, federation.to("cpu").augment) == (kind, kind)


def test_flat_samples_and_unknown_changes_are_refused() -> None:
    with pytest.raises(TDPFedError, match=r"^data.augment: 'flip' for samples of shape \(60,\); allowed: for images"):
        prepare(load_config("digits", ["data.name=synthetic", "data.augment=flip", "model.name=logistic"]))
    with pytest.raises(TDPFedError, match="augment: unknown 'flop', did you mean 'flip'"):
        make_federation("digits", augment="flop")
