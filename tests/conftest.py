"""Property tests draw the same examples on every run, however slow the machine; equal models share a gradient."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait by spinning crawl where tests share the cores

import pytest
import torch
from hypothesis import settings

import watch
from tdpfed.core.objective import Objective
from tdpfed.fast.gradient import RecordedGradient

settings.register_profile("tdpfed", derandomize=True, deadline=None, max_examples=40, database=None)
settings.load_profile("tdpfed")

torch.set_num_threads(1)  # small tensors gain nothing from threads, and lose much on a busy machine

GRADIENTS: dict[object, RecordedGradient] = {}
OWN_GRADIENTS = {"test_objective", "test_recorded_gradient", "test_convolution"}  # these are about the recording


@pytest.fixture(autouse=True)
def _hostile(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Long hostile tests leave nothing behind."""
    tmp_path_factory.getbasetemp()  # made now, so that it is not in the folder that must be empty in the end
    marks = (request.node.get_closest_marker(name) for name in ("hostile", "slow"))
    if all(marks):
        with watch.nothing_left_behind(monkeypatch):
            yield
    else:
        yield


@pytest.fixture(autouse=True)
def _shared_gradients(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording a gradient takes 100 times a small round: do it once for all tests with the same layers."""
    if request.path.stem not in OWN_GRADIENTS:
        monkeypatch.setattr("tdpfed.engine.runners.RecordedGradient", shared_gradient)


def shared_gradient(objective: Objective) -> RecordedGradient:
    """Return the gradient known for such a model, if its layers are PyTorch's own and all its values are trained."""
    layers = list(objective.model.modules())
    plain = all(type(layer).__module__.startswith("torch.nn.modules.") for layer in layers)
    if not plain or set(objective.model.state_dict()) != set(objective.layout.names):
        return RecordedGradient(objective)
    modes = tuple(layer.training for layer in layers)
    kind = (repr(objective.model), modes, objective.layout, objective.loss, objective.short)
    return GRADIENTS.setdefault(kind, RecordedGradient(objective))
