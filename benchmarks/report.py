"""Size and opening time of a page with 20 runs of 800 evaluated rounds, and duration of a comparison.

Pages: five methods with four seeds, random numbers with all digits, and every panel in use; opened several times in
headless Chromium, the first time in a browser that has just started. Comparison: six methods and three seeds on the
included digits from the command line, then the same command again.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import ROOT, provenance, write

sys.path.insert(0, str(ROOT / "tests"))  # their writer of run folders
sys.path.insert(0, str(ROOT / "tests" / "report"))  # and their browser
from browser import browser

import folders
from tdpfed.report import write_page

METHODS = ("tdpfed", "pfedme", "fedavg", "fedavg_sar", "perfedavg", "local")
QUANTITIES = ("gradient_norm", "distance", "diversity", "drift")


def noisy(path: Path, draw: random.Random) -> None:
    """Replace the numbers of a run folder by random ones with all digits."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {key: value * (1 - 0.03 * draw.random()) for key, value in line.items() if isinstance(value, float)}
        line["client_accuracy"] = [draw.random() for _ in range(100)]
        line["diagnostics"] = {name: draw.random() for name in QUANTITIES}
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def page(root: Path, rounds: int, opens: int, seed: int) -> dict[str, object]:
    draw = random.Random(seed)
    paths = [
        folders.make(root / f"{m}-{s}", f"algorithm.lam={m}.0", "robust.gauge=1.0", seed=s, rounds=rounds)
        for m in range(1, 6)
        for s in range(4)
    ]
    for path in paths:
        noisy(path, draw)
    start = time.perf_counter()
    made = write_page(paths, root / "page.html").page
    written = time.perf_counter() - start
    (root / "profile").mkdir()
    with browser(root / "profile") as chrome:
        chrome.size(1280, 900)
        seconds = [chrome.open(made) for _ in range(opens)]
        assert chrome.complaints == []
    return {"runs": len(paths), "rounds": rounds, "bytes": made.stat().st_size, "write_s": written, "open_s": seconds}


def comparison(root: Path, seeds: int) -> dict[str, object]:
    words = ["digits", "--algorithms", ",".join(METHODS), "--seeds", str(seeds), "--out", str(root / "grid")]
    command = [sys.executable, "-c", "from tdpfed.cli import main; main()", "compare", *words]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    return {"methods": METHODS, "seeds": seeds, "first_s": seconds[0], "again_s": seconds[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=800)
    parser.add_argument("--opens", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "report.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = {"page": page(root, options.rounds, options.opens, 0), "compare": comparison(root, options.seeds)}
    print(json.dumps(found, indent=2))
    write(options.out, {**provenance(0, torch.device("cpu")), **found})


if __name__ == "__main__":
    main()
