"""A round replayed as a CUDA graph is the round itself, and a GPU agrees with a CPU, where there is one."""

from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import small
from tdpfed import FedAvg, Wire
from tdpfed.engine.simulation import Simulation
from tdpfed.fast.cuda_graphs import RECORDINGS, Graphed, Latest

WIRES = {
    "factors": Wire(update="factors", terms=2),
    "factors both ways": Wire(update="factors", terms=2, down="factors", down_terms=2),
    "int4": Wire(codec="int4"),
    "top-k": Wire(update="top-k"),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def begin(name: str, device: str, graphs: bool, model: str = "dense") -> Simulation:
    simulation = Simulation(small.MODELS[model](), small.federation().to(device), small.variants()[name])
    object.__setattr__(simulation.runner, "graphs", graphs)
    return simulation


@gpu
@pytest.mark.parametrize("model", ["dense", "conv"])
@pytest.mark.parametrize("name", small.variants())
def test_replayed_rounds_equal_computed_ones_and_the_cpu(name: str, model: str) -> None:
    """Float64: the GPU's graph against its own kernels bit for bit, against the CPU to 1e-6 (Adam's divisions grow)."""
    runs = [begin(name, "cuda", True, model), begin(name, "cuda", False, model), begin(name, "cpu", False, model)]
    for _ in range(4):
        for run in runs:
            run.step()
    assert small.equal(runs[0], runs[1])
    for state, value in small.states(runs[0]).items():
        torch.testing.assert_close(value.cpu(), small.states(runs[2])[state], rtol=1e-6, atol=1e-6)


@gpu
@pytest.mark.parametrize("form", WIRES)
def test_compressed_messages_of_replayed_rounds_are_those_of_the_cpu(form: str) -> None:
    runs = [
        Simulation(small.mlp(), small.federation().to(device), FedAvg(tau=2, batch_size=4), wire=WIRES[form])
        for device in ("cuda", "cpu")
    ]
    for _ in range(4):
        for run in runs:
            run.step()
    for state, value in small.states(runs[0]).items():
        torch.testing.assert_close(value.cpu(), small.states(runs[1])[state], rtol=1e-6, atol=1e-6)


class Stub(Graphed):
    """Recording without a GPU: what is recorded computes the function and counts its replays."""

    def __init__(self) -> None:
        super().__init__(lambda state: ({"y": state["x"] * 2},))
        self.recorded: list[int] = []

    def _record(self, states: Any) -> Any:
        size = len(states[0]["x"])
        self.recorded.append(size)
        return SimpleNamespace(replay=lambda given: self._function(*given))


def test_a_kind_is_recorded_the_second_time_and_few_recordings_are_held() -> None:
    """Cohorts of any size, in any order: as with drop-outs."""
    random, stub, seen = Random(0), Stub(), set[int]()
    for _ in range(500):
        size = random.randint(1, 12)
        (out,) = stub({"x": torch.full((size,), float(size))})
        assert torch.equal(out["y"], torch.full((size,), 2.0 * size))
        assert sum(one is not None for one in stub._kinds.values()) <= RECORDINGS
        assert (size in stub.recorded) <= (size in seen)
        seen.add(size)
    assert set(stub.recorded) == set(range(1, 13))


def test_what_cannot_be_recorded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphed = Graphed(lambda state: ({"y": state["x"] + 1},))
    for _ in range(3):
        assert graphed({"x": torch.zeros(2)})[0]["y"].tolist() == [1, 1]
    assert not graphed._recordable


def test_the_latest_functions_are_kept() -> None:
    made: list[int] = []

    def make(key: int) -> Any:
        made.append(key)
        return lambda: key

    latest: Any = Latest()
    assert [latest.of(key, partial(make, key))() for key in (1, 1, 2, 1, 3, 1, 2)] == [1, 1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]
