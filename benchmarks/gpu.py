"""Cost of a local round on a GPU: milliseconds, kernels, and the share of the rate of a large matrix product.

The paper's experiments (section VII-A): MNIST with 20 clients and the DNN, CIFAR-10 with 10 clients and VGG8, for
TDPFed at compression 2, pFedMe and FedAvg. The rate is measured in the same call, on a large matrix product in the same
precision; operations are counted by PyTorch while a round runs without graphs. If a data set is not found, random
numbers of its shapes are used, which does not affect the timing. ``--whole mnist`` also times a complete run of the
preset, including records; ``--seeds`` compares several seeds computed together with one seed.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import provenance, write
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from tdpfed.config import Config, load_config
from tdpfed.data import Federation, make_federation
from tdpfed.engine.ensemble import Ensemble
from tdpfed.engine.precision import arithmetic
from tdpfed.engine.simulation import Simulation
from tdpfed.engine.updates import rows_of
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec

PRESETS = {"mnist": ("mnist-paper", (1, 28, 28), 70_000), "cifar10": ("cifar10-paper", (3, 32, 32), 60_000)}
METHODS = ("fedavg", "pfedme", "tdpfed")
DEVICE = torch.device("cuda")


def federation(name: str, config: Config, root: Path | None) -> Federation:
    clients = config.data.clients or 10
    try:
        return make_federation(name, root=root, download=False, partition="classes", clients=clients, seed=0).to(DEVICE)
    except TDPFedError:
        _, shape, samples = PRESETS[name]
        generator = torch.Generator().manual_seed(0)
        owners = torch.arange(samples) % clients
        y = (owners + torch.randint(0, 2, owners.shape, generator=generator)) % 10
        x = torch.randn(samples, *shape, generator=generator)
        return Federation.from_tensors(x, y, owners, name="random").to(DEVICE)


def configuration(name: str, method: str, data: Federation) -> Config:
    rates = [
        "algorithm.eta=1e-6",
        *([] if method == "fedavg" else ["algorithm.eta_p=1e-6"]),
    ]  # small steps: nothing can be learned from random data
    return load_config(PRESETS[name][0], [f"algorithm.name={method}", *(rates if data.name == "random" else [])])


def simulation(config: Config, data: Federation, precision: Any, seed: int = 0) -> Simulation:
    model = from_spec(config.model.name, data.input_shape, data.classes, seed=seed)
    return Simulation(model, data, config.make_algorithm(), seed=seed, precision=precision)


def seconds(step: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, with the GPU idle before and after."""
    times = []
    for turn in range(3 + repeats):  # warm-up: computed, recorded, replayed once
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def kernels(step: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.device_time_total > 0)


def operations(run: Simulation) -> int:
    """Return the floating-point operations of a round's matrix products and convolutions."""
    turn, _ = run.next_turn()
    object.__setattr__(run.runner, "graphs", False)
    with FlopCounterMode(display=False) as counter:
        run.runner.run(run.server, rows_of(run.private, turn.clients), turn)
    object.__setattr__(run.runner, "graphs", True)
    return int(counter.get_total_flops())


def product_rate(precision: Any) -> float:
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    with arithmetic(precision):
        return float(2 * 8192**3 / seconds(lambda: a @ a, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--data", default="mnist,cifar10", help="data sets, separated by commas")
    parser.add_argument("--precision", default="float32,tf32", help="any of float32, tf32, bf16, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds to compute together")
    parser.add_argument("--whole", default="", metavar="DATA", help="data sets for timing a complete run of TDPFed")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    options = parser.parse_args()
    names, precisions = options.data.split(","), options.precision.split(",")
    result: dict[str, Any] = {"provenance": provenance(0, DEVICE), "rows": [], "whole": []}
    print(f"{'data':8} {'method':8} {'in':8} {'ms/local round':>14} {'kernels':>8} {'share %':>8} {'seeds x':>8}")
    for precision in precisions:
        rate = product_rate(precision)
        for name in names:
            data = federation(name, load_config(PRESETS[name][0]), options.data_root)
            for method in METHODS:
                config = configuration(name, method, data)
                run, tau = simulation(config, data, precision), config.algorithm["tau"]
                one = seconds(run.step, options.repeats)
                together = None
                if options.seeds > 1 and name == "mnist":
                    ensemble = Ensemble([simulation(config, data, precision, seed) for seed in range(options.seeds)])
                    together = seconds(ensemble.step, options.repeats) / one
                row = {
                    "data": name, "from": data.name, "method": method, "precision": precision, "local_rounds": tau,
                    "milliseconds_per_local_round": 1000 * one / tau,
                    "kernels_per_local_round": kernels(run.step) / tau,
                    "share_of_product_rate": operations(run) / one / rate, "tflops": rate / 1e12,
                    "seeds_together": options.seeds, "cost_of_seeds_together": together,
                }  # fmt: skip
                result["rows"].append(row)
                print(
                    f"{name:8} {method:8} {precision:8} {row['milliseconds_per_local_round']:14.2f} "
                    f"{row['kernels_per_local_round']:8.0f} {100 * row['share_of_product_rate']:8.1f} "
                    f"{'-' if together is None else f'{together:.2f}':>8}",
                    flush=True,
                )
    for name in filter(None, options.whole.split(",")):
        config = load_config(PRESETS[name][0])
        run = simulation(config, federation(name, config, options.data_root), precisions[-1])
        began = time.perf_counter()
        records = list(run.run(config.run.rounds, config.run.evaluate_every))
        whole = {
            "data": name, "from": run.federation.name, "precision": precisions[-1], "rounds": config.run.rounds,
            "seconds": time.perf_counter() - began, "personalized_accuracy": records[-1].personalized_accuracy,
        }  # fmt: skip
        result["whole"].append(whole)
        print(f"{name}: {whole['rounds']} rounds of tdpfed, records included, in {whole['seconds']:.1f} s", flush=True)
    write(options.out, result)


if __name__ == "__main__":
    main()
