import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tdpfed.data import Dataset, Federation
from tdpfed.data.normalization import NORMALIZE, Normalization
from tdpfed.errors import TDPFedError


def own(samples: int = 40, clients: int = 4, **options: Any) -> Federation:
    """Samples whose only feature is their number, so that it can be seen where each went."""
    x = torch.arange(samples, dtype=torch.float64)[:, None]
    y = torch.arange(samples) % 3
    return Federation.from_tensors(x, y, torch.arange(samples) % clients, **({"normalize": "none"} | options))


@given(
    ids=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    fraction=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
)
def test_ranges_are_disjoint_and_cover_and_samples_keep_labels_and_owners(
    ids: list[int], fraction: float, seed: int
) -> None:
    n = len(ids)
    x, y = torch.arange(n)[:, None], torch.arange(n) % 4
    fed = Federation.from_tensors(x, y, ids, normalize="none", test_fraction=fraction, seed=seed, classes=4)
    starts = torch.cat([fed.train_start, fed.test_start]).tolist()
    sizes = torch.cat([fed.train_size, fed.test_size]).tolist()
    assert starts == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == n
    assert fed.train_size.min() >= 1
    assert torch.equal(fed.x[:, 0].sort().values, torch.arange(n, dtype=torch.float32))
    assert torch.equal(fed.y, fed.x[:, 0].long() % 4)
    for k, name in enumerate(sorted(set(ids))):
        x_train, y_train, x_test, y_test = fed.client(k)
        assert len(x_train) == len(y_train) == fed.train_size[k]
        assert len(x_test) == len(y_test) == fed.test_size[k]
        assert {ids[int(i)] for i in torch.cat([x_train, x_test])[:, 0]} == {name}


def test_types_shapes_and_names() -> None:
    fed = Federation.from_tensors(np.ones((8, 3, 2, 2)), np.zeros(8, np.uint16), list("aabbaabb"), name="wards")
    assert fed.name == "wards"
    assert fed.clients == 2
    assert fed.input_shape == (3, 2, 2)
    assert fed.device == torch.device("cpu")
    assert fed.classes == 1
    assert fed.x.dtype == torch.float32
    for tensor in (fed.y, fed.train_start, fed.train_size, fed.test_start, fed.test_size):
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


@pytest.mark.parametrize("clients", [[0, 2], [3], [0, 1, 2, 3]])
def test_only_some_clients_keep_their_samples_and_all_their_numbers(clients: list[int]) -> None:
    whole = own(samples=43)
    some = whole.only(torch.tensor(clients))
    assert some.clients == 4
    assert torch.equal(some.train_size, whole.train_size)
    assert torch.equal(some.test_size, whole.test_size)
    assert len(some.x) == len(some.y) == sum(len(whole.client(k)[i]) for k in clients for i in (0, 2))
    for k in clients:
        assert all(torch.equal(a, b) for a, b in zip(some.client(k), whole.client(k), strict=True))


def test_client_returns_views() -> None:
    fed = own()
    assert fed.client(1)[0].untyped_storage().data_ptr() == fed.x.untyped_storage().data_ptr()
    for k in (-1, 4):
        with pytest.raises(TDPFedError, match=f"client: {k}; allowed: 0 to 3"):
            fed.client(k)


def test_the_same_seed_splits_alike_and_another_otherwise() -> None:
    assert torch.equal(own(seed=3).x, own(seed=3).x)
    assert not torch.equal(own(seed=3).x, own(seed=4).x)


def test_test_mask_decides() -> None:
    mask = torch.arange(40) >= 30
    fed = own(test_mask=mask)
    assert fed.train_size.sum() == 30
    assert fed.x[:30].max() == 29
    assert torch.equal(fed.x, own(test_mask=mask.numpy(), seed=9).x)


def test_to_changes_type_and_leaves_the_original() -> None:
    fed = own()
    moved = fed.to("cpu", torch.float64)
    assert (moved.x.dtype, fed.x.dtype) == (torch.float64, torch.float32)
    assert torch.equal(moved.x.float(), fed.x)
    assert fed.to("cpu").x.dtype == torch.float32
    assert moved.y.dtype == torch.int64
    meta = fed.to("meta")
    assert meta.device.type == "meta"
    assert all(getattr(meta, f).is_meta for f in ("y", "train_start", "train_size", "test_start", "test_size"))
    with pytest.raises(TDPFedError, match=r"dtype: torch\.int64; allowed"):
        fed.to("cpu", torch.int64)


def parted(x: Tensor, normalize: str, dtype: torch.dtype = torch.float64) -> Federation:
    """The first two thirds train."""
    n = len(x)
    mask = torch.arange(n) >= 2 * n // 3
    ids = torch.arange(n) % 3
    y = torch.zeros(n, dtype=torch.int64)
    return Federation.from_tensors(x, y, ids, test_mask=mask, normalize=normalize, dtype=dtype)


