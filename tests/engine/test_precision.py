"""Precision: float32 is exact, what is shorter stays near, and nothing of it outlives the call."""

import pytest
import torch

import small
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError


def settings() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(("precision", "short"), [("float32", False), ("tf32", True), ("bf16", True)])
def test_settings_are_those_asked_for_and_go_back(precision: Precision, short: bool) -> None:
    before = settings()

    def fail() -> None:
        with arithmetic(precision):
            assert settings() == (short, short)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert settings() == before


@pytest.mark.parametrize("model", small.MODELS)
def test_layers_in_bf16_are_near_and_parameters_stay_float32(model: str) -> None:
    data = small.federation(dtype=torch.float32)
    runs = {
        precision: Simulation(small.MODELS[model](), data, small.variants()["fedavg"], precision=precision)
        for precision in ("float32", "bf16")
    }
    for run in runs.values():
        run.step()
    exact, short = (run.personalized() for run in runs.values())
    assert short.dtype == torch.float32
    assert not torch.equal(exact, short)
    assert (short - exact).norm() < 0.01 * exact.norm()
    assert runs["bf16"].record(0.0).personalized_loss == pytest.approx(
        runs["float32"].record(0.0).personalized_loss, rel=0.05
    )


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(TDPFedError, match="precision: unknown 'fp8'"):
        Simulation(small.mlp(), small.federation(), small.variants()["fedavg"], precision="fp8")  # type: ignore[arg-type]
