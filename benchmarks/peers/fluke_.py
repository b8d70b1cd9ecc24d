"""fluke: its own FedAvg and pFedMe; evaluation is off, a client's epoch is its 23 steps."""

import re
import sys
from typing import Any

import torch

for _ in range(50):
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except RuntimeError as error:  # for a different build of torch; fluke imports it but uses none of its operators
        missing = re.search(r"operator (torchvision::\w+) does not exist", str(error))
        if missing is None:
            raise
        torch.library.define(missing[1], "(Tensor x) -> Tensor")
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]

from fluke import DDict, FlukeENV  # type: ignore[import-not-found]
from fluke.algorithms.fedavg import FedAVG  # type: ignore[import-not-found]
from fluke.algorithms.pfedme import PFedMe, PFedMeOptimizer  # type: ignore[import-not-found]
from fluke.data import FastDataLoader  # type: ignore[import-not-found]
from shared_ import BATCH, ETA, ETA_P, INNER, LAM, arguments, clients, report, timed, unsupported
from torch import nn


class GivenClients:
    """The interface of fluke's data splitter, with the given clients."""

    num_classes = 10

    def __init__(self, path: str) -> None:
        self.loaders = [
            FastDataLoader(torch.from_numpy(x), torch.from_numpy(y), num_labels=10, batch_size=BATCH, shuffle=True)
            for x, y in clients(path)
        ]

    def assign(self, n_clients: int, batch_size: int = BATCH) -> Any:
        del batch_size
        return (self.loaders, [None] * n_clients), None


def main() -> None:
    path, method, rounds = arguments()
    if method not in ("fedavg", "pfedme"):
        unsupported(method)
    FlukeENV().set_seed(0)
    FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    own = {"name": PFedMeOptimizer, "lr": ETA_P, "lamda": LAM} if method == "pfedme" else {"lr": ETA}
    hyper = DDict(
        client={"batch_size": BATCH, "local_epochs": 1, "loss": "CrossEntropyLoss", "optimizer": own,
                "scheduler": {"step_size": 1, "gamma": 1}, **({"k": INNER} if method == "pfedme" else {})},
        server={"weighted": True, **({"beta": 1.0} if method == "pfedme" else {})},
        model=nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
    )  # fmt: skip
    run = (PFedMe if method == "pfedme" else FedAVG)(20, GivenClients(path), hyper)
    note = "its proximal term is zero: the anchor is the model itself" if method == "pfedme" else None
    report(timed(lambda: run.run(1, 1.0, finalize=False), rounds), ["fluke-fl", "torch"], note)


if __name__ == "__main__":
    main()
