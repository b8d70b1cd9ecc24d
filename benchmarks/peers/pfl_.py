"""pfl-research: its own FedAvg in its simulated backend, one process, no evaluation."""

import time
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
from pfl.callback.base import TrainingProcessCallback  # type: ignore[import-not-found]
from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
from pfl.data.sampling import get_user_sampler  # type: ignore[import-not-found]
from pfl.hyperparam.base import NNTrainHyperParams  # type: ignore[import-not-found]
from pfl.metrics import Weighted  # type: ignore[import-not-found]
from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]
from shared_ import BATCH, ETA, STEPS, WARM_UP, arguments, clients, report, unsupported
from torch import Tensor, nn


class Mlp(nn.Sequential):
    """The model with the two functions that pfl requires."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))

    def loss(self, inputs: Tensor, targets: Tensor, is_eval: bool = False) -> Tensor:
        del is_eval
        return nn.functional.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor, is_eval: bool = True) -> dict[str, Any]:
        del is_eval
        return {"loss": Weighted(float(self.loss(inputs, targets)) * len(targets), len(targets))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """Records the end of each iteration."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def after_central_iteration(self, *_: Any, **__: Any) -> Any:
        from pfl.metrics import Metrics

        self.ends.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    path, method, rounds = arguments()
    if method != "fedavg":
        unsupported(method)
    np.random.seed(0)  # noqa: NPY002
    data = [[torch.from_numpy(x), torch.from_numpy(y)] for x, y in clients(path)]
    users = FederatedDataset(lambda k: Dataset(data[k]), get_user_sampler("minimize_reuse", list(range(len(data)))))
    model = Mlp()
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    train = NNTrainHyperParams(
        local_num_epochs=None, local_num_steps=STEPS, local_batch_size=BATCH, local_learning_rate=ETA
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=WARM_UP + rounds, evaluation_frequency=10**6, train_cohort_size=len(data),
            val_cohort_size=None,
        ),
        SimulatedBackend(users, None), wrapped, train, None, [clock],
    )  # fmt: skip
    seconds = np.diff(clock.ends).tolist()
    report(seconds[WARM_UP:], ["pfl", "torch"])


if __name__ == "__main__":
    main()
