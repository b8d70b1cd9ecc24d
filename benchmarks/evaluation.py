"""What an evaluation costs: seconds of a record, over those of the plain forward passes that it needs.

The passes are those of PyTorch: every client's test samples at once through its personalized model, through the model
it uploads where that is another one, and through the server's model; without losses or metrics. TDPFed's uploads are
factors, from which the uploaded models are composed on both sides; ``passes_ratio`` is the ratio without that on the
plain side. Data are random. Both sides run in one thread and take turns; counted are seconds of the processor, which
other processes do not change much. A ratio is the median over turns.

    python benchmarks/evaluation.py
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import provenance, write
from torch import Tensor, nn

from tdpfed import FedAvg, Federation, TDPFed
from tdpfed.engine.simulation import Simulation
from tdpfed.models import MODELS, build

ROWS: dict[str, tuple[str, tuple[int, ...], int, int, Any]] = {  # model, sample, clients, test samples, method
    "DNN, FedAvg": ("dnn", (1, 28, 28), 20, 250, FedAvg(tau=1)),
    "DNN, TDPFed": ("dnn", (1, 28, 28), 20, 250, TDPFed(tau=1, compression=2)),
    "DNN, 500 clients of 25 test samples": ("dnn", (1, 28, 28), 500, 25, FedAvg(tau=1)),
    "LeNet, FedAvg": ("lenet", (1, 28, 28), 20, 250, FedAvg(tau=1)),
    "LSTM of text, FedAvg": ("lstm", (40,), 10, 30, FedAvg(tau=1)),
    "transformer of text, FedAvg": ("text-transformer", (40,), 10, 30, FedAvg(tau=1)),
}
TOKENS, CLASSES = 66, 10


def federation(model: str, shape: tuple[int, ...], clients: int, tests: int) -> Federation:
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(clients).repeat_interleave(tests + 20)
    held_out = torch.arange(tests + 20).repeat(clients) < tests
    if MODELS[model].tokens:
        text = torch.randint(TOKENS, (len(owner), shape[0] + 1), generator=generator)
        return Federation.from_tensors(text[:, :-1], text[:, 1:], owner, test_mask=held_out, classes=TOKENS)
    x = torch.rand(len(owner), *shape, generator=generator)
    y = torch.randint(CLASSES, (len(owner),), generator=generator)
    return Federation.from_tensors(x, y, owner, test_mask=held_out, classes=CLASSES)


def passes(simulation: Simulation, three: bool) -> Callable[[], None]:
    """Return the plain forward passes: of two models of every client, or of three; the last is the server's."""
    data, objective = simulation.federation, simulation.objective

    def module(theta: Tensor) -> nn.Module:
        made = copy.deepcopy(objective.model)
        made.load_state_dict(objective.state_dict(theta))
        return made.eval()

    own = [[module(theta) for theta in simulation.personalized()] for _ in range(2 if three else 1)]
    common = simulation.global_model()
    assert common is not None
    tests = [data.client(k)[2] for k in range(data.clients)]
    models = [*own, [module(common)] * len(tests)]

    def run() -> None:
        with torch.no_grad():
            for one in models:
                for model, x in zip(one, tests, strict=True):
                    model(x)

    return run


def composing(simulation: Simulation) -> Callable[[], object]:
    """Return what makes the models that clients upload out of their uploads."""
    assert simulation._trained is not None
    updates = simulation._trained[1]
    return lambda: simulation.algorithm.local_model(updates.private, updates.upload)


def timed(function: Callable[[], object]) -> float:
    began = time.process_time()
    function()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "evaluation.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name, (model, shape, clients, tests, method) in ROWS.items():
        if options.only not in name:
            continue
        data = federation(model, shape, clients, tests)
        module = build(model, shape, data.classes, seed=0)
        simulation = Simulation(module, data, method)
        simulation.step()
        factored = isinstance(method, TDPFed)
        plain, compose = passes(simulation, factored), composing(simulation)
        evaluate = lambda simulation=simulation: simulation.record(0.0)  # noqa: E731
        turns = [
            (timed(evaluate), timed(plain), timed(compose) if factored else 0.0) for _ in range(options.turns + 3)
        ][3:]
        rows[name] = {
            "clients": clients,
            "test_samples": tests,
            "seconds": statistics.median(a for a, _, _ in turns),
            "plain_seconds": statistics.median(b for _, b, _ in turns),
            "composing_seconds": statistics.median(c for _, _, c in turns),
            "ratio": statistics.median(a / (b + c) for a, b, c in turns),
            "passes_ratio": statistics.median(a / b for a, b, _ in turns),
        }
        seconds, ratio, passes_ratio = (rows[name][key] for key in ("seconds", "ratio", "passes_ratio"))
        print(f"{name:40} {1e3 * seconds:8.2f} ms  {ratio:.2f}  {passes_ratio:.2f}")
    if not options.only:
        write(options.out, {"provenance": provenance(0, torch.device("cpu")), "rows": rows})


if __name__ == "__main__":
    main()
