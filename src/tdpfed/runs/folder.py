"""A run on disk: ``config.toml`` (resolved), ``metrics.jsonl`` (a line per evaluated round) and ``summary.json``.

Refused uploads are listed in ``refusals.jsonl``: round, client, rule, tensor and reason. Lines are flushed to disk at
the end of their round, so that a crash loses no finished round. The summary is written atomically.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from tdpfed.errors import TDPFedError
from tdpfed.files import part_of, write_errors, write_file
from tdpfed.server.records import Record
from tdpfed.wire import Rejected

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
REFUSALS = "refusals.jsonl"
SEEDS = "seeds.toml"
"""The configuration of a run with several seeds, in the folder that holds the run of each."""
SUMMARY = "summary.json"
DONE = ("finished", "privacy budget spent")
"""The statuses of a run that is complete."""

T = TypeVar("T")


class RunFolder:
    """The folder of one run, created by :meth:`create`, which refuses a folder that is not empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []  # about damaged lines

    @classmethod
    def create(cls, path: Path, config: str) -> "RunFolder":
        """Make the folder and write the resolved configuration."""
        cls.check(path)
        with write_errors("--out", path):
            path.mkdir(parents=True, exist_ok=True)
            (path / METRICS).touch()
            write_file(path / CONFIG, config, field="--out")  # last: it marks the folder as a run
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", str]:
        """Return the folder of an existing run, and its configuration."""
        config = path / CONFIG
        if not config.is_file():
            raise TDPFedError(f"--resume: {str(path)!r} given, must be a run folder, with a config.toml")
        try:
            return cls(path), config.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TDPFedError(f"--resume: cannot read {str(config)!r} ({error})") from None

    def rewind(self, round_: int, *others: str) -> list[Record]:
        """Return the records up to a round; remove later and damaged lines, from refusals and ``others`` too."""
        for name in (REFUSALS, *others):
            self._rewind(name, round_, dict)
        known = {field.name for field in fields(Record)}
        return self._rewind(METRICS, round_, lambda line: Record(**{k: line[k] for k in line if k in known}))

    def _rewind(self, name: str, round_: int, read: Callable[[dict[str, Any]], T]) -> list[T]:
        file, kept, found = self.path / name, "", []
        with write_errors("--out", self.path):
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
                    if number < len(lines):  # the last line may be incomplete after a crash
                        self.warnings.append(f"{name}: line {number} of {str(self.path)!r} is damaged and left out")
            write_file(file, kept, field="--out")
        return found

    @staticmethod
    def check(path: Path) -> None:
        """Refuse a path that is not a new or empty folder; nothing is written."""
        with write_errors("--out", path):
            if path.exists() and not path.is_dir():
                raise TDPFedError(f"--out: {str(path)!r} given, which is a file; must be a new or empty folder")
            if path.exists() and any(not _left_over(entry) for entry in path.iterdir()):
                raise TDPFedError(f"--out: {str(path)!r} given, which is not empty; must be a new or empty folder")

    def append(self, record: Record) -> None:
        """Add a record as one line."""
        self.append_lines(METRICS, [record.as_dict()])

    def refuse(self, round_: int, refused: Sequence[Rejected]) -> None:
        """Add the uploads that a round refused, a line each; the file is created with the first."""
        keys = ("client", "rule", "tensor")
        lines = [{"round": round_} | {k: getattr(one, k) for k in keys} | {"reason": str(one)} for one in refused]
        if lines:
            self.append_lines(REFUSALS, lines)

    def append_lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Add JSON objects to a file, a line each, and wait until they are on the disk."""
        with write_errors("--out", self.path), (self.path / name).open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())  # the lines must be on disk before a checkpoint of this round

    @property
    def done(self) -> bool:
        """Whether the run is complete."""
        try:
            return json.loads((self.path / SUMMARY).read_text(encoding="utf-8"))["status"] in DONE
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        self.write(SUMMARY, json.dumps(summary, indent=2) + "\n")

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file atomically."""
        write_file(self.path / name, content, field="--out")


class NoFolder(RunFolder):
    """The folder in a process that does not write: another process writes the files."""

    def rewind(self, round_: int, *others: str) -> list[Record]:
        """Return no records."""
        del round_, others
        return []

    @property
    def done(self) -> bool:
        """Always False."""
        return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Write nothing."""

    def append_lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Write nothing."""


def file_name(text: str) -> str:
    """Return a text as part of a folder name that is valid on any file system."""
    return re.sub(r"[^\w.=+-]+", "_", text)


def _left_over(entry: Path) -> bool:
    """Whether a file was left by a run that was killed while its folder was created."""
    temporary = [part_of(Path(name)).name for name in (CONFIG, SEEDS)]
    return entry.name in temporary or (entry.name == METRICS and entry.stat().st_size == 0)
