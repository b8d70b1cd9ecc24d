"""The path of uploads: what is sent and what is left are what was meant, for thousands of rounds."""

import forge
import numpy as np
import pytest
import torch

from tdpfed.algorithms import FedAvg, FedAvgSAR, Local, TDPFed
from tdpfed.core.layout import Layout
from tdpfed.core.state import State, Turn
from tdpfed.cp.plan import FactorPlan, rank_for
from tdpfed.engine.attacks import attack
from tdpfed.errors import TDPFedError
from tdpfed.wire import Expected, Wire, decode, encode, validate
from tdpfed.wire.blocks import MatrixTerms, TensorTerms
from tdpfed.wire.channel import Channel, error_of, vectors_of
from tdpfed.wire.forms import LARGEST_CHANGE, Blocks, TopK, too_large

KEEPING = [label for label in forge.CHANGES if forge.WIRES[label].keeps_lost]


def rows(state: State, clients: int) -> State:
    return {name: value.expand(clients, -1).clone() for name, value in state.items()}


def start(label: str, clients: int) -> State:
    return rows(forge.channel(label).start(torch.zeros(0)), clients)


def meant(seed: int, clients: int, scale: float = 0.1) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(clients, n, generator=generator) for name, n in forge.LENGTHS.items()}


def added(left: State, right: State) -> State:
    return {name: left[name] + right[name] for name in left}


@pytest.mark.parametrize("label", KEEPING)
def test_over_rounds_what_is_sent_and_what_is_left_sum_to_what_was_meant(label: str) -> None:
    """In float64 sums, to the rounding of the single rounds."""
    channel, kept = forge.channel(label), start(label, 3)
    sums = {name: torch.zeros(3, n, dtype=torch.float64) for name, n in forge.LENGTHS.items()}
    for number in range(40):
        received, change = rows(forge.drawn(1000 + number), 3), meant(number, 3)
        uploads = added(received, change)
        sent = channel.send(uploads, received, kept)
        kept = sent.kept
        for name in sums:
            sums[name] += (uploads[name].double() - received[name]) - (sent.seen[name].double() - received[name])
    for name, total in sums.items():
        assert float((total - kept[error_of(name)].double()).abs().max()) < 2e-5
    assert float(kept[error_of("w")].abs().max()) > 2e-5  # something was left, or the law would say nothing


@pytest.mark.parametrize("label", KEEPING)
def test_a_lost_upload_is_part_of_what_is_left(label: str) -> None:
    """Whichever are lost: the sums hold for what the server has seen."""
    channel, kept = forge.channel(label), start(label, 4)
    seen, total = (
        {name: torch.zeros(4, n, dtype=torch.float64) for name, n in forge.LENGTHS.items()} for _ in range(2)
    )
    lost = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)) < 0.4
    for number in range(20):
        received, change = rows(forge.drawn(1000 + number), 4), meant(number, 4)
        sent = channel.send(added(received, change), received, kept)
        gone = channel.returned(sent.kept, sent.seen, received)
        kept = {n: torch.where(lost[number][:, None], gone[n], value) for n, value in sent.kept.items()}
        for name in seen:
            total[name] += change[name]
            seen[name] += (sent.seen[name] - received[name]) * ~lost[number][:, None]
    for name in seen:
        assert float((total[name] - seen[name] - kept[error_of(name)]).abs().max()) < 2e-5


@pytest.mark.parametrize("label", forge.CHANGES)
def test_clients_do_not_depend_on_each_other(label: str) -> None:
    """All at once equal one at a time and any order of them, to the bit."""
    channel, received = forge.channel(label), rows(forge.drawn(9), 5)
    kept = channel.send(added(received, meant(1, 5)), received, start(label, 5)).kept
    uploads = added(received, meant(2, 5))
    whole = channel.send(uploads, received, kept)
    for order in ([0], [3, 1], [4, 2, 0], [1, 0, 4, 3]):
        some = [{name: value[order] for name, value in state.items()} for state in (uploads, received, kept)]
        own = channel.send(*some)
        assert all(torch.equal(mine, part[order]) for mine, part in zip(own.parts, whole.parts, strict=True))
        for mine, all_of in ((own.seen, whole.seen), (own.kept, whole.kept)):
            assert mine.keys() == all_of.keys()
            assert all(torch.equal(value, all_of[name][order]) for name, value in mine.items())


@pytest.mark.parametrize("label", forge.CHANGES)
def test_arguments_are_not_changed(label: str) -> None:
    channel, received, kept = forge.channel(label), rows(forge.drawn(9), 3), start(label, 3)
    uploads = added(received, meant(1, 3))
    before = [{name: value.clone() for name, value in state.items()} for state in (uploads, received, kept)]
    channel.send(uploads, received, kept)
    for old, new in zip(before, (uploads, received, kept), strict=True):
        assert all(torch.equal(value, new[name]) for name, value in old.items())


