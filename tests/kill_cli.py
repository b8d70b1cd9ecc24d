"""Kill ``tdpfed run`` with SIGKILL at random instants, ``--resume`` it, and hold it against a run that was left alone.

``python tests/kill_cli.py`` kills 42 times, over tdpfed, pfedme and fedavg: at any instant of the start, at any instant
of a round, or soon after a save has begun. In the end metrics, summary, the global and every personalized model must be
those of the undisturbed run, bit for bit.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

import small
from tdpfed.runs.session import Session

ALGORITHMS = ("tdpfed", "pfedme", "fedavg")
When = Literal["start", "round", "save"]
MOMENTS: tuple[When, ...] = ("start", "round", "save")

COMMAND = shutil.which("tdpfed", path=str(Path(sys.executable).parent)) or "tdpfed"
CONFIG = """
[run]
rounds = {rounds}
seed = 3
threads = {threads}
[data]
name = "synthetic"
clients = 9
max_samples = 40
[model]
name = "dnn"
[participation]
clients = 7
dropout = 0.1
[checkpoint]
every = 1
[algorithm]
name = "{algorithm}"
tau = 2
"""


def trial(
    place: Path, algorithm: str, rounds: int, moments: Sequence[When], random: Random, threads: int = 2
) -> Counter[str]:
    """Kill a run at each of the moments and let it end; return what the kills hit."""
    file, whole, killed = place / "run.toml", place / "whole", place / "killed"
    file.write_text(CONFIG.format(rounds=rounds, algorithm=algorithm, threads=threads))
    began = time.monotonic()
    process = start(file, whole)
    wait(process, lambda: saves(whole) > 0)
    starting = time.monotonic() - began
    finish(process, whole)
    hit: Counter[str] = Counter()
    for done, moment in enumerate(moments):
        share = (rounds - saves(killed)) / (len(moments) - done + 1)
        seconds = random.uniform(0, {"start": starting, "round": 0.02, "save": 0.001}[moment])
        hit[kill(file, killed, moment, seconds, random.uniform(0, 1.5 * share))] += 1
    finish(start(file, killed), killed)
    compare(whole, killed)
    return hit


def kill(file: Path, folder: Path, moment: When, seconds: float, rounds: float) -> str:
    """Go on with the run and kill it so many seconds after the moment, in so many rounds; say what was hit."""
    before = saves(folder)
    process = start(file, folder)
    if moment != "start":
        wait(process, lambda: saves(folder) > before + rounds)
    if moment == "save":
        wait(process, lambda: bool(parts(folder)))
    due = time.monotonic() + seconds
    wait(process, lambda: time.monotonic() >= due)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "ended before it was killed"
    assert not said(folder), said(folder)
    return "a save" if parts(folder) else "a round" if saves(folder) > before else "the start"


def start(file: Path, folder: Path) -> "subprocess.Popen[bytes]":
    """Start the run, or resume it where it has begun, in a process group of its own."""
    begun = (folder / "config.toml").exists()
    arguments = ["--resume", str(folder)] if begun else [str(file), "--out", str(folder)]
    with folder.with_suffix(".err").open("wb") as errors:
        return subprocess.Popen(
            [COMMAND, "run", *arguments, "--json"], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip


def finish(process: "subprocess.Popen[bytes]", folder: Path) -> None:
    """Wait for the end of the run: in peace, and with nothing temporary left."""
    assert process.wait(600) == 0, said(folder)
    assert not said(folder), said(folder)
    assert not parts(folder), parts(folder)


def wait(process: "subprocess.Popen[bytes]", until: Callable[[], bool]) -> None:
    while not until():
        assert process.poll() is None, "ended by itself"
        time.sleep(0.0005)


def saves(folder: Path) -> int:
    """The round of the newest checkpoint."""
    return max((int(path.stem.removeprefix("checkpoint-")) for path in folder.glob("checkpoints/*.json")), default=0)


def parts(folder: Path) -> list[Path]:
    """What is being written, or was when the run was killed."""
    return [*folder.glob("*.part"), *folder.glob("checkpoints/*.part")]


def said(folder: Path) -> str:
    """What the last process of a run said on standard error but its progress; a kill is no damage to speak of."""
    lines = folder.with_suffix(".err").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("round "))


def compare(left: Path, right: Path) -> None:
    """Hold two finished runs against each other."""
    assert metrics(left) == metrics(right), "other metrics"
    assert summary(left) == summary(right), "another summary"
    one, other = (Session.resume(path, None).simulation for path in (left, right))
    assert one.round == other.round == len(metrics(left))
    shipped = [one.global_model(), other.global_model()]
    assert shipped[0] is not None
    assert shipped[1] is not None
    assert torch.equal(shipped[0], shipped[1]), "another global model"
    assert torch.equal(one.personalized(), other.personalized()), "other personalized models"


def metrics(folder: Path) -> list[dict[str, Any]]:
    return small.lines(folder / "metrics.jsonl", "seconds")


def summary(folder: Path) -> dict[str, Any]:
    return {key: value for key, value in small.summary(folder / "summary.json").items() if key != "seconds"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=14, help="for each of the three algorithms")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random = Random(arguments.seed)
    for algorithm in ALGORITHMS:
        moments = [MOMENTS[kill % 3] for kill in range(arguments.kills)]
        with tempfile.TemporaryDirectory() as place:
            hit = trial(Path(place), algorithm, arguments.rounds, moments, random)
        where = ", ".join(f"{count} in {what}" for what, count in sorted(hit.items()))
        print(f"{algorithm}: {len(moments)} kills ({where}): equal to the bit", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
