"""The choice of models and validation samples on nodes: the simulation's numbers and bytes."""

import pytest

pytest.importorskip("flwr")

from pathlib import Path

import torch
from fake import NODES, Case, worst

from tdpfed.errors import TDPFedError
from tdpfed.flower.settings import read_settings


@pytest.mark.parametrize("given", [("algorithm.name=ditto", "evaluation.personalize=best"), ("algorithm.name=mapper",)])
def test_a_run_is_the_simulation(tmp_path: Path, given: tuple[str, ...]) -> None:
    case = Case(tmp_path, *given, "algorithm.tau=2", "data.validation=0.3", "evaluation.margin=0")
    summary, record = case.run(), case.simulation.record(0.0)
    assert worst(tmp_path, case.simulation) <= 1e-6
    assert summary["uplink_bytes"] == case.simulation.ledger.uplink
    assert summary["personalized_accuracy"] == pytest.approx(record.personalized_accuracy)
    last = case.lines("metrics.jsonl")[-1]
    assert last["client_choice"] == record.client_choice
    assert (record.client_choice is None) == (len(given) == 1)
    for client in range(NODES):
        kept = case.state(client).upto(3)
        assert kept is not None
        assert torch.allclose(kept["theta"], case.simulation.private["theta"][client], atol=1e-6)


def test_other_keys_about_data_are_refused(tmp_path: Path) -> None:
    case = Case(tmp_path, "algorithm.name=fedavg", "data.validation=0.3")
    assert read_settings(case.settings)[0].data.validation == 0.3
    with pytest.raises(TDPFedError, match=r"^data\.max_samples: 3 given"):
        read_settings({**case.settings, "data.max_samples": 3})
