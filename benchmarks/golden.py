"""Compare runs bit for bit before and after a refactoring, on one machine.

``record`` runs the list below through the command line and stores, for each run, its records and a digest of every
tensor in its last checkpoint. ``check`` repeats the runs and lists differences. Bits depend on the processor and its
libraries, so a record is only valid on the machine that made it; it is not kept in the repository.

    python benchmarks/golden.py record before.json --source OTHER_CHECKOUT/src
    python benchmarks/golden.py check before.json

Records are compared by the keys that both versions write. ``--ignore uplink_bytes`` leaves out a key that a change is
meant to change.

Both take ``--device cuda``, without the runs of two processes. Where a GPU's bits differ, ``check --within 1e-5``
allows relative differences: of a tensor by its norm, of a recorded number by its size. The tensors are kept in a folder
beside the file.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DIGITS = (
    "digits", "run.rounds=6", "run.evaluate_every=3", "checkpoint.every=3",
    "data.clients=10", "data.per_client=2", "data.max_samples=100000",
)  # fmt: skip
MNIST = ("mnist", "run.rounds=5", "run.evaluate_every=5", "checkpoint.every=5")
METHODS = ("tdpfed", "fedavg", "fedavg_sar", "pfedme", "perfedavg", "local")

RUNS: dict[str, tuple[str, ...]] = {
    **{f"digits-{name}": (*DIGITS, f"algorithm.name={name}") for name in METHODS},
    **{f"mnist-{name}": (*MNIST, f"algorithm.name={name}") for name in METHODS},
    "digits-act": (*DIGITS, "algorithm.aggregation=act"),
    "digits-als": (*DIGITS, "algorithm.optimizer=als"),
    "digits-gd": (*DIGITS, "algorithm.optimizer=gd"),
    "digits-alternating": (*DIGITS, "algorithm.factor_steps=alternating", "algorithm.optimizer=rmsprop"),
    "digits-run-state": (*DIGITS, "algorithm.optimizer_state=run"),
    "digits-local-round": (*DIGITS, "algorithm.optimizer_state=local-round", "algorithm.optimizer=adagrad"),
    "digits-keep-theta": (*DIGITS, "algorithm.keep_theta=true", "participation.clients=4"),
    "digits-hessian": (*DIGITS, "algorithm.name=perfedavg", "algorithm.variant=hessian-free"),
    "digits-int8": (*DIGITS, "wire.codec=int8"),
    "digits-fedavg-int8": (*DIGITS, "algorithm.name=fedavg", "wire.codec=int8"),
    "digits-sar-half": (*DIGITS, "algorithm.name=fedavg_sar", "wire.codec=float16", "participation.clients=5"),
    "digits-robust": (*DIGITS, "robust.name=trimmed-mean", "robust.clip=median", "robust.attack=sign-flip"),
    "digits-gauge": (*DIGITS, "robust.gauge=1", "robust.attack=gauge"),
    "digits-sar-krum": (*DIGITS, "algorithm.name=fedavg_sar", "robust.name=krum", "robust.attack=alie"),
    "digits-privacy": (
        *DIGITS, "algorithm.name=fedavg", "privacy.clip=1", "privacy.noise=1", "algorithm.weights=uniform",
        "participation.clients=5", "participation.sampling=poisson",
    ),
    "digits-act-privacy": (
        *DIGITS, "algorithm.aggregation=act", "privacy.clip=1", "privacy.noise=0.5", "algorithm.weights=uniform",
    ),
    "digits-dropout": (*DIGITS, "participation.clients=5", "participation.dropout=0.3", "participation.train=all"),
    "digits-seeds": (*DIGITS, "run.seeds=2"),
    "digits-conv": (*DIGITS, "model.name=lenet", "run.rounds=3"),
    "digits-conv-pfedme": (*DIGITS, "model.name=lenet", "run.rounds=3", "algorithm.name=pfedme"),
    "mnist-momentum": (*MNIST, "algorithm.momentum=0.5"),
    "mnist-act": (*MNIST, "algorithm.aggregation=act", "run.rounds=2"),
}  # fmt: skip
TIMED = ("seconds", "previous", "sha256")
"""Keys of a record that differ from run to run: the time, and checksums, which cover it."""
RESUMED = ("digits-tdpfed", "digits-act", "digits-fedavg_sar", "mnist-tdpfed")
SHARED = ("digits-tdpfed", "digits-robust", "digits-local", "digits-fedavg_sar")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "check"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src", help="src folder of tdpfed")
    parser.add_argument("--data-root", type=Path, default=None, help="folder of MNIST")
    parser.add_argument("--only", default="", help="runs whose names contain this")
    parser.add_argument("--skip", default="", help="leave out runs whose names contain this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--within", type=float, default=0.0, help="relative difference that is allowed")
    parser.add_argument("--ignore", action="append", default=[], help="key of the records that is not compared")
    options = parser.parse_args()
    names = [name for name in RUNS if options.only in name and not (options.skip and options.skip in name)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        made = {name: pool.submit(_run, name, Path(folder), options) for name in names}
        if options.what == "check":
            made |= {
                _again(name): pool.submit(_resumed, name, Path(folder), options) for name in RESUMED if name in names
            }
        for name in SHARED:
            if name in names and options.device == "cpu":
                made[f"{name}, two processes"] = pool.submit(_run, name, Path(folder), options, processes=2)
        found = {name: job.result() for name, job in made.items()}
    if options.what == "record":  # a resumed run must equal an uninterrupted one
        found |= {_again(name): {"tensors": found[name]["tensors"]} for name in RESUMED if name in names}
        options.file.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} runs recorded")
        return
    before = json.loads(options.file.read_text())
    differences = {name: _difference(before.get(name), now, options.ignore) for name, now in found.items()}
    different = [name for name, difference in differences.items() if difference]
    farthest = {name: _farthest(before[name], found[name], name, options) for name in different if name in before}
    for name in different:
        print(f"{name}: {differences[name]}; relative difference {farthest.get(name, 'unknown')}")
    print(f"{len(found) - len(different)} of {len(found)} runs equal to the bit")
    if options.within:
        far = [name for name in different if not farthest.get(name, math.inf) <= options.within]
        print(f"{len(found) - len(far)} of {len(found)} within {options.within:g}")
        different = far
    sys.exit(bool(different))


def _again(name: str) -> str:
    return f"{name}, resumed"


def _run(name: str, folder: Path, options: argparse.Namespace, processes: int = 1) -> dict[str, Any]:
    out = folder / f"{name}-{processes}"
    source, *settings = RUNS[name]
    settings.append(f"run.device={options.device}")
    _call(options, processes, source, *(part for one in settings for part in ("--set", one)), "--out", str(out))
    return _contents(out, _stored(options, name if processes == 1 else f"{name}, two processes", options.what))


def _stored(options: argparse.Namespace, name: str, what: str) -> Path:
    """Return the file with the tensors of a run."""
    file: Path = options.file
    return file.with_suffix(".tensors") / f"{name.replace(', ', '-')}.{what}.safetensors"


def _farthest(before: Any, now: Any, name: str, options: argparse.Namespace) -> float:
    """Return the largest relative difference: of a tensor by its norm, of a number by its size."""
    found = [0.0]
    files = [_stored(options, name.removesuffix(", resumed"), "record"), _stored(options, name, "check")]
    if not all(file.exists() for file in files):
        return math.inf
    old, new = map(load_file, files)
    if old.keys() - new.keys():  # a new version may keep more
        return math.inf
    found += [_relative(old[key].double(), new[key].double()) for key in old]
    for one, other in zip(before.get("records", []), now.get("records", []), strict=True):
        for key in one.keys() & other.keys() - set(options.ignore):
            if isinstance(one[key], float) and isinstance(other[key], float):
                found.append(_relative(torch.tensor(one[key]), torch.tensor(other[key])))
            elif one[key] != other[key]:
                return math.inf
    return max(found)


def _relative(one: Tensor, other: Tensor) -> float:
    """Return the relative difference; infinite if numbers differ that are not finite."""
    if one.shape != other.shape:
        return math.inf
    known = one.isfinite()
    if not torch.equal(one[~known].nan_to_num(), other[~known].nan_to_num()) or not bool(other[known].isfinite().all()):
        return math.inf
    return float((one - other)[known].norm() / one[known].norm().clamp_min(1e-12))


def _resumed(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run three rounds, then resume the run with its whole number of rounds."""
    out = folder / f"{name}-resumed"
    source, *settings = RUNS[name]
    rounds = next(one for one in settings if one.startswith("run.rounds="))
    half = [one for one in settings if one != rounds]
    half += ["run.rounds=3", "checkpoint.every=3", f"run.device={options.device}"]
    _call(options, 1, source, *(part for one in half for part in ("--set", one)), "--out", str(out))
    _call(options, 1, "--resume", str(out), "--set", rounds)
    return {"tensors": _contents(out, _stored(options, _again(name), options.what))["tensors"]}


