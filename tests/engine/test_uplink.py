"""The way of simulated uploads to the server: attackers' own rows alone, then the codec, and nothing else."""

from typing import Any

import pytest
import torch

import small
from tdpfed import FedAvg, Local
from tdpfed.config.loading import load_config
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.engine.attacks import Attack, attack, attackers
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.uplink import Uplink
from tdpfed.errors import TDPFedError
from tdpfed.runs.experiment import prepare
from tdpfed.wire import lossy

SOME = torch.tensor([1, 2, 5, 6, 8])


def sent(algorithm: Any) -> tuple[Simulation, State, Turn]:
    """Return a simulation of ten clients, and what some of them upload in round 1."""
    simulation = small.train(algorithm, 0, data=small.federation(10, dtype=torch.float32))
    turn = Turn(0, 1, SOME)
    rows = {name: value[SOME] for name, value in simulation.private.items()}
    return simulation, simulation.runner.run(simulation.server, rows, turn).upload, turn


@pytest.mark.parametrize("name", ["fedavg", "fedavg_sar", "tdpfed", "tdpfed act"])
def test_without_attack_and_codec_uploads_are_passed_on_as_they_are(name: str) -> None:
    simulation, uploads, turn = sent(small.variants()[name])
    assert simulation.uplink.transmit(uploads, simulation.server, turn) is uploads


@pytest.mark.parametrize("codec", ["float32", "int8"])
@pytest.mark.parametrize("name", ["fedavg", "fedavg_sar", "tdpfed", "tdpfed act"])
def test_attackers_rows_are_replaced_first_and_all_are_rounded_then(name: str, codec: Any) -> None:
    simulation, uploads, turn = sent(small.variants()[name])
    algorithm, hostile = simulation.algorithm, attackers(0, 10, 0.4)[SOME]
    assert 0 < int(hostile.sum()) < len(SOME)
    uplink = Uplink(algorithm, 10, 0, codec, Attack("sign-flip", 0.4, 3.0))
    arrived = uplink.transmit(uploads, simulation.server, turn)
    message = algorithm.broadcast(simulation.server, turn)
    bad = attack("sign-flip", uploads, algorithm.unchanged(message), hostile, turn, strength=3.0)
    for entry, value in bad.items():
        torch.testing.assert_close(value[hostile], (4 * message[entry] - 3 * uploads[entry])[hostile])
        assert torch.equal(value[~hostile], uploads[entry][~hostile])
    expected = bad if codec == "float32" else lossy(bad, layouts_of(algorithm.up()), codec, 0, 1, SOME)
    assert arrived.keys() == uploads.keys()
    assert all(torch.equal(value, expected[entry]) for entry, value in arrived.items())


def test_an_unknown_codec_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TDPFedError, match="codec: unknown 'flaot16', did you mean 'float16'"):
        Uplink(FedAvg(), 3, 0, "flaot16", None)  # type: ignore[arg-type]


def test_local_training_meets_no_attack() -> None:
    simulation = small.train(Local(**small.COMMON), 1, attack=Attack("noise"))
    assert simulation.refused == []
    assert small.equal(simulation, small.train(Local(**small.COMMON), 1))


def test_the_configuration_reaches_the_uplink() -> None:
    overrides = [
        "robust.name=median",
        "robust.gauge=2",
        "robust.attack=noise",
        "robust.attack_strength=3",
        "wire.codec=int8",
    ]
    simulation = prepare(load_config("digits", overrides))
    rule, uplink = simulation.server_round.rule, simulation.uplink
    assert (rule.name, rule.gauge, uplink.codec) == ("median", 2.0, "int8")
    assert uplink.attack == Attack("noise", 0.2, 3.0)
