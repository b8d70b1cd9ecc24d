"""Batched equals loop; chunks equal the whole bit for bit; the same seed gives the same bits."""

from typing import Any

import pytest
import torch

import small
from tdpfed.algorithms import FedAvg, PFedMe, TDPFed
from tdpfed.core.state import Turn
from tdpfed.engine.runners import Runner
from tdpfed.engine.simulation import Simulation
from tdpfed.fast.gradient import RecordedGradient
from tdpfed.runs.simulate import simulate
from tdpfed.server.participation import Participation

CLIENTS = 11
CHUNKED = {
    "tdpfed": TDPFed(**small.TDPFED),
    "fedavg": FedAvg(**small.COMMON),
    "pfedme": PFedMe(**small.COMMON, momentum=0.5),
    "tdpfed nu": small.variants()["tdpfed nu"],
}


@pytest.mark.parametrize("name", small.variants())
@pytest.mark.parametrize("model", small.MODELS)
@pytest.mark.parametrize(
    "participation", [Participation(), Participation(2, "all"), Participation(1, "selected")], ids=str
)
def test_batched_equals_loop(name: str, model: str, participation: Participation) -> None:
    runs = [
        small.train(small.variants()[name], 3, model=model, runner=runner, participation=participation)
        for runner in ("batched", "loop")
    ]
    small.assert_close(runs[0], runs[1], 1e-9)
    assert runs[0].minibatch_loss == pytest.approx(runs[1].minibatch_loss, rel=1e-9)
    start = small.train(small.variants()[name], 0, model=model)
    assert float((runs[0].private["theta"] - start.private["theta"]).norm()) > 0.01, "nothing was trained"


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("model", small.MODELS)
def test_any_chunking_equals_none_bit_for_bit(name: str, model: str) -> None:
    data = small.federation(CLIENTS, dtype=torch.float32)
    whole = small.train(CHUNKED[name], model=model, data=data)
    for chunk in (1, 2, 3, 4, 5, 8, 9, CLIENTS, 100):  # with remainders of 1, 2 and 3 clients
        assert small.equal(whole, small.train(CHUNKED[name], model=model, data=data, chunk=chunk)), chunk


@pytest.mark.parametrize("name", CHUNKED)
def test_any_chunking_equals_none_at_the_papers_size(name: str) -> None:
    """MNIST's shapes and minibatches: there the kernels differ from those of tiny matrices."""
    from tdpfed.data import Federation
    from tdpfed.models import build

    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(CLIENTS).repeat_interleave(20)
    x = torch.randn(len(owner), 1, 28, 28, generator=generator)
    data = Federation.from_tensors(x, torch.arange(len(owner)) % 10, owner)
    algorithm = {
        "tdpfed": TDPFed(tau=1, s=2, s_prime=2), "fedavg": FedAvg(tau=2), "pfedme": PFedMe(tau=1, s=2),
        "tdpfed nu": TDPFed(tau=2, s=6, s_prime=2, nu=1.0, momentum_state="round"),
    }[name]  # fmt: skip
    runs = []
    for chunk in (None, 1, 2, 3, 5, 8):
        simulation = Simulation(build("dnn", seed=0), data, algorithm, chunk=chunk)
        simulation.step()
        runs.append(simulation)
    assert all(small.equal(runs[0], other) for other in runs[1:])


def test_the_estimate_of_what_fits_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    together = Runner._run_chunk

    def spy(self: Runner, server: Any, private: Any, turn: Any, rows: slice, index: Any) -> Any:
        sizes.append(rows.stop - rows.start)
        return together(self, server, private, turn, rows, index)

    monkeypatch.setattr(Runner, "_run_chunk", spy)
    data = small.federation(CLIENTS, dtype=torch.float32)
    whole = small.train(CHUNKED["fedavg"], data=data)
    assert sizes == [CLIENTS, CLIENTS]
    sizes.clear()
    monkeypatch.setattr("tdpfed.engine.runners.CPU_CHUNK_BYTES", 1)
    tight = small.train(CHUNKED["fedavg"], data=data)
    assert max(sizes) < CLIENTS
    assert sum(sizes) == 2 * CLIENTS
    assert small.equal(whole, tight)


@pytest.mark.parametrize("name", small.variants())
def test_the_same_seed_gives_the_same_bits_and_another_seed_others(name: str) -> None:
    def results(seed: int) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        run = simulate(
            small.mlp(), small.federation(dtype=torch.float32), small.variants()[name], 3, seed=seed,
            participation=Participation(clients=3, dropout=0.2),
        )  # fmt: skip
        records = [{key: value for key, value in r.as_dict().items() if key != "seconds"} for r in run.records]
        return records, small.states(run.simulation)

    first, again, other = results(11), results(11), results(12)
    assert first[0] == again[0]
    assert all(torch.equal(value, again[1][key]) for key, value in first[1].items())
    assert first[0] != other[0]
    assert not torch.equal(first[1]["private theta"], other[1]["private theta"])


@pytest.mark.parametrize("name", CHUNKED)
@pytest.mark.parametrize("model", small.MODELS)
def test_the_gradient_that_tests_share_is_a_models_own(name: str, model: str) -> None:
    """``conftest.py`` records it once for equal layers: that changes no bit of a run."""
    shared, other, own = (small.train(CHUNKED[name], 0, model=model) for _ in range(3))
    assert shared.runner.gradient is other.runner.gradient
    vars(own.runner)["gradient"] = RecordedGradient(own.objective)
    for run in (shared, own):
        run.step()
    assert small.equal(shared, own)


def test_global_random_state_is_neither_used_nor_changed() -> None:
    runs = []
    for seed in (1, 2):
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(small.train(TDPFed(**small.TDPFED)))
        assert torch.equal(before, torch.get_rng_state())
    assert small.equal(*runs)


@pytest.mark.parametrize("name", small.variants())
@pytest.mark.parametrize("runner", ["batched", "loop"])
def test_a_client_does_not_depend_on_its_company(name: str, runner: Any) -> None:
    data = small.federation(CLIENTS, dtype=torch.float32)
    simulation = small.train(small.variants()[name], 1, model="conv", data=data, runner=runner)
    everybody = torch.arange(CLIENTS)

    def run(clients: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = {key: value[clients] for key, value in simulation.private.items()}
        outcome = simulation.runner.run(simulation.server, rows, Turn(0, 2, clients))
        return {**{f"own {k}": v for k, v in outcome.private.items()}, **outcome.upload, **outcome.metrics}

    whole = run(everybody)
    for company in ([4], [4, 0], [6, 4, 1], [0, 1, 2, 3, 4], [5, 4, 3, 2, 1, 0, 6]):
        some = run(torch.tensor(company))
        for key, value in some.items():
            for row, client in enumerate(company):
                assert torch.equal(value[row], whole[key][client]), (key, company)
