"""The server's optimizers, held against float64 loops written from the papers."""

from typing import Any

import numpy as np
import pytest
import torch

import small
from tdpfed.algorithms import FedAvg, FedAvgSAR, Local, PFedMe, TDPFed
from tdpfed.core.state import own_entries
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import CombinedError, TDPFedError
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.robust import Rule
from tdpfed.server.step import AVERAGE, ServerStep
from tdpfed.wire import Wire

STEPS: dict[str, ServerStep] = {
    "rate": ServerStep(optimizer="sgd", rate=0.5),
    "fedavgm": ServerStep(optimizer="sgd", rate=0.7, momentum=0.9),
    "fedadam": ServerStep(optimizer="adam", rate=0.02, momentum=0.9, decay=0.95, floor=1e-2),
    "fedyogi": ServerStep(optimizer="yogi", rate=0.02, momentum=0.9, decay=0.95, floor=1e-2),
    "adam without mean": ServerStep(optimizer="adam", rate=0.01),
}


class Reference:
    """Algorithm 2 of Reddi et al. (2021) and FedAvgM (Hsu et al., 2019), one coordinate after another, in float64."""

    def __init__(self, step: ServerStep, size: int) -> None:
        self.step = step
        self.mean = np.zeros(size)
        self.square = np.full(size, step.floor**2)

    def __call__(self, x: np.ndarray, average: np.ndarray) -> np.ndarray:
        step, new = self.step, np.empty_like(x)
        for i, delta in enumerate(average - x):
            if step.optimizer == "sgd":
                self.mean[i] = step.momentum * self.mean[i] + delta
                new[i] = x[i] + step.rate * self.mean[i]
                continue
            self.mean[i] = step.momentum * self.mean[i] + (1 - step.momentum) * delta
            if step.optimizer == "adam":
                self.square[i] = step.decay * self.square[i] + (1 - step.decay) * delta**2
            else:
                sign = np.sign(self.square[i] - delta**2)
                self.square[i] = self.square[i] - (1 - step.decay) * delta**2 * sign
            new[i] = x[i] + step.rate * self.mean[i] / (np.sqrt(self.square[i]) + step.floor)
        return new


