"""Seconds per communication round on MNIST with 20 clients: our batched and loop runners against a plain PyTorch loop.

The set-up is the paper's (section VII-A): DNN 784-100-10, two classes per client, 23 local rounds of 20 samples, all
clients, float32. The three alternate in one process, round by round, so that noise affects them equally; the result
is the ratio. Without MNIST files, random numbers of the same shapes are used, which does not affect the timing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import alternate, provenance, write
from plain import fedavg_round, initial_factors, pfedme_round, tdpfed_round
from torch import nn

from tdpfed.algorithms import Algorithm, FedAvg, PFedMe, TDPFed
from tdpfed.data import Federation, make_federation
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.models import build

METHODS: dict[str, Algorithm] = {"fedavg": FedAvg(tau=23), "pfedme": PFedMe(), "tdpfed": TDPFed()}


def federation(root: Path | None, seed: int) -> Federation:
    try:
        return make_federation("mnist", root=root, download=False, partition="classes", clients=20, seed=seed)
    except TDPFedError:
        generator = torch.Generator().manual_seed(seed)
        clients = torch.arange(20).repeat_interleave(3500)
        y = (clients + torch.randint(0, 2, clients.shape, generator=generator)) % 10
        return Federation.from_tensors(torch.randn(len(y), 1, 28, 28, generator=generator), y, clients, name="random")


def plain(method: str, model: nn.Module, data: Federation) -> Callable[[], object]:
    if method == "fedavg":
        return lambda: fedavg_round(model, data)
    if method == "pfedme":
        return lambda: pfedme_round(model, data)
    factors = [initial_factors(model, 2.0)]

    def one_round() -> None:
        factors[0] = tdpfed_round(factors[0], model, data)

    return one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "engine.json")
    options = parser.parse_args()
    data = federation(options.data_root, options.seed)
    result: dict[str, Any] = {"provenance": provenance(options.seed, data.device), "data": data.name, "methods": {}}
    print(f"{'method':8} {'batched s':>10} {'loop s':>10} {'plain s':>10} {'vs plain':>9} {'vs loop':>8}")
    for method in options.methods.split(","):
        runs = {
            runner: Simulation(build("dnn", seed=options.seed), data, METHODS[method], seed=options.seed, runner=runner)
            for runner in ("batched", "loop")
        }
        seconds = alternate(
            {
                "batched": runs["batched"].step,
                "loop": runs["loop"].step,
                "plain": plain(method, build("dnn", seed=options.seed), data),
            },
            options.repeats, data.device, warmup=1,
        )  # fmt: skip
        ratios = {"vs_plain": seconds["plain"] / seconds["batched"], "vs_loop": seconds["loop"] / seconds["batched"]}
        result["methods"][method] = {**seconds, **ratios}
        numbers = " ".join(f"{seconds[name]:10.3f}" for name in ("batched", "loop", "plain"))
        print(f"{method:8} {numbers} {ratios['vs_plain']:8.2f}x {ratios['vs_loop']:7.2f}x", flush=True)
    write(options.out, result)


if __name__ == "__main__":
    main()
