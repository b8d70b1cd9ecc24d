"""What the hostile suite checks of each of its tests: it ends, in bounded memory, and leaves nothing behind."""

import faulthandler
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PATIENCE = 1200
"""Seconds after which a test hangs: its stacks are printed and the process ends."""

MEMORY = 1 << 20
"""KiB by which the largest memory of the process may grow in a test."""

MOUNTS = Path("/proc/self/mounts")


@contextmanager
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if processes, mounts or temporary files remain, or if memory grows too much.

    Processes are known by their environment, which has a temporary folder of its own, also those that run on alone.
    """
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    mounts, memory = _mounts(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield
        end = time.monotonic() + 10
        while processes_of(folder) and time.monotonic() < end:  # a killed process takes a moment to disappear
            time.sleep(0.1)
        assert processes_of(folder) == []
        assert _mounts() == mounts
        assert sorted(path.name for path in folder.iterdir()) == []
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MEMORY
    finally:
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> list[str]:
    """Return the command lines of other processes whose temporary folder this is."""
    mark, found = f"TMPDIR={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _mounts() -> str:
    return MOUNTS.read_text() if MOUNTS.exists() else ""
