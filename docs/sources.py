"""Result files as nested values by name, and how a value is printed; what ``figures.py`` looks keys up in."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from pack import PACKED, read


class FigureError(ValueError):
    """A key that nothing stands behind, or a marker in a place where it cannot work."""


class Sources:
    """The result files below a root, each read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packed: Callable[[str], dict[str, Any]] = cache(lambda name: read(root / "results" / name / PACKED))
        self.tree: Callable[[str], Mapping[str, Any]] = cache(self._tree)

    def _tree(self, name: str) -> Mapping[str, Any]:
        """Return a file as nested values by name."""
        study, benchmark = self.root / "results" / name / "results.json", self.root / "benchmarks/results"
        if name == "pairs":
            return _json(self.root / "results/mnist-classes-in-turn/pairs.json")
        if (benchmark / f"{name}.json").is_file():
            return _json(benchmark / f"{name}.json")
        if not study.is_file():
            raise FigureError(f"{name!r} is neither a study nor a benchmark")
        found = _json(study)
        if "tables" in found:  # the paper's experiments
            lines = {line["run"]: line for table in reversed(found["tables"].values()) for line in reversed(table)}
            seconds = found["provenance"]["seconds"]
            return {run: {**lines[run], "seconds": statistics.mean(seconds[run])} for run in lines if run in seconds}
        if "rows" in found:  # rows and columns
            return dict(found["rows"])
        if "settings" in found:
            return {name: {run: _percent(line) for run, line in of.items()} for name, of in found["settings"].items()}
        return {line["algorithm"]: _percent(line) for line in found["methods"]}


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _percent(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return figures with accuracies in percent, and deviations under the name that they have elsewhere."""

    def scaled(key: str, value: Any) -> Any:
        if isinstance(value, Mapping) and "spread" in value:
            return {"mean": scaled(key, value["mean"]), "sd": scaled(key, value["spread"])}
        return 100 * value if key.endswith("accuracy") and value is not None else value

    return {key: scaled(key, value) for key, value in line.items()}


def walk(found: Any, path: Sequence[str]) -> Any:
    """Return what a path leads to inside nested values."""
    for name in path:
        found = found[int(name)] if isinstance(found, list) else found[name]
    return found


def as_text(value: Any, decimals: int) -> str:
    """Return a value as it is printed: a mean with its deviation, the two ends of a range, or a number."""
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " to ".join(f"{one:,.{decimals}f}" for one in value)
    if isinstance(value, Mapping):
        mean, sd = value["mean"], value["sd"]
        return f"{mean:,.{decimals}f}" + ("" if sd is None else f" ± {sd:,.{decimals}f}")
    return f"{value:,.{decimals}f}"
