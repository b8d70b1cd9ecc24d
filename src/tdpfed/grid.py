"""Many runs side by side in one folder, a run folder each: what is finished stays, what fails stops no other.

On a GPU runs that differ in their seed alone are computed together.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.config import Config, parse_config, to_toml
from tdpfed.engine.folder import DONE, RunFolder
from tdpfed.errors import TDPFedError
from tdpfed.session import Session, run_together


@dataclass(frozen=True)
class Cell:
    """One run of a grid: the name of its folder, and its configuration."""

    name: str
    config: Config


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: where it is, whether it was there before, and what stopped it if anything did."""

    cell: Cell
    path: Path
    kept: bool = False
    error: str | None = None


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    data_root: Path | None,
    *,
    on_start: Callable[[Sequence[Cell]], None],
    on_round: Callable[[Session], None],
    on_end: Callable[[Outcome], None],
) -> list[Outcome]:
    """Run the cells that are not finished; nothing is run where the folder holds another experiment."""
    paths = {cell.name: folder / cell.name for cell in cells}
    if len(paths) < len(cells):
        raise TDPFedError(f"cells: {len(cells)} given, of which only {len(paths)} have different names")
    for cell in cells:
        _check(paths[cell.name], cell.config)
    outcomes = {cell.name: Outcome(cell, paths[cell.name], kept=True) for cell in cells if _done(paths[cell.name])}
    for outcome in outcomes.values():
        on_end(outcome)
    for group in _together([cell for cell in cells if cell.name not in outcomes]):
        on_start(group)
        for cell, error in zip(group, _run([paths[c.name] for c in group], group, data_root, on_round), strict=True):
            outcomes[cell.name] = Outcome(cell, paths[cell.name], error=None if error is None else str(error))
            on_end(outcomes[cell.name])
    return [outcomes[cell.name] for cell in cells]


def _run(
    paths: Sequence[Path], cells: Sequence[Cell], data_root: Path | None, show: Callable[[Session], None]
) -> Sequence[TDPFedError | None]:
    try:
        sessions = [
            Session.resume(path, data_root) if path.exists() else Session.begin(cell.config, path, data_root)
            for path, cell in zip(paths, cells, strict=True)
        ]
        return run_together(sessions, show)
    except TDPFedError as error:
        return [error] * len(cells)


def _together(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Yield cells to compute as one: on a GPU those that differ in their seed alone, on a CPU one after another."""
    groups: dict[Any, list[Cell]] = {}
    for number, cell in enumerate(cells):
        plain = cell.config.model_dump(exclude={"run": {"seed"}})
        key = json.dumps(plain, sort_keys=True) if cell.config.device().type == "cuda" else number
        groups.setdefault(key, []).append(cell)
    yield from groups.values()


def _check(path: Path, config: Config) -> None:
    """Refuse a folder that holds anything but this very run."""
    if not path.exists():
        return
    _, text = RunFolder.open(path)
    try:
        there = parse_config(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, TDPFedError) as error:
        raise TDPFedError(f"--out: {str(path / 'config.toml')!r} is damaged ({error})") from None
    if to_toml(there) != to_toml(config):
        pairs = zip(to_toml(there).splitlines(), to_toml(config).splitlines(), strict=False)
        was, wanted = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
        raise TDPFedError(f"--out: {str(path)!r} holds another run ({was!r}, not {wanted!r}); give a new folder")


def _done(path: Path) -> bool:
    try:
        return json.loads((path / "summary.json").read_text(encoding="utf-8"))["status"] in DONE
    except (OSError, ValueError, KeyError, TypeError):
        return False
