"""Seconds per round, memory and checkpoints against the number of clients, the size of the model, and processes.

``clients``: federations of 200 to 10,000 clients with 100 samples each, of which 100 take part in a round; the paper's
DNN, 23 local steps of 20 samples. ``models``: 20 clients, a hidden layer of 25 to 1600 units, 23 local rounds, for
TDPFed 2. ``ranks``: 100 of 1,000 clients in one process with one thread, one with two threads, and two processes with
one thread each. Federations alternate in one process, round by round; memory and checkpoints, and the other cases, are
measured in separate processes. Samples are random numbers of MNIST's shapes, which does not affect the timing.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import provenance, write
from torch import nn

from tdpfed.algorithms import Algorithm, FedAvg, PFedMe, TDPFed
from tdpfed.data import Federation
from tdpfed.engine.processes import joined
from tdpfed.engine.simulation import Simulation
from tdpfed.models import build
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.snapshot import snapshot_of
from tdpfed.server.participation import Participation

POPULATIONS = (200, 1000, 3000, 10_000)
HIDDEN = (25, 50, 100, 200, 400, 800, 1600)
PARTICIPANTS, SAMPLES = 100, 100


def federation(clients: int, seed: int = 0) -> Federation:
    generator = torch.Generator().manual_seed(seed)
    owner = torch.arange(clients).repeat_interleave(SAMPLES)
    x = torch.randint(0, 256, (len(owner), 1, 28, 28), dtype=torch.uint8, generator=generator)
    y = (owner + torch.randint(0, 2, owner.shape, generator=generator)) % 10
    return Federation.from_tensors(x, y, owner, classes=10, name="random")


def resident() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"now": pages * os.sysconf("SC_PAGE_SIZE") / 2**30, "peak": most / 2**30}


def clients(population: int, rounds: int, state: str) -> dict[str, Any]:
    """Measure rounds of one federation: seconds, resident memory in GiB, and the cost of checkpoints and evaluation."""
    data = federation(population)
    before = resident()
    simulation = Simulation(
        build("dnn", seed=0), data, FedAvg(tau=23), participation=Participation(PARTICIPANTS),
        evaluate_clients=PARTICIPANTS, state=state,  # type: ignore[arg-type]
    )  # fmt: skip
    seconds, saves, sizes = [], [], []
    with tempfile.TemporaryDirectory() as place:
        checkpoints = Checkpoints(Path(place))
        for number in range(rounds + 1):
            began = time.perf_counter()
            simulation.step()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            checkpoints.save(snapshot_of(simulation), simulation.trained)
            saves.append(time.perf_counter() - began)
            newest = max(int(path.stem) for path in Path(place).glob("*.json"))
            sizes.append(sum(path.stat().st_size for path in Path(place).glob(f"{newest:08}*")))
            del number
    began = time.perf_counter()
    simulation.record(0.0)
    sample = time.perf_counter() - began
    after = resident()
    simulation.store.whole()  # as if every client had trained
    simulation.recorder = replace(simulation.recorder, evaluated=torch.arange(population))
    began = time.perf_counter()
    simulation.record(0.0)
    complete = time.perf_counter() - began
    return {
        "clients": population, "state": simulation.store.place, "seconds": seconds[1:], "save_seconds": saves[1:],
        "save_bytes": sizes[1:], "evaluate_sample_seconds": sample, "evaluate_all_seconds": complete,
        "resident_gib": {"data": before, "rounds": after, "all_clients_in_use": resident()},
    }  # fmt: skip


def models(hidden: int, method: str, rounds: int) -> dict[str, Any]:
    """Measure rounds of 20 clients with one hidden layer of ``hidden`` units."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    algorithm: Algorithm = {"fedavg": FedAvg(tau=23), "pfedme": PFedMe(tau=23), "tdpfed": TDPFed(tau=2)}[method]
    simulation = Simulation(model, federation(20), algorithm)
    seconds = _rounds(simulation, rounds)
    return {"hidden": hidden, "method": method, "parameters": simulation.objective.layout.size, "seconds": seconds}


