"""Loss, gradient and answers of flat parameters, against autograd on the module itself."""

import copy

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.core.layout import Layout
from tdpfed.core.objective import Objective


def case(model: str, clients: int = 3) -> tuple[Objective, Tensor, Tensor, Tensor]:
    """Return an objective, parameters (K, P), inputs (K, B, ...) and targets (K, B)."""
    generator = torch.Generator().manual_seed(1)
    objective = Objective.of(small.MODELS[model]().double())
    theta = torch.randn(clients, objective.layout.size, dtype=torch.float64, generator=generator) * 0.3
    x = torch.randn(clients, 5, *small.SHAPE, dtype=torch.float64, generator=generator)
    return objective, theta, x, torch.randint(small.CLASSES, (clients, 5), generator=generator)


def by_autograd(objective: Objective, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    module = copy.deepcopy(objective.model)
    module.load_state_dict(objective.layout.unflatten(theta))
    loss = nn.functional.cross_entropy(module(x), y)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), loss.detach()


@pytest.mark.parametrize("model", small.MODELS)
def test_gradient_equals_autograd_single_and_batched(model: str) -> None:
    objective, theta, x, y = case(model)
    gradients, losses = objective.gradient(theta, (x, y))
    assert gradients.shape == theta.shape
    assert losses.shape == (3,)
    for k in range(3):
        expected, loss = by_autograd(objective, theta[k], x[k], y[k])
        alone, lone_loss = objective.gradient(theta[k], (x[k], y[k]))
        for got, value in ((gradients[k], losses[k]), (alone, lone_loss)):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(value, loss, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", small.MODELS)
def test_a_gradient_leaves_no_trace_and_needs_no_mode(model: str) -> None:
    objective, theta, x, y = case(model)
    kept = theta.clone()
    expected = [objective.gradient(*row) for row in ((theta, (x, y)), (theta[1], (x[1], y[1])))]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = [objective.gradient(*row) for row in ((theta, (x, y)), (theta[1], (x[1], y[1])))]
        for ours, twin in zip(found, expected, strict=True):
            assert torch.equal(ours[0], twin[0])
            assert torch.equal(ours[1], twin[1])
    assert torch.equal(theta, kept)
    assert not any(tensor.requires_grad for pair in expected for tensor in (*pair, theta))
    assert all(parameter.grad is None for parameter in objective.model.parameters())


@pytest.mark.parametrize("model", small.MODELS)
def test_per_sample(model: str) -> None:
    objective, theta, x, y = case(model)
    losses, correct = objective.per_sample(theta, (x, y))
    assert correct is not None
    assert losses.shape == correct.shape == (3, 5)
    for k in range(3):
        outputs = objective.outputs(theta[k], x[k])
        expected = nn.functional.cross_entropy(outputs, y[k], reduction="none")
        torch.testing.assert_close(losses[k], expected)
        assert torch.equal(correct[k], outputs.argmax(1) == y[k])
        alone = objective.per_sample(theta[k], (x[k], y[k]))
        torch.testing.assert_close(alone[0], losses[k])
        assert alone[1] is not None
        assert torch.equal(alone[1], correct[k])
    assert correct.any()
    assert not correct.all()
    assert not losses.requires_grad


def test_initial_is_a_copy_of_the_models_parameters() -> None:
    model = small.convnet()
    objective = Objective.of(model)
    theta = objective.initial()
    assert not theta.requires_grad
    for name, value in objective.layout.unflatten(theta).items():
        assert torch.equal(value, dict(model.named_parameters())[name])
    theta.zero_()
    assert all(bool(parameter.any()) for parameter in model.parameters())
    x = torch.randn(4, *small.SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(objective.outputs(objective.initial(), x), model(x).detach())


def test_a_loss_of_ones_own() -> None:
    """Half the squared distance of the output to a one-hot target, whose gradient is known."""

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(targets, 3)).square().sum(-1).mean() / 2

    model = nn.Linear(2, 3, bias=False).double()
    objective = Objective.of(model, squared)
    assert objective.layout == Layout(("weight",), ((3, 2),))
    w = torch.randn(3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.tensor([[1.0, 2.0], [-1.0, 0.5]], dtype=torch.float64)
    y = torch.tensor([0, 2])
    residual = x @ w.T - nn.functional.one_hot(y, 3)
    gradient, loss = objective.gradient(w.reshape(-1), (x, y))
    torch.testing.assert_close(gradient, (residual.T @ x / 2).reshape(-1))
    torch.testing.assert_close(loss, residual.square().sum() / 4)
    losses, _ = objective.per_sample(w.reshape(-1), (x, y))
    torch.testing.assert_close(losses, residual.square().sum(-1) / 2)


@pytest.mark.parametrize("tied", [False, True])
def test_replaced_parameters_give_the_same_outputs_and_are_put_back(tied: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    if tied:
        model[2].weight = model[0].weight
    objective = Objective.of(model)
    assert objective.tied is tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    thetas, x = torch.randn(3, objective.layout.size), torch.randn(5, 4)

    def compare(like: Tensor) -> None:
        with torch.no_grad(), objective.replacing(like) as outputs:
            for theta in like:
                assert torch.equal(outputs(theta, x.to(like)), objective.outputs(theta, x.to(like)))
            raise ZeroDivisionError

    for like in (thetas, thetas.double()):  # of another type than the model
        with pytest.raises(ZeroDivisionError):
            compare(like)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
