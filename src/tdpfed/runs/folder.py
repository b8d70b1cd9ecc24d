"""A run on disk: ``config.toml`` (resolved), ``metrics.jsonl`` (a line per evaluated round) and ``summary.json``.

``federation.json`` has the clients' ids and what was applied to their samples (:mod:`tdpfed.runs.data_card`). Refused
uploads are listed in ``refusals.jsonl``: round, client, rule, tensor and reason. Lines are flushed to disk at the end
of their round, so that a crash loses no finished round. The summary is written atomically. Lines and the summary carry
checksums (:mod:`tdpfed.runs.seals`), and the summary holds those of the other files.
"""

import hashlib
import json
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tdpfed.config.loading import CONFIG_BYTES
from tdpfed.errors import TDPFedError
from tdpfed.files import FolderLock, append, part_of, read_file, write_errors, write_file
from tdpfed.runs.seals import Chain, Tail, is_sealed, lines_of, linked, sealed
from tdpfed.server.records import Record
from tdpfed.wire import Rejected

CONFIG = "config.toml"
FEDERATION = "federation.json"
FROZEN = "frozen.safetensors"
METRICS = "metrics.jsonl"
REFUSALS = "refusals.jsonl"
SEEDS = "seeds.toml"
"""The configuration of a run with several seeds, in the folder that holds the run of each."""
SUMMARY = "summary.json"
DONE = ("finished", "privacy budget spent")
"""The statuses of a run that is complete."""
CONFIGURATION = "configuration"
"""The key of a checkpoint under which the resolved configuration is."""
FILES = "files"
"""The key of a summary and of a checkpoint under which the checksums of the other files are."""

T = TypeVar("T")


