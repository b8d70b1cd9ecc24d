"""How fast are compose and residual_grad, as a share of the machine's GEMM rate, and how much memory do they use?

Operations are counted, not estimated from time. Per factorized parameter and client, with D = product and S = sum of
its sizes and rank R, a multiply-add being two operations:

    compose         2 D R                 one product of the two sides' Khatri-Rao matrices
    residual_grad   4 D R + 4 S R^2       two products with the matricized tensor; Gram matrices and A_n V_n

Elementwise work (Khatri-Rao products, contractions of small modes, dense parameters) takes time but is not counted.

Memory: peak bytes of residual_grad beyond inputs and result, relative to the largest intermediate that the design
allows: kernel positions x larger channel count x R x 4 bytes, for one client and for all K. (A CPU processes
as many clients together as fit its caches, one in VGG8's largest layer and all 20 of the DNN; a GPU processes all.)
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import alternate, provenance, write
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tdpfed.cp.plan import FactorPlan
from tdpfed.fast.factor_algebra import compose, residual_grad
from tdpfed.models import build

CASES = (("dnn", 20), ("vgg8", 10))
COMPRESSION = 2.0


class LiveBytes(TorchDispatchMode):
    """Tracks the peak number of bytes in live storages created inside this context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in given:
                storage = tensor.untyped_storage()
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def peak_bytes(function: Callable[[], Tensor], device: torch.device) -> int:
    """Return the peak number of bytes that ``function`` allocates, without those of its result."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = function()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before) - result.nbytes
    with LiveBytes() as live:
        result = function()
    return int(live.peak) - result.nbytes


def measure(name: str, clients: int, gemm_size: int, repeats: int, seed: int, device: torch.device) -> dict[str, Any]:
    plan = FactorPlan.of(build(name, seed=seed), COMPRESSION)
    factorized = [(row.shape, row.rank) for row in plan.rows() if row.rank is not None]
    generator = torch.Generator().manual_seed(seed)
    theta, a, x, y = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((clients, plan.dense.size), (clients, plan.factors.size), *[(gemm_size, gemm_size)] * 2)
    )
    product = torch.empty_like(x)
    seconds = alternate(
        {
            "gemm": lambda: torch.mm(x, y, out=product),
            "compose": lambda: compose(plan, a),
            "residual_grad": lambda: residual_grad(plan, a, theta, 1.0),
        },
        repeats,
        device,
    )
    operations = {
        "gemm": 2 * gemm_size**3,
        "compose": clients * sum(2 * math.prod(shape) * rank for shape, rank in factorized),
        "residual_grad": clients
        * sum(4 * math.prod(shape) * rank + 4 * sum(shape) * rank**2 for shape, rank in factorized),
    }
    gflops = {key: operations[key] / seconds[key] / 1e9 for key in seconds}
    largest = max(math.prod(shape[2:]) * max(shape[:2]) * rank * 4 for shape, rank in factorized)
    peak = peak_bytes(lambda: residual_grad(plan, a, theta, 1.0), device)
    return {
        "model": name,
        "clients": clients,
        "compression": COMPRESSION,
        "seconds": seconds,
        "operations": operations,
        "gflops": gflops,
        "share_of_gemm": {key: gflops[key] / gflops["gemm"] for key in ("compose", "residual_grad")},
        "memory": {
            "largest_intermediate_of_one_client_bytes": largest,
            "result_bytes": a.nbytes,
            "peak_beyond_inputs_and_result_bytes": peak,
            "multiple_of_one_client": peak / largest,
            "multiple_of_all_clients": peak / largest / clients,
            "multiple_of_all_clients_with_result": (peak + a.nbytes) / largest / clients,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--gemm", type=int, default=2048, help="side of the square float32 product that sets the rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cp.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [measure(name, k, options.gemm, options.repeats, options.seed, device) for name, k in CASES]
    write(options.out, {**provenance(options.seed, device), "repeats": options.repeats, "results": results})
    for result in results:
        print(f"\n{result['model']}, {result['clients']} clients, compression {COMPRESSION:g}, {device}")
        print(f"  {'':15}{'ms':>10}{'GFLOP/s':>12}{'of GEMM':>10}")
        for key in ("gemm", "compose", "residual_grad"):
            share = result["share_of_gemm"].get(key, 1.0)
            print(f"  {key:15}{1e3 * result['seconds'][key]:10.2f}{result['gflops'][key]:12.1f}{share:10.0%}")
        memory = result["memory"]
        peak, largest = (
            memory[key] / 2**20
            for key in ("peak_beyond_inputs_and_result_bytes", "largest_intermediate_of_one_client_bytes")
        )
        print(
            f"  residual_grad's peak beyond inputs and result: {peak:.1f} MiB, that is"
            f" {memory['multiple_of_one_client']:.2f} x the largest intermediate of one client ({largest:.2f} MiB),"
            f" {memory['multiple_of_all_clients']:.2f} x that of all"
            f" ({memory['multiple_of_all_clients_with_result']:.2f} x with the result)"
        )
    print(f"\nwritten to {options.out}")


if __name__ == "__main__":
    main()
