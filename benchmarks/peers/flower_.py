"""Flower: FedAvg in its simulation on Ray, a client app with a PyTorch loop, all clients every round."""

import time
from collections import OrderedDict
from typing import Any

import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from shared_ import BATCH, ETA, WARM_UP, arguments, clients, report, unsupported
from torch import nn

CLIENTS = 20


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


class Trainer(NumPyClient):
    """One client: 23 steps of SGD from the server's parameters."""

    def __init__(self, path: str, number: int) -> None:
        x, y = clients(path)[number]
        self.x, self.y = torch.from_numpy(x), torch.from_numpy(y)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        del config
        local = model()
        names = local.state_dict().keys()
        local.load_state_dict(OrderedDict((n, torch.tensor(p)) for n, p in zip(names, parameters, strict=True)))
        optimizer = torch.optim.SGD(local.parameters(), lr=ETA)
        for index in torch.randperm(len(self.x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(local(self.x[index]), self.y[index]).backward()
            optimizer.step()
        return [value.numpy() for value in local.state_dict().values()], len(self.x), {}


class Timed(FedAvg):
    """Records the time at which each round has been aggregated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.ends: list[float] = []

    def aggregate_fit(self, *given: Any) -> Any:
        result = super().aggregate_fit(*given)
        self.ends.append(time.perf_counter())
        return result


def main() -> None:
    path, method, rounds = arguments()
    if method != "fedavg":
        unsupported(method)
    start = ndarrays_to_parameters([value.numpy() for value in model().state_dict().values()])
    strategy = Timed(
        fraction_fit=1.0, fraction_evaluate=0.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS,
        initial_parameters=start,
    )  # fmt: skip
    trainers: dict[int, Trainer] = {}

    def client(context: Context) -> Any:
        number = int(context.node_config["partition-id"])
        trainers.setdefault(number, Trainer(path, number))
        return trainers[number].to_client()

    components = ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=1 + WARM_UP + rounds))
    run_simulation(
        ServerApp(server_fn=lambda _: components), ClientApp(client_fn=client), num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip
    seconds = [end - begin for begin, end in zip(strategy.ends[:-1], strategy.ends[1:], strict=True)]
    report(seconds[WARM_UP:], ["flwr", "ray", "torch"])


if __name__ == "__main__":
    main()
