"""Seconds per round on a GPU: ours, a plain PyTorch loop, and the same loop compiled and under CUDA graphs.

    python benchmarks/gpu_peers.py                        # every row that is not in the file yet; renews the file
    python benchmarks/gpu_peers.py --only resnet18 --again
    python benchmarks/gpu_peers.py --device cpu --tiny --out FILE    # tiny rows, to test this program

All take turns in one process, on random samples of the data sets' shapes that are on the device already, in one
precision. The loops are what a researcher writes: a module per client, autograd, ``torch.optim.SGD``. ``compiled`` is
that loop with its module under ``torch.compile``, ``graphed`` replays a minibatch's work as a CUDA graph. A peer that
fails or takes too long is reported as such. After each row the file is written, so that a run can be cut off.

``floor`` is the time that the counted operations or bytes take at the rates of a large matrix product and a large
copy, which are measured in the same run: PyTorch counts the operations of the plain loop; the bytes are those of
parameters, gradients and activations, each read and written as often as an SGD step must at least.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from common import provenance, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from tdpfed import FedAvg, Federation, PFedMe
from tdpfed.engine.precision import Precision, arithmetic
from tdpfed.engine.simulation import Simulation
from tdpfed.models import build

LAM, ETA, ETA_P, S = 12.0, 1e-3, 1e-3, 5
METHODS = ("fedavg", "pfedme")
WARM_UP = 3
"""Rounds that are not counted: ours are computed, recorded and replayed once."""
PARAMETER_PASSES = 5
"""Read forward and backward, the gradient written, gradient and parameter read (one pass each), parameter written."""
ACTIVATION_PASSES = 4
"""Written and read by the next layer, their gradients likewise."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """A workload: model, input shape, clients, and a round's minibatches of a client."""

    name: str
    model: str
    shape: tuple[int, int, int]
    clients: int
    steps: int
    batch: int
    classes: int = 10


ROWS = (
    Row("MLP, 20 clients", "dnn", (1, 28, 28), 20, 23, 20),
    Row("MLP, 100 clients", "dnn", (1, 28, 28), 100, 23, 20),
    Row("PFLlib's CNN, 20 clients", "cnn", (1, 28, 28), 20, 50, 10),
    Row("PFLlib's CNN, 100 clients", "cnn", (1, 28, 28), 100, 50, 10),
    Row("LeNet, 20 clients", "lenet", (3, 32, 32), 20, 25, 20),
    Row("ResNet-8, 20 clients", "resnet8", (3, 32, 32), 20, 25, 20),
    Row("VGG8, 10 clients", "vgg8", (3, 32, 32), 10, 25, 20),
    Row("ResNet-18, 10 clients", "resnet18", (3, 32, 32), 10, 10, 32),
    Row("transformer, 20 clients", "transformer", (3, 32, 32), 20, 25, 20),
)


def federation(row: Row, device: torch.device) -> Federation:
    """Return random samples, four minibatches for each client."""
    generator = torch.Generator().manual_seed(0)
    each = 4 * row.batch
    owner = torch.arange(row.clients).repeat_interleave(each)
    x = torch.randn(len(owner), *row.shape, generator=generator)
    y = torch.randint(row.classes, (len(owner),), generator=generator)
    made = Federation.from_tensors(x, y, owner, classes=row.classes, test_mask=torch.zeros(len(owner)) > 0)
    return made.to(device)


def ours(row: Row, method: str, data: Federation, precision: Precision) -> Step:
    common: dict[str, Any] = {"tau": row.steps, "batch_size": row.batch, "eta": ETA}
    chosen = FedAvg(**common) if method == "fedavg" else PFedMe(**common, s=S, lam=LAM, eta_p=ETA_P)
    return Simulation(build(row.model, row.shape, row.classes, seed=0), data, chosen, precision=precision).step


