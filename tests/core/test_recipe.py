"""Recipes of local training are the optimizers and schedules of PyTorch, for a client alone and for many at once."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import local_work
from local_work import Problem, close, unchanged
from tdpfed.core.layout import Ranges
from tdpfed.core.local import LocalWork
from tdpfed.core.plain import PlainLocal
from tdpfed.core.recipe import USUAL, Optimizer
from tdpfed.core.state import Turn
from tdpfed.errors import CombinedError, TDPFedError
from tdpfed.fast.local import FastLocal

LR, LAM = 0.05, 3.0

Torch = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
RECIPES: dict[str, tuple[Optimizer, Torch]] = {
    "momentum": (Optimizer(momentum=0.8), lambda p: torch.optim.SGD(p, LR, momentum=0.8)),
    "nesterov": (
        Optimizer(momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, LR, momentum=0.8, nesterov=True),
    ),
    "decay": (Optimizer(weight_decay=0.3), lambda p: torch.optim.SGD(p, LR, weight_decay=0.3)),
    "decay and nesterov": (
        Optimizer(momentum=0.5, nesterov=True, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, LR, momentum=0.5, nesterov=True, weight_decay=0.3),
    ),
    "adam": (Optimizer(name="adam"), lambda p: torch.optim.Adam(p, LR)),
    "adam and decay": (Optimizer(name="adam", weight_decay=0.3), lambda p: torch.optim.Adam(p, LR, weight_decay=0.3)),
    "adamw": (Optimizer(name="adamw", weight_decay=0.3), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.3)),
    "adamw without": (Optimizer(name="adamw"), lambda p: torch.optim.AdamW(p, LR, weight_decay=0.0)),
    "clip": (Optimizer(clip=0.2), lambda p: torch.optim.SGD(p, LR)),
    "clip that never binds": (Optimizer(clip=1e6), lambda p: torch.optim.SGD(p, LR)),
    "clip and adamw": (
        Optimizer(name="adamw", weight_decay=0.1, clip=0.2),
        lambda p: torch.optim.AdamW(p, LR, weight_decay=0.1),
    ),
}
EXTRA = [(), ("anchor",), ("correction",), ("only",), ("anchor", "correction", "only")]


def torch_steps(one: Problem, optimizer: Optimizer, rule: Torch, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Steps on the module itself; parameters outside of ``only``, which is whole parameters here, are frozen."""
    layout, module = one.objective.layout, copy.deepcopy(one.objective.model)
    module.load_state_dict(layout.unflatten(one.theta))
    added = layout.unflatten(options.get("correction", torch.zeros_like(one.theta)))
    pulled = layout.unflatten(options.get("anchor", one.theta))
    inside = layout.unflatten(mask(one.theta, options.get("only")))
    trained = {name: p for name, p in module.named_parameters() if bool(inside[name].any())}
    torch_optimizer = rule(trained.values())
    for t in range(local_work.TAU):
        x, y = one.batches[t]
        torch_optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        whole = loss
        for name, p in module.named_parameters():
            whole = whole + (added[name] * p).sum()
            whole = whole + (LAM / 2 * (p - pulled[name]).square().sum() if "anchor" in options else 0.0)
        whole.backward()
        if optimizer.clip is not None:
            nn.utils.clip_grad_norm_(trained.values(), optimizer.clip)
        torch_optimizer.step()
    return layout.flatten({name: p.detach() for name, p in module.named_parameters()}), loss.detach()


def mask(theta: Tensor, only: Ranges | None) -> Tensor:
    found = torch.full_like(theta, float(only is None))
    for begin, end in only or ():
        found[begin:end] = 1
    return found


def options_of(problem: Problem, extra: tuple[str, ...]) -> dict[str, Any]:
    layout, generator = problem.objective.layout, torch.Generator().manual_seed(3)
    correction = 0.1 * torch.randn(3, layout.size, generator=generator, dtype=torch.float64)
    last = layout.ranges(layout.without(layout.names[:-2]))
    found = {"anchor": problem.anchor, "correction": correction, "only": last}
    return {name: found[name] for name in extra}


def row(options: dict[str, Any], k: int) -> dict[str, Any]:
    return {name: value[k] if torch.is_tensor(value) else value for name, value in options.items()}


def plain(problem: Problem, optimizer: Optimizer, turn: Turn) -> PlainLocal:
    batch, gradient = problem.batches.__getitem__, problem.objective.gradient
    return PlainLocal(turn, local_work.TAU, batch, gradient, optimizer=optimizer)


def fast(problem: Problem, optimizer: Optimizer, turn: Turn) -> FastLocal:
    batch = problem.batches.__getitem__
    return FastLocal(turn, local_work.TAU, batch, problem.recorded, set(), optimizer=optimizer)


