"""Fast local work is the plain one: the same numbers up to rounding, and as little changed."""

from typing import Any

import pytest
import torch
from torch import Tensor

import local_work
from local_work import FACTOR_LR, PLANS, close, drawn, named, unchanged
from tdpfed.core.layout import Ranges
from tdpfed.core.local import FactorRule, Factors, LocalWork, Near
from tdpfed.core.state import State
from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError
from tdpfed.fast.graph_rewrites import InPlace
from tdpfed.fast.optim import aligned_copy

LR, LAM = 0.05, 3.0
FEW_RULES = [
    FactorRule("adam", FACTOR_LR), FactorRule("adam", FACTOR_LR, "run"), FactorRule("rmsprop", FACTOR_LR, "run"),
    FactorRule("adagrad", FACTOR_LR, alternating=True), FactorRule("als", FACTOR_LR),
]  # fmt: skip


def is_skipped(model: str) -> bool:
    """Whether several steps on a minibatch skip the first layer's weights."""
    whole = local_work.problem(model)
    return whole.fast._gradient.skips_first_layer(whole.theta, whole.batches[0])


def test_the_models_are_the_different_cases() -> None:
    assert [model for model in local_work.MODELS if is_skipped(model)] == ["wide"]


@pytest.mark.parametrize("model", local_work.MODELS)
def test_a_gradient_is_the_plain_one(model: str) -> None:
    whole = local_work.problem(model)
    together = whole.fast.gradient(whole.theta, whole.batches[0])
    for k, one in enumerate(whole.each()):
        expected = one.plain.gradient(one.theta, one.batches[0])
        alone = one.fast.gradient(one.theta, one.batches[0])
        for rows, ours, twin in zip(together, alone, expected, strict=True):
            close(rows[k], twin)
            close(ours, twin)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("anchor", [None, "own", "shared"])
@pytest.mark.parametrize(("steps", "first"), [(None, 0), (1, 0), (3, 2), (None, 1)])
def test_a_descent_is_the_plain_one(model: str, anchor: str | None, steps: int | None, first: int) -> None:
    whole = local_work.problem(model)
    anchors = {None: None, "own": whole.anchor, "shared": whole.anchor[0].expand_as(whole.anchor)}[anchor]
    options: dict[str, Any] = {"lr": LR, "steps": steps, "first": first, "lam": LAM}
    together = whole.fast.descend(whole.theta, **options, anchor=anchors)
    for k, one in enumerate(whole.each()):
        own = None if anchors is None else anchors[k]
        expected = one.plain.descend(one.theta, **options, anchor=own)
        alone = one.fast.descend(one.theta, **options, anchor=own)
        for rows, ours, twin in zip(together, alone, expected, strict=True):
            close(rows[k], twin)
            close(ours, twin)


PARTS = {"all": None, "last": (-1,), "last two": (-2, -1), "ends": (0, -1)}


def part_of(whole: local_work.Problem, numbers: tuple[int, ...] | None) -> Ranges | None:
    """The ranges of parameters by their numbers."""
    layout = whole.objective.layout
    return None if numbers is None else layout.ranges(layout.select([layout.names[n] for n in numbers]))


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_descent_of_a_part_or_with_a_correction_is_the_plain_one(
    model: str, anchored: bool, corrected: bool, part: str, steps: int
) -> None:
    """Both are the steps written out here, and frozen values do not move."""
    whole = local_work.problem(model)
    only = part_of(whole, PARTS[part])
    generator = torch.Generator().manual_seed(3)
    correction = torch.randn(whole.theta.shape, generator=generator, dtype=whole.theta.dtype) if corrected else None
    frozen = torch.ones(whole.theta.shape[-1], dtype=torch.bool)
    for begin, end in ((0, len(frozen)),) if only is None else only:
        frozen[begin:end] = False
    assert bool(frozen.any()) == (only is not None and (model != "product" or part == "last"))
    with unchanged(whole.theta, whole.anchor, *([] if correction is None else [correction])):
        together = whole.fast.descend(
            whole.theta, lr=LR, steps=steps, first=1, lam=LAM, anchor=whole.anchor if anchored else None,
            correction=correction, only=only,
        )  # fmt: skip
    assert torch.equal(together[0][:, frozen], whole.theta[:, frozen])
    for k, one in enumerate(whole.each()):
        options: dict[str, Any] = {
            "lr": LR, "steps": steps, "first": 1, "lam": LAM, "anchor": one.anchor if anchored else None,
            "correction": None if correction is None else correction[k], "only": only,
        }  # fmt: skip
        theta = one.theta
        for t in range(1, 1 + steps):
            g, loss = one.objective.gradient(theta, one.batches[t])
            g = g + LAM * (theta - one.anchor) if anchored else g
            g = g if correction is None else g + correction[k]
            theta = torch.where(frozen, theta, theta - LR * g)
        for found in (one.plain.descend(one.theta, **options), one.fast.descend(one.theta, **options)):
            close(found[0], theta)
            close(found[1], loss)
        close(together[0][k], theta)
        close(together[1][k], loss)


