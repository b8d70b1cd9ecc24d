"""A round replayed as a CUDA graph is the round itself, and a GPU agrees with a CPU; only where a GPU is."""

import pytest
import torch

import small
from tdpfed.engine.simulate import Simulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def begin(name: str, device: str, graphs: bool, model: str = "dense") -> Simulation:
    simulation = Simulation(small.MODELS[model](), small.federation().to(device), small.variants()[name])
    object.__setattr__(simulation.runner, "graphs", graphs)
    return simulation


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
