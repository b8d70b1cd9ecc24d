"""Local work as ordinary PyTorch, against loops of ``torch.optim`` on the module and on factors themselves."""

import copy
from collections.abc import Callable, Generator
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import local_work
from local_work import Problem, close, unchanged
from tdpfed.core.local import KEPT, FactorRule, Near
from tdpfed.core.objective import Objective
from tdpfed.core.plain import PlainLocal, modes_in_turn
from tdpfed.core.state import Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError

LR, FACTOR_LR, LAM = 0.05, 4e-3, 3.0
PLAN = FactorPlan.of({"w": (6, 5, 4), "b": (7,), "v": (9, 8), "k": (5, 4, 3, 3)}, 1.5)

Torch = Callable[[list[Tensor]], torch.optim.Optimizer]
RULES: dict[str, Torch] = {
    "gd": lambda p: torch.optim.SGD(p, lr=FACTOR_LR),
    "adam": lambda p: torch.optim.Adam(p, lr=FACTOR_LR),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=FACTOR_LR),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=FACTOR_LR),
}


def sgd(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def module_of(objective: Objective, theta: Tensor) -> nn.Module:
    module = copy.deepcopy(objective.model)
    module.load_state_dict(objective.layout.unflatten(theta))
    return module


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def torch_steps(
    one: Problem, batches: list[int], rule: Torch, anchor: Tensor | None, lam: float
) -> tuple[Tensor, Tensor]:
    """Steps of an optimizer of PyTorch on ``f + lam/2 ||theta - anchor||^2``, and the loss ``f`` before the last."""
    module = module_of(one.objective, one.theta)
    optimizer = rule(list(module.parameters()))
    for t in batches:
        x, y = one.batches[t]
        optimizer.zero_grad()
        loss = whole = nn.functional.cross_entropy(module(x), y)
        if anchor is not None:
            flat = torch.cat([parameter.reshape(-1) for parameter in module.parameters()])
            whole = loss + lam / 2 * (flat - anchor).square().sum()
        whole.backward()
        optimizer.step()
    return parameters(module), loss.detach()


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize(("steps", "first"), [(None, 0), (1, 0), (3, 2)])
def test_descend_is_sgd(model: str, anchored: bool, steps: int | None, first: int) -> None:
    whole = local_work.problem(model)
    options: dict[str, Any] = {"lr": LR, "steps": steps, "first": first}
    together = whole.plain.descend(whole.theta, **options, anchor=whole.anchor if anchored else None, lam=LAM)
    for k, one in enumerate(whole.each()):
        anchor = one.anchor if anchored else None
        count = local_work.TAU if steps is None else steps
        expected = torch_steps(one, list(range(first, first + count)), sgd, anchor, LAM)
        found = one.plain.descend(one.theta, **options, anchor=anchor, lam=LAM)
        for ours, rows, twin in zip(found, together, expected, strict=True):
            assert ours.shape == twin.shape
            close(ours, twin)
            close(rows[k], twin)
        assert not torch.allclose(found[0], one.theta, atol=1e-3)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_proximal_steps_are_sgd_with_nesterov_momentum(model: str, momentum: float, steps: int) -> None:
    whole = local_work.problem(model)
    options: dict[str, Any] = {"lam": LAM, "lr": LR, "momentum": momentum, "steps": steps}
    together = whole.plain.proximal(whole.theta, whole.batches[1], anchor=whole.anchor, **options)

    def rule(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=LR, momentum=momentum, nesterov=momentum > 0)

    for k, one in enumerate(whole.each()):
        expected = torch_steps(one, [1] * steps, rule, one.anchor, LAM)
        found = one.plain.proximal(one.theta, one.batches[1], anchor=one.anchor, **options)
        for ours, rows, twin in zip(found[:2], together[:2], expected, strict=True):
            close(ours, twin)
            close(rows[k], twin)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_any_gradient_will_do(momentum: float, steps: int) -> None:
    """Half a squared norm, whose gradient is theta itself, without any data."""
    generator = torch.Generator().manual_seed(0)
    theta, w = (torch.randn(2, 7, generator=generator, dtype=torch.float64) for _ in range(2))
    batch = torch.zeros(2, 1), torch.zeros(2, 1)
    local = PlainLocal(Turn(0, 0, torch.arange(2)), steps, lambda _: batch, lambda a, _: (a, a.square().sum(-1) / 2))
    twin, velocity = theta, torch.zeros_like(theta)
    with unchanged(theta, w):  # also where the gradient is theta's own memory
        near = local.proximal(theta, batch, anchor=w, lam=LAM, lr=0.1, momentum=momentum, steps=steps)
        down, _ = local.descend(theta, lr=0.1)
    for _ in range(steps):
        last = twin.square().sum(-1) / 2
        g = twin + LAM * (twin - w)
        velocity = momentum * velocity + g
        twin = twin - 0.1 * (g + momentum * velocity)
    close(near.loss, last)
    close(near.theta, twin)
    close(down, 0.9**steps * theta)


def drawn(*lead: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Factors, and the parameters that they come near to in four local rounds."""
    generator = torch.Generator().manual_seed(seed)
    a = 0.5 * torch.randn(*lead, PLAN.factors.size, generator=generator, dtype=torch.float64)
    targets = [torch.randn(*lead, PLAN.dense.size, generator=generator, dtype=torch.float64) for _ in range(4)]
    return a, targets


def near(theta: Tensor) -> Near:
    return Near(theta, torch.zeros(theta.shape[:-1]))


def torch_factors(
    a: Tensor, make: Torch, *, alternating: bool, fresh: bool
) -> Generator[Tensor, tuple[Tensor, int], None]:
    """Yield what PyTorch's optimizer gives; send in the next parameters and how many steps to take."""
    leaves = [piece.clone().requires_grad_() for piece in PLAN.factors.split(a)]
    optimizer = make(list(leaves))
    theta, steps = yield a
    while True:
        if fresh:
            optimizer = make(list(leaves))
        for _ in range(steps):
            for turn in range(max(PLAN.modes) + 1) if alternating else (None,):
                optimizer.zero_grad()
                loss = LAM / 2 * (theta - PLAN.compose(PLAN.factors.join(leaves))).square().sum()
                loss.backward()
                for leaf, mode in zip(leaves, PLAN.modes, strict=True):
                    if turn not in (None, mode):
                        leaf.grad = None  # of which the optimizer does not move it, nor what it keeps of it
                optimizer.step()
        theta, steps = yield PLAN.factors.join([leaf.detach() for leaf in leaves])


@pytest.mark.parametrize("optimizer", RULES)
@pytest.mark.parametrize(
    ("restart", "alternating"),
    [("round", False), ("local-round", False), ("run", False), ("round", True), ("local-round", True)],
)
def test_factors_move_as_by_torch(
    optimizer: Literal["adam", "gd", "adagrad", "rmsprop"],
    restart: Literal["round", "local-round", "run"],
    alternating: bool,
) -> None:
    """Two rounds of two local rounds each; an optimizer that continues hands its state from one to the other."""
    rule = FactorRule(optimizer, FACTOR_LR, restart, alternating)
    local = local_work.problem("narrow").plain
    rows, all_targets = drawn(3)
    for k in range(3):
        a, targets = rows[k], [target[k] for target in all_targets]
        private = rule.start(PLAN.factors.size, a)
        twin = torch_factors(a, RULES[optimizer], alternating=alternating, fresh=restart == "local-round")
        next(twin)
        for round_ in (targets[:2], targets[2:]):
            factors = local.factors(PLAN, a, rule, private)
            close(factors.composed, PLAN.compose(a))
            for theta in round_:
                factors = factors.towards(near(theta), LAM, 3)
                close(factors.value, twin.send((theta, 3)), 1e-9)
                close(factors.composed, PLAN.compose(factors.value))
            a, private = factors.value, factors.state
            if restart == "round":
                twin = torch_factors(a, RULES[optimizer], alternating=alternating, fresh=False)
                next(twin)
        assert private.keys() == rule.start(PLAN.factors.size, a).keys()
        assert bool(private) == (restart == "run" and optimizer != "gd")
        if restart == "run" and optimizer == "adam":
            assert private["steps"].tolist() == [12]
        assert not torch.allclose(a, rows[k], atol=0.01)


def test_als_is_a_damped_sweep_whatever_the_steps() -> None:
    rule = FactorRule("als", FACTOR_LR, damping=0.5)
    a, targets = drawn(3)
    factors = local_work.problem("narrow").plain.factors(PLAN, a, rule, {})
    for theta in targets:
        a = PLAN.refine(a, theta, sweeps=1, damping=0.5)
        factors = factors.towards(near(theta), LAM, 9)
        assert torch.equal(factors.value, a)
        assert factors.state == {}


def test_an_optimizer_that_continues_starts_afresh_where_nothing_was_kept() -> None:
    a, targets = drawn(2)
    rule, local = FactorRule("adam", FACTOR_LR, "run"), local_work.problem("narrow").plain
    kept = {name: value.expand(2, -1) for name, value in rule.start(PLAN.factors.size, a).items()}
    assert tuple(kept) == KEPT
    ends = [local.factors(PLAN, a, rule, private).towards(near(targets[0]), LAM, 3) for private in ({}, kept)]
    assert torch.equal(ends[0].value, ends[1].value)
    assert all(torch.equal(value, ends[1].state[name]) for name, value in ends[0].state.items())
    assert ends[0].state["steps"].tolist() == [[3], [3]]


@pytest.mark.parametrize("restart", ["round", "local-round"])
def test_only_an_optimizer_that_continues_keeps_and_reads_state(restart: Literal["round", "local-round"]) -> None:
    a, targets = drawn(2)
    local, junk = local_work.problem("narrow").plain, {name: torch.full_like(a, torch.nan) for name in KEPT}
    factors = local.factors(PLAN, a, FactorRule("adam", FACTOR_LR, restart), junk).towards(near(targets[0]), LAM, 2)
    assert factors.value.isfinite().all()
    assert factors.state == {}
    assert FactorRule("adam", FACTOR_LR, restart).start(PLAN.factors.size, a) == {}


def test_a_turn_moves_one_mode_of_every_tensor() -> None:
    turns = modes_in_turn(PLAN, torch.device("cpu"))
    assert len(turns) == 4
    assert torch.stack(turns).sum(0).eq(1).all()
    for n, turn in enumerate(turns):
        pieces = zip(PLAN.factors.split(turn), PLAN.modes, strict=True)
        assert all(bool(piece.all()) == (mode == n) == bool(piece.any()) for piece, mode in pieces)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("optimizer", [*RULES, "als"])
@pytest.mark.parametrize("restart", ["round", "run"])
def test_neither_arguments_nor_earlier_results_change(
    model: str, momentum: float, optimizer: Any, restart: Literal["round", "run"]
) -> None:
    if optimizer == "als" and restart == "run":
        return
    whole = local_work.problem(model)
    plan = FactorPlan.of(dict(zip(whole.objective.layout.names, whole.objective.layout.shapes, strict=True)), 1.5)
    a = 0.4 * torch.randn(plan.factors.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rule, local = FactorRule(optimizer, FACTOR_LR, restart), whole.plain
    theta, anchor, message = whole.theta[0].expand(3, -1), whole.anchor[0].expand(3, -1), a.expand(3, -1)
    private = {name: value.expand(3, -1) for name, value in rule.start(plan.factors.size, a).items()}
    data = [tensor for batch in whole.batches for tensor in batch]
    with unchanged(theta, anchor, message, *private.values(), *data) as kept:
        kept.keep(*local.gradient(theta, local.batch(0)), *local.descend(theta, lr=LR))
        kept.keep(*local.descend(theta, lr=LR, anchor=anchor, lam=LAM))
        factors = local.factors(plan, message, rule, private)
        for batch in local.batches():
            kept.keep(composed := factors.composed, factors.value, *factors.state.values())
            step = local.proximal(theta, batch, anchor=composed, lam=LAM, lr=LR, momentum=momentum, steps=3)
            theta, factors = step.theta, factors.towards(step, LAM, 3)
            kept.keep(theta, step.loss)
        kept.keep(factors.value, *factors.state.values())


@pytest.mark.parametrize(("steps", "first"), [(0, 0), (-1, 0), (1, -1), (None, -1)])
@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_descend_refuses_no_steps_and_minibatches_before_the_first(steps: int | None, first: int, kind: str) -> None:
    whole = local_work.problem("narrow")
    with pytest.raises(TDPFedError, match="must be at least"):
        getattr(whole, kind).descend(whole.theta, lr=LR, steps=steps, first=first)


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_proximal_refuses_no_steps(kind: str) -> None:
    whole = local_work.problem("narrow")
    local = getattr(whole, kind)
    with pytest.raises(TDPFedError, match="steps: 0 given, must be at least 1"):
        local.proximal(whole.theta, local.batch(0), anchor=whole.theta, lam=1.0, lr=LR, steps=0)


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_minibatches_come_in_order_tau_of_them_by_default(kind: str) -> None:
    local = getattr(whole := local_work.problem("narrow"), kind)
    for count, expected in ((None, local_work.TAU), (2, 2), (0, 0)):
        batches = list(local.batches(count))
        assert len(batches) == expected
        assert all(one is other for one, other in zip(batches, whole.batches, strict=False))
    for earlier, later in pairwise(local.batches()):
        assert not torch.equal(earlier[0], later[0])
