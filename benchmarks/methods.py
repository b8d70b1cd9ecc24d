"""Every method on one preset with one seed: accuracy, bytes and seconds.

A first look, not a study: with one seed, differences of a few tenths of a point are noise.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write

from tdpfed.algorithms import ALGORITHMS
from tdpfed.config.loading import load_config
from tdpfed.runs.prepare import prepare, threads
from tdpfed.runs.summary import facts_of, summarize

COLUMNS = {
    "personalized_accuracy": "personalized", "local_accuracy": "local", "global_accuracy": "global",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", nargs="?", default="mnist-paper")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder; results/PRESET-ROUNDS-rounds by default")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    overrides = [f"run.rounds={options.rounds}", f"run.evaluate_every={options.rounds}"]
    print(f"{'method':12} {'personalized':>12} {'global':>8} {'MB up':>8} {'seconds':>8}")
    for name in options.algorithms.split(","):
        config = load_config(options.preset, [*overrides, f"algorithm.name={name}"])
        simulation = prepare(config, options.data_root)
        torch.set_num_threads(threads(config, simulation))
        records = list(simulation.run(config.run.rounds, config.run.evaluate_every))
        row = summarize(facts_of(simulation, config.model.name), records, "finished")
        rows.append({**row, "hyper_parameters": config.algorithm})
        shown = [
            f"{100 * row[key]:.2f}" if row[key] is not None else "-"
            for key in ("personalized_accuracy", "global_accuracy")
        ]
        print(
            f"{name:12} {shown[0]:>12} {shown[1]:>8} {row['uplink_bytes'] / 1e6:8.1f} {row['seconds']:8.1f}", flush=True
        )
    out = options.out or ROOT / "results" / f"{options.preset}-{options.rounds}-rounds"
    result = {"provenance": provenance(0, torch.device("cpu")), "preset": options.preset, "methods": rows}
    write(out / "results.json", result)
    (out / "README.md").write_text(page(result), encoding="utf-8")


def page(result: Mapping[str, Any]) -> str:
    """Return the result as a Markdown page."""
    made, rows = result["provenance"], result["methods"]
    lines = [
        f"# Every method on the preset `{result['preset']}`: {rows[0]['rounds']} rounds, one seed", "",
        "Accuracies in percent after the last round. With one seed, differences of a few tenths of a point are noise.",
        "",
        f"| | {' | '.join(COLUMNS.values())} | MB up | seconds |", "| --- |" + " ---: |" * (len(COLUMNS) + 2),
    ]  # fmt: skip
    for row in rows:
        shown = ["-" if row[key] is None else f"{100 * row[key]:.2f}" for key in COLUMNS]
        lines.append(
            f"| {row['algorithm']} | {' | '.join(shown)} | {row['uplink_bytes'] / 1e6:.1f} | {row['seconds']:.0f} |"
        )
    lines += [
        "", f"Command: `{made['command']}`. Hyper-parameters of every method: [results.json](results.json).", "",
        f"Device: {made['hardware']['cpu']}, {made['hardware']['device']}; torch {made['versions']['torch']}, "
        f"Python {made['versions']['python']}; commit {made['commit'][:12]}; {made['date'][:10]}.",
        *([f"{made['note']}"] if "note" in made else []), "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
