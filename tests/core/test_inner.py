"""The inner problem with options: a velocity that continues, an accuracy at which steps end, implicit steps."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import local_work
from local_work import Problem, close, unchanged
from tdpfed.core.inner import implicit_rate
from tdpfed.core.local import LocalWork, Near
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import Turn

LAM, LR, MOMENTUM = 3.0, 0.05, 0.6
OPTIONS: dict[str, Any] = {"lam": LAM, "lr": LR, "momentum": MOMENTUM}


class Inner:
    """The inner problem of one client as a module with autograd; parameters and anchors are flat vectors."""

    def __init__(self, one: Problem) -> None:
        self.one, self.module = one, copy.deepcopy(one.objective.model)

    def value(self, theta: Tensor, t: int, anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the whole and of the loss alone, and the loss."""
        leaf = theta.clone().requires_grad_()
        x, y = self.one.batches[t]
        outputs = torch.func.functional_call(self.module, self.one.objective.layout.unflatten(leaf), (x,))
        loss = nn.functional.cross_entropy(outputs, y)
        (g,) = torch.autograd.grad(loss, leaf)
        return g + LAM * (theta - anchor), g, loss.detach()


def torch_rounds(one: Problem, anchors: list[Tensor], steps: int, momentum: float) -> tuple[Tensor, Tensor]:
    """Steps of one optimizer of PyTorch on minibatches 0, 1, ...; parameters and velocity after them."""
    inner, theta = Inner(one), nn.Parameter(one.theta.clone())
    optimizer = torch.optim.SGD([theta], lr=LR, momentum=momentum, nesterov=momentum > 0)
    for t, anchor in enumerate(anchors):
        for _ in range(steps):
            theta.grad = inner.value(theta.detach(), t, anchor)[0]
            optimizer.step()
    return theta.detach(), optimizer.state[theta]["momentum_buffer"] if momentum else torch.zeros_like(theta)


def rounds(local: LocalWork, theta: Tensor, anchors: list[Tensor], batches: list[Any], **options: Any) -> Near:
    velocity: Tensor | None = torch.zeros_like(theta)
    for batch, anchor in zip(batches, anchors, strict=False):
        assert velocity is not None
        with unchanged(theta, anchor, velocity):
            near = local.proximal(theta, batch, anchor=anchor, velocity=velocity, **OPTIONS | options)
        theta, velocity = near.theta, near.velocity
    return near


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_velocity_continues_over_minibatches_and_anchors(model: str, steps: int) -> None:
    whole = local_work.problem(model)
    anchors = [whole.anchor, whole.theta, 2 * whole.anchor]
    together = [rounds(local, whole.theta, anchors, whole.batches, steps=steps) for local in (whole.plain, whole.fast)]
    for k, one in enumerate(whole.each()):
        own = [anchor[k] for anchor in anchors]
        theta, velocity = torch_rounds(one, own, steps, MOMENTUM)
        alone = [rounds(local, one.theta, own, one.batches, steps=steps) for local in (one.plain, one.fast)]
        found = [(near.theta[k], near.velocity[k], near.loss[k]) for near in together if near.velocity is not None]
        found += [(near.theta, near.velocity, near.loss) for near in alone if near.velocity is not None]
        assert len(found) == 4
        for moved, speed, loss in found:
            close(moved, theta)
            close(speed, velocity)
            close(loss, found[0][2])
    afresh = whole.theta
    for anchor, batch in zip(anchors, whole.batches, strict=False):
        afresh = whole.plain.proximal(afresh, batch, anchor=anchor, **OPTIONS, steps=steps).theta
    assert float((afresh - together[0].theta).norm()) > 1e-3


def test_a_velocity_without_momentum_has_no_effect() -> None:
    whole = local_work.problem("wide")
    velocity = 1 + whole.theta
    for local in (whole.plain, whole.fast):
        near, usual = (
            local.proximal(whole.theta, whole.batches[0], anchor=whole.anchor, lam=LAM, lr=LR, steps=3, velocity=start)
            for start in (velocity, None)
        )
        close(near.theta, usual.theta)
        assert usual.velocity is None


