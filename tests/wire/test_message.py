"""Messages: what comes out is what went in, on every algorithm's real states; sizes are exact; senders are told."""

import math
import tracemalloc
from typing import Any

import forge
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

import small
from tdpfed.algorithms import Algorithm, FedAvg, TDPFed
from tdpfed.core.layout import Layout
from tdpfed.core.state import Turn
from tdpfed.errors import TDPFedError
from tdpfed.models import build
from tdpfed.wire import Codec, Expected, Kind, Layouts, decode, encode, encoded_size, lossy, validate

ALGORITHMS = {name: algorithm for name, algorithm in small.variants().items() if algorithm.communicates}
SEED, ROUND = 11, 3


def layouts_of(algorithm: Algorithm, state: dict[str, Tensor]) -> Layouts:
    known: dict[str, Layout | None] = {"w": algorithm.layout, "theta": algorithm.layout, "values": None}
    if isinstance(algorithm, TDPFed):
        known["factors"] = algorithm.plan.factors
    return {name: known[name] for name in state}


def traffic(algorithm: Algorithm, model: str) -> dict[Kind, tuple[dict[str, Tensor], Layouts]]:
    """Real messages of five clients, down and up, tensors ``(5, n)``."""
    run = small.train(algorithm, 1, model=model, data=small.federation(dtype=torch.float32))
    assert run._trained is not None
    down = run.algorithm.broadcast(run.server, Turn(0, 2, torch.arange(5)))
    up = run._trained[1].upload
    return {"down": (down, layouts_of(run.algorithm, down)), "up": (up, layouts_of(run.algorithm, up))}


@pytest.mark.parametrize("codec", forge.CODECS)
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_round_trip_loss_and_size_of_every_algorithms_messages(name: str, model: str, codec: Codec) -> None:
    for kind, (states, layouts) in traffic(ALGORITHMS[name], model).items():
        lengths = {entry: value.shape[-1] for entry, value in states.items()}
        simulated = lossy(states, layouts, codec, SEED, ROUND, torch.arange(5), kind)
        samples = {k: 0 if kind == "down" else 10**k for k in range(5)}
        for k in range(5):
            state = {entry: value[k] for entry, value in states.items()}
            data = encode(state, layouts, kind=kind, round_=ROUND, client=k, samples=samples[k], codec=codec, seed=SEED)
            where: dict[str, Any] = {"kind": kind, "round_": ROUND, "client": k, "samples": samples[k]}
            assert len(data) == encoded_size(lengths, layouts, codec, **where)
            expected = Expected(
                kind=kind, round=ROUND, lengths=lengths, layouts=layouts, codec=codec, clients=range(5), samples=samples
            )
            received = validate(decode(data, len(data)), expected)
            assert received.keys() == state.keys()
            for entry, value in received.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, simulated[entry][k])  # the simulator sees what a receiver does
                assert torch.equal(value, state[entry]) == (codec == "float32")


@given(
    st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.sampled_from(forge.CODECS),
    st.integers(1, 3000),
)  # fmt: skip
def test_size_is_exact_whatever_the_digits(round_: int, client: int, samples: int, codec: Codec, length: int) -> None:
    where: dict[str, Any] = {"kind": "up", "round_": round_, "client": client, "samples": samples}
    state = {"factors": forge.state()["factors"], "values": torch.ones(length)}
    lengths = {"factors": forge.FACTORS.size, "values": length}
    data = encode(state, forge.LAYOUTS, codec=codec, seed=0, **where)
    assert len(data) == encoded_size(lengths, forge.LAYOUTS, codec, **where)
    message = decode(data, len(data))
    assert (message.round, message.client, message.samples) == (round_, client, samples)


@pytest.mark.parametrize("codec", forge.CODECS)
def test_the_payload_is_safetensors(codec: Codec) -> None:
    data = forge.honest(codec)
    read = load(forge.parts(data)[1])
    message = decode(data, len(data))
    assert read.keys() == message.tensors.keys()
    for name, value in message.tensors.items():
        assert value.dtype == read[name].dtype
        assert torch.equal(value, read[name])


def test_a_message_can_be_put_together_by_hand() -> None:
    data = forge.honest("int8")
    assert data[:5] == b"TDPF\x01"
    header, payload = forge.parts(data)
    assert forge.signed(header, payload) == data
    assert list(header) == ["kind", "round", "client", "samples", "layout", "codec", "sha256"]
    assert (header["kind"], header["round"], header["client"], header["samples"]) == ("up", 5, 12, 21)