@pytest.mark.parametrize("shape", [(90, 5), (90, 2, 4), (90, 3, 4, 4)])
def test_standard_normalizes_per_channel_or_feature_by_training_samples_alone(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 7 + 3
    x = x * torch.arange(1, shape[1] + 1).view(-1, *[1] * (len(shape) - 2))
    fed = parted(x, "standard")
    dims = [d for d in range(len(shape)) if d != 1]
    train = fed.x[:60]
    assert torch.allclose(train.mean(dims), torch.zeros(shape[1], dtype=torch.float64), atol=1e-12)
    assert torch.allclose(train.var(dims, correction=0), torch.ones(shape[1], dtype=torch.float64))
    disturbed = x.clone()
    disturbed[60:] *= 1000
    assert torch.equal(parted(disturbed, "standard").x[:60], train)
    assert not torch.equal(parted(disturbed, "standard").x[60:], fed.x[60:])


def test_feature_normalizes_every_pixel_by_training_samples_alone() -> None:
    x = torch.randn(90, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x * torch.arange(1, 49).view(3, 4, 4) + torch.arange(48).view(3, 4, 4)
    x[:, 0, 0, 0] = 7.0
    train = parted(x, "feature").x[:60]
    assert torch.allclose(train.mean(0), torch.zeros(3, 4, 4, dtype=torch.float64), atol=1e-12)
    ones = torch.ones(3, 4, 4, dtype=torch.float64)
    ones[0, 0, 0] = 0.0  # a constant stays finite
    assert torch.allclose(train.var(0, correction=0), ones)
    flat = parted(x.flatten(1), "standard").x
    assert torch.equal(parted(x, "feature").x, flat.view_as(x))


def test_standard_leaves_constant_features_finite() -> None:
    x = torch.full((9, 2), 0.1)
    x[:, 1] = torch.arange(9)
    x[8, 0] = 5.1
    fed = parted(x, "standard", torch.float32)
    assert fed.x[:6, 0].abs().max() < 1e-6
    assert fed.x[:, 0].max() == pytest.approx(5.0)


def test_unit_and_none() -> None:
    bytes_ = torch.tensor([[0], [51], [255]], dtype=torch.uint8).repeat(3, 1)
    assert sorted(set(parted(bytes_, "unit").x.flatten().tolist())) == [0, 0.2, 1]
    assert sorted(set(parted(bytes_, "none").x.flatten().tolist())) == [0, 51, 255]
    assert sorted(set(parted(bytes_ / 255, "unit", torch.float32).x.flatten().tolist())) == pytest.approx([0, 0.2, 1])
    assert sorted(set(parted(bytes_, "symmetric").x.flatten().tolist())) == pytest.approx([-1, -0.6, 1])
    floats = parted(bytes_ / 255, "symmetric", torch.float32)
    assert sorted(set(floats.x.flatten().tolist())) == pytest.approx([-1, -0.6, 1])
    assert bytes_.dtype == torch.uint8
    with pytest.raises(TDPFedError, match="normalize: 'symmetric' with values from 0 to 255; allowed: bytes or"):
        parted(bytes_.float(), "symmetric")
    with pytest.raises(TDPFedError, match="normalize: 'unit' with values from 0 to 255; allowed: bytes or"):
        parted(bytes_.float(), "unit")
    with pytest.raises(TDPFedError, match=r"normalize: unknown 'standart'.*did you mean 'standard'"):
        parted(bytes_, "standart")


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.uint8])
def test_the_callers_data_stay_as_they_were(normalize: str, kind: torch.dtype) -> None:
    x = torch.rand(9, 2, generator=torch.Generator().manual_seed(0)).to(kind)
    before = x.clone()
    parted(x, normalize, torch.float32)
    assert torch.equal(x, before)


def test_half_precision_is_normalized_before_it_is_rounded() -> None:
    x = torch.arange(90, dtype=torch.float64)[:, None] * 1e4
    fed = parted(x, "standard", torch.float16)
    assert fed.x.dtype == torch.float16
    assert torch.allclose(fed.x, parted(x, "standard").x.half(), atol=1e-3)


def test_read_only_arrays_are_taken() -> None:
    x = np.ones((4, 2), np.float32)
    x.setflags(write=False)
    assert Federation.from_tensors(x, np.zeros(4, np.int64), [0, 0, 1, 1]).x.shape == (4, 2)


