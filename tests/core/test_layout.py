"""Laws of layouts: flatten and unflatten are inverse, views share memory, the hash tells layouts apart."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tdpfed.core.layout import Layout
from tdpfed.errors import TDPFedError

shapes = st.lists(st.lists(st.integers(1, 4), max_size=4).map(tuple), min_size=1, max_size=5)
batches = st.lists(st.integers(0, 3), max_size=2)


def layout_of(sizes: list[tuple[int, ...]]) -> Layout:
    return Layout.of({f"p{n}": shape for n, shape in enumerate(sizes)})


@given(shapes, batches)
def test_flatten_and_unflatten_are_inverse(sizes: list[tuple[int, ...]], batch: list[int]) -> None:
    layout = layout_of(sizes)
    flat = torch.randn(*batch, layout.size, generator=torch.Generator().manual_seed(0))
    named = layout.unflatten(flat)
    assert [tuple(t.shape) for t in named.values()] == [(*batch, *shape) for shape in sizes]
    assert list(named) == list(layout.names)
    assert torch.equal(layout.flatten(named), flat)
    assert torch.equal(layout.flatten(dict(reversed(named.items()))), flat)
    assert torch.equal(layout.join(layout.split(flat)), flat)


@given(shapes, st.lists(st.integers(1, 3), max_size=2))
def test_unflatten_gives_the_slices_without_a_copy(sizes: list[tuple[int, ...]], batch: list[int]) -> None:
    layout = layout_of(sizes)
    flat = torch.randn(*batch, layout.size, generator=torch.Generator().manual_seed(0))
    for name, tensor in layout.unflatten(flat).items():
        assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        assert torch.equal(tensor.reshape(*batch, -1), flat[..., layout.slices[name]])
    ends = [(where.start, where.stop) for where in layout.slices.values()]
    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == layout.size == sum(layout.sizes)


def test_a_module_has_the_layout_of_its_named_parameters() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(5, 2, bias=False))
    layout = Layout.of(model)
    assert layout.names == ("0.weight", "0.bias", "1.weight")
    assert layout.shapes == ((4, 3, 3, 3), (4,), (2, 5))
    assert layout == Layout.of(dict(model.named_parameters()))
    named = layout.unflatten(layout.flatten(dict(model.named_parameters())))
    assert all(torch.equal(named[name], value) for name, value in model.named_parameters())


def test_the_gradient_of_unflatten_is_the_slice_of_ones() -> None:
    layout = Layout.of({"a": (2, 2), "b": (3,)})
    flat = torch.zeros(2, 7, requires_grad=True)
    layout.unflatten(flat)["b"].sum().backward()
    assert flat.grad is not None
    assert flat.grad.tolist() == [[0, 0, 0, 0, 1, 1, 1]] * 2


def test_the_hash_depends_on_names_shapes_and_order_alone() -> None:
    base = Layout.of({"a": (2, 3), "b": (4,)})
    assert base.hash == Layout.of({"a": torch.zeros(2, 3), "b": [4]}).hash
    others: list[dict[str, tuple[int, ...]]] = [
        {"a": (2, 3), "c": (4,)},
        {"a": (3, 2), "b": (4,)},
        {"b": (4,), "a": (2, 3)},
        {"a": (2, 3)},
        {"a": (6,), "b": (4,)},
    ]
    hashes = {base.hash, *(Layout.of(dict[str, Tensor | Sequence[int]](other)).hash for other in others)}
    assert len(hashes) == 6
    assert all(len(h) == 64 for h in hashes)


def test_the_hash_is_stable() -> None:
    assert Layout.of({"w": (2, 3)}).hash == "0c2475f6761048cd66b6e4c7626f46e4a345093026012bf8772336d6d2f76d18"


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(TDPFedError, match="no parameters given, at least one"):
        Layout.of({})
    with pytest.raises(TDPFedError, match="no parameters given, at least one"):
        Layout.of(nn.ReLU())
    with pytest.raises(TDPFedError, match=r"'a' has shape \(2, 0\), every dimension must be at least 1"):
        Layout.of({"a": (2, 0)})
    with pytest.raises(TDPFedError, match="the name 'a' appears more than once, names must be unique"):
        Layout(("a", "b", "a"), ((1,), (1,), (2,)))


@pytest.mark.parametrize("shape", [(), (6,), (8,), (7, 1), (3, 6)])
def test_flat_vectors_of_another_length_are_refused(shape: tuple[int, ...]) -> None:
    layout = Layout.of({"a": (2, 2), "b": (3,)})
    for call in (layout.split, layout.unflatten):
        with pytest.raises(TDPFedError, match="the last dimension must be 7") as error:
            call(torch.zeros(shape))
        assert str(shape) in str(error.value)


def test_flatten_refuses_other_names_and_shapes() -> None:
    layout = Layout.of({"a": (2, 2), "b": (3,)})
    with pytest.raises(TDPFedError, match=r"missing \['b'\], not in the layout \['c'\]"):
        layout.flatten({"a": torch.zeros(2, 2), "c": torch.zeros(3)})
    with pytest.raises(TDPFedError, match=r"'b' has shape \(4,\), must be \(3,\)"):
        layout.flatten({"a": torch.zeros(2, 2), "b": torch.zeros(4)})
    with pytest.raises(TDPFedError, match=r"'b' has shape \(5, 3\), must be \(6, 3\)"):
        layout.flatten({"a": torch.zeros(6, 2, 2), "b": torch.zeros(5, 3)})
    with pytest.raises(TDPFedError, match=r"'a' has shape \(2,\), must be \('...', 2, 2\)"):
        layout.flatten({"a": torch.zeros(2), "b": torch.zeros(3)})


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.InstanceNorm2d(4, track_running_stats=True)]
)
def test_running_statistics_are_refused(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(norm))
    with pytest.raises(TDPFedError) as error:
        Layout.of(model)
    for word in ("'1.0'", type(norm).__name__, "GroupNorm"):
        assert word in str(error.value)
    with pytest.raises(TDPFedError, match="model itself"):
        Layout.of(norm)


def test_norms_without_running_statistics_pass() -> None:
    model = nn.Sequential(
        nn.BatchNorm2d(4, track_running_stats=False), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)
    )
    assert len(Layout.of(model).names) == 6


NET = Layout.of({"conv.weight": (2, 1, 3), "conv.bias": (2,), "fc.weight": (3, 2), "fc.bias": (3,)})


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("last", ["fc.weight", "fc.bias"]),
        ("!last", ["conv.weight", "conv.bias"]),
        ("!conv*", ["fc.weight", "fc.bias"]),
        (["!*.bias", "fc.bias"], ["conv.weight", "fc.weight", "fc.bias"]),
        ([], []),
    ],
)
def test_patterns_and_their_opposites(patterns: str | list[str], names: list[str]) -> None:
    assert NET.matching(patterns) == names
    rest = [name for name in NET.names if name not in names]
    assert list(NET.without(patterns).names) == rest
    flat = torch.arange(2.0 * NET.size).reshape(2, -1)
    if names:
        part, other = NET.select(patterns), NET.without(patterns)
        assert part.size + other.size == NET.size
        assert torch.equal(
            NET.merge(NET.merge(0 * flat, NET.take(flat, part), part), NET.take(flat, other), other), flat
        )


@pytest.mark.parametrize(("patterns", "wrong"), [("conv.w", "conv.w"), (["last", "no*"], "no*"), ("!*", "!*")])
def test_a_pattern_that_matches_nothing_is_refused(patterns: str | list[str], wrong: str) -> None:
    for call in (NET.matching, NET.select, NET.without):
        with pytest.raises(TDPFedError) as error:
            call(patterns, "algorithm.personal")
        assert (error.value.field, error.value.value) == ("algorithm.personal", wrong)
        assert error.value.allowed == NET.names
        assert all(name in str(error.value) for name in ("algorithm.personal: ", repr(wrong), *NET.names))


@pytest.mark.parametrize("patterns", ["*", ["last", "!last"]])
def test_something_must_remain(patterns: str | list[str]) -> None:
    with pytest.raises(TDPFedError) as error:
        NET.without(patterns, "algorithm.personal")
    assert error.value.field == "algorithm.personal"
    assert error.value.value == ([patterns] if isinstance(patterns, str) else patterns)


@given(shapes, st.data())
def test_ranges_are_where_a_part_is(sizes: list[tuple[int, ...]], data: st.DataObject) -> None:
    layout = layout_of(sizes)
    names = data.draw(st.lists(st.sampled_from(layout.names), min_size=1, unique=True))
    part = layout.select(names)
    ranges = layout.ranges(part)
    flat = torch.arange(layout.size)
    assert torch.equal(torch.cat([flat[begin:end] for begin, end in ranges]), layout.take(flat, part))
    assert all(before[1] < after[0] for before, after in pairwise(ranges)), "neighbors are one range"