def test_the_same_state_gives_the_same_bytes() -> None:
    assert forge.honest("int8") == forge.honest("int8")
    assert forge.honest("int8") != forge.honest("int8", round_=6)


def test_int8_factors_are_seven_times_smaller_than_the_dense_model() -> None:
    model = build("dnn", (1, 28, 28), 10, seed=0)
    layout = Layout.of(model)
    assert layout.size == 79_510
    tdpfed, fedavg = TDPFed(compression=2.0).bind(layout, 20), FedAvg().bind(layout, 20)
    theta = layout.flatten({name: value.detach() for name, value in model.named_parameters()})
    sizes = []
    for algorithm, codec in ((tdpfed, "int8"), (fedavg, "float32")):
        state = algorithm.init(theta, torch.Generator().manual_seed(0))
        chosen: Codec = "int8" if codec == "int8" else "float32"
        layouts = layouts_of(algorithm, state)
        sizes.append(len(encode(state, layouts, kind="up", round_=800, client=19, samples=2500, codec=chosen, seed=0)))
    assert sizes[1] / sizes[0] >= 7


@pytest.mark.parametrize("codec", forge.CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_sender_may_not_send_what_is_not_finite(codec: Codec, value: float) -> None:
    state = forge.state()
    state["factors"][15] = value
    with pytest.raises(TDPFedError, match=r"factors/fc1\.bias"):
        encode(state, forge.LAYOUTS, kind="up", round_=1, client=0, samples=1, codec=codec, seed=0)


@pytest.mark.parametrize("value", [65520.0, -1e6, 3.4e38])
def test_float16_does_not_overflow_silently(value: float) -> None:
    state = forge.state()
    state["factors"][7] = value
    with pytest.raises(TDPFedError, match=r"factors/fc1\.A2: .* float16"):
        encode(state, forge.LAYOUTS, kind="up", round_=1, client=0, samples=1, codec="float16", seed=0)
    state["factors"][7] = 65504.0
    data = encode(state, forge.LAYOUTS, kind="up", round_=1, client=0, samples=1, codec="float16", seed=0)
    assert float(decode(data, len(data)).tensors["factors"][7]) == 65504


def test_a_float64_beyond_float32_is_an_error_too() -> None:
    state = {"values": torch.tensor([1.0, 1e39], dtype=torch.float64)}
    with pytest.raises(TDPFedError, match="values: 1e\\+39"):
        encode(state, {"values": None}, kind="up", round_=1, client=0, samples=1, codec="float32", seed=0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"codec": "int4"}, "codec"),
        ({"state": {"factors": torch.zeros(21)}}, "entries"),
        ({"state": {"factors": torch.zeros(20), "values": torch.zeros(5)}}, r"factors: shape \(20,\)"),
        ({"state": {"factors": torch.zeros(1, 21), "values": torch.zeros(5)}}, r"shape \(1, 21\)"),
        ({"state": {"factors": torch.zeros(21), "values": torch.zeros(0)}}, r"values: shape \(0,\)"),
        ({"client": -1}, "client"),
        ({"round_": -1}, "round"),
        ({"samples": 2**63}, "samples"),
        ({"kind": "sideways"}, "kind"),
    ],
)
def test_a_sender_is_told_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "state": forge.state(), "layouts": forge.LAYOUTS, "kind": "up", "round_": 1, "client": 0, "samples": 1,
        "codec": "float32", "seed": 0,
    }  # fmt: skip
    with pytest.raises(TDPFedError, match=words):
        encode(**given | changes)


def test_entries_that_share_memory_and_views_can_be_sent() -> None:
    rows = torch.randn(4, 5, requires_grad=True)
    state = {"a": rows[1], "b": rows[1], "c": rows[:, 0]}
    layouts: Layouts = {"a": None, "b": None, "c": None}
    data = encode(state, layouts, kind="down", round_=1, client=0, samples=0, codec="float32", seed=0)
    tensors = decode(data, len(data)).tensors
    assert all(torch.equal(tensors[name], value) for name, value in state.items())


def test_decoding_copies_no_values() -> None:
    """They are views of the bytes, which live as long as they do."""
    values = torch.arange(2_000_000.0)
    data = encode(
        {"values": values}, {"values": None}, kind="up", round_=1, client=0, samples=1, codec="float32", seed=0
    )
    tracemalloc.start()
    message = decode(data, len(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000
    del data
    assert torch.equal(message.tensors["values"], values)
