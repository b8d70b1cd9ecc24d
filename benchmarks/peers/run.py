"""Seconds per round of the same workload in tdpfed (ours), in plain PyTorch loops and in other packages.

    python benchmarks/peers/run.py --data-root DIR

MNIST, MLP 784-100-10, 20 clients of two classes, 23 local steps of 20 samples, all clients, float32, all CPU
threads: FedAvg, pFedMe with 5 inner steps and, against the plain loop, FedProx, Ditto and TDPFed at compression 2, as
in the preset ``mnist-paper`` and with Nesterov momentum 0.5. With ``--conv``: CIFAR-10's shapes, VGG8, 10 clients, 5
local steps, FedAvg, pFedMe and TDPFed as in the preset, in ours and in the plain loop. Every package gets its own new
environment, which is deleted afterwards; a package that cannot be installed or does not run is reported. All take turns
in processes of their own, whose first rounds are not counted. The median over all rounds of all turns is compared.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from common import ROOT, alternate, provenance, write
from floor import operations

from tdpfed.config.loading import load_config
from tdpfed.runs.prepare import prepare

TORCH = f"torch=={torch.__version__}"
PEERS: dict[str, list[str]] = {
    "fedjax": ["fedjax", "jax", "jaxlib"],
    "fluke": [TORCH, "fluke-fl"],
    "pfl": [TORCH, "pfl[pytorch]"],
    "flower": [TORCH, "flwr[simulation]"],
}
"""Packages and their requirements; those based on PyTorch get the same release as ours."""

METHODS = ("fedavg", "fedprox", "ditto", "pfedme", "tdpfed", "tdpfed-momentum")
CONV_METHODS = ("fedavg", "pfedme", "tdpfed")
LOOP_ONLY = ("fedprox", "ditto", "tdpfed", "tdpfed-momentum")
"""Methods that are compared with the plain loop only."""

OURS = ("ours", "plain loop", "plain loop with loaders")


def export(path: Path, data_root: Path | None, conv: bool) -> str:
    """Write every client's training samples, partitioned and normalized as ours; return the data set's name."""
    preset = "cifar10-paper" if conv else "mnist-paper"
    data = prepare(load_config(preset, ["run.device=cpu", "algorithm.name=fedavg"]), data_root).federation
    train = int(data.train_size.sum())
    np.savez(path, x=data.x[:train].numpy(), y=data.y[:train].numpy(), sizes=data.train_size.numpy())
    return data.name


def install(folder: Path, name: str) -> tuple[str, str | None]:
    """Create an environment for a package; return its Python, and an error if there was one."""
    python = folder / name / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(folder / name)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PEERS[name]],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return str(python), "does not install: " + _last_line(done.stderr)
    return str(python), None


def measure(python: str, name: str, method: str, data: Path, rounds: int, extra: list[str]) -> dict[str, Any]:
    """Run one package in a new process; return the seconds of each counted round and versions, or an error."""
    kind = name.partition(" ")[0]
    script = HERE / ("ours.py" if kind == "ours" else f"{kind}_.py")
    more = {"ours": extra, "plain": ["--loaders"] if "loaders" in name else []}.get(kind, [])
    command = [python, str(script), str(data), method, str(rounds), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    except subprocess.TimeoutExpired:
        return {"error": "does not end within half an hour"}
    if done.returncode:
        return {"error": "does not run: " + _last_line(done.stderr)}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def gemm_rate(repeats: int = 15) -> float:
    """Return the machine's operations per second in a large float32 product."""
    x, y = torch.randn(2048, 2048), torch.randn(2048, 2048)
    out = torch.empty_like(x)
    seconds = alternate({"gemm": lambda: torch.mm(x, y, out=out)}, repeats, torch.device("cpu"))
    return 2 * 2048**3 / seconds["gemm"]