def test_what_clients_keep_follows_from_the_form() -> None:
    names = {label: set(forge.channel(label).start(torch.zeros(0))) for label in forge.WIRES}
    errors = {error_of("w"), error_of("values")}
    for label, found in names.items():
        if label.startswith("dense") or label == "top-k float32":
            assert found == set()
        elif label.startswith("factors"):
            assert found == errors | {vectors_of("w")}
        else:
            assert found == errors
    assert all(not forge.channel(label).start(torch.zeros(0))[error_of("w")].any() for label in KEEPING)
    first, again = (start("factors int4", 2)[vectors_of("w")] for _ in range(2))
    assert torch.equal(first, again)
    other = Channel(forge.channel("factors int4").algorithm, forge.WIRES["factors int4"], 2)
    assert not torch.equal(other.start(torch.zeros(0))[vectors_of("w")], first[0])


# Thousands of rounds


SMALL = Layout.of({"wide": (7, 16), "kernel": (5, 3, 3, 3), "bias": (5,)})


@pytest.mark.parametrize(
    "wire",
    [
        Wire(update="factors", terms=1, sweeps=1), Wire(update="factors", terms=1, sweeps=1, kernels="tensor"),
        Wire(codec="int4"), Wire(update="top-k", share=0.05, codec="int4"),
    ],
    ids=lambda wire: f"{wire.update} {wire.kernels}",
)  # fmt: skip
def test_feedback_stays_bounded_over_3000_rounds_of_random_changes(wire: Wire) -> None:
    """In 4 bits: what is left is no larger at the end than it soon is, and what is sent adds up to what was meant."""
    channel, clients, rounds = Channel(FedAvg().bind(SMALL, 3), wire, 0), 3, 3000
    kept, received = rows(channel.start(torch.zeros(0)), clients), {"w": torch.zeros(clients, SMALL.size)}
    changes = torch.randn(rounds, clients, SMALL.size, generator=torch.Generator().manual_seed(0))
    norms = torch.zeros(rounds)
    found = torch.zeros(clients, SMALL.size, dtype=torch.float64)
    for number, change in enumerate(changes):
        sent = channel.send({"w": change}, received, kept)
        kept = sent.kept
        norms[number] = kept[error_of("w")].norm(dim=-1).max()
        found += sent.seen["w"]
    wanted = changes.double().sum(0)
    assert bool(norms.isfinite().all())
    assert all(bool(value.isfinite().all()) for value in kept.values())
    assert float(norms[-1000:].max()) < 1.2 * float(norms[500:1500].max())
    assert float((wanted - found - kept[error_of("w")]).abs().max()) < 5e-3
    assert float((wanted - found).norm() / wanted.norm()) < 0.25


@pytest.mark.parametrize("label", KEEPING)
def test_a_change_that_stays_the_same_is_sent_in_the_end(label: str) -> None:
    """On average over rounds the server sees it all: nothing is left out for good."""
    channel, kept = forge.channel(label), start(label, 2)
    received, change = rows(forge.drawn(1), 2), meant(0, 2)
    total = torch.zeros(2, forge.LENGTHS["w"], dtype=torch.float64)
    for _ in range(300):
        sent = channel.send(added(received, change), received, kept)
        kept = sent.kept
        total += sent.seen["w"] - received["w"]
    gap = (total / 300 - change["w"]).norm() / change["w"].norm()
    assert float(gap) < 0.08


# Top-k and all values, against numpy


