"""A method with messages of its own is treated like a built-in one: by runners, codecs, attacks, rules and privacy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import small
from hub import together
from own_methods import OWN, Changes, Halves, Thirsty, Undeclared
from tdpfed.algorithms import ALGORITHMS, Algorithm, FedAvg
from tdpfed.config.loading import load_config
from tdpfed.core.state import Turn, layouts_of, lengths_of
from tdpfed.engine.attacks import Attack
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.progress import progress
from tdpfed.runs.session import Session
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.robust import Rule, average_for
from tdpfed.wire import Wire
from tdpfed.wire.codecs import scales
from tdpfed.wire.forms import HEADER_BYTES, start_vectors

EQUIVALENT: dict[str, Algorithm] = {"changes": Changes(**small.COMMON), "halves": Halves(**small.COMMON)}
UNIFORM: dict[str, Any] = {**small.COMMON, "weights": "uniform"}


def trained(algorithm: Algorithm, rounds: int = 3, **options: Any) -> Simulation:
    options = {"data": small.federation(7), **options}
    return small.train(algorithm, rounds, **options)


def model_of(simulation: Simulation) -> Tensor:
    shipped = simulation.global_model()
    assert shipped is not None
    return shipped


def assert_equals_fedavg(algorithm: Algorithm, **options: Any) -> None:
    own, fedavg = trained(algorithm, **options), trained(FedAvg(weights=algorithm.weights, **small.COMMON), **options)
    torch.testing.assert_close(model_of(own), model_of(fedavg), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(own.personalized(), fedavg.personalized(), rtol=1e-9, atol=1e-10)
    assert own.minibatch_loss == pytest.approx(fedavg.minibatch_loss, rel=1e-9)


@pytest.mark.parametrize("participation", [Participation(), Participation(4, "all", dropout=0.2)], ids=str)
@pytest.mark.parametrize("runner", ["batched", "loop"])
@pytest.mark.parametrize("name", EQUIVALENT)
def test_they_are_fedavg_whatever_the_runner(name: str, runner: Any, participation: Participation) -> None:
    assert_equals_fedavg(EQUIVALENT[name], runner=runner, participation=participation)


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "noise", "alie", "label-flip"])
def test_an_attack_on_changes_is_the_attack_on_models(kind: Any) -> None:
    """A client that changed nothing sends 0: an attack is measured from there."""
    attack = Attack(kind, 0.3, 2.0 if kind in ("sign-flip", "scale") else None)
    assert_equals_fedavg(EQUIVALENT["changes"], attack=attack)
    honest, attacked = (trained(EQUIVALENT["changes"], attack=a) for a in (None, attack))
    assert not torch.equal(model_of(honest), model_of(attacked))


@pytest.mark.parametrize("kind", ["sign-flip", "scale", "alie"])
def test_an_attack_reaches_every_entry(kind: Any) -> None:
    """Without the norm bound, which judges each entry by itself."""
    assert_equals_fedavg(EQUIVALENT["halves"], attack=Attack(kind, 0.3), rule=Rule(bound="off"))


RULES = [Rule("median"), Rule("trimmed-mean"), Rule("krum"), Rule("multi-krum"), Rule(clip=0.05), Rule(clip="median")]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.clip}")
def test_robust_rules_treat_changes_as_models(rule: Rule) -> None:
    assert_equals_fedavg(EQUIVALENT["changes"], rule=rule)
    assert_equals_fedavg(EQUIVALENT["changes"], rule=rule, attack=Attack("scale", 0.2))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.name} {rule.clip}")
def test_robust_rules_take_entries_one_by_one_each_from_its_own_center(rule: Rule) -> None:
    before = trained(EQUIVALENT["halves"], 1)
    halves, turn = before.algorithm, Turn(0, 2, torch.arange(7))
    assert isinstance(halves, Halves)
    uploads = before.runner.run(before.server, before.private, turn).upload
    sizes, center = before.federation.train_size.double(), halves.parts(before.server["w"])
    by_hand = [average_for(rule, center[entry])(uploads[entry], sizes) for entry in ("body", "head")]
    mean, robust = (
        replace(before.server_round, rule=asked).aggregate(before.server, uploads, before.federation.train_size, turn)
        for asked in (Rule(), rule)
    )
    assert torch.equal(robust["w"], torch.cat(by_hand))
    assert not torch.equal(robust["w"], mean["w"])
    if rule.name in ("median", "trimmed-mean"):  # coordinate by coordinate: entries make no difference
        assert_equals_fedavg(halves, rule=rule)


@pytest.mark.parametrize("codec", ["float16", "int8"])
@pytest.mark.parametrize("name", EQUIVALENT)
def test_a_codec_costs_its_rounding_and_no_more(name: str, codec: Any) -> None:
    """int8 is off by less than a step, 1/127 of the largest value of what travels; changes are small, so is theirs."""
    data = small.federation(7, dtype=torch.float32)
    exact, rounded = (trained(EQUIVALENT[name], 1, data=data, wire=Wire(codec=c)) for c in ("float32", codec))
    assert exact._trained is not None
    largest = max(float(value.abs().max()) for value in exact._trained[1].upload.values())
    gap = (model_of(exact) - model_of(rounded)).abs().max()
    assert 0 < float(gap) < largest * (1 / 127 if codec == "int8" else 2**-10)
    again = trained(EQUIVALENT[name], 1, data=data, wire=Wire(codec=codec), runner="loop")
    torch.testing.assert_close(model_of(again), model_of(rounded), rtol=0, atol=largest / 127)


def test_privacy_of_changes_is_privacy_of_models() -> None:
    for privacy in (Privacy(0.05, 1.0), Privacy(10.0, 0.01)):  # all are clipped, or none
        asked = Participation(4, sampling="poisson")
        assert_equals_fedavg(replace(EQUIVALENT["changes"], weights="uniform"), privacy=privacy, participation=asked)


def test_privacy_of_two_entries_adds_noise_to_both() -> None:
    data = small.federation(6)
    noisy = trained(Halves(**UNIFORM), 1, data=data, privacy=Privacy(10.0, 1e-3))
    again = trained(Halves(**UNIFORM), 1, data=data, privacy=Privacy(10.0, 1e-3))
    plain = trained(FedAvg(**UNIFORM), 1, data=data)
    halves = noisy.algorithm
    assert isinstance(halves, Halves)
    assert small.equal(noisy, again)
    for noise in halves.parts(noisy.server["w"] - plain.server["w"]).values():
        spread = 4 / (2 * noise.numel()) ** 0.5  # four deviations of an estimate
        assert float(noise.square().mean().sqrt()) == pytest.approx(1e-3 * 10 / 6, rel=spread)


class Curious(FedAvg):
    """FedAvg that reads an upload before it asks for the average."""

    def aggregate(self, server: Any, uploads: Any, average: Any, turn: Turn) -> Any:
        return {"w": average("w") + 0 * uploads["w"][0]}


def test_privacy_hides_uploads() -> None:
    trained(Curious(**UNIFORM), 1)
    with pytest.raises(TDPFedError, match="'w' read, must not be"):
        trained(Curious(**UNIFORM), 1, privacy=Privacy(1.0, 1.0))


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("name", EQUIVALENT)
def test_the_ledger_counts_what_the_method_declares(name: str, codec: Any) -> None:
    simulation = trained(EQUIVALENT[name], 2, wire=Wire(codec=codec))
    algorithm, size = simulation.algorithm, simulation.objective.layout.size
    assert sum(lengths_of(algorithm.up()).values()) == sum(lengths_of(algorithm.down()).values()) == size
    layouts = layouts_of(algorithm.up())
    held = size + 4 * sum(scales(n, layouts[entry]) for entry, n in lengths_of(algorithm.up()).items())
    sent = 4 * size if codec == "float32" else held
    assert simulation.ledger.downlink == 2 * 7 * (HEADER_BYTES + 4 * size)
    assert simulation.ledger.uplink == 2 * 7 * (HEADER_BYTES + sent)


FORMS = {
    "factors": Wire(update="factors", terms=2), "top-k": Wire(update="top-k", share=0.2),
    "int4": Wire(codec="int4"), "int8": Wire(codec="int8", feedback=True),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_method_that_sends_changes_is_one_that_sends_models_in_every_form(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client that changed nothing sends is taken off first: 0, or the model it received.

    Only the vectors from which the first terms start depend on an entry's name.
    """
    monkeypatch.setattr("tdpfed.wire.channel.start_vectors", lambda form, _, *rest: start_vectors(form, "", *rest))
    assert_equals_fedavg(EQUIVALENT["changes"], wire=FORMS[form])
    assert_equals_fedavg(EQUIVALENT["changes"], wire=FORMS[form], participation=Participation(4, "all", dropout=0.2))


