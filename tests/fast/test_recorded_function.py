"""A recorded function is replayed for inputs of its kind; one that cannot be recorded is called as it is."""

import pytest
import torch
from torch import Tensor, fx

import local_work
from tdpfed.fast import recorded_function
from tdpfed.fast.recorded_function import RecordedFunction


def test_it_is_called_once_for_a_kind_of_input() -> None:
    calls = list[torch.Size]()

    def function(x: Tensor, y: Tensor) -> Tensor:
        calls.append(x.shape)
        return (x * y).sin().sum(-1)

    recorded = RecordedFunction(function)
    for size in (3, 3, 5, 3):
        x, y = torch.randn(2, size), torch.randn(2, size)
        torch.testing.assert_close(recorded(x, y), (x * y).sin().sum(-1))
    assert calls == [(2, 3), (2, 5)]


def test_a_function_that_depends_on_values_is_called_each_time() -> None:
    def function(x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x

    recorded = RecordedFunction(function)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(recorded(x), torch.ones(3))


def test_only_the_latest_kinds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_function, "RECORDINGS", 2)
    recorded = RecordedFunction(lambda x: 2 * x)
    for size in range(1, 6):
        recorded(torch.ones(size))
    assert len(recorded._known) == 2


@pytest.mark.parametrize("model", local_work.MODELS)
def test_losses_and_products_of_models_are_recorded(model: str) -> None:
    whole = local_work.problem(model)
    whole.fast.loss(whole.theta, whole.batches[0])
    whole.fast.hessian_product(whole.theta, whole.batches[0], whole.anchor)
    for pair in (whole.recorded._losses, whole.recorded._products):
        found = [made for function in pair for made in function._known.values()]
        assert found
        assert all(isinstance(made, fx.GraphModule) for made in found)
