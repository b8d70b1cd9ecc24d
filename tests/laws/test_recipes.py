"""A recipe of local training over rounds: a plain loop of ``torch.optim``, whatever the runner, the chunk or a stop."""

import copy
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_reference import flat, load, mean_of, minibatches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import small
from tdpfed.algorithms import ALGORITHMS, FedAvg, PFedMe, Scaffold
from tdpfed.algorithms.base import Update
from tdpfed.config import load_config
from tdpfed.core.local import LocalWork
from tdpfed.core.recipe import Optimizer
from tdpfed.core.state import State
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError, each
from tdpfed.runs.session import Session
from tdpfed.runs.simulate import simulate

ROUNDS, ETA = 3, 0.05
RECIPES: dict[str, tuple[Optimizer, Callable[..., torch.optim.Optimizer], Callable[..., Any]]] = {
    "nesterov and steps": (
        Optimizer(momentum=0.8, nesterov=True, weight_decay=0.1, schedule="step", every=2, factor=0.5),
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.8, nesterov=True, weight_decay=0.1),
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    ),
    "adamw, clipped, cosine": (
        Optimizer(name="adamw", weight_decay=0.1, clip=0.3, schedule="cosine"),
        lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=0.1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS),
    ),
    "plain steps of a rate that falls": (
        Optimizer(schedule="cosine"),
        torch.optim.SGD,
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, ROUNDS),
    ),
}
FOLLOW = {name: method for name, method in small.variants().items() if method.follows == "any"}


@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("name", RECIPES)
def test_rounds_are_a_loop_of_torch(name: str, runner: Any) -> None:
    """The optimizer begins afresh in every round, and the scheduler counts rounds."""
    optimizer, rule, schedule = RECIPES[name]
    data, method = small.federation(4), FedAvg(**small.COMMON, eta=ETA)
    found = simulate(small.mlp(), data, method, ROUNDS, runner=runner, optimizer=optimizer).simulation
    shared: dict[str, Tensor] = dict(small.mlp().double().named_parameters())
    rates = torch.optim.SGD([nn.Parameter(torch.zeros(1))], ETA)
    scheduler = schedule(rates)
    for round_ in range(1, ROUNDS + 1):
        trained: list[dict[str, Tensor]] = []
        for client in range(4):
            module = load(small.mlp().double(), shared)
            torch_optimizer = rule(module.parameters(), rates.param_groups[0]["lr"])
            for x, y in minibatches(data, client, round_, method.tau, method.batch_size):
                torch_optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                if optimizer.clip is not None:
                    nn.utils.clip_grad_norm_(module.parameters(), optimizer.clip)
                torch_optimizer.step()
            trained.append(dict(module.named_parameters()))
        shared = mean_of(trained, data.train_size.tolist())
        rates.step()
        scheduler.step()
    torch.testing.assert_close(found.global_model(), flat(shared), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", FOLLOW)
def test_batched_equals_loop(name: str) -> None:
    optimizer = RECIPES["adamw, clipped, cosine"][0].over(ROUNDS)
    runs = [small.train(FOLLOW[name], 2, runner=runner, optimizer=optimizer) for runner in ("batched", "loop")]
    small.assert_close(runs[0], runs[1], 1e-9)
    usual = small.train(FOLLOW[name], 2)
    assert not torch.allclose(runs[0].private["theta"], usual.private["theta"], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "model"), [*((name, "dense") for name in RECIPES), ("adamw, clipped, cosine", "conv")]
)
def test_any_chunking_equals_none_bit_for_bit(name: str, model: str) -> None:
    data, optimizer = small.federation(7, dtype=torch.float32), RECIPES[name][0].over(ROUNDS)
    method = FedAvg(**small.COMMON)
    whole = small.train(method, model=model, data=data, optimizer=optimizer)
    for chunk in (1, 3, 5):
        assert small.equal(whole, small.train(method, model=model, data=data, optimizer=optimizer, chunk=chunk)), chunk


@pytest.mark.parametrize("name", RECIPES)
def test_seeds_together_equal_seeds_alone(name: str) -> None:
    def begin(seed: int) -> Simulation:
        optimizer, method = RECIPES[name][0].over(ROUNDS), FedAvg(**small.COMMON)
        return Simulation(small.mlp(seed), small.federation(seed=seed), method, seed=seed, optimizer=optimizer)

    together, alone = Ensemble([begin(0), begin(1)]), [begin(0), begin(1)]
    for _ in range(2):
        together.step()
        for one in alone:
            one.step()
    assert all(small.equal(*pair) for pair in zip(together.simulations, alone, strict=True))


