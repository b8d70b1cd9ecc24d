"""TDPFed's variants, each against a plain loop over one client in float64."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import TDPFed
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import Turn
from tdpfed.cp.plan import FactorPlan
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.updates import rows_of
from tdpfed.errors import TDPFedError
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.snapshot import restore, snapshot_of

CLIENT = 2


def settings(**options: Any) -> TDPFed:
    return TDPFed(**{**small.TDPFED, **options})


def one_client(algorithm: TDPFed, round_: int = 1) -> tuple[Simulation, Tensor, Tensor]:
    """Return a fresh simulation, and theta and factors of one client after its round."""
    simulation = Simulation(small.convnet(), small.federation(), algorithm, runner="loop")
    rows = {name: value[CLIENT : CLIENT + 1] for name, value in simulation.private.items()}
    outcome = simulation.runner.run(simulation.server, rows, Turn(0, round_, torch.tensor([CLIENT])))
    return simulation, outcome.private["theta"][0], outcome.upload["factors"][0]


def reference(
    simulation: Simulation, algorithm: TDPFed, move: Any, theta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Algorithm 1's ClientUpdate: ``move(a, theta, t)`` is what a variant does to the factors in local round t."""
    plan = FactorPlan.of(simulation.objective.model, algorithm.compression)
    a = simulation.server["factors"]
    theta = plan.compose(a) if theta is None else theta
    batches = simulation.runner.batches(Turn(0, 1, torch.tensor(CLIENT)))
    before = theta
    for t in range(algorithm.tau):
        batch, w = batches(t), plan.compose(a)
        if algorithm.momentum_state == "local-round":
            before = theta
        for _ in range(algorithm.s):
            g, lr = simulation.objective.gradient(theta, batch)[0], algorithm.eta_p
            whole = g + algorithm.lam * (theta - w)
            if algorithm.nu is not None and float(whole @ whole) <= algorithm.nu:
                break
            if algorithm.proximal == "implicit":
                point = (theta - lr * g + lr * algorithm.lam * w) / (1 + lr * algorithm.lam)
            else:
                point = theta - lr * whole
            theta, before = point + algorithm.momentum * (point - before), point
        a = move(a, theta, t)
    return theta, a


INNER: dict[str, dict[str, Any]] = {
    "velocity kept": {"momentum_state": "round"},
    "implicit": {"proximal": "implicit"},
    "implicit, plain": {"proximal": "implicit", "momentum": 0.0, "eta_p": 0.5},
    "implicit, velocity kept": {"proximal": "implicit", "momentum_state": "round", "eta_p": 0.2, "momentum": 0.7},
    "nu": {"nu": 0.3, "s": 9},
    "nu, velocity kept": {"nu": 0.3, "s": 9, "momentum_state": "round"},
    "all": {"nu": 0.3, "s": 9, "momentum_state": "round", "proximal": "implicit"},
}


