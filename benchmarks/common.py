"""Shared by all benchmarks: provenance, fair timing, and result files."""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FOLDERS = ("--data-root", "--environments", "--out")


def provenance(seed: int, device: torch.device) -> dict[str, Any]:
    """Return hardware, versions, commit, command, seed and date."""
    return {
        "hardware": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        },
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform()},
        # A copy without git history gets its commit from the environment.
        "commit": os.environ.get("TDPFED_COMMIT") or _git("rev-parse", "HEAD"),
        "dirty": "TDPFED_COMMIT" not in os.environ
        and _git("status", "--porcelain", "--untracked-files=no") not in ("", None),
        "seed": seed,
        "command": _command(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def alternate(
    functions: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, warmup: int = 2
) -> dict[str, float]:
    """Return each function's median seconds, measured alternately, so that noise affects all of them equally."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            seconds = _seconds(function, device)
            if turn >= warmup:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def slug(name: str) -> str:
    """Return a name in a form suitable for file names."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` as JSON; create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def _command() -> str:
    """Return the command with its local folders replaced by DIR."""
    before = ["", "python", *sys.argv]
    return shlex.join(
        "DIR" if Path(word).is_absolute() or option in FOLDERS else word for option, word in pairwise(before)
    )


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