@contextmanager
def silent(simulation: Any, rounds: int, records: Any) -> Any:
    yield lambda _: None


def config(*overrides: str, rounds: int = 4) -> Any:
    quick = [
        f"run.rounds={rounds}", "checkpoint.every=2", "data.clients=4", "data.max_samples=20", "model.name=logistic",
        "algorithm.name=fedavg", "algorithm.tau=2", "optimizer.momentum=0.5", "optimizer.schedule=cosine",
    ]  # fmt: skip
    return load_config("digits", [*quick, *overrides])


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, stopped = (Session.begin(config(), tmp_path / name, None) for name in ("whole", "stopped"))
    whole.run(silent)
    for _ in range(3):  # the last checkpoint is of round 2
        stopped.simulation.step()
        stopped.after_round()
    stopped.folder.release()
    resumed = Session.resume(tmp_path / "stopped", None)
    assert resumed.simulation.round == 2
    resumed.run(silent)
    assert small.equal(whole.simulation, resumed.simulation)


def test_rounds_are_added_only_where_the_rate_does_not_depend_on_them(tmp_path: Path) -> None:
    for name, overrides in {"follows": (), "fixed": ("optimizer.rounds=4",)}.items():
        Session.begin(config(*overrides), tmp_path / name, None).run(silent)
    with pytest.raises(TDPFedError) as caught:
        Session.resume(tmp_path / "follows", None, overrides=["run.rounds=6"])
    assert (caught.value.field, caught.value.value) == ("run.rounds", 6)
    longer = Session.resume(tmp_path / "fixed", None, overrides=["run.rounds=6"])
    assert longer.left == 2
    longer.folder.release()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_method_follows_a_recipe_or_refuses_it(name: str) -> None:
    optimizer = Optimizer(momentum=0.5, clip=1.0, schedule="step")
    refused = {"any": set(), "rate": {"momentum", "clip"}, "none": {"momentum", "clip", "schedule"}}
    method = ALGORITHMS[name]
    try:
        optimizer.check_for(name, method.follows)
        errors = []
    except TDPFedError as error:
        errors = each(error)
    assert {error.field for error in errors} == {f"optimizer.{field}" for field in refused[method.follows]}
    assert all(error.value == getattr(optimizer, str(error.field).partition(".")[2]) for error in errors)


def test_a_run_refuses_what_its_method_cannot_follow() -> None:
    with pytest.raises(TDPFedError) as caught:
        small.train(PFedMe(**small.COMMON), 0, optimizer=Optimizer(name="adam"))
    assert (caught.value.field, caught.value.value) == ("optimizer.name", "adam")
    with pytest.raises(TDPFedError) as caught:
        small.train(FedAvg(**small.COMMON), 0, optimizer=Optimizer(schedule="cosine"))
    assert caught.value.field == "optimizer.rounds"


class ByGradients(FedAvg):
    """A method that takes its steps itself, and does not say that it cannot follow a recipe."""

    def update(self, message: State, private: State, local: LocalWork) -> Update:
        theta = message["w"]
        for batch in local.batches():
            g, loss = local.gradient(theta, batch)
            theta = theta - self.eta * g
        return {"theta": theta}, {"w": theta}, {"loss": loss}


@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_a_recipe_is_never_ignored(runner: Any) -> None:
    small.train(ByGradients(**small.COMMON), 1, runner=runner)
    for optimizer in (Optimizer(momentum=0.5), Optimizer(schedule="step")):
        with pytest.raises(TDPFedError, match="optimizer"):
            small.train(ByGradients(**small.COMMON), 1, runner=runner, optimizer=optimizer)


def test_scaffolds_control_variates_know_the_rate_of_a_round() -> None:
    """A round at half the rate is a round of SCAFFOLD with half the rate."""
    falling = small.train(
        Scaffold(**small.COMMON, eta=ETA), 1, optimizer=Optimizer(schedule="step", every=1, factor=0.5)
    )
    half = small.train(Scaffold(**small.COMMON, eta=ETA / 2), 0)
    half.resume_from(1, dict(falling.server), small.store(falling.private), copy.deepcopy(falling.ledger))
    for run in (falling, half):
        run.step()
    small.assert_close(falling, half, 1e-9)