def _call(options: argparse.Namespace, processes: int, *arguments: str) -> None:
    root = ["--data-root", str(options.data_root)] if options.data_root else []
    many = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *many, "-m", "tdpfed", "run", *arguments, *root, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(options.source), "TDPFED_COMMIT": "golden"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr[-2000:]}")


def _contents(out: Path, store: Path) -> dict[str, Any]:
    """Return the records of a run without times, and digests of its latest checkpoint's tensors; store the tensors."""
    records, tensors, values = [], {}, {}
    for file in sorted(out.rglob("metrics.jsonl")):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        records += [{key: value for key, value in line.items() if key not in TIMED} for line in lines]
    for folder in sorted(out.rglob("checkpoints")):
        newest = json.loads(max(folder.glob("*.json")).read_text())
        for entry in (newest["server"], *newest["private"]):
            for key, value in sorted(load_file(folder / entry["name"]).items()):
                place = f"{folder.parent.name if 'seed' in folder.parent.name else ''}{key}"
                tensors[place] = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
                values[place] = value.contiguous()
    store.parent.mkdir(parents=True, exist_ok=True)
    save_file(values, store)
    return {"records": records, "tensors": tensors}


def _difference(before: Any, now: Any, ignored: list[str]) -> str:
    """Return what differs, in words; empty if nothing does."""
    if before is None:
        return "not recorded before"
    tensors = [
        key for key in {**now["tensors"], **before["tensors"]} if now["tensors"].get(key) != before["tensors"].get(key)
    ]
    pairs = list(zip(before.get("records", []), now.get("records", []), strict=True))
    keys = sorted({key for old, new in pairs for key in old.keys() & new.keys() if old[key] != new[key]} - set(ignored))
    return f"tensors {tensors or 'equal'}, records {keys or 'equal'}" if tensors or keys else ""


if __name__ == "__main__":
    main()
