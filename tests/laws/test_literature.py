"""Laws of the methods people compare with: where they coincide with FedAvg, training alone or each other."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import small
from tdpfed.algorithms import (
    APFL,
    Algorithm,
    Ditto,
    FedAvg,
    FedBABU,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    Local,
    Scaffold,
)
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import Turn, lengths_of
from tdpfed.data import Federation
from tdpfed.engine.attacks import Attack
from tdpfed.engine.runners import RunnerName
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.fast.local import FastLocal
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.robust import Rule
from tdpfed.wire import Wire

NEW = ("fedprox", "scaffold", "ditto", "apfl", "fedper", "fedrep", "lgfedavg", "fedbabu")
SPLIT: dict[str, type[Any]] = {"fedper": FedPer, "fedrep": FedRep, "lgfedavg": LGFedAvg, "fedbabu": FedBABU}
CONDITIONS = [Participation(), Participation(3), Participation(4, dropout=0.3)]
RUNNERS: tuple[RunnerName, ...] = ("batched", "loop")


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


def pair(left: Algorithm, right: Algorithm, **options: Any) -> tuple[Simulation, Simulation]:
    return small.train(left, 3, **options), small.train(right, 3, **options)


# Where they coincide


CASES = [
    {"runner": runner, "model": model, "participation": participation}
    for runner, model, participation in product(RUNNERS, small.MODELS, CONDITIONS)
]


@pytest.mark.parametrize("options", CASES, ids=lambda options: " ".join(map(str, options.values())))
class TestCoincide:
    def test_fedprox_without_its_term_is_fedavg(self, options: Any) -> None:
        prox, fedavg = pair(FedProx(**small.COMMON, mu=0.0), FedAvg(**small.COMMON), **options)
        close(prox.server["w"], fedavg.server["w"])
        close(prox.personalized(), fedavg.personalized())
        assert prox.minibatch_loss == pytest.approx(fedavg.minibatch_loss, rel=1e-9)

    @pytest.mark.parametrize("lam", [0.0, 3.0])
    def test_the_shared_model_of_ditto_is_fedavgs(self, lam: float, options: Any) -> None:
        ditto, fedavg = pair(Ditto(**small.COMMON, lam=lam), FedAvg(**small.COMMON), **options)
        close(ditto.server["w"], fedavg.server["w"])
        assert not torch.allclose(ditto.personalized(), fedavg.personalized(), atol=1e-4)

    def test_ditto_without_its_term_is_training_alone(self, options: Any) -> None:
        ditto, alone = pair(Ditto(**small.COMMON, lam=0.0), Local(**small.COMMON), **options)
        close(ditto.personalized(), alone.personalized())

    def test_apfl_without_own_models_is_fedavg(self, options: Any) -> None:
        apfl, fedavg = pair(APFL(**small.COMMON, alpha=0, adaptive=False), FedAvg(**small.COMMON), **options)
        close(apfl.server["w"], fedavg.server["w"])
        close(apfl.personalized(), fedavg.personalized())

    def test_apfl_with_own_models_alone_is_training_alone(self, options: Any) -> None:
        apfl, alone = pair(APFL(**small.COMMON, alpha=1, adaptive=False), Local(**small.COMMON), **options)
        close(apfl.personalized(), alone.personalized())
        assert apfl.minibatch_loss == pytest.approx(alone.minibatch_loss, rel=1e-9)

    @pytest.mark.parametrize("method", [FedPer, LGFedAvg])
    def test_with_nothing_personal_they_are_fedavg(self, method: Any, options: Any) -> None:
        split, fedavg = pair(method(**small.COMMON, personal=()), FedAvg(**small.COMMON), **options)
        close(split.server["shared"], fedavg.server["w"])
        close(split.personalized(), fedavg.personalized())

    def test_lgfedavg_and_fedper_are_one_method_with_the_parts_swapped(self, options: Any) -> None:
        runs = pair(FedPer(**small.COMMON, personal=("!last",)), LGFedAvg(**small.COMMON), **options)
        assert small.equal(*runs)


@pytest.mark.parametrize("runner", RUNNERS)
def test_scaffold_with_one_client_is_sgd(runner: RunnerName) -> None:
    data = small.federation(1)
    scaffold, alone = pair(Scaffold(**small.COMMON), Local(**small.COMMON), data=data, runner=runner)
    close(scaffold.server["w"], alone.personalized()[0])


# SCAFFOLD's control variates


@pytest.mark.parametrize("participation", CONDITIONS, ids=str)
def test_the_server_s_control_variate_is_the_mean_of_the_clients(participation: Participation) -> None:
    simulation = small.train(Scaffold(**small.COMMON), 0, participation=participation)
    for _ in range(5):
        simulation.step()
        close(simulation.server["c"], simulation.private["c"].mean(0))
    assert float(simulation.server["c"].norm()) > 0.01


def test_with_weights_it_is_their_weighted_mean_when_all_take_part() -> None:
    simulation = small.train(Scaffold(**small.COMMON, weights="samples"), 4)
    sizes = simulation.federation.train_size.double()
    close(simulation.server["c"], (sizes / sizes.sum()) @ simulation.private["c"])


def test_a_control_variate_is_the_mean_gradient_of_a_clients_steps() -> None:
    simulation = small.train(Scaffold(**small.COMMON), 2)
    before = {name: value.clone() for name, value in simulation.private.items()}
    server = dict(simulation.server)
    simulation.step()
    for client in range(5):
        batches = simulation.runner.batches(Turn(0, 3, torch.tensor(client)))
        y, gradients = server["w"], []
        for t in range(3):
            g, _ = simulation.objective.gradient(y, batches(t))
            gradients.append(g)
            y = y - 0.05 * (g + server["c"] - before["c"][client])
        close(simulation.private["c"][client], torch.stack(gradients).mean(0))


def test_with_full_gradients_scaffold_finds_the_common_optimum_and_fedavg_does_not() -> None:
    """The claim of the paper: drift is corrected. The gradient of the mean loss at the end tells."""
    clients, samples = 4, 40
    generator = torch.Generator().manual_seed(3)
    owner = torch.arange(clients).repeat_interleave(samples)
    x = 0.5 * torch.randn(len(owner), *small.SHAPE, generator=generator)
    guess = torch.randint(small.CLASSES, (len(owner),), generator=generator)
    y = torch.where(torch.rand(len(owner), generator=generator) < 0.6, owner % small.CLASSES, guess)
    data = Federation.from_tensors(x, y, owner, classes=small.CLASSES, dtype=torch.float64)
    (size,) = data.train_size.unique().tolist()
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, small.CLASSES))

    def slope(algorithm: Algorithm) -> float:
        simulation = Simulation(net, data, algorithm)
        for _ in range(60):
            simulation.step()
        w = simulation.global_model()
        assert w is not None
        gradients = [simulation.objective.gradient(w, data.client(k)[:2])[0] for k in range(clients)]
        return float(torch.stack(gradients).mean(0).norm())

    whole: dict[str, Any] = {"tau": 10, "batch_size": size, "eta": 0.3, "weights": "uniform"}
    assert slope(Scaffold(**whole)) < 0.05 * slope(FedAvg(**whole))


# Models of two parts


def parts(simulation: Simulation) -> tuple[Tensor, Tensor]:
    """Masks ``(P,)`` of the shared and of the personal parameters."""
    layout, algorithm = simulation.objective.layout, simulation.algorithm
    assert isinstance(algorithm, FedPer | FedRep | LGFedAvg | FedBABU)
    masks = []
    for part in (algorithm.shared, algorithm.own):
        mask = torch.zeros(layout.size, dtype=torch.bool)
        for name in part.names:
            mask[layout.slices[name]] = True
        masks.append(mask)
    assert torch.equal(masks[0], ~masks[1])
    return masks[0], masks[1]


@pytest.mark.parametrize("model", small.MODELS)
def test_lgfedavg_and_fedper_share_complementary_parts(model: str) -> None:
    runs = pair(FedPer(**small.COMMON), LGFedAvg(**small.COMMON), model=model)
    (body, head), (top, rest) = map(parts, runs)
    assert torch.equal(body, rest)
    assert torch.equal(head, top)
    names = runs[0].objective.layout.names
    layouts = [run.algorithm.up()["shared"] for run in runs]
    assert layouts[1].names == ("fc2.weight", "fc2.bias")  # type: ignore[union-attr]
    assert {*layouts[0].names, *layouts[1].names} == set(names)  # type: ignore[union-attr]
    values = [sum(lengths_of(run.algorithm.up()).values()) for run in runs]
    assert sum(values) == runs[0].objective.layout.size
    for run, count in zip(runs, values, strict=True):
        assert small.carries(run.ledger.uplink, 3 * 5, count)
        assert small.carries(run.ledger.downlink, 3 * 5, count)


@pytest.mark.parametrize("name", SPLIT)
def test_what_is_personal_never_leaves_its_client(name: str) -> None:
    """Other personal values at the other clients change no upload of this one, nor the server, but for training."""
    simulation = small.train(small.variants()[name], 2)
    shared, own = parts(simulation)
    values = sum(lengths_of(simulation.algorithm.up()).values())
    assert values == int(shared.sum())
    turn = Turn(0, 3, torch.arange(5))
    before = simulation.runner.run(simulation.server, simulation.private, turn)
    other = {key: value.clone() for key, value in simulation.private.items()}
    other["theta"][1:, own] += 1.0
    after = simulation.runner.run(simulation.server, other, turn)
    assert torch.equal(before.upload["shared"][0], after.upload["shared"][0])
    assert torch.equal(before.private["theta"][0], after.private["theta"][0])


class Watched:
    """Descents with what they started from and ended at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Tensor, Tensor]] = []
        for kind in (PlainLocal, FastLocal):
            inner: Any = kind.descend

            def descend(local: Any, theta: Tensor, inner: Any = inner, **options: Any) -> tuple[Tensor, Tensor]:
                found: tuple[Tensor, Tensor] = inner(local, theta, **options)
                self.calls.append((theta.clone(), found[0].clone()))
                return found

            monkeypatch.setattr(kind, "descend", descend)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("model", small.MODELS)
