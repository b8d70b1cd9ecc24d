"""Child processes that do not outlive their parent: they log to files, and all are stopped whatever happens.

Flower's processes start others, some of them in separate sessions. All inherit a mark in their environment, by which
processes left behind are found (on Linux; elsewhere Flower's own check for a dead parent has to suffice). If this
process is killed, Linux kills its direct children, and Flower's check ends the rest.
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
DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Runs a program that gets SIGKILL when the thread that started it ends (PR_SET_PDEATHSIG)."""


class Processes:
    """The processes of one federation; leaving the ``with`` block stops them."""

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
        """Start a process that writes to ``NAME.log``; no process of that name may be running.

        Whatever it writes is for this user alone.
        """
        if name in self.running and self.running[name].poll() is None:
            raise TDPFedError(f"process: {name!r} is already running")
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        wrapper = [sys.executable, "-ISc", DIE_WITH_PARENT, str(os.getpid())] if sys.platform == "linux" else []
        append = os.open(self.logs / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(append, "ab") as log:
            self.running[name] = subprocess.Popen(
                [*wrapper, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**env, MARK: self.mark}, umask=0o077,
            )  # fmt: skip
        return self.running[name]

    def log(self, name: str) -> str:
        """Return the output of a process."""
        with contextlib.suppress(OSError):
            return (self.logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return ""

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop one process by a signal, and wait for it."""
        process = self.running.pop(name)
        _signal(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self.patience)
        if process.poll() is None:
            _signal(process.pid, signal.SIGKILL)
            process.wait()

    def stop(self) -> None:
        """Stop all processes and their descendants: first by SIGTERM, then by SIGKILL."""
        for how, patience in ((signal.SIGTERM, self.patience), (signal.SIGKILL, 2.0)):
            end, signaled = time.monotonic() + patience, set[int]()
            while (alive := self.alive()) and time.monotonic() < end:
                for pid in alive:  # including those started in the meantime
                    if pid not in signaled:
                        _signal(pid, how)
                signaled.update(alive)
                time.sleep(0.1)
        for process in self.running.values():
            process.wait()

    def alive(self) -> list[int]:
        """Return the running processes that were started here or carry the mark."""
        started = [process.pid for process in self.running.values() if process.poll() is None]
        return sorted({*started, *marked(self.mark)})


def marked(mark: str) -> list[int]:
    """Return the processes with a mark in their environment, except zombies."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def _signal(pid: int, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, how)
