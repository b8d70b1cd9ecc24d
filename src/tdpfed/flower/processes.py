"""Child processes that do not outlive us: their output in files, and an end for all of them whatever happens.

Flower's processes start others, some of them in sessions of their own. All inherit a mark in their environment, by
which those that stay behind are found (on Linux; elsewhere Flower's own watch on parents has to do). Where we are
killed and can end nobody, Linux ends those we started, and that watch the rest.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tdpfed.errors import TDPFedError

MARK = "TDPFED_FEDERATION"
LEASH = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Becomes another program that gets SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG)."""


class Processes:
    """The processes of one federation; leaving the ``with`` block ends them."""

    def __init__(self, logs: Path, patience: float = 8.0) -> None:
        self.logs, self.patience, self.mark = logs, patience, secrets.token_hex(12)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except KeyboardInterrupt:
            self.stop()
            raise

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """Start a process whose output goes to ``NAME.log``; one of that name must not run."""
        if name in self.running and self.running[name].poll() is None:
            raise TDPFedError(f"process: {name!r} runs already")
        self.logs.mkdir(parents=True, exist_ok=True)
        leash = [sys.executable, "-ISc", LEASH, str(os.getpid())] if sys.platform == "linux" else []
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [*leash, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**env, MARK: self.mark},
            )  # fmt: skip
        return self.running[name]

    def log(self, name: str) -> str:
        """Return what a process has said."""
        with contextlib.suppress(OSError):
            return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return ""

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one process by a signal, and wait for it."""
        process = self.running.pop(name)
        _signal(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.patience)
        if process.poll() is None:
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """End all processes, politely first, and whatever they have started."""
        for how, patience in ((signal.SIGTERM, self.patience), (signal.SIGKILL, 2.0)):
            end, told = time.monotonic() + patience, set[int]()
            while (alive := self.alive()) and time.monotonic() < end:
                for pid in alive:  # those that were started meanwhile, too
                    if pid not in told:
                        _signal(pid, how)
                told.update(alive)
                time.sleep(0.1)
        for process in self.running.values():
            process.wait()

    def alive(self) -> list[int]:
        """Return the processes that carry our mark, those that were started here among them."""
        started = [process.pid for process in self.running.values() if process.poll() is None]
        return sorted({*started, *marked(self.mark)})


def marked(mark: str) -> list[int]:
    """Return the processes with a mark in their environment, but for those that are only waited for."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _signal(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, how)