def table(result: dict[str, Any]) -> str:
    """Return the medians as Markdown, with their ranges and how many times as long as ours they are."""
    rows = [f"| | {' | '.join(result['methods'])} |", "| --- |" + " --- |" * len(result["methods"])]
    names = list(dict.fromkeys(name for method in result["methods"].values() for name in method))
    for name in names:
        cells = []
        for found in result["methods"].values():
            one = found.get(name)
            if one is None:
                cells.append("-")
            elif "error" in one:
                cells.append(one["error"].partition(":")[0])
            else:
                ratio = one["median"] / found["ours"]["median"] if "median" in found.get("ours", {}) else float("nan")
                spread = f"{one['least']:.3f} to {one['most']:.3f}"
                cells.append(f"{one['median']:.3f} s ({spread}; {len(one['seconds'])} rounds), {ratio:.1f}x")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _summary(turns: list[dict[str, Any]]) -> dict[str, Any]:
    good = [turn for turn in turns if "error" not in turn]
    if not good:
        return {"error": turns[-1]["error"]}
    seconds = [second for turn in good for second in turn["seconds"]]
    return {
        "median": statistics.median(seconds), "least": min(seconds), "most": max(seconds), "seconds": seconds,
        "medians_of_turns": [statistics.median(turn["seconds"]) for turn in good], "versions": good[0]["versions"],
        "failed_turns": len(turns) - len(good), **({"note": good[0]["note"]} if "note" in good[0] else {}),
    }  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no reason given"])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--conv", action="store_true", help="VGG8 on CIFAR-10's shapes, on ours and the plain loop")
    parser.add_argument("--methods", default=None, help=f"of {', '.join(METHODS)}; all by default, less with --conv")
    parser.add_argument("--peers", default=",".join(PEERS), help="which packages; empty for none")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count in each turn")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of ours")
    parser.add_argument("--environments", type=Path, default=None, help="keep environments here, and use those there")
    parser.add_argument(
        "--out", type=Path, default=None, help="benchmarks/results/peers.json by default, or peers-conv"
    )
    options = parser.parse_args()
    out = options.out or HERE.parent / "results" / ("peers-conv.json" if options.conv else "peers.json")
    extra = ["--conv", *options.set] if options.conv else list(options.set)
    with tempfile.TemporaryDirectory() as place:
        data = Path(place) / "clients.npz"
        name = export(data, options.data_root, options.conv)
        pythons, errors = dict.fromkeys(OURS, sys.executable), dict[str, str]()
        for peer in [] if options.conv else [peer for peer in options.peers.split(",") if peer]:
            folder = options.environments or Path(place)
            python = folder / peer / "bin" / "python"
            pythons[peer], error = (str(python), None) if python.exists() else install(folder, peer)
            if error is not None:
                errors[peer] = error
            print(f"{peer}: {error or 'installed'}", file=sys.stderr, flush=True)
        chosen = options.methods.split(",") if options.methods else CONV_METHODS if options.conv else METHODS
        methods: dict[str, dict[str, list[dict[str, Any]]]] = {method: {} for method in chosen}
        rates = [gemm_rate()]
        for turn in range(options.turns):
            for method, found in methods.items():
                for one, python in pythons.items():
                    factors = method.startswith("tdpfed")
                    if (method in LOOP_ONLY and one not in OURS[:2]) or (options.conv and "loaders" in one):
                        continue
                    failed = errors.get(one) or next((t["error"] for t in found.get(one, []) if "error" in t), None)
                    slow = factors and (options.conv or one != "ours")
                    rounds = max(1, options.rounds // 3) if slow else options.rounds
                    answer = {"error": failed} if failed else measure(python, one, method, data, rounds, extra)
                    found.setdefault(one, []).append(answer)
                    said = answer.get("error") or f"{statistics.median(answer['seconds']):.3f} s per round"
                    print(f"turn {turn + 1}, {method}, {one}: {said}", file=sys.stderr, flush=True)
            rates.append(gemm_rate())
    result: dict[str, Any] = {
        "provenance": provenance(0, torch.device("cpu")), "data": name, "turns": options.turns, "set": options.set,
        "workload": f"{'VGG8, 10 clients, 5' if options.conv else 'MLP, 20 clients, 23'} local steps of 20 samples",
        "gemm_gflops": [rate / 1e9 for rate in rates],
        "methods": {m: {n: _summary(turns) for n, turns in found.items()} for m, found in methods.items()},
    }  # fmt: skip
    if not options.conv:
        rate = statistics.median(rates)
        result["floor_seconds"] = {method: operations(method.partition("-")[0]) / rate for method in methods}
    write(out, result)
    text = table(result)
    out.with_suffix(".md").write_text(_page(result, text, out.name))
    print(text)
    print(f"written to {out.relative_to(ROOT) if out.is_relative_to(ROOT) else out}")


def _page(result: dict[str, Any], text: str, name: str) -> str:
    made = result["provenance"]
    hardware, commit = made["hardware"], (made["commit"] or "unknown")[:12] + (" with changes" if made["dirty"] else "")
    floors = ", ".join(f"{method} {seconds:.3f} s" for method, seconds in result.get("floor_seconds", {}).items())
    notes = [
        f"{method}, {one}: {found['note']}" for method, all_ in result["methods"].items() for one, found in all_.items()
        if "note" in found
    ]  # fmt: skip
    packages = (
        " The other packages have 460 samples of each client, which is one pass of 23 minibatches; `tdpfed` (ours) and "
        "the plain loops draw the same number of minibatches from all samples."
    )
    return (
        f"# Seconds per round: {result['workload']}, {result['data']}\n\nMedian (minimum to maximum), and "
        f"how many times as long as ours.{packages if floors else ''}\n\n{text}\n"
        + "".join(f"- {note}\n" for note in notes) + ("\n" if notes else "")
        + (f"Time for the counted operations at the speed of one large matrix product, "
           f"{statistics.median(result['gemm_gflops']):.0f} GFLOP/s in the same run: {floors}.\n\n" if floors else "")
        + f"{hardware['cpu']}, {hardware['threads']} threads; torch {made['versions']['torch']}, Python "
        f"{made['versions']['python']}; commit {commit}; {made['date'][:10]}. Versions of all packages and every "
        f"round's seconds: [{name}]({name}).\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