def reference(one: Problem, nu: float, most: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """A loop with a break, as one would write it for a single client."""
    inner, theta, velocity = Inner(one), one.theta, torch.zeros_like(one.theta)
    for step in range(most + 1):
        if step == most:
            break
        g, _, loss = inner.value(theta, 0, one.anchor)
        if float(g @ g) <= nu:
            break
        velocity = MOMENTUM * velocity + g
        theta = theta - LR * (g + MOMENTUM * velocity)
    return theta, velocity, loss, step


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("started", [False, True], ids=["at rest", "with velocity"])
def test_each_client_stops_where_its_own_loop_would(model: str, started: bool) -> None:
    whole, most = local_work.problem(model), 25
    start = torch.zeros_like(whole.theta) if started else None
    sizes = [Inner(one).value(one.theta, 0, one.anchor)[0].square().sum() for one in whole.each()]
    for nu in (1e-2 * float(min(sizes)), 1.01 * float(sorted(sizes)[1]), 1e-30, 1e9):
        expected = [reference(one, nu, most) for one in whole.each()]
        taken = [steps for *_, steps in expected]
        for local in (whole.plain, whole.fast):
            with unchanged(whole.theta, whole.anchor):
                near = local.proximal(
                    whole.theta, whole.batches[0], anchor=whole.anchor, **OPTIONS, steps=most, nu=nu, velocity=start
                )
            for k, (theta, velocity, loss, _) in enumerate(expected):
                close(near.theta[k], theta)
                close(near.loss[k], loss)
                if started:
                    assert near.velocity is not None
                    close(near.velocity[k], velocity)
        for k, one in enumerate(whole.each()):
            for local in (one.plain, one.fast):
                options: dict[str, Any] = OPTIONS | {"steps": most, "nu": nu}
                close(local.proximal(one.theta, one.batches[0], anchor=one.anchor, **options).theta, expected[k][0])
        if nu == 1e9:
            assert taken == [0, 0, 0]
        elif nu == 1e-30:
            assert taken == [most] * 3
        elif nu < float(min(sizes)):
            assert all(0 < steps < most for steps in taken)
        else:
            assert min(taken) == 0 < max(taken)


@pytest.mark.parametrize("model", ["wide", "conv"])
@pytest.mark.parametrize("options", [{"nu": 1.0}, {}], ids=["nu", "velocity"])
def test_a_clients_bits_do_not_depend_on_the_others(model: str, options: dict[str, Any]) -> None:
    many = local_work.problem(model, 7, torch.float32)
    few = many.only(slice(2, 5))
    found = [rounds(one.fast, one.theta, [one.anchor] * 2, one.batches, **options, steps=6) for one in (many, few)]
    assert torch.equal(found[0].theta[2:5], found[1].theta)
    assert torch.equal(found[0].loss[2:5], found[1].loss)
    assert found[0].velocity is not None
    assert found[1].velocity is not None
    assert torch.equal(found[0].velocity[2:5], found[1].velocity)


def test_a_gradient_that_is_not_finite_does_not_count_as_accurate() -> None:
    theta = torch.zeros(2, 3, dtype=torch.float64)
    batch = torch.zeros(2, 1), torch.zeros(2, 1)
    bad = torch.tensor([[torch.nan] * 3, [1.0] * 3], dtype=torch.float64)
    local = PlainLocal(Turn(0, 0, torch.arange(2)), 1, lambda _: batch, lambda a, _: (bad, a.sum(-1)))
    near = local.proximal(theta, batch, anchor=theta, lam=0.0, lr=0.1, steps=1, nu=100.0)
    assert bool(near.theta[0].isnan().all())
    assert torch.equal(near.theta[1], theta[1])


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("lr", [0.05, 0.3])
def test_implicit_steps_take_the_proximal_term_at_their_end(model: str, lr: float) -> None:
    """Also at a rate at which explicit steps on the proximal term alone would move away from the anchor."""
    whole, lam = local_work.problem(model), 12.0
    options: dict[str, Any] = {"lam": lam, "lr": implicit_rate(lr, lam), "steps": 6}
    for k, one in enumerate(whole.each()):
        inner, theta = Inner(one), one.theta
        for _ in range(6):
            g = inner.value(theta, 0, one.anchor)[1]
            theta = (theta - lr * g + lr * lam * one.anchor) / (1 + lr * lam)
        for local in (one.plain, one.fast):
            close(local.proximal(one.theta, one.batches[0], anchor=one.anchor, **options).theta, theta)
        close(whole.fast.proximal(whole.theta, whole.batches[0], anchor=whole.anchor, **options).theta[k], theta)


@pytest.mark.parametrize("model", local_work.MODELS)
def test_implicit_steps_with_momentum_are_the_accelerated_proximal_gradient_method(model: str) -> None:
    """Textbook form: a gradient step from the point ahead, then the proximal map; what is kept is the point ahead."""
    whole, lam, lr = local_work.problem(model), 12.0, 0.1
    options: dict[str, Any] = {"lam": lam, "lr": implicit_rate(lr, lam), "momentum": MOMENTUM, "steps": 6}
    for one in whole.each():
        inner, ahead, before = Inner(one), one.theta, one.theta
        for _ in range(6):
            g = inner.value(ahead, 0, one.anchor)[1]
            point = (ahead - lr * g + lr * lam * one.anchor) / (1 + lr * lam)
            ahead, before = point + MOMENTUM * (point - before), point
        close(one.plain.proximal(one.theta, one.batches[0], anchor=one.anchor, **options).theta, ahead)
        if model == "conv":  # its ReLUs and maxima have kinks, at one of which the solution lies
            continue
        many = one.plain.proximal(one.theta, one.batches[0], anchor=one.anchor, **options | {"steps": 300}).theta
        g = inner.value(many, 0, one.anchor)[1]
        assert float((g + lam * (many - one.anchor)).norm()) < 1e-9  # it ends at the inner problem's solution