@pytest.mark.parametrize("form", FORMS)
def test_entries_without_shapes_travel_with_all_values_of_their_change_or_the_largest(form: str) -> None:
    simulation = trained(EQUIVALENT["halves"], 3, data=small.federation(7, dtype=torch.float32), wire=FORMS[form])
    entry = simulation.channel.form.entries["head"]
    assert sum(section.length for section in entry.sections if not section.scale) == (2 * 8 if form == "top-k" else 39)
    dense = trained(EQUIVALENT["halves"], 3, data=small.federation(7, dtype=torch.float32))
    moved = (
        model_of(dense) - trained(EQUIVALENT["halves"], 0, data=small.federation(7, dtype=torch.float32)).server["w"]
    )
    assert 0 < float((model_of(simulation) - model_of(dense)).norm() / moved.norm()) < (0.9 if form == "top-k" else 0.5)


def test_a_method_whose_messages_have_other_names_sends_its_changes_down_too() -> None:
    simulation = trained(EQUIVALENT["changes"], 3, wire=Wire(update="factors", down="factors", down_codec="float32"))
    assert set(simulation.downlink.form.entries) == {"model"}
    known = simulation.broadcast.known
    assert known.keys() == {"model", "last"}
    assert known["last"] is simulation.server["last"]  # does not travel
    assert float((known["model"] - simulation.server["model"]).norm()) < 0.2 * float(simulation.server["last"].norm())


