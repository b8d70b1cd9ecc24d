"""Many rounds in a process of their own: neither memory nor files add up. 2,000 of them with ``-m slow``.

The process writes down, after every round, its resident memory, its open files and what lies in the run folder; once
with plain averaging, once with a hostile client whose uploads are refused.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tdpfed.config.loading import parse_config
from tdpfed.engine.simulation import Simulation
from tdpfed.runs.session import OnRound, Session
from tdpfed.server.records import Record

SETTLED = 100  # rounds
CONFIG = """
[run]
rounds = {rounds}
evaluate_every = 10
[data]
name = "synthetic"
clients = 4
max_samples = 8
options = {{dimension = 6, classes = 3}}
[model]
name = "logistic"
[participation]
clients = 3
dropout = 0.1
[checkpoint]
every = 10
[algorithms.tdpfed]
tau = 1
s = 1
s_prime = 1
[algorithms.fedavg]
tau = 1
"""
HOSTILE = {
    "wire": {"codec": "int8"},
    "robust": {"attack": "scale", "attack_fraction": 0.25, "attack_strength": 1e6, "gauge": 0.5},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"algorithm": {"name": "fedavg"}},
    "factors": {
        "algorithm": {"name": "fedavg"}, "server": {"optimizer": "sgd", "momentum": 0.5},
        "wire": {"update": "factors", "terms": 1, "down": "factors", "down_terms": 1},
    },
    "hostile": {"algorithm": {"name": "tdpfed"}, **HOSTILE},
}  # fmt: skip


@dataclass
class Seen:
    """What the process has seen of itself; it must not grow much either."""

    resident: list[int] = field(default_factory=list)  # after each round
    open: list[int] = field(default_factory=list)
    most_files: int = 0
    temporary: list[str] = field(default_factory=list)

    def look(self, folder: Path) -> None:
        files = within(folder)
        self.resident.append(resident())
        self.open.append(len(os.listdir("/proc/self/fd")))
        self.most_files = max(self.most_files, len(files))
        self.temporary += [name for name in files if name.endswith(".part")]


def endure(folder: Path, variant: str, rounds: int) -> Seen:
    """Run all rounds in this process."""
    seen = Seen()

    @contextmanager
    def watched(simulation: Simulation, rounds: int, records: list[Record]) -> Iterator[OnRound]:
        yield lambda _: seen.look(folder)

    session = Session.begin(parse_config(tomllib.loads(CONFIG.format(rounds=rounds)) | VARIANTS[variant]), folder, None)
    assert session.run(watched)["status"] == "finished"
    return seen


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def within(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def expected_in(folder: Path, rounds: int) -> list[str]:
    """The files a run folder must hold: its own, and what the two checkpoints name."""
    manifests = sorted((folder / "checkpoints").glob("*.json"))
    assert [json.loads(path.read_text())["round"] for path in manifests] == [rounds - 10, rounds]
    named = {path.name for path in manifests}
    for path in manifests:
        body = json.loads(path.read_text())
        named |= {file["name"] for file in (body["server"], *body["private"])}
    own = ("config.toml", "federation.json", "metrics.jsonl", "summary.json")
    return sorted([*own, *(f"checkpoints/{name}" for name in named)])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("rounds", [300, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rounds_leave_nothing_behind(variant: str, rounds: int, tmp_path: Path) -> None:
    run, temporary, working = (tmp_path / name for name in ("run", "temporary", "working"))
    temporary.mkdir()
    working.mkdir()
    done = subprocess.run(
        [sys.executable, __file__, str(run), variant, str(rounds)], env={**os.environ, "TMPDIR": str(temporary)},
        cwd=working, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = Seen(**json.loads(done.stdout))
    assert len(seen.resident) == len(seen.open) == rounds
    assert max(seen.resident[SETTLED - 1 :]) - seen.resident[SETTLED - 1] < 5_000_000
    assert set(seen.open) == {seen.open[0]}
    assert seen.most_files <= 4 + 2 * 4
    assert not seen.temporary
    refusals = ["refusals.jsonl"] if variant == "hostile" else []
    assert within(run) == sorted(expected_in(run, rounds) + refusals)
    assert not [*temporary.iterdir(), *working.iterdir()]
    assert len((run / "metrics.jsonl").read_text().splitlines()) == rounds // 10


if __name__ == "__main__":
    print(json.dumps(asdict(endure(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))))  # noqa: T201
