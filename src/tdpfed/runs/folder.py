"""A run on disk: ``config.toml`` (resolved), ``metrics.jsonl`` (a line per evaluated round) and ``summary.json``.

Where uploads were refused, ``refusals.jsonl`` names each: round, client, rule, tensor and reason. A line is flushed
when its round is done, so what is finished is there whatever happens next. The summary appears whole or not at all.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

import tdpfed
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.server.records import Record
from tdpfed.wire import Rejected

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
REFUSALS = "refusals.jsonl"
SUMMARY = "summary.json"
DONE = ("finished", "privacy budget spent")
"""Ends that a run was meant to come to."""

T = TypeVar("T")


class RunFolder:
    """The folder of one run; made by :meth:`create`, which refuses a folder that holds anything."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []  # what was found damaged

    @classmethod
    def create(cls, path: Path, config: str) -> "RunFolder":
        """Make the folder and write the resolved configuration."""
        cls.check(path)
        with _named_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / METRICS).touch()
            _replace(path / CONFIG, config)  # last: a folder with a configuration is a run
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", str]:
        """Return the folder of a run that was begun, and its configuration."""
        config = path / CONFIG
        if not config.is_file():
            raise TDPFedError(f"--resume: {str(path)!r} is no run folder, it must hold config.toml")
        try:
            return cls(path), config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TDPFedError(f"--resume: cannot read {str(config)!r} ({error})") from None

    def rewind(self, round_: int, *others: str) -> list[Record]:
        """Return the records up to a round; drop what came after, or was cut off, here, of refusals and in others."""
        for name in (REFUSALS, *others):
            self._rewind(name, round_, dict)
        known = {field.name for field in fields(Record)}
        return self._rewind(METRICS, round_, lambda line: Record(**{k: line[k] for k in line if k in known}))

    def _rewind(self, name: str, round_: int, read: Callable[[dict[str, Any]], T]) -> list[T]:
        file, kept, found = self.path / name, "", []
        with _named_errors(self.path):
            if not file.exists():
                return []
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            for number, text in enumerate(lines, 1):
                try:
                    line = json.loads(text)
                    if line["round"] <= round_:
                        found.append(read(line))
                        kept += text + "\n"
                except (ValueError, TypeError, KeyError):
                    if number < len(lines):  # the last may well have been cut off
                        self.warnings.append(f"{name}: line {number} of {str(self.path)!r} is damaged and left out")
            _replace(file, kept)
        return found

    @staticmethod
    def check(path: Path) -> None:
        """Refuse a path that holds anything; nothing is written."""
        with _named_errors(path):
            if path.exists() and not path.is_dir():
                raise TDPFedError(f"--out: {str(path)!r} is a file; give a new or empty folder")
            if path.exists() and any(not _left_over(entry) for entry in path.iterdir()):
                raise TDPFedError(f"--out: {str(path)!r} is already there and not empty; give a new or empty folder")

    def append(self, record: Record) -> None:
        """Add a record as one line, flushed."""
        self._append(METRICS, [record.as_dict()])

    def refuse(self, round_: int, refused: Sequence[Rejected]) -> None:
        """Add the uploads that a round refused, a line each, flushed; the file is there once there are any."""
        keys = ("client", "rule", "tensor")
        lines = [{"round": round_} | {k: getattr(one, k) for k in keys} | {"reason": str(one)} for one in refused]
        if lines:
            self._append(REFUSALS, lines)

    def _append(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        with _named_errors(self.path), (self.path / name).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())  # a checkpoint of this round may follow, and must not outlive it

    @property
    def done(self) -> bool:
        """Whether the run in it has come to an end that it was meant to come to."""
        try:
            return json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))["status"] in DONE
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, whole or not at all."""
        self.write(SUMMARY, json.dumps(summary, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file, whole or not at all."""
        with _named_errors(self.path):
            _replace(self.path / name, text)


class NoFolder(RunFolder):
    """What processes have that leave writing to another: it takes everything and writes nothing."""

    def rewind(self, round_: int, *others: str) -> list[Record]:
        """There is nothing to go back to."""
        del round_, others
        return []

    @property
    def done(self) -> bool:
        """Nobody has ended here."""
        return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Leave it to the other."""

    def _append(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Leave it to the other."""


def file_name(text: str) -> str:
    """Return a text as part of a folder's name, on any file system."""
    return re.sub(r"[^\w.=+-]+", "_", text)


def _left_over(entry: Path) -> bool:
    """Whether a file was left by a start that was killed before it became a run."""
    return entry.name == f"{CONFIG}.part" or (entry.name == METRICS and entry.stat().st_size == 0)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TDPFedError(f"--out: cannot write to {str(path)!r} ({error.strerror})") from None


def summarize(simulation: Simulation, records: Sequence[Record], *, model: str, status: str) -> dict[str, Any]:
    """Return what a run came to, as plain values; accuracies are fractions, None before the first evaluation."""
    last = records[-1] if records else None
    personal = [r.personalized_accuracy for r in records if r.personalized_accuracy is not None]
    ledger, federation = simulation.ledger, simulation.federation
    honest = simulation.honest.nonzero().flatten().tolist()
    return {
        "status": status,
        "algorithm": simulation.algorithm.name,
        "dataset": federation.name,
        "model": model,
        "rounds": simulation.round,
        "seed": simulation.seed,
        "clients": federation.clients,
        "clients_trained": int(simulation.store.touched.sum()),
        "parameters": simulation.objective.layout.size,
        "personalized_accuracy": last.personalized_accuracy if last else None,
        "local_accuracy": last.local_accuracy if last else None,
        "global_accuracy": last.global_accuracy if last else None,
        "best_personalized_accuracy": max(personal, default=None),
        "worst_decile_accuracy": worst_decile([last.client_accuracy[k] for k in honest]) if last else None,
        "train_loss": last.loss if last else None,
        "uplink_bytes": ledger.uplink,
        "downlink_bytes": ledger.downlink,
        "bytes_per_client_round": ledger.per_client_round,
        "rejected_uploads": ledger.rejected,
        "epsilon": simulation.epsilon,
        "delta": None if simulation.accountant is None else simulation.accountant.privacy.delta,
        "compression_rate": simulation.compression_rate,
        "seconds": last.seconds if last else None,
        "device": device_name(federation.device),
        "commit": source_commit(),
        "versions": {"tdpfed": tdpfed.__version__, "torch": torch.__version__, "python": platform.python_version()},
    }


@cache
def source_commit() -> str | None:
    """Return the commit of the source tree where the package is run from one; ``+`` marks changes to it.

    A copy of a commit without its history is told which it is by ``$TDPFED_COMMIT``.
    """
    here = Path(tdpfed.__file__).parent
    if told := os.environ.get("TDPFED_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", "__init__.py"):  # some other project's tree, in which the package is installed
            return None
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def worst_decile(accuracies: Sequence[float | None]) -> float | None:
    """Return the mean accuracy of the worst tenth of the clients (at least one)."""
    known = sorted(accuracy for accuracy in accuracies if accuracy is not None)
    worst = known[: max(1, len(known) // 10)]
    return sum(worst) / len(worst) if worst else None


def device_name(device: torch.device) -> str:
    """Return the device in words: the GPU's name, or the processor and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