@pytest.mark.parametrize("name", INNER)
def test_options_of_the_inner_problem(name: str) -> None:
    """Against Nesterov's method in its textbook form: a point, and the point ahead of it."""
    algorithm = settings(**INNER[name])
    simulation, theta, a = one_client(algorithm)
    plan = FactorPlan.of(simulation.objective.model, algorithm.compression)
    expected_theta, expected = reference(simulation, algorithm, by_torch(OPTIMIZERS["adam"], algorithm, plan))
    torch.testing.assert_close(a, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(theta, expected_theta, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", INNER)
def test_a_resumed_run_with_these_options_equals_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    whole = small.train(settings(**INNER[name]), 4)
    stopped, resumed = (small.train(settings(**INNER[name]), rounds) for rounds in (2, 0))
    Checkpoints(tmp_path).save(snapshot_of(stopped), None)
    found = Checkpoints(tmp_path).load()
    assert found is not None
    restore(resumed, found[0])
    for _ in range(2):
        resumed.step()
    assert small.equal(whole, resumed)


def test_a_velocity_is_kept_only_with_momentum() -> None:
    with pytest.raises(TDPFedError, match=r"^momentum_state: 'round' given, must be 'local-round' without momentum"):
        settings(momentum_state="round", momentum=0.0)
    with pytest.raises(TDPFedError, match=r"^nu: 0\.0 given, must be a finite number above 0"):
        settings(nu=0.0)


def by_torch(make: Any, algorithm: TDPFed, plan: FactorPlan, *, afresh: bool = False, alternating: bool = False) -> Any:
    """Move named factors by an optimizer of torch.optim and autograd; one optimizer for each factor."""
    parameters: dict[str, nn.Parameter] = {}
    rules: dict[str, torch.optim.Optimizer] = {}

    def distance(theta: Tensor) -> Tensor:
        flat = torch.cat([parameter.reshape(-1) for parameter in parameters.values()])
        return algorithm.lam / 2 * (theta - plan.compose(flat)).square().sum()

    def move(a: Tensor, theta: Tensor, t: int) -> Tensor:
        if t == 0 or afresh:
            for name, value in plan.factors.unflatten(a).items():
                parameters[name] = nn.Parameter(value.clone())
                rules[name] = make([parameters[name]])
        modes = dict(zip(plan.factors.names, plan.modes, strict=True))
        turns = [[n for n in modes if modes[n] == m] for m in range(4)] if alternating else [list(modes)]
        for _ in range(algorithm.s_prime):
            for names in turns:
                gradients = torch.autograd.grad(distance(theta), [parameters[n] for n in names])
                for name, gradient in zip(names, gradients, strict=True):
                    parameters[name].grad = gradient
                    rules[name].step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in parameters.values()])

    return move