class Loop:
    """A round as a researcher writes it: client after client, minibatch after minibatch."""

    def __init__(self, row: Row, method: str, data: Federation) -> None:
        self.row, self.method, self.data = row, method, data
        self.model = build(row.model, row.shape, row.classes, seed=0).to(data.device)

    def minibatches(self, client: int) -> Iterator[tuple[Tensor, Tensor]]:
        start, size = int(self.data.train_start[client]), int(self.data.train_size[client])
        order = torch.randperm(size, device=self.data.device) + start
        for step in range(self.row.steps):
            index = order[step * self.row.batch % size :][: self.row.batch]
            yield self.data.x[index], self.data.y[index]

    def round(self) -> None:
        locals_ = [self.trained(client) for client in range(self.row.clients)]
        shares = (self.data.train_size / self.data.train_size.sum()).tolist()
        with torch.no_grad():
            for p, *others in zip(self.model.parameters(), *locals_, strict=True):
                p.copy_(sum(share * other for share, other in zip(shares, others, strict=True)))

    def trained(self, client: int) -> list[Tensor]:
        """Return the parameters that a client sends."""
        theta = copy.deepcopy(self.model)
        w = [p.detach().clone() for p in self.model.parameters()]
        optimizer = torch.optim.SGD(theta.parameters(), lr=ETA if self.method == "fedavg" else ETA_P)
        for x, y in self.minibatches(client):
            self.minibatch(theta, w, optimizer, x, y)
        return [p.detach() for p in theta.parameters()] if self.method == "fedavg" else w

    def minibatch(
        self, theta: nn.Module, w: list[Tensor], optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
    ) -> None:
        """Take the steps on one minibatch; ``w`` is pFedMe's local model, changed in place."""
        for _ in range(1 if self.method == "fedavg" else S):
            optimizer.zero_grad()
            cross_entropy(theta(x), y).backward()
            if self.method == "pfedme":
                for p, anchor in zip(theta.parameters(), w, strict=True):
                    assert p.grad is not None
                    p.grad.add_(p.detach() - anchor, alpha=LAM)
            optimizer.step()
        if self.method == "pfedme":
            with torch.no_grad():
                for p, anchor in zip(theta.parameters(), w, strict=True):
                    anchor.sub_(anchor - p, alpha=ETA * LAM)


class OneModule(Loop):
    """The loop with one module for all clients, whose values are replaced: compiled and recorded work needs that."""

    def __init__(self, row: Row, method: str, data: Federation) -> None:
        super().__init__(row, method, data)
        self.theta = copy.deepcopy(self.model)
        self.w = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.theta.parameters(), lr=ETA if method == "fedavg" else ETA_P)

    def trained(self, client: int) -> list[Tensor]:
        with torch.no_grad():
            for p, anchor, start in zip(self.theta.parameters(), self.w, self.model.parameters(), strict=True):
                p.copy_(start)
                anchor.copy_(start)
        for x, y in self.minibatches(client):
            self.work(x, y)
        sent = [p.detach() for p in self.theta.parameters()] if self.method == "fedavg" else self.w
        return [p.clone() for p in sent]

    def work(self, x: Tensor, y: Tensor) -> None:
        self.minibatch(self.theta, self.w, self.optimizer, x, y)


class Compiled(OneModule):
    """The loop with its module under ``torch.compile``."""

    def __init__(self, row: Row, method: str, data: Federation) -> None:
        super().__init__(row, method, data)
        self.fast = torch.compile(self.theta)

    def work(self, x: Tensor, y: Tensor) -> None:
        self.minibatch(self.fast, self.w, self.optimizer, x, y)  # type: ignore[arg-type]


class Graphed(OneModule):
    """The loop with a minibatch's work recorded as a CUDA graph, replayed for every minibatch of every client."""

    def __init__(self, row: Row, method: str, data: Federation) -> None:
        super().__init__(row, method, data)
        self.x, self.y = (one[: row.batch].clone() for one in (data.x, data.y))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().work(self.x, self.y)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            super().work(self.x, self.y)

    def work(self, x: Tensor, y: Tensor) -> None:
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()


PEERS: dict[str, type[Loop]] = {"plain": Loop, "compiled": Compiled, "graphed": Graphed}


def operations(row: Row, method: str, data: Federation) -> int:
    """Return the floating-point operations of a round's matrix products and convolutions, as PyTorch counts them."""
    one = OneModule(replace(row, clients=1, steps=1), method, data)
    with FlopCounterMode(display=False) as counter:
        one.work(data.x[: row.batch], data.y[: row.batch])
    return int(counter.get_total_flops()) * row.clients * row.steps