X, Y, IDS = torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("x", "y", "ids", "options", "message"),
    [
        (torch.tensor([[1.0, torch.nan]] * 4), Y, IDS, {}, "x: NaN, infinite or beyond"),
        (torch.tensor([[1e300]] * 4, dtype=torch.float64), Y, IDS, {}, "x: NaN, infinite or beyond torch.float32"),
        (torch.ones(4), Y, IDS, {}, r"x: torch\.float32 of shape \(4,\); allowed: real numbers"),
        (torch.ones(4, 1, dtype=torch.complex64), Y, IDS, {}, r"x: torch\.complex64"),
        (torch.ones(0, 2), Y[:0], [], {}, "x: no samples"),
        (X, Y.float(), IDS, {"targets": "classes"}, r"y: torch\.float32 of shape \(4,\); allowed for classes: whole"),
        (X, Y / 0, IDS, {}, "y: NaN, infinite"),
        (X, Y + 0j, IDS, {}, r"y: torch\.complex64; allowed: whole or real numbers"),
        (X, Y[:3], IDS, {}, r"y: shape \(3,\); allowed: a target for each of the 4 samples of x"),
        (X, Y, IDS[:3], {}, r"client_ids: shape \(3,\)"),
        (X, Y, IDS, {"test_mask": torch.tensor([True])}, r"test_mask: shape \(1,\)"),
        (X, Y, IDS, {"test_mask": torch.tensor([0, 1, 0, 1])}, "test_mask: int64; allowed: bool"),
        (X, Y, IDS, {"test_mask": torch.tensor([0, 0, 1, 1]).bool()}, "client 1: 0 training and 2 test samples"),
        (X, Y, IDS, {"classes": 1}, "y: labels from 0 to 1; allowed: 0 to 0"),
        (X, Y - 1, IDS, {}, "y: labels from -1 to 0; allowed: 0 to 0"),
        (X, Y, IDS, {"test_fraction": 1.5}, "test_fraction: 1.5"),
        (X, Y, IDS, {"dtype": torch.int32}, r"dtype: torch\.int32"),
        (X, Y, [0.5] * 4, {}, "client ids: float64"),
    ],
)
def test_bad_tensors(x: Tensor, y: Tensor, ids: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(TDPFedError, match=message):
        Federation.from_tensors(x, y, ids, **options)


def test_from_parts_takes_the_parts_in_order() -> None:
    data = Dataset("tiny", np.arange(6, dtype=np.uint8)[:, None], np.array([0, 1, 2, 0, 1, 2]), 3)
    parts = [(np.array([4, 1]), np.array([5])), (np.array([0]), np.array([], np.int64))]
    fed = Federation.from_parts(data, parts, normalize="none")
    assert fed.x[:, 0].tolist() == [4, 1, 0, 5]
    assert fed.y.tolist() == [1, 1, 0, 2]
    assert [t.tolist() for t in (fed.train_start, fed.train_size)] == [[0, 2], [2, 1]]
    assert [t.tolist() for t in (fed.test_start, fed.test_size)] == [[3, 4], [1, 0]]
    assert (fed.name, fed.classes, fed.clients) == ("tiny", 3, 2)
    assert Federation.from_parts(data, parts, dtype=torch.float64).x.dtype == torch.float64
    with pytest.raises(TDPFedError, match="client 1: 0 training samples"):
        Federation.from_parts(data, [parts[0], (parts[1][1], parts[1][0])])
    with pytest.raises(TDPFedError, match="clients: 0"):
        Federation.from_parts(data, [])


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])
def test_what_was_applied_is_kept_and_gives_the_same_bits(
    normalize: str, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Also after a way through JSON."""
    x = torch.rand(90, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = (x * 200).to(kind) if kind == torch.uint8 else x
    fed = parted(x, normalize, dtype)
    applied = Normalization.from_dict(json.loads(json.dumps(fed.normalization.as_dict())))
    mask = torch.arange(90) >= 60
    order = [i for test in (False, True) for k in range(3) for i in range(90) if i % 3 == k and bool(mask[i]) == test]
    assert torch.equal(applied.apply(x[order], dtype), fed.x)
    assert applied.kind == normalize
    always = normalize in ("standard", "feature", "symmetric")
    assert applied.changes == (always or (normalize == "unit" and kind == torch.uint8))


@pytest.mark.parametrize(
    "change",
    [{"kind": "other"}, {"scale": [0.0]}, {"mean": [float("nan")]}, {"mean": ["a"]}, {"shape": [2]}, {"type": "save"}],
)
def test_damaged_statistics_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TDPFedError, match="normalize: "):
        Normalization.from_dict({**Normalization().as_dict(), **change})


def test_clients_keep_their_ids_and_classes_their_names() -> None:
    ids = ["hospital-2", "hospital-10", "hospital-1"] * 4
    x, y = torch.arange(12.0)[:, None], torch.arange(12) % 2
    fed = Federation.from_tensors(x, y, ids, normalize="none", class_names=["healthy", "ill"])
    assert fed.ids == ("hospital-1", "hospital-10", "hospital-2")
    assert fed.class_names == ("healthy", "ill")
    assert {ids[int(i)] for i in fed.client("hospital-10")[0][:, 0]} == {"hospital-10"}
    assert fed.position("hospital-2") == 2
    assert fed.to("cpu").with_augment("none").only(torch.tensor([1])).ids == fed.ids
    with pytest.raises(TDPFedError, match=r"client: unknown 'hospital-3', did you mean 'hospital-2'\? Allowed: hosp"):
        fed.client("hospital-3")
    assert Federation.from_tensors(x, y, [7, 5, 30] * 4, normalize="none").ids == ("5", "7", "30")
    with pytest.raises(TDPFedError, match="class_names: 3 names; allowed: one for each of 2 classes"):
        Federation.from_tensors(x, y, ids, classes=2, class_names=["a", "b", "c"])
    with pytest.raises(TDPFedError, match="ids: 2 different names; allowed: one for each of 3"):
        replace(fed, ids=("a", "b", "b"))
