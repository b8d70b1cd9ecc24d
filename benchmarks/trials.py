"""Studies: a preset under many settings and seeds, each run recorded with what made it, and a table of the lot.

``python benchmarks/trials.py benchmarks/studies/NAME.toml`` runs what ``results/NAME.json`` does not hold yet, and
writes it and ``results/NAME.md``. A study gives ``title``, ``preset``, ``seeds``, ``set`` (for all), ``metrics`` and
tables ``rows`` and ``columns``, which map a name to a list of ``key=value`` settings; every row meets every column.
"""

import argparse
import json
import statistics
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from common import ROOT, provenance, write

from tdpfed.config.loading import load_config
from tdpfed.errors import TDPFedError
from tdpfed.runs.experiment import prepare, threads
from tdpfed.runs.summary import facts_of, summarize
from tdpfed.server.records import Record

CURVE = ("round", "loss", "personalized_accuracy", "local_accuracy", "global_accuracy", "uplink_bytes", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="folder")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so long")
    options = parser.parse_args()
    study = tomllib.loads(options.study.read_text())
    path = options.out / f"{options.study.stem}.json"
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else []
    known, began = {_key(cell) for cell in cells}, time.perf_counter()
    for cell in _cells(study):
        if _key(cell) in known or time.perf_counter() - began > options.seconds:
            continue
        cells.append({**cell, **_run(cell, options.data_root)})
        print(
            cell["row"], cell["column"], cell["seed"], cells[-1].get("error") or _shown(study, [cells[-1]]), flush=True
        )
        write(path, {"title": study["title"], "preset": study["preset"], "cells": cells})
    wanted = {_key(cell) for cell in _cells(study)}
    path.with_suffix(".md").write_text(_table(study, [cell for cell in cells if _key(cell) in wanted]))


def _cells(study: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "preset": study["preset"], "row": row, "column": column, "seed": seed,
            "settings": [*study.get("set", []), *rows, *columns, f"run.seed={seed}"],
        }
        for seed in study["seeds"]
        for row, rows in study["rows"].items()
        for column, columns in study["columns"].items()
    ]  # fmt: skip


def _key(cell: dict[str, Any]) -> tuple[str, ...]:
    return (cell["preset"], *cell["settings"])


def _run(cell: dict[str, Any], data_root: Path | None) -> dict[str, Any]:
    config = load_config(cell["preset"], cell["settings"])
    simulation = prepare(config, data_root)
    torch.set_num_threads(threads(config, simulation))
    records: list[Record] = []
    error = None
    try:
        records += simulation.run(config.run.rounds, config.run.evaluate_every)
    except TDPFedError as stopped:
        error = str(stopped)
    summary = summarize(facts_of(simulation, config.model.name), records, "finished" if error is None else "failed")
    curve = [{key: record.as_dict()[key] for key in CURVE} for record in records]
    made = provenance(config.run.seed, simulation.federation.device)
    return {"error": error, "summary": summary, "curve": curve, "provenance": made}


def _shown(study: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    """Return the study's metrics of runs that differ in their seed alone: means, and spreads if there are several."""
    if not cells:
        return ""
    if any(cell["error"] for cell in cells):
        return "fails"
    shown = []
    for metric in study["metrics"]:
        values = [100 * cell["summary"][metric] for cell in cells]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        shown.append(f"{statistics.mean(values):.2f}{spread}")
    return " / ".join(shown)


def _table(study: dict[str, Any], cells: list[dict[str, Any]]) -> str:
    columns = list(study["columns"])
    lines = [
        f"# {study['title']}", "", study.get("text", "").strip(), "",
        "In each cell: " + ", ".join(metric.replace("_", " ") for metric in study["metrics"]) + ", in per cent"
        + (f", mean ± standard deviation over seeds {study['seeds']}." if len(study["seeds"]) > 1 else ", one seed."),
        "", "| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns),
    ]  # fmt: skip
    for row in study["rows"]:
        found = [[cell for cell in cells if (cell["row"], cell["column"]) == (row, column)] for column in columns]
        lines.append(f"| {row} | " + " | ".join(_shown(study, some) for some in found) + " |")
    made = [cell["provenance"] for cell in cells]
    devices, versions, commits = (
        sorted({value(one) for one in made})
        for value in (
            lambda one: one["hardware"]["device"],
            lambda one: f"torch {one['versions']['torch']}, Python {one['versions']['python']}",
            lambda one: f"{(one['commit'] or 'unknown')[:12]}{' with changes' if one['dirty'] else ''}",
        )
    )
    common = " ".join(f"`{setting}`" for setting in study.get("set", [])) or "none"
    lines += [
        "", f"Preset `{study['preset']}`, settings for all: {common}. "
        "Settings of rows and columns, curves and provenance of every run are in the JSON file of the same name.", "",
        f"Device: {', '.join(devices)}; {', '.join(versions)}; commit {', '.join(commits)}.", "",
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