@pytest.mark.parametrize("model", ["wide", "conv"])
def test_steps_of_the_last_layer_leave_the_backward_pass_of_the_others_out(model: str) -> None:
    """The recorded step of a part has fewer operators than that of the whole model."""
    whole = local_work.problem(model)
    only = part_of(whole, (-2, -1))
    assert only is not None
    theta = whole.theta.clone()
    theta, batch = (theta[0], (whole.batches[0][0][0], whole.batches[0][1][0])) if model == "conv" else (
        theta, whole.batches[0]
    )  # fmt: skip
    counts = []
    for part in (None, only):
        one, many = whole.recorded._part(part)
        step = (one if model == "conv" else many)._steps.of(theta, *batch)
        assert isinstance(step, InPlace)
        counts.append(len(step.move_only.graph.nodes))
    assert counts[1] < 0.8 * counts[0]


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("lam", [0.0, LAM, 1 / LR])
def test_proximal_steps_are_the_plain_ones(model: str, momentum: float, steps: int, lam: float) -> None:
    whole = local_work.problem(model)
    options: dict[str, Any] = {"lam": lam, "lr": LR, "momentum": momentum, "steps": steps}
    for anchor in (whole.anchor, whole.anchor[1].expand_as(whole.anchor)):
        together = whole.fast.proximal(whole.theta, whole.batches[1], anchor=anchor, **options)
        for k, one in enumerate(whole.each()):
            expected = one.plain.proximal(one.theta, one.batches[1], anchor=anchor[k], **options)
            alone = one.fast.proximal(one.theta, one.batches[1], anchor=anchor[k], **options)
            for rows, ours, twin in zip(together[:2], alone[:2], expected[:2], strict=True):
                close(rows[k], twin)
                close(ours, twin)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize(("momentum", "nu"), [(0.0, None), (0.6, None), (0.6, 1e-3)])
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("kept", [False, True])
def test_steps_from_a_result_that_is_used_up_have_the_same_bits(
    model: str, momentum: float, nu: float | None, steps: int, kept: bool
) -> None:
    """The other way is to begin at its parameters, which stay as they are."""
    whole = local_work.problem(model)
    options: dict[str, Any] = {
        "anchor": whole.anchor, "lam": LAM, "lr": LR, "momentum": momentum, "nu": nu, "steps": steps,
    }  # fmt: skip
    for local in (whole.fast, whole.plain):
        velocity = torch.zeros_like(whole.theta) if kept else None
        once = local.proximal(whole.theta, whole.batches[0], velocity=velocity, **options)
        with unchanged(once.theta, whole.anchor):
            expected = local.proximal(once.theta, whole.batches[1], velocity=once.velocity, **options)
        found = local.proximal(once, whole.batches[1], velocity=once.velocity, **options)
        for ours, twin in zip(found, expected, strict=True):
            if isinstance(twin, torch.Tensor):
                assert isinstance(ours, torch.Tensor)
                assert torch.equal(ours, twin)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("whose", ["all", "a view"])
def test_a_result_that_is_the_anchor_too_is_not_overwritten(model: str, momentum: float, whose: str) -> None:
    """As in a proximal point method, in which each call pulls towards where the last one ended."""
    whole = local_work.problem(model)
    for local in (whole.fast, whole.plain):
        options: dict[str, Any] = {"lam": LAM, "lr": LR, "momentum": momentum, "steps": 4}
        once = local.proximal(whole.theta, whole.batches[0], anchor=whole.anchor, **options)
        start = once.theta.clone()
        expected = local.proximal(start, whole.batches[1], anchor=start.clone(), **options)
        anchor = once.theta if whose == "all" else once.theta[:, :]
        found = local.proximal(once, whole.batches[1], anchor=anchor, **options)
        assert torch.equal(found.theta, expected.theta)


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("steps", [1, 3])
def test_a_result_that_is_none_of_a_call_is_not_used_up(model: str, steps: int) -> None:
    """A method may begin with a result of its own making: its parameters are those of the server, or of a row."""
    whole = local_work.problem(model)
    shared = whole.theta[0].expand_as(whole.theta)
    options: dict[str, Any] = {"anchor": whole.anchor, "lam": LAM, "lr": LR, "steps": steps}
    for theta in (shared, whole.theta, aligned_copy(whole.theta)):
        with unchanged(theta):
            found = whole.fast.proximal(Near(theta, torch.zeros(len(theta))), whole.batches[0], **options)
        assert torch.equal(found.theta, whole.fast.proximal(theta, whole.batches[0], **options).theta)


