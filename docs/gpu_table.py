"""The page of ``benchmarks/gpu_peers.py``: seconds per round on a GPU, ratios, and the share of the floor."""

from collections.abc import Mapping
from typing import Any

SOURCE, PAGE = "benchmarks/results/gpu-peers.json", "benchmarks/results/gpu-peers.md"

PEERS = {"plain": "plain loop", "compiled": "under torch.compile", "graphed": "under CUDA graphs"}


def page(result: Mapping[str, Any]) -> str:
    """Return the page of all rows that are measured."""
    rows = result["rows"]
    where = sorted({_made(row["made"]) for row in rows})
    return "\n".join([
        "# Seconds per round on a GPU: ours and loops over clients", "",
        "Made from `gpu-peers.json` by `docs/generate.py`; `python benchmarks/gpu_peers.py` measures it. The median of "
        "a round of each, all in turns in one process; in brackets how many times as long as ours. *Floor* is the time "
        "that the counted operations or bytes take at the rates of a large matrix product and of a large copy, which "
        "are measured in the same run, and *share* is how much of our time it is.", "",
        *table(result), "",
        *(f"- {one}" for one in where), "",
    ])  # fmt: skip


def _made(origin: Mapping[str, Any]) -> str:
    hardware, versions, commit = origin["hardware"], origin["versions"], origin["commit"] or "unknown"
    return f"{hardware['device']}, torch {versions['torch']}, commit {commit[:12]}, {origin['date'][:10]}"


def table(result: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        f"| | method | ours, ms | {' | '.join(PEERS.values())} | floor, ms | share |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    for row in result["rows"]:
        own = row["seconds"]["ours"].get("median")
        cells = [row["row"], f"{row['method']}, {row['precision']}", _milliseconds(own)]
        for name in PEERS:
            found = row["seconds"].get(name, {}).get("median")
            cells.append("-" if found is None else f"{_milliseconds(found)} ({row['ratios'].get(name, 0):.1f}x)")
        share = row["share_of_floor"]
        cells += [_milliseconds(row["floor_seconds"]), "-" if share is None else f"{100 * share:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:,.1f}"