@pytest.mark.parametrize("wire", [Wire(codec="int8"), FORMS["factors"], FORMS["top-k"]], ids=lambda wire: wire.update)
@pytest.mark.parametrize("name", EQUIVALENT)
def test_any_number_of_processes_equals_one(name: str, wire: Wire) -> None:
    def work(ranks: Ranks) -> tuple[list[Any], dict[str, Tensor], int]:
        simulation = Simulation(
            small.mlp(), small.federation(7, dtype=torch.float32), EQUIVALENT[name], wire=wire,
            participation=Participation(4, dropout=0.2), attack=Attack("sign-flip"), ranks=ranks,
        )  # fmt: skip
        records = [record.as_dict() | {"seconds": 0} for record in simulation.run(3)]
        return records, simulation.server, simulation.algorithm.population

    records, server, population = work(ALONE)
    assert population == 7
    for result in together(2, work):
        assert isinstance(result, tuple), result
        assert result[0] == records
        assert all(torch.equal(value, server[entry]) for entry, value in result[1].items())
        assert result[2] == population


@pytest.mark.parametrize("name", EQUIVALENT)
def test_runs_together_equal_runs_alone(name: str) -> None:
    def begun(seed: int) -> Simulation:
        return Simulation(small.mlp(seed), small.federation(seed=seed), EQUIVALENT[name], seed=seed)

    ensemble, alone = Ensemble([begun(0), begun(1)]), [begun(0), begun(1)]
    for _ in range(2):
        assert ensemble.step() == [None, None]
        for simulation in alone:
            simulation.step()
    assert all(small.equal(*pair) for pair in zip(ensemble.simulations, alone, strict=True))


@pytest.mark.parametrize("name", EQUIVALENT)
def test_a_run_by_name_is_resumed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, name, OWN[name])
    settings = ["run.rounds=5", "checkpoint.every=2", "participation.clients=3", "data.clients=5", "wire.codec=int8"]
    config = load_config("digits", [*settings, f"algorithm.name={name}", "algorithm.tau=2"])
    whole = Session.begin(config, tmp_path / "whole", None)
    assert whole.run(progress)["algorithm"] == name
    cut = Session.begin(config, tmp_path / "cut", None)
    for _ in range(3):
        cut.simulation.step()
        cut.after_round()
    cut.folder.release()
    resumed = Session.resume(tmp_path / "cut", None)
    assert resumed.simulation.round == 2
    resumed.run(progress)
    assert small.equal(resumed.simulation, whole.simulation)


@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_minibatches_beyond_those_expected_are_the_ones_that_more_draws_would_give(runner: Any) -> None:
    runs = [
        trained(Thirsty(**small.COMMON, more=5, expected=expected), 2, runner=runner, chunk=3)
        for expected in (8, 7, 3, 2, 1, 20)  # 8 are used
    ]
    assert all(small.equal(runs[0], other) for other in runs[1:])
    longer = trained(FedAvg(tau=8, batch_size=small.COMMON["batch_size"]), 2, runner=runner)
    small.assert_close(runs[0], longer, 1e-9)
    fewer = trained(Thirsty(**small.COMMON, more=4), 2, runner=runner)
    assert not torch.equal(model_of(fewer), model_of(longer))


@pytest.mark.parametrize("fault", ["name", "more", "none", "length", "loss"])
@pytest.mark.parametrize("runner", ["batched", "loop", "together"])
def test_an_upload_that_was_not_declared_is_refused(fault: str, runner: Any) -> None:
    algorithm = Undeclared(**small.COMMON, fault=fault)
    words = r"undeclared\.update: "
    if runner == "together":
        with pytest.raises(TDPFedError, match=words):
            Ensemble([Simulation(small.mlp(), small.federation(), algorithm, seed=seed) for seed in (0, 1)]).step()
    else:
        with pytest.raises(TDPFedError, match=words):
            trained(algorithm, 1, runner=runner)


def test_a_method_knows_how_many_clients_there_are() -> None:
    assert FedAvg().population == 0
    for clients in (3, 7):
        simulation = small.train(FedAvg(), 0, data=small.federation(clients), participation=Participation(2))
        assert simulation.algorithm.population == clients