class RunFolder:
    """The folder of one run, created by :meth:`create`, which refuses a folder that is not empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []  # about damaged lines
        self.lock: FolderLock | None = None  # held while this process writes the folder
        self._tails: dict[str, Tail] = {}  # of the files of lines, once they are known

    def release(self) -> None:
        """Let others use the folder."""
        if self.lock is not None:
            self.lock.release()

    @classmethod
    def create(cls, path: Path, config: str) -> "RunFolder":
        """Make the folder and write the resolved configuration."""
        cls.check(path)
        with write_errors("--out", path):
            path.mkdir(parents=True, exist_ok=True)
            write_file(path / METRICS, "", field="--out")
            write_file(path / CONFIG, config, field="--out")  # last: it marks the folder as a run
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> tuple["RunFolder", str]:
        """Return the folder of an existing run, and its configuration."""
        config = path / CONFIG
        if not config.is_file():
            raise TDPFedError(f"{str(path)!r} given, must be a run folder, with a config.toml", field="--resume")
        try:
            return cls(path), read_file(config, most=CONFIG_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise TDPFedError(f"cannot read {str(config)!r} ({error})", field="--resume") from None

    def rewind(self, round_: int, *others: str, saved: Mapping[str, Any] | None = None) -> list[Record]:
        """Return the records up to a round; remove later and damaged lines, from refusals and ``others`` too.

        ``saved`` are the sums in the checkpoint of that round, which show whether anything is gone.
        """
        for name in (REFUSALS, *others):
            self._rewind(name, round_, dict, saved)
        return self._rewind(METRICS, round_, Record.from_dict, saved)

    def _rewind(
        self, name: str, round_: int, read: Callable[[dict[str, Any]], T], saved: Mapping[str, Any] | None
    ) -> list[T]:
        file, found, kept, chain = self.path / name, list[T](), list[str](), Chain()
        with write_errors("--out", self.path):
            try:
                text = read_file(file, follow=False).decode("utf-8", "replace")
            except FileNotFoundError:
                text = None
            lines = [] if text is None else list(lines_of(text))
            for number, line in lines:
                try:
                    values = json.loads(line)
                    if is_sealed(line) is False:
                        raise ValueError
                    if values["round"] > round_:
                        continue
                    one = read(values)
                except (ValueError, TypeError, KeyError, RecursionError):
                    if number < len(lines):  # the last line may be incomplete after a crash
                        self.warnings.append(f"{name}: line {number} of {str(self.path)!r} is damaged and left out")
                    continue
                if gap := chain.gap(line):
                    self.warnings.append(f"{name}: line {number} of {str(self.path)!r} {gap}")
                found.append(one)
                kept.append(line + "\n")
            self._tails[name] = chain.tail
            self._compare(name, round_, saved)
            if text is not None:
                write_file(file, "".join(kept), field="--out")
        return found

    def _compare(self, name: str, round_: int, saved: Mapping[str, Any] | None) -> None:
        """Warn if the lines kept are not those that the checkpoint knows."""
        if saved is None or name not in saved:
            return
        tail, known = self._tails[name], _tail(saved[name])
        if known is None:
            self.warnings.append(f"{name}: the checkpoint of {str(self.path)!r} has no sum that can be read")
        elif tail != known:
            self.warnings.append(
                f"{name}: {tail.lines} sound lines up to round {round_} in {str(self.path)!r}, the checkpoint of that "
                f"round was saved after {known.lines}; what is missing or was changed is not restored"
            )
            self._tails[name] = known  # the next line does not follow the last: the gap stays visible

    @staticmethod
    def check(path: Path) -> None:
        """Refuse a path that is not a new or empty folder; nothing is written."""
        with write_errors("--out", path):
            if path.exists() and not path.is_dir():
                raise TDPFedError(f"{str(path)!r} given, which is a file; must be a new or empty folder", field="--out")
            if path.exists() and any(not _left_over(entry) for entry in path.iterdir()):
                raise TDPFedError(
                    f"{str(path)!r} given, which is not empty; must be a new or empty folder, or resume the run in it",
                    field="--out",
                )

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
        """Add JSON objects to a file, a line each with checksums, and wait until they are on the disk."""
        text, tail = "", self._tail(name)
        for line in lines:
            new, tail = linked(line, tail)
            text += new + "\n"
        with write_errors("--out", self.path):
            append(self.path / name, text)  # on disk before a checkpoint of this round
        self._tails[name] = tail

    def _tail(self, name: str) -> Tail:
        """Return the end of a file of lines; it is read once."""
        if name not in self._tails:
            chain = Chain()
            with write_errors("--out", self.path), suppress(FileNotFoundError):
                for _, line in lines_of(read_file(self.path / name, follow=False).decode("utf-8", "replace")):
                    chain.gap(line)
            self._tails[name] = chain.tail
        return self._tails[name]

    @property
    def sums(self) -> dict[str, Any]:
        """Number of lines and last checksum of the records and refusals, for a checkpoint or the summary."""
        return {name: asdict(self._tail(name)) for name in (METRICS, REFUSALS)}

    @property
    def done(self) -> bool:
        """Whether the run is complete."""
        try:
            return json.loads(read_file(self.path / SUMMARY))["status"] in DONE
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, with the checksums of the other files and its own."""
        with write_errors("--out", self.path):
            there = [name for name in (CONFIG, FEDERATION, FROZEN) if name == CONFIG or (self.path / name).exists()]
            whole = {name: {"sha256": hashlib.sha256(read_file(self.path / name)).hexdigest()} for name in there}
        files = {**whole, **self.sums}
        self.write(SUMMARY, sealed(json.dumps({**summary, FILES: files}, indent=2)))

    def reopen(self) -> None:
        """Remove the summary: it does not describe a run that continues. Files that are links are refused before."""
        for name in (METRICS, REFUSALS):
            if (self.path / name).is_symlink():
                file = str(self.path / name)
                raise TDPFedError(f"{file!r} is a symbolic link, must be a regular file", field="--resume")
        with write_errors("--out", self.path):
            (self.path / SUMMARY).unlink(missing_ok=True)

    def change(self, config: str) -> None:
        """Write another configuration of the same run, which continues."""
        self.reopen()
        self.write(CONFIG, config)

    def write(self, name: str, content: str | bytes) -> None:
        """Write a file atomically."""
        write_file(self.path / name, content, field="--out")


class NoFolder(RunFolder):
    """The folder in a process that does not write: another process writes the files."""

    def rewind(self, round_: int, *others: str, saved: Mapping[str, Any] | None = None) -> list[Record]:
        """Return no records."""
        del round_, others, saved
        return []

    @property
    def sums(self) -> dict[str, Any]:
        """No checksums."""
        return {}

    @property
    def done(self) -> bool:
        """Always False."""
        return False

    def finish(self, summary: dict[str, Any]) -> None:
        """Write nothing."""

    def reopen(self) -> None:
        """Remove nothing."""

    def change(self, config: str) -> None:
        """Write nothing."""

    def append_lines(self, name: str, lines: Sequence[dict[str, Any]]) -> None:
        """Write nothing."""


def file_name(text: str) -> str:
    """Return a text as part of a folder name that is valid on any file system."""
    return re.sub(r"[^\w.=+-]+", "_", text)


def _left_over(entry: Path) -> bool:
    """Whether a file was left by a run that was killed while its folder was created."""
    temporary = [part_of(Path(name)).name for name in (CONFIG, SEEDS)]
    found = entry.lstat()
    return entry.name in temporary or (
        entry.name == METRICS and stat.S_ISREG(found.st_mode) and found.st_size == 0 and found.st_nlink == 1
    )


def _tail(saved: object) -> Tail | None:
    """Return the end of a file of lines as a checkpoint has it; None if it cannot be read."""
    if not isinstance(saved, Mapping) or saved.keys() != {"lines", "sha256"}:
        return None
    fits = type(saved["lines"]) is int and isinstance(saved["sha256"], str)
    return Tail(**saved) if fits else None