def numpy_rows(values: np.ndarray, rows_: int, levels: int) -> np.ndarray:
    """Return values rounded in rows with a scale each, which has 16 bits."""
    columns = -(-len(values) // rows_)
    padded = np.zeros(rows_ * columns, np.float32)
    padded[: len(values)] = values
    grid = padded.reshape(rows_, columns)
    scale = torch.from_numpy(np.abs(grid).max(1) / np.float32(levels)).to(torch.bfloat16).float().numpy()
    whole = np.clip(np.rint(grid / np.where(scale > 0, scale, np.inf)[:, None]), -levels, levels)
    return np.asarray((whole.astype(np.float32) * scale[:, None]).reshape(-1)[: len(values)])


@pytest.mark.parametrize(("codec", "levels"), [("float32", 0), ("int8", 127), ("int4", 7)])
@pytest.mark.parametrize(("length", "share"), [(50, 0.1), (700, 0.5), (700, 1.0), (1000, 0.001)])
def test_top_k_equals_numpy(codec: str, levels: int, length: int, share: float) -> None:
    """The largest values by magnitude in the order of their positions, in rows of about 256 with a scale each."""
    count = max(1, round(share * length))
    form = TopK(length, count, codec)  # type: ignore[arg-type]
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(1))
    parts, _ = form.shrink(x, x[:, :0])
    grown = form.grow(parts).numpy()
    for client, values in enumerate(x.numpy()):
        where = np.sort(np.argsort(-np.abs(values))[:count])
        assert parts[0][client].tolist() == where.tolist()
        expected = np.zeros(length, np.float32)
        expected[where] = values[where] if not levels else numpy_rows(values[where], -(-count // 256), levels)
        assert np.array_equal(grown[client], expected)


@pytest.mark.parametrize(("codec", "levels"), [("int8", 127), ("int4", 7)])
def test_all_values_in_few_bits_equal_numpy(codec: str, levels: int) -> None:
    """A scale for each output of a matrix or kernel, one for a vector, which always has 8 bits, one for 256 values."""
    wire = Wire(codec=codec, feedback=True)  # type: ignore[arg-type]
    form = Channel(forge.Two().bind(forge.WEIGHTS, 5), wire, 0).form
    x = forge.drawn(3)
    for name, entry in form.entries.items():
        assert isinstance(entry, Blocks)
        grown = entry.grow(entry.shrink(x[name][None], x[name][None, :0])[0])[0]
        shapes = forge.WEIGHTS.shapes if name == "w" else [(31,)]
        expected = [
            numpy_rows(part.numpy(), shape[0] if len(shape) > 1 else 1, levels if len(shape) > 1 else 127)
            for part, shape in zip(x[name].split([torch.Size(s).numel() for s in shapes]), shapes, strict=True)
        ]
        assert np.array_equal(grown.numpy(), np.concatenate(expected))


# Forms follow from the settings


def blocks_of(wire: Wire, layout: Layout = forge.WEIGHTS) -> list[tuple[str, int | None]]:
    form = Channel(FedAvg().bind(layout, 5), wire, 0).form.entries["w"]
    assert isinstance(form, Blocks)
    return [
        (type(block).__name__, block.terms if isinstance(block, MatrixTerms | TensorTerms) else None)
        for block in form.blocks
    ]


def test_terms_are_those_asked_for_or_what_the_paper_says_for_a_rate() -> None:
    four = [("MatrixTerms", 4), ("Dense", None), ("MatrixTerms", 4), ("MatrixTerms", 4)]
    assert blocks_of(Wire(update="factors", codec="float32"))[:3] == four[:3]  # 4 by default
    assert blocks_of(Wire(update="factors", terms=2)) == [(kind, terms and 2) for kind, terms in four]
    for rate in (2.0, 3.0, 5.0):
        found = blocks_of(Wire(update="factors", compression=rate, codec="float32"))
        for (_, terms), shape in zip(found, [(12, 17), None, (8, 36), (21, 5)], strict=True):
            assert terms == (None if shape is None else rank_for(shape, rate))
    kernels = blocks_of(Wire(update="factors", terms=2, kernels="tensor"))
    assert [kind for kind, _ in kernels] == ["MatrixTerms", "Dense", "TensorTerms", "MatrixTerms"]


def test_terms_that_take_as_many_bytes_as_the_values_are_not_sent() -> None:
    layout = Layout.of({"small": (3, 4), "vector": (40,), "row": (1, 30), "large": (30, 40)})
    found = blocks_of(Wire(update="factors", terms=10), layout)
    assert found == [("Dense", None)] * 3 + [("MatrixTerms", 10)]


@pytest.mark.parametrize(
    ("algorithm", "wire", "words"),
    [
        (FedAvg(), Wire(update="factors", terms=13), r"wire\.terms: 13 given, must be at most 12"),
        (FedAvg(), Wire(update="factors", compression=40), r"wire\.compression: 40 given, must be at most 5\.486"),
        (FedAvgSAR(), Wire(update="factors"), r"wire\.update: 'factors' given, must be 'dense'.*fedavg_sar"),
        (FedAvgSAR(), Wire(codec="int4"), r"wire\.update: 'dense' given, must be .*fedavg_sar"),
        (FedAvgSAR(), Wire(codec="int8", feedback=True), r"fedavg_sar"),
        (TDPFed(), Wire(update="factors"), r"wire\.update: 'factors' given, must be 'dense' or 'top-k'.*'tdpfed'"),
    ],
)
def test_what_a_method_cannot_send_is_refused(algorithm: FedAvg, wire: Wire, words: str) -> None:
    with pytest.raises(TDPFedError, match=words):
        Channel(algorithm.bind(forge.WEIGHTS, 5), wire, 0)


def test_a_model_without_matrices_has_no_terms() -> None:
    with pytest.raises(TDPFedError, match=r"wire\.update: 'factors' given, must be 'dense' or 'top-k'"):
        Channel(FedAvg().bind(Layout.of({"a": (3,), "b": (4,)}), 5), Wire(update="factors"), 0)


@pytest.mark.parametrize("wire", [Wire(update="factors"), Wire(update="top-k"), Wire(codec="int4"), Wire(codec="int8")])
def test_a_method_that_does_not_communicate_has_nothing_to_send(wire: Wire) -> None:
    channel = Channel(Local().bind(forge.WEIGHTS, 5), wire, 0)
    assert not channel.changes
    assert channel.form.sections == ()
    assert channel.start(torch.zeros(0)) == {}


# The gauge


@pytest.mark.parametrize("strength", [3.0, 100.0])
@pytest.mark.parametrize("shape", [(12, 17), (8, 4, 3, 3), (4, 5, 6)])
def test_factors_in_another_gauge_compose_the_same_change(shape: tuple[int, ...], strength: float) -> None:
    """The attack that ruins averages of factors: scaled, flipped and permuted columns. Changes are composed first."""
    layout, terms = Layout.of({"x.weight": shape, "x.bias": (3,)}), 3
    kernels = "tensor" if len(shape) > 2 else "matrix"
    wire = Wire(update="factors", codec="float32", terms=terms, kernels=kernels)  # type: ignore[arg-type]
    channel = Channel(FedAvg(weights="uniform").bind(layout, 5), wire, 0)
    plan = FactorPlan.of(dict(zip(layout.names, layout.shapes, strict=True)), ranks={"x.weight": terms})
    order = sorted(range(len(shape)), key=lambda mode: shape[mode])
    generator = torch.Generator().manual_seed(0)
    received = torch.randn(5, layout.size, generator=generator)[:1].expand(5, -1).clone()
    uploads = {"w": received + 0.1 * torch.randn(5, layout.size, generator=generator)}
    kept = rows(channel.start(received), 5)
    sent = channel.send(uploads, {"w": received}, kept)

    vectors = dict(zip(order, sent.parts, strict=False))  # a part for each mode, from short to long; then the bias
    columns = [vectors[mode].unflatten(-1, (terms, shape[mode])).mT for mode in range(len(shape))]
    factors = plan.factors.join([*columns, sent.parts[-1]])
    hostile = torch.tensor([False, True, False, False, True])
    turn = Turn(0, 1, torch.arange(5))
    bad = attack("gauge", {"factors": factors}, {"factors": factors}, hostile, turn, plan=plan, strength=strength)
    moved = plan.factors.split(bad["factors"])
    gone = [moved[mode].mT.flatten(-2) for mode in order]
    parts = [*gone, moved[-1]]
    distance = sum(float((new - old)[1].norm()) for new, old in zip(parts, sent.parts, strict=True))
    assert distance > float(sent.parts[0][1].norm())

    seen = []
    for client in range(5):
        own = [part[client].contiguous() for part in parts]
        data = encode(own, channel.form, kind="up", round_=1, client=client, samples=1)
        want = Expected(
            kind="up", round=1, form=channel.form, clients=range(5), samples=dict.fromkeys(range(5), 1),
            unchanged={"w": received[0]},
        )  # fmt: skip
        seen.append(validate(decode(data, 10**5), want)["w"])
    found = torch.stack(seen)
    torch.testing.assert_close(found, sent.seen["w"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.mean(0), sent.seen["w"].mean(0), rtol=1e-4, atol=1e-5)
    averaged = plan.compose(bad["factors"].mean(0))  # the average of the factors themselves is another tensor
    honest = sent.seen["w"].mean(0) - received[0]
    assert float((averaged - honest).norm()) > float(honest.norm())


def test_a_change_is_too_large_beyond_the_bound_and_if_it_is_not_finite() -> None:
    unchanged = torch.full((6, 4), 10.0)  # of norm 20
    sizes = torch.tensor([0.0, 0.99, 1.01, float("nan"), float("inf"), 1e25]) * LARGEST_CHANGE * 10.0
    assert too_large(torch.ones(6, 4) * sizes[:, None], unchanged).tolist() == [False, False, True, True, True, True]
    assert not too_large(torch.tensor([[0.5 * LARGEST_CHANGE]]), torch.zeros(1, 1)).any()
    assert too_large(torch.tensor([[1.5 * LARGEST_CHANGE]]), torch.zeros(1, 1)).all()
