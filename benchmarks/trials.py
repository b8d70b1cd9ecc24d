"""Studies: a preset with many settings and seeds, every run with its provenance, and a table of all of them.

``python benchmarks/trials.py results/NAME/study.toml`` runs what the packed file next to it does not contain yet, adds
it there, and writes ``results.json`` and ``README.md``. A study gives ``title``, ``preset``, ``seeds``, ``set`` (for
all), ``metrics`` and tables ``rows`` and ``columns``, which map a name to a list of ``key=value`` settings; every row
is combined with every column.
"""

import argparse
import statistics
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import provenance, slug, write
from pack import PACKED, PackedRun, read
from pack import write as write_packed

from tdpfed.config.loading import load_config, to_toml
from tdpfed.errors import TDPFedError
from tdpfed.runs.prepare import prepare, threads
from tdpfed.runs.summary import facts_of, summarize
from tdpfed.server.records import Record

FIGURES = (
    "personalized_accuracy", "best_personalized_accuracy", "global_accuracy", "compression_rate", "rejected_uploads",
)  # fmt: skip
CURVE = (
    "round", "minibatch_loss", "personalized_accuracy", "local_accuracy", "global_accuracy", "metrics", "uplink_bytes",
    "seconds",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--data-root", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder; that of the study by default")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run after this time")
    options = parser.parse_args()
    study = tomllib.loads(options.study.read_text())
    out = options.out or options.study.parent
    runs = read(out / PACKED) if (out / PACKED).exists() else {}
    known, began = {_key(run["cell"]) for run in runs.values()}, time.perf_counter()
    for cell in _cells(study):
        if _key(cell) in known or time.perf_counter() - began > options.seconds:
            continue
        run = _run(cell, options.data_root)
        runs[run["name"]] = run
        print(cell["row"], cell["column"], cell["seed"], run["cell"]["error"] or _shown(study, [run]), flush=True)
        out.mkdir(parents=True, exist_ok=True)
        write_packed(out / PACKED, runs.values())
    wanted = {_key(cell) for cell in _cells(study)}
    made = [run for run in runs.values() if _key(run["cell"]) in wanted]
    write(out / "results.json", {"title": study["title"], "preset": study["preset"], "rows": _figures(study, made)})
    (out / "README.md").write_text(_page(study, made, out.name), encoding="utf-8")


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


def _run(cell: dict[str, Any], data_root: Path | None) -> PackedRun:
    """Run a cell and return it in packed form; the cell and its provenance are stored under ``cell``."""
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
    made = provenance(config.run.seed, simulation.federation.device)
    return {
        "name": f"{slug(cell['row'])}_{slug(cell['column'])}_seed{cell['seed']}",
        "config": to_toml(config),
        "records": [{key: value for key, value in record.as_dict().items() if key in CURVE} for record in records],
        "summary": summary,
        "cell": {**cell, "error": error, "provenance": made},
    }


def _of(runs: list[PackedRun], row: str, column: str) -> list[PackedRun]:
    return [run for run in runs if (run["cell"]["row"], run["cell"]["column"]) == (row, column)]


def _figures(study: dict[str, Any], runs: list[PackedRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return mean and standard deviation over seeds of every cell; accuracies are in percent, bytes in millions."""
    return {
        row: {
            column: _stats(_of(runs, row, column), study["metrics"])
            for column in study["columns"]
            if _of(runs, row, column)
        }
        for row in study["rows"]
    }


def _value(summary: dict[str, Any], key: str) -> float | None:
    """Return a number of a summary, or a metric of a model: ``global_perplexity`` is that of the global model."""
    model, _, metric = key.partition("_")
    value = summary.get(key, summary.get("metrics", {}).get(metric, {}).get(model))
    return None if value is None else float(value)


def _stats(runs: list[PackedRun], metrics: Sequence[str] = ()) -> dict[str, Any]:
    found: dict[str, Any] = {"seeds": len(runs), "failed": sum(run["cell"]["error"] is not None for run in runs)}
    for key in dict.fromkeys([*FIGURES, *metrics]):
        scale = 100 if key.endswith("accuracy") else 1e-6 if key.endswith("bytes") else 1
        values = [scale * value for run in runs if (value := _value(run["summary"], key)) is not None]
        if len(values) == len(runs) and not found["failed"]:
            found[key] = {"mean": statistics.mean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}
    return found


def _shown(study: dict[str, Any], runs: list[PackedRun]) -> str:
    """Return the study's metrics of runs that differ in their seed alone: means, and spreads if there are several."""
    return " / ".join(_each(study, runs)) if runs else ""


def _each(study: dict[str, Any], runs: list[PackedRun]) -> list[str]:
    """Return each metric as text, or that the runs fail; - for one that does not exist, as a model's that is not."""
    stats = _stats(runs, study["metrics"])
    if stats["failed"]:
        return ["fails"]
    found = [stats.get(metric) for metric in study["metrics"]]
    texts = [None if one is None else (f"{one['mean']:,.2f}", one["sd"]) for one in found]
    return ["-" if text is None else text[0] if text[1] is None else f"{text[0]} ± {text[1]:.2f}" for text in texts]


def _title(metric: str) -> str:
    """Return a metric in words, with its unit."""
    unit = {"accuracy": ", %", "bytes": ", MB"}.get(metric.rpartition("_")[2], "")
    return metric.removesuffix("_bytes").replace("_", " ") + unit


def _page(study: dict[str, Any], runs: list[PackedRun], name: str) -> str:
    columns, spread = list(study["columns"]), len(study["seeds"]) > 1
    metrics = [_title(metric) for metric in study["metrics"]]
    over = f"mean ± standard deviation over seeds {study['seeds']}." if spread else "one seed."
    cells = {row: [_shown(study, _of(runs, row, column)) for column in columns] for row in study["rows"]}
    titles, legend = columns, f"In each cell: {' / '.join(metrics)}; {over}"
    if len(columns) == 1:  # then each metric has a column
        cells = {row: _each(study, _of(runs, row, columns[0])) for row in study["rows"]}
        titles, legend = metrics, f"{over[0].upper()}{over[1:]}"
    lines = [
        f"# {study['title']}", "", study.get("text", "").strip(), "", legend, "",
        "| | " + " | ".join(titles) + " |", "| --- |" + " --- |" * len(titles),
        *(f"| {row} | " + " | ".join(texts) + " |" for row, texts in cells.items()),
    ]  # fmt: skip
    made = [run["cell"]["provenance"] for run in runs]
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
        "", f"Preset `{study['preset']}`, settings of all runs: {common}. Settings of rows and columns: "
        "[study.toml](study.toml). Curves and provenance of every run: [runs.jsonl.gz](runs.jsonl.gz).", "",
        f"Command: `python benchmarks/trials.py results/{name}/study.toml`. Device: {', '.join(devices)}; "
        f"{', '.join(versions)}; commit {', '.join(commits)}.", "",
    ]  # fmt: skip
    return "\n".join(line for n, line in enumerate(lines) if line or lines[n - 1])


if __name__ == "__main__":
    main()
