"""A report onto disk: the page, whole or not at all; figures and tables beside it; and the page that follows a run."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tdpfed.engine.folder import METRICS, REFUSALS
from tdpfed.errors import TDPFedError
from tdpfed.plan import FactorPlan
from tdpfed.report import figures, table
from tdpfed.report.group import Group, group_runs, in_progress
from tdpfed.report.page import render
from tdpfed.report.plans import plan_of
from tdpfed.report.read import CONFIG, SUMMARY, read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Report:
    """A page that was written, what is on it and what is to be noted."""

    page: Path
    groups: Sequence[Group]
    notes: Sequence[str]

    @property
    def running(self) -> int:
        """How many of its runs are in progress."""
        return len(in_progress(self.groups))


def write_page(runs: Sequence[Path], out: Path | None = None, *, reload_every: float = 0.0) -> Report:
    """Read run folders and write their page: into the folder of a single run, or to ``report.html``, unless told."""
    read, damage = read_runs(runs)
    groups, notes = group_runs(read)
    page = out or (read[0].path / "report.html" if len(read) == 1 else Path("report.html"))
    report = Report(page, groups, [*damage, *notes])
    text = render(groups, report.notes, reload_every=reload_every)
    with _named_errors("--out", page):
        if page.is_dir():
            raise TDPFedError(f"--out: {str(page)!r} is a folder, must be a file, as in report.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        _replace(page, text)
    return report


def follow(
    runs: Sequence[Path],
    out: Path | None,
    on_page: Callable[[Report], None],
    *,
    every: float = 1.0,
    reload: float = 5.0,
) -> Report:
    """Write the page again whenever a run folder has changed, until no run is in progress; Ctrl-C leaves a snapshot."""
    try:
        while True:
            seen = _state(runs)
            report = write_page(runs, out, reload_every=reload)
            on_page(report)
            if not report.running:
                return report
            while _state(runs) == seen:
                time.sleep(every)
    except KeyboardInterrupt:
        return write_page(runs, out)


def export(groups: Sequence[Group], folder: Path) -> list[Path]:
    """Write the figures as PNG, SVG and PDF and the tables as CSV, Markdown and LaTeX; return the files."""
    written: list[Path] = []
    datasets = list(dict.fromkeys(group.dataset for group in groups))
    plans = [(group, plan) for group in groups if isinstance(plan := plan_of(group.runs[0]), FactorPlan)]
    tables = {"results": table.results(groups), "runs": table.single_runs(groups)}
    tables |= {"plan": table.plan_rows(plans)} if plans else {}
    with _named_errors("--export", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, made in tables.items():
            for ending, write in (("csv", table.to_csv), ("md", table.to_markdown), ("tex", table.to_latex)):
                written.append(folder / f"{name}.{ending}")
                written[-1].write_text(write(made), encoding="utf-8")
        for number, dataset in enumerate(datasets):
            same = [_slug(other) for other in datasets].count(_slug(dataset)) > 1
            prefix = "" if len(datasets) == 1 else f"{_slug(dataset)}-{number}-" if same else f"{_slug(dataset)}-"

            def save(name: str, figure: "Figure", prefix: str = prefix) -> None:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, for all formats
                for ending in FORMATS:
                    written.append(folder / f"{prefix}{_slug(name)}.{ending}")
                    stamp = {"svg": "Date", "pdf": "CreationDate"}.get(ending)  # the same run, the same file
                    figure.savefig(written[-1], format=ending, metadata={stamp: None} if stamp else None)

            figures.draw([group for group in groups if group.dataset == dataset], save)
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def _state(runs: Sequence[Path]) -> list[tuple[int, int]]:
    """Return what changes when a run writes: time and size of its files."""
    found = []
    for path in [run / name for run in runs for name in (CONFIG, METRICS, REFUSALS, SUMMARY)]:
        try:
            stat = path.stat()
            found.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((0, 0))
    return found


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        Path(temporary).chmod(0o666 & ~_umask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextmanager
def _named_errors(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TDPFedError(f"{option}: cannot write {str(path)!r} ({error.strerror})") from None
