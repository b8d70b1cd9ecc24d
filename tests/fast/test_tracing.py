"""Recording leaves nothing on the disk and in the environment, and takes no settings from a common folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hostile

TRACE = """
import os, torch
from tdpfed.fast.tracing import recorded
before = dict(os.environ)
graph = recorded(lambda x: torch.relu(x).sum(), torch.ones(3))
assert graph(torch.tensor([-1.0, 2.0, 3.0])) == 5
assert dict(os.environ) == before
from torch._inductor.compiler_bisector import CompilerBisector
print(CompilerBisector.bisection_enabled)
"""


@pytest.mark.parametrize("planted", [False, True])
def test_recording_leaves_no_folder_and_follows_none(tmp_path: Path, planted: bool) -> None:
    if planted:
        for name in ("root", os.environ.get("USER", "root"), f"uid_{os.getuid()}"):
            folder = tmp_path / f"torchinductor_{name}" / "bisect"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "bisect_status.txt").write_text("backend=aot_eager\nsubsystem=decomposition\n")
    before = sorted(tmp_path.rglob("*"))
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE], capture_output=True, text=True, check=False, timeout=300,
        env={**environment, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_users_own_folder_stays(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TRACE], capture_output=True, text=True, check=False, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