def test_fedreps_body_does_not_move_in_head_steps_nor_its_head_in_body_steps(
    model: str, runner: RunnerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    simulation = small.train(FedRep(**small.COMMON, head_steps=2), 2, model=model, runner=runner)
    body, head = parts(simulation)
    assert len(watched.calls) == 2 * 2 * (5 if runner == "loop" else 1)
    for number, (before, after) in enumerate(watched.calls):
        frozen, moving = (body, head) if number % 2 == 0 else (head, body)
        assert torch.equal(before[..., frozen], after[..., frozen])
        assert bool((before[..., moving] != after[..., moving]).any())


@pytest.mark.parametrize("runner", RUNNERS)
def test_fedbabus_common_head_never_moves_and_its_personalized_one_does(runner: RunnerName) -> None:
    simulation = small.train(FedBABU(**small.COMMON), 0, runner=runner)
    start = simulation.objective.initial().double()
    for _ in range(3):
        simulation.step()
        body, head = parts(simulation)
        shipped = simulation.global_model()
        assert shipped is not None
        assert torch.equal(shipped[head], start[head])
        assert not torch.equal(shipped[body], start[body])
        assert simulation._trained is not None
        outcome = simulation._trained[1]
        local = simulation.algorithm.local_model(outcome.private, outcome.upload)
        assert torch.equal(local[:, head], start[head].expand(5, -1))
        assert bool((simulation.personalized()[:, head] != start[head]).any(-1).all())
    assert "head" not in simulation.algorithm.down()


def test_fedbabus_fine_tuned_model_starts_from_the_received_one() -> None:
    """With as many steps as training takes and nothing frozen it is what FedAvg would have trained from there."""
    simulation = small.train(FedBABU(**small.COMMON, fine_tune=small.COMMON["tau"]), 2)
    shipped = simulation.global_model()
    assert shipped is not None
    fedavg = Simulation(small.mlp(), small.federation(), FedAvg(**small.COMMON))
    expected = fedavg.runner.run({"w": shipped}, fedavg.private, Turn(0, 3, torch.arange(5)))
    simulation.step()
    close(simulation.personalized(), expected.private["theta"])


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(
    ("personal", "value"), [(("conv*", "last"), "conv*"), (("!*",), "!*"), (("*",), ["*"]), (("last", "!last"), None)]
)
def test_patterns_that_match_nothing_or_everything_are_refused(name: str, personal: Any, value: Any) -> None:
    with pytest.raises(TDPFedError) as error:
        small.train(SPLIT[name](personal=personal), 0)
    assert error.value.field == "algorithm.personal"
    assert error.value.value == (list(personal) if value is None else value)
    assert "fc1.weight" in str(error.value)


@pytest.mark.parametrize("name", ["fedrep", "fedbabu"])
def test_methods_that_need_two_parts_refuse_an_empty_list(name: str) -> None:
    with pytest.raises(TDPFedError) as error:
        SPLIT[name](personal=())
    assert (error.value.field, error.value.value) == ("personal", [])


@pytest.mark.parametrize(
    ("method", "field", "value"),
    [(FedProx, "mu", -0.1), (Ditto, "lam", -1), (APFL, "alpha", 1.5), (APFL, "alpha", -0.1), (Scaffold, "eta_g", 0.0),
     (FedRep, "head_steps", 0), (FedBABU, "fine_tune", 0), (FedPer, "personal", 3)],
)  # fmt: skip
def test_settings_out_of_range_are_refused(method: Any, field: str, value: Any) -> None:
    with pytest.raises(TDPFedError) as error:
        method(**{field: value})
    assert (error.value.field, error.value.value) == (field, value)


# With the rest of the package


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("participation", [Participation(3, dropout=0.2), Participation(2, "all")], ids=str)
def test_chunks_equal_the_whole_bit_for_bit(name: str, participation: Participation) -> None:
    data = small.federation(7, dtype=torch.float32)
    runs = [
        small.train(small.variants()[name], 3, data=data, chunk=chunk, participation=participation, model="conv")
        for chunk in (None, 1, 3)
    ]
    assert all(small.equal(runs[0], other) for other in runs[1:])


WIRES = {
    "factors": Wire(update="factors", terms=2),
    "factors both ways": Wire(update="factors", terms=2, down="factors", down_terms=2),
    "top-k": Wire(update="top-k", share=0.3),
    "int8": Wire(codec="int8"),
    "int4": Wire(codec="int4"),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("name", NEW)
def test_uploads_in_any_form_train_and_stay_finite(name: str, wire: str, runner: RunnerName) -> None:
    data = small.federation(6, dtype=torch.float32)
    options: dict[str, Any] = {"data": data, "runner": runner, "participation": Participation(4, dropout=0.2)}
    run = small.train(small.variants()[name], 6, wire=WIRES[wire], **options)
    plain = small.train(small.variants()[name], 6, **options)
    assert all(bool(value.isfinite().all()) for value in small.states(run).values())
    assert run.ledger.uplink < plain.ledger.uplink
    start = small.train(small.variants()[name], 0, **options)
    moved = (run.personalized() - start.personalized()).norm()
    assert float((run.personalized() - plain.personalized()).norm()) < 0.5 * float(moved)


RULES = [Rule("median"), Rule("trimmed-mean"), Rule("krum"), Rule(clip="median")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.clip}")
@pytest.mark.parametrize("name", NEW)
def test_a_robust_rule_withstands_a_client_that_sends_much_too_much(name: str, rule: Rule) -> None:
    data = small.federation(7)
    attack = Attack("sign-flip", 0.15, 30.0)
    options: dict[str, Any] = {"data": data, "attack": attack, "rule": replace(rule, bound="off")}
    honest = small.train(small.variants()[name], 4, data=data)
    attacked = small.train(small.variants()[name], 4, **options)
    assert all(bool(value.isfinite().all()) for value in small.states(attacked).values())
    unprotected = small.train(small.variants()[name], 4, **(options | {"rule": Rule(bound="off")}))

    def gap(run: Simulation) -> float:
        entry = next(iter(run.server))
        return float((run.server[entry] - honest.server[entry]).norm())

    assert gap(attacked) < 0.5 * gap(unprotected)


@pytest.mark.parametrize("name", [name for name in NEW if name != "scaffold"])
def test_privacy_adds_noise_to_what_is_released_and_reads_no_upload(name: str) -> None:
    algorithm = replace(small.variants()[name], weights="uniform")
    asked = Participation(4, sampling="poisson")
    runs = [
        small.train(algorithm, 3, participation=asked, privacy=Privacy(10.0, noise)) for noise in (1e-3, 1e-3, 0.01)
    ]
    assert small.equal(*runs[:2])
    entry = next(iter(runs[0].server))
    gap = float((runs[2].server[entry] - runs[0].server[entry]).norm())
    deviation = 10.0 * 0.01 / 4 * len(runs[0].server[entry]) ** 0.5  # of one round's noise
    assert gap > deviation
    assert runs[2].epsilon is not None


def test_privacy_refuses_a_server_that_counts_who_took_part() -> None:
    with pytest.raises(TDPFedError) as error:
        small.train(Scaffold(**small.COMMON), 0, privacy=Privacy(1.0, 1.0))
    assert (error.value.field, error.value.value) == ("algorithm.name", "scaffold")