CASES = [*(("narrow", name, EXTRA[0]) for name in RECIPES), *(("narrow", name, EXTRA[-1]) for name in RECIPES)]
CASES += [("narrow", "decay and nesterov", extra) for extra in EXTRA[1:-1]]
CASES += [("conv", name, extra) for name in ("momentum", "clip and adamw") for extra in (EXTRA[0], EXTRA[-1])]


@pytest.mark.parametrize(("model", "name", "extra"), CASES, ids=str)
def test_steps_are_those_of_torch(model: str, name: str, extra: tuple[str, ...]) -> None:
    optimizer, rule = RECIPES[name]
    whole = local_work.problem(model)
    options, turn = options_of(whole, extra), Turn(0, 1, torch.arange(3))
    given = [value for value in options.values() if torch.is_tensor(value)]
    with unchanged(whole.theta, *given):
        together = [
            kind(whole, optimizer, turn).descend(whole.theta, lr=LR, lam=LAM, **options) for kind in (plain, fast)
        ]
    for k, one in enumerate(whole.each()):
        own = row(options, k)
        expected = torch_steps(one, optimizer, rule, own)
        alone = [
            kind(one, optimizer, Turn(0, 1, torch.tensor(k))).descend(one.theta, lr=LR, lam=LAM, **own)
            for kind in (plain, fast)
        ]
        for theta, loss in [*alone, *((thetas[k], losses[k]) for thetas, losses in together)]:
            close(theta, expected[0])
            close(loss, expected[1])
        assert not torch.allclose(expected[0], one.theta, atol=1e-3)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (Optimizer(schedule="cosine", rounds=7), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 7)),
        (Optimizer(schedule="step", every=3, factor=0.4), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.4)),
        (Optimizer(), lambda o: torch.optim.lr_scheduler.ConstantLR(o, 1.0)),
    ],
    ids=["cosine", "step", "constant"],
)
def test_schedules_are_those_of_torch(optimizer: Optimizer, schedule: Callable[[Any], Any]) -> None:
    torch_optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], LR)
    scheduler = schedule(torch_optimizer)
    for round_ in range(1, 8):
        expected = pytest.approx(torch_optimizer.param_groups[0]["lr"], rel=1e-12)
        assert optimizer.rate(LR, round_) == expected
        assert optimizer.rate(LR, torch.tensor(round_)) == expected  # as runs of several seeds pass it
        if optimizer.schedule != "constant":
            assert LR * float(optimizer.share(torch.tensor(round_ - 1.0, dtype=torch.float64))) == expected
        torch_optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", [plain, fast])
def test_a_schedule_scales_the_rate_of_a_round(kind: Callable[..., LocalWork]) -> None:
    whole = local_work.problem("narrow")
    turn = Turn(0, 5, torch.arange(3))
    for name in ("momentum", "adamw", "clip"):
        optimizer = RECIPES[name][0]
        scheduled = Optimizer(**{**vars(optimizer), "schedule": "step", "every": 2, "factor": 0.5})
        found, _ = kind(whole, scheduled, turn).descend(whole.theta, lr=LR)
        expected, _ = kind(whole, optimizer, turn).descend(whole.theta, lr=LR / 4)
        assert torch.equal(found, expected)
    found, _ = kind(whole, Optimizer(schedule="cosine", rounds=8), turn).descend(whole.theta, lr=LR)
    close(found, kind(whole, USUAL, turn).descend(whole.theta, lr=LR / 2)[0])


def test_a_rate_that_is_a_tensor_gives_the_same_steps() -> None:
    """On a GPU one recorded computation serves all rounds, so the rate is a tensor there."""
    one = local_work.problem("narrow").only(0)
    for optimizer, _ in RECIPES.values():
        steps = [optimizer.rule(lr) for lr in (LR, torch.tensor(LR, dtype=torch.float64))]
        points = []
        for rule in steps:
            theta, moments = one.theta, rule.init(one.theta)
            for count in (1, 2, 3):
                theta, moments = rule.step(theta, one.anchor, moments, count)
            points.append(theta)
        close(points[0], points[1])


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({"name": "sgdd"}, {"name"}),
        ({"momentum": 1.0, "weight_decay": -1, "clip": 0}, {"momentum", "weight_decay", "clip"}),
        ({"name": "adam", "momentum": 0.9}, {"momentum"}),
        ({"nesterov": True}, {"nesterov"}),
        ({"schedule": "linear", "rounds": 0, "every": 0, "factor": 2.0}, {"schedule", "rounds", "every", "factor"}),
    ],
)
def test_wrong_values_name_field_value_and_what_is_allowed(given: dict[str, Any], fields: set[str]) -> None:
    with pytest.raises(TDPFedError) as caught:
        Optimizer(**given)
    errors = caught.value.errors if isinstance(caught.value, CombinedError) else [caught.value]
    assert {error.field for error in errors} == fields
    assert all(error.value == given[str(error.field)] and error.allowed for error in errors)
