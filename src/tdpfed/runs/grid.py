"""Many runs in one folder, each in its own run folder: finished runs are kept, and a failed run does not stop others.

On a GPU, runs that differ only in their seed are computed together.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tdpfed.config import Config, parse_config, to_toml
from tdpfed.config.loading import CONFIG_BYTES, parse_toml
from tdpfed.config.resume import check_same_run, settings_by_key
from tdpfed.errors import TDPFedError
from tdpfed.files import read_file, write_errors, write_file
from tdpfed.runs.folder import CONFIG, SEEDS, RunFolder
from tdpfed.runs.session import Session, run_together


@dataclass(frozen=True)
class Cell:
    """One run of a grid: the name of its folder, and its configuration."""

    name: str
    config: Config


@dataclass(frozen=True)
class CellResult:
    """The result of a cell: its folder, whether it was finished before, and the error that stopped it, if any."""

    cell: Cell
    path: Path
    kept: bool = False
    error: str | None = None
    warnings: Sequence[str] = ()


def check_seeds(config: Config, folder: Path) -> None:
    """Refuse a folder with other content than this run with several seeds; nothing is written."""
    if not has_seeds(folder):
        RunFolder.check(folder)
    elif differs := _difference(_configuration(folder / SEEDS), config):
        raise TDPFedError(f"--out: {str(folder)!r} given, which holds another run ({differs}); must be another folder")


def begin_seeds(config: Config, folder: Path) -> Path:
    """Create a folder for a run with several seeds and return it; a folder with other content is refused."""
    check_seeds(config, folder)
    _create(folder)
    write_file(folder / SEEDS, to_toml(config), field="--out")
    return folder


def has_seeds(folder: Path) -> bool:
    """Whether a folder holds a run with several seeds."""
    return (folder / SEEDS).exists()


def seeds_in(folder: Path) -> list[Cell]:
    """Return a cell for each seed of a run with several seeds."""
    config = _configuration(folder / SEEDS)
    seeds = range(config.run.seed, config.run.seed + config.run.seeds)
    runs = (replace(config.run, seed=seed, seeds=1) for seed in seeds)
    return [Cell(f"seed{run.seed}", replace(config, run=run)) for run in runs]


def finished(cells: Sequence[Cell], folder: Path) -> list[Cell]:
    """Return the cells that are finished in a folder; raise an error if none is."""
    done = [cell for cell in cells if RunFolder(folder / cell.name).done]
    if cells and not done:
        raise TDPFedError(f"--no-run: {str(folder)!r} holds no finished run of this experiment")
    return done


def check_cells(cells: Sequence[Cell], folder: Path) -> None:
    """Refuse cells of the same name, and a folder with another experiment; nothing is written."""
    names = {cell.name for cell in cells}
    if len(names) < len(cells):
        raise TDPFedError(f"cells: {len(cells)} given with {len(names)} different names, names must be unique")
    for cell in cells:
        _check(folder / cell.name, cell.config)


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    data_root: Path | None,
    *,
    on_start: Callable[[Sequence[Cell]], None],
    on_round: Callable[[Session], None],
    on_end: Callable[[CellResult], None],
    on_stop: Callable[[], None] | None = None,
) -> list[CellResult]:
    """Run the cells that are not finished; a folder with another experiment is refused before any run.

    Cells that were interrupted or failed resume from their last checkpoint, and so do those that get more rounds.
    Ctrl-C is raised again; with ``on_stop`` the first one waits for the current round.
    """
    check_cells(cells, folder)
    paths = {cell.name: folder / cell.name for cell in cells}
    _create(folder)
    results = {
        cell.name: CellResult(cell, paths[cell.name], kept=True)
        for cell in cells
        if RunFolder(paths[cell.name]).done and not _grows(paths[cell.name], cell.config)
    }
    for result in results.values():
        on_end(result)
    threads = torch.get_num_threads()  # a session may set fewer, which must not limit the next
    for group in _groups([cell for cell in cells if cell.name not in results]):
        on_start(group)
        try:
            ended = _run(group, [paths[cell.name] for cell in group], data_root, on_round, on_stop)
        finally:
            torch.set_num_threads(threads)
        for result in ended:
            results[result.cell.name] = result
            on_end(result)
    return [results[cell.name] for cell in cells]


def _run(
    cells: Sequence[Cell],
    paths: Sequence[Path],
    data_root: Path | None,
    show: Callable[[Session], None],
    on_stop: Callable[[], None] | None,
) -> list[CellResult]:
    sessions: list[Session] = []
    errors: Sequence[Exception | None]
    try:
        for cell, path in zip(cells, paths, strict=True):
            if not _begun(path):
                sessions.append(Session.begin(cell.config, path, data_root))
                continue
            more = [f"run.rounds={cell.config.run.rounds}"] if _grows(path, cell.config) else []
            more.append(f"run.train_loss={str(cell.config.run.train_loss).lower()}")
            sessions.append(Session.resume(path, data_root, overrides=more))
        errors = run_together(sessions, show, on_stop)
        for session in [session for session in sessions if not session.summary]:
            session.end()  # it was killed between its last round and its summary
    except Exception as error:  # memory, disk or user code: the other cells still run
        errors = [error] * len(cells)
    finally:
        for session in sessions:
            session.folder.release()
    warnings = [session.warnings for session in sessions] + [[]] * (len(cells) - len(sessions))
    return [
        CellResult(cell, path, error=None if error is None else _one_line(error), warnings=own)
        for cell, path, error, own in zip(cells, paths, errors, warnings, strict=True)
    ]


def _groups(cells: Sequence[Cell]) -> Iterator[Sequence[Cell]]:
    """Yield groups of cells to compute together: on a GPU those that differ only in their seed, else single cells."""
    groups: dict[Any, list[Cell]] = {}
    for number, cell in enumerate(cells):
        unseeded = replace(cell.config, run=replace(cell.config.run, seed=0))
        key = to_toml(unseeded) if cell.config.device().type == "cuda" else number
        groups.setdefault(key, []).append(cell)
    yield from groups.values()


def _check(path: Path, config: Config) -> None:
    """Refuse a folder that holds anything but this run, and a link to a folder elsewhere."""
    if path.is_symlink():
        raise TDPFedError(f"--out: {str(path)!r} is a symbolic link; give another folder")
    if not _begun(path):
        RunFolder.check(path)
        return
    there = _configuration(path / CONFIG)
    there = replace(there, run=replace(there.run, train_loss=config.run.train_loss))  # changes only what is recorded
    if RunFolder(path).done:  # a finished run may have been computed on another device
        there = replace(there, run=replace(there.run, device=config.run.device))
    if there.run.rounds < config.run.rounds:  # more rounds extend a run, unless its learning rates depend on them
        check_same_run(settings_by_key(_spelled_out(there)), _spelled_out(config), f"the run in {str(path)!r}")
        there = replace(there, run=replace(there.run, rounds=config.run.rounds))
    if differs := _difference(there, config):
        raise TDPFedError(f"--out: {str(path)!r} given, which holds another run ({differs}); must be another folder")


def _difference(there: Config, config: Config) -> str:
    """Return the first setting in which two runs differ, in words; empty if they are the same run.

    A default that is spelled out in one of them, as older versions wrote it, is no difference.
    """
    was, wanted = (settings_by_key(_spelled_out(one)) for one in (there, config))
    keys = [key for key in {**was, **wanted} if was.get(key) != wanted.get(key)]
    return f"{keys[0]} = {was.get(keys[0])!r}, not {wanted.get(keys[0])!r}" if keys else ""


def _spelled_out(config: Config) -> Config:
    return replace(config, wire=config.wire.spelled_out())


def _configuration(file: Path) -> Config:
    try:
        return parse_config(parse_toml(read_file(file, most=CONFIG_BYTES).decode()))
    except (OSError, UnicodeDecodeError, TDPFedError) as error:
        raise TDPFedError(f"--out: {str(file)!r} is damaged ({error})") from None


def _grows(path: Path, config: Config) -> bool:
    """Whether a run has fewer rounds in its folder than it is to have."""
    return _configuration(path / CONFIG).run.rounds < config.run.rounds


def _begun(path: Path) -> bool:
    """Whether a folder holds a run; files left by a killed start do not count."""
    return (path / CONFIG).exists()


def _create(folder: Path) -> None:
    with write_errors("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)


def _one_line(error: Exception) -> str:
    """Return an error as one line; exceptions other than TDPFedError with their type."""
    text = " ".join(str(error).split())
    return text if isinstance(error, TDPFedError) else f"{type(error).__name__}: {text}".rstrip(": ")
