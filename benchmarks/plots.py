"""Draw ``docs/performance.svg`` from the results of ``scale.py``: seconds by clients, model size and processes."""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"
OUT = Path(__file__).parents[1] / "docs" / "performance.svg"
NAMES = {"fedavg": "FedAvg, 23 local rounds", "pfedme": "pFedMe, 23", "tdpfed": "TDPFed, 2"}


def cases(what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"scale-{what}.json").read_text())["cases"]
    return found


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "tdpfed", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    many = sorted(cases("clients"), key=lambda case: case["clients"])
    spread = [
        [case["median"] - min(case["seconds"]) for case in many],
        [max(case["seconds"]) - case["median"] for case in many],
    ]
    left.errorbar([c["clients"] for c in many], [c["median"] for c in many], spread, marker="o", capsize=3)
    left.set(xscale="log", ylim=(0, None), xlabel="clients, of which 100 take part", ylabel="seconds per round")
    left.set_title("FedAvg, by number of clients")
    for method, name in NAMES.items():
        sizes = sorted((c for c in cases("models") if c["method"] == method), key=lambda case: case["parameters"])
        middle.plot([c["parameters"] for c in sizes], [c["median"] for c in sizes], marker="o", label=name)
    middle.set(xscale="log", yscale="log", xlabel="parameters, 20 clients", title="by size of the model")
    middle.legend(frameon=False)
    shared = cases("ranks")
    names = [f"{c['ranks']} x {c['threads']}" for c in shared]
    low = [c["median"] - min(c["seconds"]) for c in shared]
    high = [max(c["seconds"]) - c["median"] for c in shared]
    right.bar(names, [statistics.median(c["seconds"]) for c in shared], yerr=[low, high], capsize=3, width=0.5)
    right.set(xlabel="processes x threads, on two cores", title="FedAvg, 100 of 1,000 clients")
    figure.savefig(OUT, metadata={"Date": None})
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