def test_parameters_that_did_not_move_are_not_used_up() -> None:
    """With ``nu`` a client may end where it began; the next call must not write there."""
    whole = local_work.problem("wide")
    theta = whole.fast.proximal(whole.theta, whole.batches[0], anchor=whole.anchor, lam=LAM, lr=LR, steps=2).theta
    options: dict[str, Any] = {"anchor": whole.anchor, "lam": LAM, "lr": LR, "steps": 3}
    with unchanged(theta):
        still = whole.fast.proximal(theta, whole.batches[0], nu=1e30, **options)
        assert torch.equal(still.theta, theta)
        whole.fast.proximal(still, whole.batches[1], **options)


def model_plan(whole: local_work.Problem) -> FactorPlan:
    layout = whole.objective.layout
    return FactorPlan.of(dict(zip(layout.names, layout.shapes, strict=True)), 1.5)


def rounds(
    local: LocalWork, plan: FactorPlan, a: Tensor, theta: Tensor, rule: FactorRule, private: State, momentum: float
) -> tuple[Tensor, Factors]:
    """LocalWork rounds as TDPFed takes them."""
    factors = local.factors(plan, a, rule, private)
    for batch in local.batches():
        near = local.proximal(theta, batch, anchor=factors.composed, lam=LAM, lr=LR, momentum=momentum, steps=3)
        theta, factors = near.theta, factors.towards(near, LAM, 3)
    return theta, factors


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("rule", FEW_RULES, ids=named)
@pytest.mark.parametrize("shared", [True, False])
def test_neither_arguments_nor_earlier_results_change(
    model: str, momentum: float, rule: FactorRule, shared: bool
) -> None:
    """Tensors of their own, and expanded ones, whose rows are the same memory."""
    whole = local_work.problem(model)
    plan, local = model_plan(whole), whole.fast
    a, _ = drawn(plan, 3)
    theta, anchor, message = (
        value[0].expand_as(value) if shared else value for value in (whole.theta, whole.anchor, a)
    )
    start = rule.start(plan.factors.size, a[0])
    private = {name: value.expand(3, -1) if shared else value.repeat(3, 1) for name, value in start.items()}
    data = [tensor for batch in whole.batches for tensor in batch]
    with unchanged(theta, anchor, message, *private.values(), *data) as kept:
        kept.keep(*local.gradient(theta, local.batch(0)), *local.descend(theta, lr=LR))
        kept.keep(*local.descend(theta, lr=LR, anchor=anchor, lam=LAM))
        factors = local.factors(plan, message, rule, private)
        for batch in local.batches():
            kept.keep(composed := factors.composed, factors.value, *factors.state.values())
            for steps in (1, 3):
                near = local.proximal(theta, batch, anchor=composed, lam=LAM, lr=LR, momentum=momentum, steps=steps)
                kept.keep(near.theta, near.loss)
            theta, factors = near.theta, factors.towards(near, LAM, 3)
        kept.keep(factors.value, *factors.state.values())
        kept.keep(*local.descend(theta, lr=LR), *local.gradient(theta, local.batch(0)))


@pytest.mark.parametrize("model", ["wide", "conv"])
def test_one_client_without_an_axis_changes_nothing_either(model: str) -> None:
    one = local_work.problem(model).only(0)
    plan, local = model_plan(one), one.fast
    a, rule = drawn(plan, 1)[0][0], FactorRule("adam", FACTOR_LR, "run")
    private = rule.start(plan.factors.size, a)
    with unchanged(one.theta, one.anchor, a, *private.values()) as kept:
        kept.keep(*local.descend(one.theta, lr=LR, anchor=one.anchor, lam=LAM), *local.descend(one.theta, lr=LR))
        for momentum in (0.0, 0.6):
            theta, factors = rounds(local, plan, a, one.theta, rule, private, momentum)
            kept.keep(theta, factors.value, *factors.state.values())