OPTIMIZERS: dict[str, Any] = {
    "gd": lambda p: torch.optim.SGD(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("state", ["round", "local-round"])
@pytest.mark.parametrize("steps", ["joint", "alternating"])
def test_factor_optimizers(optimizer: Any, state: Any, steps: Any) -> None:
    algorithm = settings(optimizer=optimizer, optimizer_state=state, factor_steps=steps)
    simulation, theta, a = one_client(algorithm)
    plan = FactorPlan.of(simulation.objective.model, algorithm.compression)
    assert {rank is None for rank, shape in zip(plan.ranks, plan.dense.shapes, strict=True) if len(shape) > 1} == {
        False
    }
    move = by_torch(
        OPTIMIZERS[optimizer], algorithm, plan, afresh=state == "local-round", alternating=steps == "alternating"
    )
    expected_theta, expected = reference(simulation, algorithm, move)
    # AdaGrad and RMSProp divide by the gradient: where that is all but zero they blow rounding up.
    torch.testing.assert_close(a, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(theta, expected_theta, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("lead", [(), (2,)], ids=["one client", "clients"])
@pytest.mark.parametrize("model", small.MODELS)
def test_an_optimizer_that_goes_on_makes_two_rounds_one(optimizer: Any, lead: tuple[int, ...], model: str) -> None:
    """A client's two rounds, the second from its own upload and theta, against one of twice the local rounds."""
    twice = settings(optimizer=optimizer, tau=2 * small.TDPFED["tau"], keep_theta=True)
    simulation = Simulation(small.MODELS[model](), small.federation(), twice)
    long = simulation.algorithm
    assert isinstance(long, TDPFed)
    halves = [replace(long, tau=small.TDPFED["tau"], optimizer_state=state) for state in ("run", "round")]
    turn = Turn(0, 1, torch.arange(2).expand(lead) if lead else torch.tensor(CLIENT))
    batches, grad = simulation.runner.batches(turn), simulation.objective.gradient
    message = long.broadcast(simulation.server, turn)

    def begun(algorithm: TDPFed) -> dict[str, Tensor]:
        start = algorithm.init_private(simulation.objective.initial().double())
        return {name: value.expand(*lead, *value.shape) for name, value in start.items()}

    def rounds(algorithm: TDPFed) -> tuple[Tensor, Tensor]:
        sent, private = dict(message), begun(algorithm)
        for first in range(0, twice.tau, algorithm.tau):
            kept = {name: value.clone() for name, value in private.items()}
            local = PlainLocal(turn, algorithm.tau, lambda t, first=first: batches(first + t), grad)  # type: ignore[misc]
            new, sent, _ = algorithm.update(sent, private, local)
            assert all(torch.equal(private[name], value) for name, value in kept.items())
            assert {name: value.shape for name, value in new.items()} == {n: v.shape for n, v in private.items()}
            private = dict(reversed(new.items()))  # what comes from a file is in any order
        return private["theta"], sent["factors"]

    expected, goes_on, afresh = rounds(long), *(rounds(half) for half in halves)
    for one, other in zip(goes_on, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
    if optimizer != "gd":
        assert float((afresh[1] - expected[1]).norm()) > 1e-6


@pytest.mark.parametrize("option", [{"optimizer": "als"}, {"factor_steps": "alternating"}])
def test_what_has_no_whole_state_cannot_go_on(option: Any) -> None:
    with pytest.raises(TDPFedError, match="optimizer_state: 'run' given, must be 'round' or 'local-round' with"):
        settings(optimizer_state="run", **option)


def test_variants_differ() -> None:
    """Otherwise the test above could not tell them apart."""
    options: list[dict[str, Any]] = [
        {}, {"optimizer_state": "local-round"}, {"factor_steps": "alternating"}, {"optimizer": "gd"},
        {"optimizer": "adagrad"}, {"optimizer": "rmsprop"}, {"optimizer": "als"},
        {"momentum": 0.0}, {"lam": 5.0}, {"s": 3}, {"s_prime": 4}, {"eta_p": 0.06}, *INNER.values(),
    ]  # fmt: skip
    results = [one_client(settings(**option))[2] for option in options]
    for n, one in enumerate(results):
        assert all(float((one - other).norm()) > 1e-6 for other in results[n + 1 :])


@pytest.mark.parametrize("damping", [0.0, 1.0, 7.0])
def test_als_is_a_damped_least_squares_step_of_each_factor_in_turn(damping: float) -> None:
    algorithm = settings(optimizer="als", als_damping=damping, s_prime=99)
    simulation, theta, a = one_client(algorithm)
    plan = FactorPlan.of(simulation.objective.model, algorithm.compression)

    def solve(tensor: Tensor, factors: list[Tensor]) -> list[Tensor]:
        """Least squares of every factor with the others fixed, held near its old value; by explicit design matrices."""
        letters = "abcd"[: len(factors)]
        for n, old in enumerate(factors):
            others = [factor for m, factor in enumerate(factors) if m != n]
            rest = letters.replace(letters[n], "")
            spec = ",".join(f"{letter}z" for letter in rest) + f"->{rest}z"
            design = torch.einsum(spec, *others).reshape(-1, old.shape[1])
            target = tensor.movedim(n, 0).reshape(old.shape[0], -1).T
            pull = damping * design.square().sum() / old.shape[1]
            full = torch.cat([design, pull.sqrt() * torch.eye(old.shape[1], dtype=old.dtype)])
            wanted = torch.cat([target, pull.sqrt() * old.T])
            factors[n] = torch.linalg.lstsq(full, wanted).solution.T
        return factors

    def move(a: Tensor, theta: Tensor, t: int) -> Tensor:
        del t
        named, dense, moved = plan.factors.unflatten(a), plan.dense.unflatten(theta), []
        values = iter(named.values())
        for (_, tensor), rank in zip(dense.items(), plan.ranks, strict=True):
            if rank is None:
                moved.append((tensor + damping * next(values)) / (1 + damping))
            else:
                moved += solve(tensor, [next(values) for _ in tensor.shape])
        return torch.cat([value.reshape(-1) for value in moved])

    expected_theta, expected = reference(simulation, algorithm, move)
    torch.testing.assert_close(plan.compose(a), plan.compose(expected), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(theta, expected_theta, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("damping", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("model", small.MODELS)
def test_als_never_increases_the_distance(model: str, damping: float) -> None:
    algorithm = settings(optimizer="als", als_damping=damping)
    simulation = small.train(algorithm, rounds=1, model=model)
    bound = simulation.algorithm
    assert isinstance(bound, TDPFed)
    turn = Turn(0, 2, torch.arange(5))
    message = bound.broadcast(simulation.server, turn)
    before = message["factors"]
    shrunk = 0
    local = simulation.runner.local(turn, simulation.runner.batches(turn))
    for (theta, *_), factors in bound.local_rounds(message, simulation.private, local):
        a = factors.value
        old = (theta - bound.plan.compose(before.contiguous())).norm(dim=-1)
        new = (theta - bound.plan.compose(a)).norm(dim=-1)
        assert (new <= old * (1 + 1e-12)).all()
        shrunk += int((new < 0.999 * old).sum())
        before = a
    assert shrunk > 0


def test_theta_starts_from_the_global_model_or_is_kept() -> None:
    for keep in (False, True):
        algorithm = settings(keep_theta=keep, optimizer="gd")
        simulation = small.train(algorithm, rounds=1, model="conv", runner="loop")
        bound = simulation.algorithm
        assert isinstance(bound, TDPFed)
        own = simulation.private["theta"][CLIENT].clone()
        start = own if keep else bound.plan.compose(simulation.server["factors"])
        turn = Turn(0, 2, torch.tensor([CLIENT]))
        seen: list[Tensor] = []

        def spy(theta: Tensor, batch: Any, seen: list[Tensor] = seen, simulation: Simulation = simulation) -> Any:
            seen.append(theta)
            return simulation.objective.gradient(theta, batch)

        private = rows_of(simulation.private, turn.clients)
        local = PlainLocal(turn, bound.tau, simulation.runner.batches(turn), spy)
        bound.update(bound.broadcast(simulation.server, turn), private, local)
        torch.testing.assert_close(seen[0][0], start, rtol=1e-12, atol=1e-12)
        assert len(seen) == algorithm.tau * algorithm.s


def test_a_client_that_keeps_theta_starts_its_first_round_from_the_global_model() -> None:
    simulation = small.train(settings(keep_theta=True), rounds=0, model="conv", runner="loop")
    bound = simulation.algorithm
    assert isinstance(bound, TDPFed)
    turn = Turn(0, 1, torch.tensor([CLIENT]))
    seen: list[Tensor] = []

    def spy(theta: Tensor, batch: Any) -> Any:
        seen.append(theta)
        return simulation.objective.gradient(theta, batch)

    private = rows_of(simulation.private, turn.clients)
    local = PlainLocal(turn, bound.tau, simulation.runner.batches(turn), spy)
    bound.update(bound.broadcast(simulation.server, turn), private, local)
    torch.testing.assert_close(seen[0][0], bound.plan.compose(simulation.server["factors"]), rtol=1e-12, atol=1e-12)


def test_act_starts_theta_from_the_averaged_tensor_itself() -> None:
    """Not from the factors fitted to it: the full tensor travels down too."""
    simulation = small.train(settings(aggregation="act"), rounds=1)
    bound = simulation.algorithm
    assert isinstance(bound, TDPFed)
    turn = Turn(0, 2, torch.tensor(0))
    message = bound.broadcast(simulation.server, turn)
    assert set(message) == {"theta", "factors"}
    assert float((message["theta"] - bound.plan.compose(message["factors"])).norm()) > 1e-4
    seen: list[Tensor] = []

    def spy(theta: Tensor, batch: Any) -> Any:
        seen.append(theta)
        return simulation.objective.gradient(theta, batch)

    local = PlainLocal(turn, bound.tau, simulation.runner.batches(turn), spy)
    bound.update(message, {"theta": simulation.private["theta"][0]}, local)
    assert torch.equal(seen[0], simulation.server["theta"])
    shipped = simulation.global_model()
    assert shipped is not None
    assert torch.equal(shipped, simulation.server["theta"])


def test_the_plan_follows_the_settings() -> None:
    def plan(**options: Any) -> FactorPlan:
        bound = Simulation(small.convnet(), small.federation(), settings(**options)).algorithm
        assert isinstance(bound, TDPFed)
        return bound.plan

    model = small.convnet()
    assert plan() == FactorPlan.of(model, 1.5)
    assert plan(compression=3.0) == FactorPlan.of(model, 3.0)
    assert plan(exclude=("fc*",)) == FactorPlan.of(model, 1.5, exclude=("fc*",))
    assert plan(include=("fc*",)) == FactorPlan.of(model, 1.5, include=("fc*",))
    assert plan(ranks={"fc1.weight": 2}) == FactorPlan.of(model, 1.5, ranks={"fc1.weight": 2})