@pytest.mark.parametrize("name", STEPS)
def test_optimizers_equal_their_papers(name: str) -> None:
    step = STEPS[name]
    algorithm = FedAvg().bind(small.train(FedAvg(), 0).objective.layout, 5)
    size = algorithm.layout.size
    generator = torch.Generator().manual_seed(0)
    server = {"w": torch.randn(size, generator=generator, dtype=torch.float64)}
    server |= step.start(server, algorithm)
    x, reference = server["w"].numpy().copy(), Reference(step, size)
    for number in range(30):
        scale = 10.0 ** (number % 5 - 3)  # squares rise and fall, or Yogi would be Adam
        average = server["w"] + scale * torch.randn(size, generator=generator, dtype=torch.float64)
        x = reference(x, x + (average - server["w"]).numpy())
        before = {key: value.clone() for key, value in server.items()}
        after = step.after(server, {"w": average}, algorithm)
        assert all(torch.equal(value, before[key]) for key, value in server.items())
        server = after
        np.testing.assert_allclose(server["w"].numpy(), x, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", STEPS)
def test_in_a_run_the_step_is_taken_on_the_average_of_every_round(name: str) -> None:
    """Held against a run whose averages are stepped on by hand."""
    step = STEPS[name]
    own = small.train(FedAvg(**small.COMMON), 0, server_step=step)
    plain = small.train(FedAvg(**small.COMMON), 0)
    reference = Reference(step, plain.objective.layout.size)
    for _ in range(4):
        before = plain.server["w"]
        plain.step()
        plain.server = {"w": torch.from_numpy(reference(before.numpy(), plain.server["w"].numpy()))}
        own.step()
        torch.testing.assert_close(own.server["w"], plain.server["w"], rtol=1e-8, atol=1e-9)
    assert own.global_model() is own.server["w"]
    assert own_entries(own.server).keys() == {"w"}


@pytest.mark.parametrize("algorithm", [FedAvg(**small.COMMON), PFedMe(**small.COMMON), TDPFed(**small.TDPFED)])
@pytest.mark.parametrize(
    "options", [{}, {"wire": Wire(codec="int8")}, {"participation": Participation(3, dropout=0.3)}]
)
def test_rate_1_without_momentum_is_the_average_to_the_bit(algorithm: Any, options: dict[str, Any]) -> None:
    """Whatever else is set, since the others have no part in it."""
    step = ServerStep(optimizer="sgd", rate=1.0, momentum=0.0, decay=0.5, floor=7.0)
    assert step.plain
    assert AVERAGE.plain
    assert not any(one.plain for one in STEPS.values())
    data = small.federation(dtype=torch.float32)
    plain, own = (small.train(algorithm, 3, data=data, server_step=one, **options) for one in (AVERAGE, step))
    assert small.equal(plain, own)


def test_a_robust_or_private_average_is_stepped_on_as_any_other() -> None:
    data = small.federation(7)
    for options in (
        {"rule": Rule("median")},
        {"privacy": Privacy(0.1, 0.5), "participation": Participation(4, sampling="poisson")},
    ):
        algorithm = FedAvg(**small.COMMON, weights="uniform")
        start = small.train(algorithm, 0, data=data).server["w"]
        plain, half = (
            small.train(algorithm, 1, data=data, server_step=step, **options).server["w"]
            for step in (AVERAGE, ServerStep(optimizer="sgd", rate=0.5))
        )
        torch.testing.assert_close(half, start + (plain - start) / 2)


def test_a_round_without_uploads_changes_nothing() -> None:
    simulation = small.train(FedAvg(**small.COMMON), 2, server_step=STEPS["fedavgm"])
    before = {name: value.clone() for name, value in simulation.server.items()}
    simulation.server_round = type(simulation.server_round)(
        simulation.algorithm, 0, Participation(dropout=0.999999), Rule(), None, STEPS["fedavgm"]
    )
    simulation.step()
    assert len(simulation.trained) == 0
    assert all(torch.equal(value, before[name]) for name, value in simulation.server.items())


def test_every_entry_that_is_averaged_has_moments_of_its_own() -> None:
    simulation = small.train(TDPFed(**small.TDPFED), 2, server_step=STEPS["fedadam"])
    assert set(simulation.server) == {"factors", "step.factors.mean", "step.factors.square"}
    momentum = small.train(FedAvg(**small.COMMON), 2, server_step=STEPS["fedavgm"])
    assert set(momentum.server) == {"w", "step.w.mean"}
    assert set(small.train(FedAvg(**small.COMMON), 2, server_step=STEPS["rate"]).server) == {"w"}
    subsets = small.train(FedAvgSAR(**small.COMMON), 2, server_step=STEPS["rate"])
    whole = small.train(FedAvgSAR(**small.COMMON), 1)
    start = small.train(FedAvgSAR(**small.COMMON), 0).server["w"]
    torch.testing.assert_close(
        small.train(FedAvgSAR(**small.COMMON), 1, server_step=STEPS["rate"]).server["w"],
        start + (whole.server["w"] - start) / 2,
    )
    assert set(subsets.server) == {"w"}


@pytest.mark.parametrize(
    "algorithm", [Local(**small.COMMON), TDPFed(**small.TDPFED, aggregation="act")], ids=["local", "act"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "yogi"])
def test_a_method_that_keeps_no_average_has_no_optimizer(algorithm: Any, optimizer: Any) -> None:
    with pytest.raises(TDPFedError, match=rf"server\.optimizer: '{optimizer}' given, must be 'average'") as error:
        small.train(algorithm, 0, server_step=ServerStep(optimizer=optimizer))
    assert error.value.field == "server.optimizer"
    small.train(algorithm, 0, server_step=AVERAGE)


def test_bad_settings_are_told_at_once() -> None:
    with pytest.raises(CombinedError) as error:
        ServerStep(optimizer="sdg", rate=0.0, momentum=1.0, decay=-0.1, floor=0.0)  # type: ignore[arg-type]
    assert [one.field for one in error.value.errors] == ["optimizer", "rate", "momentum", "decay", "floor"]
    assert "did you mean 'sgd'" in str(error.value)


def test_a_simulation_averages_by_default() -> None:
    simulation = Simulation(small.mlp(), small.federation(), FedAvg())
    assert simulation.server_round.step is AVERAGE
    assert simulation.server.keys() == {"w"}