def ranks(population: int, rounds: int) -> dict[str, Any] | None:
    """Measure rounds in the processes started by torchrun; the first one reports."""
    with joined() as place:
        simulation = Simulation(
            build("dnn", seed=0), federation(population), FedAvg(tau=23), participation=Participation(PARTICIPANTS),
            ranks=place,
        )  # fmt: skip
        seconds = _rounds(simulation, rounds, warm_up=30)  # the number of clients of a process varies
        found = {
            "ranks": place.world,
            "threads": torch.get_num_threads(),
            "seconds": seconds,
            "resident_gib": resident(),
        }
        return found if place.leads else None


def in_turn(rounds: int) -> dict[str, list[float]]:
    """Measure rounds of all federations alternately in one process, so that noise affects them equally."""
    simulations = {
        population: Simulation(
            build("dnn", seed=0), federation(population), FedAvg(tau=23), participation=Participation(PARTICIPANTS)
        )
        for population in POPULATIONS
    }
    seconds: dict[str, list[float]] = {str(population): [] for population in simulations}
    for turn in range(2 + rounds):
        for population, simulation in simulations.items():
            began = time.perf_counter()
            simulation.step()
            if turn >= 2:
                seconds[str(population)].append(time.perf_counter() - began)
    return seconds


def _rounds(simulation: Simulation, rounds: int, warm_up: int = 1) -> list[float]:
    seconds = []
    for _ in range(warm_up + rounds):
        began = time.perf_counter()
        simulation.step()
        seconds.append(time.perf_counter() - began)
    return seconds[warm_up:]


def _ask(arguments: list[str], processes: int = 1, threads: int | None = None) -> dict[str, Any]:
    """Run one case in one or more new processes and return its output."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes > 1 else []
    env = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=env
    )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _merged(cases: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Merge the turns of each case: the seconds of all rounds, other values from the last turn."""
    found: dict[Any, dict[str, Any]] = {}
    for case in cases:
        before = found.get(case[key], {}).get("seconds", [])
        found[case[key]] = {**case, "seconds": [*before, *case["seconds"]]}
    return [{**case, "median": statistics.median(case["seconds"])} for case in found.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clients", "models", "ranks"])
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds of each turn of a case")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--state", default="auto", help="clients: where their state is stored")
    parser.add_argument("--out", type=Path, default=None, help="benchmarks/results/scale-WHAT.json by default")
    parser.add_argument("--case", nargs="+", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        first = int(options.case[0])
        if options.what == "clients":
            answer: dict[str, Any] | None = clients(first, 4, options.state) if first else dict(in_turn(options.rounds))
        else:
            answer = (
                models(first, options.case[1], options.rounds)
                if options.what == "models"
                else ranks(first, options.rounds)
            )
        if answer:  # of several processes, only the first has a result
            print(json.dumps(answer), flush=True)
        return
    common = ["--rounds", str(options.rounds), "--state", options.state, "--case"]
    cases: list[dict[str, Any]] = []
    for turn in range(options.turns):
        if options.what == "clients":
            seconds = _ask(["clients", *common, "0"])
            found = [_ask(["clients", *common, str(population)]) for population in POPULATIONS]
            cases += [{**case, "seconds": seconds[str(case["clients"])]} for case in found]
        elif options.what == "models":
            for method in ("fedavg", "pfedme", "tdpfed"):
                cases += [_ask(["models", *common, str(hidden), method]) for hidden in HIDDEN]
        else:
            cases += [_ask(["ranks", *common, "1000"], *how) for how in ((1, 1), (1, 2), (2, 1))]
        print(f"turn {turn + 1} of {options.turns} done", file=sys.stderr, flush=True)
    for case in cases:
        case["case"] = " ".join(
            str(case[key]) for key in ("clients", "method", "hidden", "ranks", "threads") if key in case
        )
    merged = _merged(cases, "case")
    made = {"provenance": provenance(0, torch.device("cpu")), "samples_per_client": SAMPLES, "cases": merged}
    made["participants"] = 20 if options.what == "models" else PARTICIPANTS
    write(options.out or Path(__file__).parent / "results" / f"scale-{options.what}.json", made)
    for case in merged:
        print(f"{case['case']:>24}: {case['median']:.3f} s per round")


if __name__ == "__main__":
    main()
