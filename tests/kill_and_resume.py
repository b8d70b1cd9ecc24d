"""Kill a run with SIGKILL at random instants, resume it each time, and hold it against the run that was left alone.

``python tests/kill_and_resume.py --kills 14`` does so for tdpfed, pfedme and fedavg. After every kill the checkpoint
that loads must be a state of the undisturbed run, and in the end its records and all its models, bit for bit.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch

import small
from tdpfed import Participation
from tdpfed.algorithms import Algorithm, FedAvg, PFedMe, TDPFed
from tdpfed.engine.checkpoint import Checkpoints, Snapshot, restore, snapshot_of
from tdpfed.engine.simulate import Simulation

ALGORITHMS: list[Algorithm] = [TDPFed(**small.TDPFED), PFedMe(**small.COMMON), FedAvg(**small.COMMON)]


def begin(algorithm: Algorithm) -> Simulation:
    return Simulation(small.mlp(), small.federation(9), algorithm, seed=3, participation=Participation(2))


def advance(simulation: Simulation, records: list[Any]) -> torch.Tensor:
    """Run a round, add its record, and return who changed."""
    simulation.step()
    records.append(simulation.record(0.0).as_dict())
    return simulation.trained


def work(folder: Path, algorithm: Algorithm, rounds: int) -> None:
    """Go on from the newest checkpoint to the end, with a checkpoint after every round."""
    simulation, checkpoints = begin(algorithm), Checkpoints(folder)
    records: list[Any] = []
    found = checkpoints.load()
    if found is not None:
        snapshot, warnings = found
        assert not warnings, warnings  # a kill is no damage
        restore(simulation, snapshot)
        records = snapshot.meta["records"]
    while simulation.round < rounds:
        changed = advance(simulation, records)
        checkpoints.save(snapshot_of(simulation, records=records), changed)


def same(left: Snapshot, right: Snapshot) -> bool:
    pairs = [(left.server, right.server), (left.private, right.private)]
    equal = all(a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs)
    return equal and left.round == right.round and left.meta == right.meta


def reference(algorithm: Algorithm, rounds: int) -> list[Snapshot]:
    """Return the states after every round of a run that nothing disturbs."""
    simulation = begin(algorithm)
    states: list[Snapshot] = []
    records: list[Any] = []
    for _ in range(rounds):
        advance(simulation, records)
        now = snapshot_of(simulation, records=records)
        private = {name: value.clone() for name, value in now.private.items()}
        states.append(Snapshot(now.round, now.server, private, json.loads(json.dumps(now.meta))))
    return states


def disturbed(folder: Path, algorithm: Algorithm, kills: int, random: Random) -> tuple[int, int]:
    """Kill ``kills`` child processes, then run to the end; return how many saves were hit, and the rounds it took."""
    loaded: list[Snapshot] = []
    hit = 0
    for kill in range(kills):
        child = os.fork()
        if child == 0:
            try:
                work(folder, algorithm, 10**9)
            finally:
                os._exit(1)
        # At any instant; at any instant after a save; as soon as a save begins.
        before = manifests(folder)
        while kill % 3 and manifests(folder) <= before:
            alive(child)
        time.sleep(random.uniform(0, 0.15))
        while kill % 3 == 2 and not parts(folder):
            alive(child)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "ended before it was killed"
        hit += parts(folder)
        found = Checkpoints(folder).load()
        if found is not None:
            assert not found[1], found[1]
            loaded.append(found[0])
    rounds = loaded[-1].round + 3 if loaded else 3
    work(folder, algorithm, rounds)
    last = Checkpoints(folder).load()
    assert last is not None
    states = reference(algorithm, rounds)
    assert all(same(snapshot, states[snapshot.round - 1]) for snapshot in [*loaded, last[0]]), "another state"
    assert last[0].round == rounds
    assert not parts(folder)
    return hit, rounds


def alive(child: int) -> None:
    assert os.waitpid(child, os.WNOHANG)[0] == 0, "ended by itself"
    time.sleep(0.0005)


def manifests(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.json")}


def parts(folder: Path) -> bool:
    """Whether a save is under way, or was."""
    return any(folder.glob("*.part"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=14, help="for each of the three algorithms")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random = Random(arguments.seed)
    for algorithm in ALGORITHMS:
        with tempfile.TemporaryDirectory() as folder:
            hit, rounds = disturbed(Path(folder) / "checkpoints", algorithm, arguments.kills, random)
        print(f"{algorithm.name}: {arguments.kills} kills in {rounds} rounds, {hit} during a save: equal to the bit")  # noqa: T201


if __name__ == "__main__":
    main()