@pytest.mark.parametrize("model", local_work.MODELS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
@pytest.mark.parametrize("rule", [FactorRule("adam", FACTOR_LR), FactorRule("rmsprop", FACTOR_LR, "run")], ids=named)
def test_local_rounds_are_the_plain_ones(model: str, momentum: float, rule: FactorRule) -> None:
    whole = local_work.problem(model)
    plan = model_plan(whole)
    a, _ = drawn(plan, 3)
    private = {name: value.repeat(3, 1) for name, value in rule.start(plan.factors.size, a[0]).items()}
    theta, factors = rounds(whole.fast, plan, a, whole.theta, rule, private, momentum)
    for k, one in enumerate(whole.each()):
        own = {name: value[k] for name, value in private.items()}
        twin, expected = rounds(one.plain, plan, a[k], one.theta, rule, own, momentum)
        close(theta[k], twin, 1e-7)
        close(factors.value[k], expected.value, 1e-7)


@pytest.mark.parametrize("model", local_work.MODELS)
def test_a_clients_bits_do_not_depend_on_the_others(model: str) -> None:
    """Three clients or seven: as few as the engine computes together, and more."""
    many = local_work.problem(model, 7, torch.float32)
    few = many.only(slice(2, 5))
    for momentum in (0.0, 0.6):
        for steps in (1, 4):
            ends = [
                one.fast.proximal(
                    one.theta, one.batches[0], anchor=one.anchor, lam=LAM, lr=LR, momentum=momentum, steps=steps
                )
                for one in (many, few)
            ]
            assert torch.equal(ends[0].theta[2:5], ends[1].theta)
            assert torch.equal(ends[0].loss[2:5], ends[1].loss)
    for anchored in (False, True):
        found = [
            one.fast.descend(one.theta, lr=LR, anchor=one.anchor if anchored else None, lam=LAM) for one in (many, few)
        ]
        assert torch.equal(found[0][0][2:5], found[1][0])
        assert torch.equal(found[0][1][2:5], found[1][1])
    gradients = [one.fast.gradient(one.theta, one.batches[0])[0] for one in (many, few)]
    assert torch.equal(gradients[0][2:5], gradients[1])


def test_what_a_method_asks_for_is_noted() -> None:
    whole = local_work.problem("narrow")
    seen: set[str] = set()
    local = whole.fast
    local._used = seen
    local.gradient(whole.theta, whole.batches[0])
    assert seen == {"gradient"}
    local.descend(whole.theta, lr=LR)
    options: dict[str, Any] = {"anchor": whole.anchor, "lam": LAM, "lr": LR}
    local.proximal(whole.theta, whole.batches[0], **options)
    assert seen == {"gradient", "descend", "proximal"}
    local.proximal(whole.theta, whole.batches[0], **options, steps=2)
    local.factors(PLANS[2], drawn(PLANS[2], 3)[0], FactorRule("gd", FACTOR_LR), {})
    assert seen == {"gradient", "descend", "proximal", "plain steps", "factors"}


@pytest.mark.parametrize("model", local_work.MODELS)
def test_a_loss_is_that_of_the_gradient(model: str) -> None:
    whole = local_work.problem(model)
    together = whole.fast.loss(whole.theta, whole.batches[0])
    for k, one in enumerate(whole.each()):
        expected = one.plain.gradient(one.theta, one.batches[0])[1]
        for found in (together[k], one.fast.loss(one.theta, one.batches[0]), one.plain.loss(one.theta, one.batches[0])):
            close(found, expected)


@pytest.mark.parametrize("model", local_work.MODELS)
def test_a_product_with_the_hessian_is_a_difference_of_gradients(model: str) -> None:
    """And the fast one is the plain one."""
    whole, step = local_work.problem(model), 1e-5
    together = whole.fast.hessian_product(whole.theta, whole.batches[0], whole.anchor)
    for k, one in enumerate(whole.each()):
        batch, product = one.batches[0], one.plain.hessian_product(one.theta, one.batches[0], one.anchor)
        close(together[k], product)
        close(one.fast.hessian_product(one.theta, batch, one.anchor), product)
        ahead, behind = (one.plain.gradient(one.theta + s * one.anchor, batch)[0] for s in (step, -step))
        torch.testing.assert_close(product, (ahead - behind) / (2 * step), rtol=1e-4, atol=1e-6)
    assert float(together.norm()) > 0.1


@pytest.mark.parametrize("kind", ["validation", "public", "positions"])
def test_what_a_round_has_not_is_refused(kind: str) -> None:
    whole = local_work.problem("wide")
    for local in (whole.fast, whole.plain):
        with pytest.raises(TDPFedError, match=r"^algorithm\.name: the method needs "):
            getattr(local, kind)(0)
