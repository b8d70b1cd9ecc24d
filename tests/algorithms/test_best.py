"""The choice of the model that validates best: by hand, at both ends, with every kind of method, and from a command."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from typer.testing import CliRunner

import small
from by_hand import CLIENTS, close, cut, opposed, start
from tdpfed.algorithms import Algorithm, Best, Ditto, FedAvg, Local, Mapper
from tdpfed.algorithms.base import held_out_of
from tdpfed.cli import app, main
from tdpfed.config import load_config
from tdpfed.core.draws import HeldOut, Stream, key, own_indices
from tdpfed.core.permutation import permute
from tdpfed.data.build import make_federation
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.runs.session import Session
from tdpfed.runs.simulate import simulate
from tdpfed.runs.snapshot import restore, snapshot_of
from tdpfed.server.participation import Participation

SHARE = 0.3
DATA = opposed(5).with_validation(SHARE)
"""Every other client contradicts the others: what is federated is of little use."""
SOME = {name: small.variants()[name] for name in ("fedavg", "ditto", "fedper", "tdpfed")}


def best(method: Algorithm, **settings: Any) -> Best:
    return Best.of(method, validation=SHARE, **{"margin": 0.0, "alone_rate": 0.1, **settings})


def choices(simulation: Simulation) -> list[str | None]:
    found = simulation.record(0.0).client_choice
    assert found is not None
    return found


def test_where_alone_validates_best_it_is_training_alone_to_the_bit() -> None:
    """Federated training with a rate that moves nothing leaves the initial model, which is worse for every client."""
    made = small.train(best(FedAvg(**small.COMMON, eta=1e-30), mixes=()), 6, data=DATA)
    alone = small.train(Local(**small.COMMON, eta=0.1), 6, data=DATA)
    assert choices(made) == ["alone"] * 5
    assert torch.equal(made.personalized(), alone.personalized())


def test_where_the_method_validates_best_it_is_the_method_to_the_bit() -> None:
    data = small.federation().with_validation(SHARE)
    made = small.train(best(FedAvg(**small.COMMON, eta=0.1), alone_rate=1e-30), 6, data=data)
    method = small.train(FedAvg(**small.COMMON, eta=0.1), 6, data=data)
    assert choices(made) == ["method"] * 5
    assert torch.equal(made.personalized(), method.personalized())


@pytest.mark.parametrize("name", ["fedavg_sar", "pfedme", "local", "scaffold", "apfl", "fedper", "tdpfed act"])
def test_what_travels_is_the_methods(name: str) -> None:
    """Server, private state, local models and bytes are those of the method without the choice."""
    method = small.variants()[name]
    made, alone = (small.train(one, 2, data=DATA, participation=Participation(4)) for one in (best(method), method))
    assert made.ledger == alone.ledger
    assert all(torch.equal(value, alone.server[entry]) for entry, value in made.server.items())
    assert all(torch.equal(value, made.private[f"method.{entry}"]) for entry, value in alone.private.items())
    one, other = made.record(0.0), alone.record(0.0)
    assert (one.local_accuracy, one.global_accuracy, one.minibatch_loss) == (
        other.local_accuracy, other.global_accuracy, other.minibatch_loss,
    )  # fmt: skip
    assert other.client_choice is None


@pytest.mark.parametrize("margin", [0.0, 1.0])
def test_the_choice_by_hand(margin: float) -> None:
    """Wrong predictions of all candidates on the held-out samples, each counted once."""
    mixes, found = (0.3, 0.6), set[int]()
    method = Ditto(**small.COMMON, eta=0.1, lam=2.0)
    algorithm = best(method, mixes=mixes, margin=margin, choice_batches=3)
    simulation, module, like, data, sizes = start(algorithm, "dense", data=opposed().with_validation(SHARE))
    for _ in range(4):
        simulation.step()
        assert simulation._trained is not None
        private, upload = simulation.private, simulation._trained[1].upload["w"]
        for k in range(CLIENTS):
            size, held = sizes[k], max(1, int(SHARE * sizes[k]))
            order = permute(torch.arange(size), torch.tensor(size), key(0, Stream.HOLD_OUT, torch.tensor([k])))
            rows = data.train_start[k] + order[size - held :]
            assert held <= 3 * method.batch_size  # all are seen

            def errors(theta: Tensor, rows: Tensor = rows) -> Tensor:
                outputs: Tensor = functional_call(module, cut(theta, like), (data.x[rows],))
                return (outputs.argmax(-1) != data.y[rows]).double()

            own, alone = private["method.theta"][k], private["alone"][k]
            models = [own, upload[k], *((1 - m) * own + m * alone for m in mixes), alone]
            gains = torch.stack([errors(own) - errors(theta) for theta in models])
            noise = gains.std(-1) / held**0.5
            sure = [0, *(n for n in range(1, 5) if gains[n].mean() > margin * noise[n])]
            number = max(sure, key=lambda n: float(gains[n].mean()))
            assert int(private["choice"][k]) == number
            close(private["theta"][k], models[number])
            found.add(number)
    assert len(found) > 1


def test_one_sample_is_not_enough() -> None:
    algorithm = Best.of(FedAvg(**small.COMMON, eta=1e-30), validation=0.01, alone_rate=0.1)
    assert choices(small.train(algorithm, 4)) == ["method"] * 5


def test_test_samples_play_no_part() -> None:
    generator, tests = torch.Generator().manual_seed(3), int(DATA.test_start[0])
    y, x = DATA.y.clone(), DATA.x.clone()
    y[tests:] = y[tests:][torch.randperm(len(y) - tests, generator=generator)]
    x[tests:] = x[tests:].flip(0)
    one, other = (small.train(best(SOME["ditto"]), 3, data=data) for data in (DATA, replace(DATA, x=x, y=y)))
    assert small.equal(one, other)
    assert one.record(0.0).client_accuracy != other.record(0.0).client_accuracy


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("until", [None, 1])
def test_all_at_once_is_one_by_one_and_chunks_change_nothing(name: str, until: int | None) -> None:
    data = DATA if until is None else opposed(5)
    whole, loop, chunked = (
        small.train(best(SOME[name], choose_rounds=until), 2, data=data, **how)
        for how in ({}, {"runner": "loop"}, {"chunk": 2})
    )
    small.assert_close(whole, loop, 1e-6)
    assert small.equal(whole, chunked)
    assert choices(whole) == choices(loop)


def test_resumed_is_uninterrupted() -> None:
    algorithm, data = best(SOME["tdpfed"], choose_rounds=2), opposed(5)
    whole, part = (small.train(algorithm, rounds, data=data) for rounds in (4, 2))
    resumed = small.train(algorithm, 0, data=data)
    restore(resumed, snapshot_of(part))
    for _ in range(2):
        resumed.step()
    assert small.equal(whole, resumed)


def test_held_out_samples_are_not_trained_on() -> None:
    share, clients = 0.4, torch.arange(5)
    data = small.federation()
    drawn = own_indices(0, 1, clients, data.train_start, data.train_size, 50, 4, HeldOut(share)).flatten(1)
    held = data.held_out(0, share)
    for k in range(5):
        x_train, _, _, _ = data.client(k)
        samples = data.x[drawn[k].unique()]
        together = torch.cat([samples, held.client(k)[2]]).flatten(1)
        assert len(together) == len(x_train)
        assert len(together.unique(dim=0)) == len(x_train.flatten(1).unique(dim=0))


class Released(FedAvg):
    """FedAvg that holds samples out in its first three rounds."""

    name = "released"
    held_out = SHARE
    held_out_until = 3


class ReleasedAlone(Local):
    """Training alone that does so."""

    name = "released alone"
    held_out = SHARE
    held_out_until = 3


def test_after_the_choice_all_samples_are_trained_on_and_the_choice_stays() -> None:
    data = opposed(5)
    made, fedavg, alone = (
        small.train(one, 3, data=data)
        for one in (
            best(FedAvg(**small.COMMON, eta=0.1), choose_rounds=3, mixes=(0.5,)), Released(**small.COMMON, eta=0.1),
            ReleasedAlone(**small.COMMON, eta=0.1),
        )
    )  # fmt: skip
    chosen = choices(made)
    assert len(set(chosen)) > 1
    for _ in range(2):
        for one in (made, fedavg, alone):
            one.step()
        assert torch.equal(made.server["w"], fedavg.server["w"])
        assert torch.equal(made.private["alone"], alone.personalized())
        assert choices(made) == chosen
        method, own = fedavg.personalized(), alone.personalized()
        used = {"method": method, "alone": own, "0.5 alone": torch.lerp(method, own, 0.5)}
        assert all(torch.equal(made.personalized()[k], used[str(name)][k]) for k, name in enumerate(chosen))


@pytest.mark.parametrize("round_", [3, 4])
def test_held_out_samples_return_after_the_last_round_of_the_choice(round_: int) -> None:
    data = small.federation()
    clients, sizes = torch.arange(5), data.train_size
    drawn = own_indices(0, round_, clients, data.train_start, sizes, 50, 4, HeldOut(SHARE, 3)).flatten(1)
    seen = torch.tensor([len(row.unique()) for row in drawn])
    assert torch.equal(seen, sizes - (HeldOut(SHARE).sizes(sizes) if round_ == 3 else 0))


def test_a_method_that_holds_samples_out_to_the_end_does_so_inside_too() -> None:
    made = Best.of(Mapper(**small.COMMON), choose_rounds=3)
    assert held_out_of(made, 0.0) == HeldOut(0.25, None)
    assert held_out_of(Best.of(FedAvg(), choose_rounds=3), 0.0) == HeldOut(0.25, 3)
    assert held_out_of(Best.of(FedAvg(), choose_rounds=3), 0.1) == HeldOut(0.1, None)


def test_a_client_that_first_takes_part_after_the_choice_has_none() -> None:
    algorithm = best(FedAvg(**small.COMMON, eta=0.1), choose_rounds=1)
    made = small.train(algorithm, 1, data=opposed(5), participation=Participation(2))
    early = [name is not None for name in choices(made)]
    assert sum(early) == 2
    for _ in range(8):
        made.step()
    assert [name is not None for name in choices(made)] == early
    late = early.index(False)
    assert torch.equal(made.personalized()[late], made.private["method.theta"][late])


@pytest.mark.parametrize("until", [2, None])
def test_a_run_from_python_goes_on_from_the_command_line(tmp_path: Path, until: int | None) -> None:
    data, algorithm = (
        make_federation("digits", clients=4, per_client=5, max_samples=40),
        Best.of(FedAvg(tau=2), choose_rounds=until),
    )
    simulate("logistic", data, algorithm, 3, out=tmp_path / "run")
    session = Session.resume(tmp_path / "run", None, overrides=["run.rounds=5"])
    try:
        assert session.simulation.algorithm == Best.of(FedAvg(tau=2), choose_rounds=2 if until else 1).bind(
            session.simulation.objective.layout, 4, session.simulation.algorithm.most_samples
        )
    finally:
        session.folder.release()


def test_validation_accuracy_by_hand() -> None:
    simulation = small.train(FedAvg(**small.COMMON, eta=0.1), 2, data=DATA)
    held, right = DATA.held_out(0, SHARE), 0
    for k, theta in enumerate(simulation.personalized()):
        _, _, x, y = held.client(k)
        right += int((simulation.objective.outputs(theta, x).argmax(-1) == y).sum())
    assert simulation.record(0.0).validation_accuracy == right / int(held.test_size.sum())
    assert small.train(FedAvg(**small.COMMON), 1).record(0.0).validation_accuracy is None


QUICK = [
    "run.rounds=4", "data.clients=6", "data.max_samples=60", "model.name=logistic", "algorithm.name=fedavg",
    "algorithm.tau=4", "data.validation=0.3", "evaluation.personalize=best",
]  # fmt: skip


def command(folder: Path, *settings: str) -> list[str]:
    sets = [part for text in (*QUICK, *settings) for part in ("--set", text)]
    return ["run", "digits", *sets, "--out", str(folder)]


def test_a_run_says_who_uses_what(tmp_path: Path) -> None:
    """On digits with two classes per client some are best off alone, and with an idle one nobody is."""
    CliRunner().invoke(app, command(tmp_path / "run", "evaluation.margin=0", "evaluation.mixes=[]"))
    summary = small.summary(tmp_path / "run" / "summary.json")
    (last,) = [line for line in small.lines(tmp_path / "run" / "metrics.jsonl") if line["round"] == 4]
    assert sum(summary["choices"].values()) == len(last["client_choice"]) == 6
    assert {name: last["client_choice"].count(name) for name in summary["choices"]} == summary["choices"]
    assert summary["choices"].get("alone", 0) > 0
    assert summary["validation_accuracy"] == last["validation_accuracy"] > 0
    CliRunner().invoke(app, command(tmp_path / "idle", "evaluation.alone_rate=1e-30", "run.rounds=1"))
    assert small.summary(tmp_path / "idle" / "summary.json")["choices"] == {"method": 6}


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("data.validation=1", "data.validation: 1 given, must be"),
        ("evaluation.validation=0", "evaluation.validation: 0 given, must be a finite number above 0 and below 1"),
        ("evaluation.choose_rounds=0", "evaluation.choose_rounds: 0 given, must be"),
        ("data.max_samples=2", "data.validation: 0.3 given, must be 0, or"),
        ("evaluation.mixes=[1.0]", "evaluation.mixes: [1.0] given, must be"),
        ("evaluation.margin=-1", "evaluation.margin: -1 given, must be"),
        ("evaluation.personalize=test", "evaluation.personalize: 'test' given, must be"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, setting: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tdpfed", *command(tmp_path / "run", setting)])
    monkeypatch.setattr("sys.path", sys.path[:])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_client_with_one_sample_has_none_to_hold_out() -> None:
    data = replace(small.federation(), train_size=torch.tensor([9, 1, 9, 9, 9]))
    with pytest.raises(TDPFedError, match=r"^validation: 0\.2 given.*client 1 has 1"):
        data.with_validation(0.2)
    with pytest.raises(TDPFedError, match=r"^evaluation\.validation: 0\.25 given.*client 1 has 1"):
        small.train(Best.of(FedAvg(**small.COMMON)), 0, data=data)


def test_the_configuration_makes_it() -> None:
    config = load_config("digits", ["data.validation=0.25", "evaluation.personalize=best", "evaluation.margin=2"])
    made = config.make_algorithm()
    assert made == Best.of(config.method, validation=0.25, margin=2.0)
    free = load_config("digits", ["evaluation.personalize=best", "run.rounds=41"])
    assert free.make_algorithm() == Best.of(free.method, choose_rounds=20)
    assert (made.name, made.rates.keys() - config.method.rates.keys()) == (config.method.name, {"alone_rate"})
    assert json.dumps(config.as_dict()["evaluation"])