def least_bytes(row: Row, method: str) -> int:
    """Return the bytes that a round's steps must at least read and write, in float32."""
    model, seen = build(row.model, row.shape, row.classes, seed=0), [0]

    def count(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen[0] += output.numel()

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with torch.no_grad():
        model(torch.zeros(row.batch, *row.shape))
    parameters = sum(p.numel() for p in model.parameters())
    steps = row.clients * row.steps * (1 if method == "fedavg" else S)
    return 4 * steps * (PARAMETER_PASSES * parameters + ACTIVATION_PASSES * seen[0])


def seconds(function: Step, device: torch.device) -> float:
    """Return the time of a call, with the device idle before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peaks(device: torch.device, precision: Precision, tiny: bool) -> dict[str, float]:
    """Return the device's rates: operations of a large matrix product, bytes of a large copy, each per second."""
    side, length = (256, 1 << 20) if tiny else (8192, 1 << 28)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    x = torch.zeros(length, device=device)
    y = torch.empty_like(x)
    with arithmetic(precision):
        product, copied = (
            statistics.median(seconds(call, device) for _ in range(10)) for call in (lambda: a @ a, lambda: y.copy_(x))
        )
    return {"operations_per_second": 2 * side**3 / product, "bytes_per_second": 8 * length / copied}


def turns(functions: Mapping[str, Step], device: torch.device, repeats: int, most: float) -> dict[str, dict[str, Any]]:
    """Return each function's seconds, measured in turns; one that fails, or whose call takes too long, ends early."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    errors: dict[str, str] = {}
    for turn in range(WARM_UP + repeats):
        for name, function in functions.items():
            enough = sum(times[name]) > most and len(times[name]) > 1
            if name in errors or enough:
                continue
            try:
                taken = seconds(function, device)
            except Exception as error:  # a compiler that is missing, memory that runs out
                errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if turn >= WARM_UP or (name != "ours" and turn > 0 and taken > 1):
                times[name].append(taken)
    return {
        name: {"error": errors[name]} if name in errors or not found else
        {"median": statistics.median(found), "least": min(found), "most": max(found), "rounds": len(found)}
        for name, found in times.items()
    }  # fmt: skip


def measured(row: Row, method: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row's record: seconds of all, ratios, and the floor."""
    data = federation(row, device)
    found: dict[str, Step] = {"ours": ours(row, method, data, options.precision)}
    errors = {}
    for name, kind in PEERS.items():
        try:
            if name == "graphed" and device.type != "cuda":
                raise RuntimeError("needs a GPU")
            found[name] = kind(row, method, data).round
        except Exception as error:
            errors[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    with arithmetic(options.precision):
        times = {**turns(found, device, options.repeats, options.most), **errors}
    own = times["ours"].get("median")
    work, moved = operations(row, method, data), least_bytes(row, method)
    rates = options.peaks
    floor = max(work / rates["operations_per_second"], moved / rates["bytes_per_second"])
    return {
        "row": row.name, "method": method, "precision": options.precision, "clients": row.clients, "steps": row.steps,
        "batch": row.batch, "seconds": times,
        "ratios": {name: one["median"] / own for name, one in times.items() if own and "median" in one},
        "operations": work, "bytes": moved, "floor_seconds": floor, **rates,
        "share_of_operations": work / rates["operations_per_second"] / own if own else None,
        "share_of_bytes": moved / rates["bytes_per_second"] / own if own else None,
        "share_of_floor": floor / own if own else None,
    }  # fmt: skip


def tiny(row: Row) -> Row:
    """Return a row that takes a moment on a CPU."""
    return replace(row, clients=3, steps=1, batch=2)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", default="", help="rows whose names contain this word")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most", type=float, default=30.0, help="most seconds of a peer's counted rounds")
    parser.add_argument("--again", action="store_true", help="measure rows that are in the file too")
    parser.add_argument("--tiny", action="store_true", help="tiny rows, to test this program")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu-peers.json")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    origin = provenance(0, device)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    known = {(row["row"], row["method"], row["precision"]) for row in rows}
    options.peaks = peaks(device, options.precision, options.tiny)
    for row in (one for one in ROWS if options.only.lower() in one.name.lower()):
        for method in options.methods.split(","):
            at = row.name, method, options.precision
            if at in known and not options.again:
                continue
            made = measured(tiny(row) if options.tiny else row, method, device, options) | {"made": origin}
            rows = [one for one in rows if (one["row"], one["method"], one["precision"]) != at] + [made]
            places = [one.name for one in ROWS]
            rows.sort(key=lambda one: (places.index(one["row"]), METHODS.index(one["method"]), one["precision"]))
            write(options.out, {"provenance": origin, "rows": rows})
            ratios = ", ".join(f"{name} {ratio:.1f}x" for name, ratio in made["ratios"].items() if name != "ours")
            own = made["seconds"]["ours"]
            print(f"{row.name}, {method}: ours {1000 * own.get('median', float('nan')):.1f} ms; {ratios}", flush=True)
            if device.type == "cuda":
                torch.compiler.reset()
                torch.cuda.empty_cache()
    return {"provenance": origin, "rows": rows}


if __name__ == "__main__":
    main()
