"""Writing a report: the page, exported figures and tables, and a page that follows a run in progress."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tdpfed.cp.plan import FactorPlan
from tdpfed.errors import TDPFedError
from tdpfed.files import write_errors, write_file
from tdpfed.report import figures, table
from tdpfed.report.group import Group, group_runs, in_progress
from tdpfed.report.page import render
from tdpfed.report.plans import plan_of
from tdpfed.report.read import find_runs, read_runs
from tdpfed.runs.folder import CONFIG, METRICS, REFUSALS, SUMMARY

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Report:
    """A written page, its groups and notes, and whether runs are still in progress."""

    page: Path
    groups: Sequence[Group]
    notes: Sequence[str]
    unfinished: bool


def write_page(runs: Sequence[Path], out: Path | None = None, *, reload_every: float = 0.0) -> Report:
    """Read run folders and write their page to ``out``, by default into a single given folder or the working directory.

    If ``reload_every`` is positive, the page reloads itself after that many seconds while a run is in progress. A
    folder of runs always counts as in progress, because more runs may start.
    """
    read, damage = read_runs(runs)
    groups, notes = group_runs(read)
    home = runs[0] if len(runs) == 1 else read[0].path if len(read) == 1 else Path()
    page = out or home / "report.html"
    unfinished = bool(in_progress(groups)) or any(find_runs(run) != [run] for run in runs)
    report = Report(page, groups, [*damage, *notes], unfinished)
    text = render(groups, report.notes, reload_every=reload_every if unfinished else 0.0)
    with write_errors("--out", page):
        if page.is_dir():
            raise TDPFedError(f"--out: {str(page)!r} is a folder, must be a file, as in report.html")
        page.parent.mkdir(parents=True, exist_ok=True)
        write_file(page, text, field="--out", unique=True)
    return report


def follow(
    runs: Sequence[Path],
    out: Path | None,
    on_page: Callable[[Report], None],
    *,
    every: float = 1.0,
    reload: float = 5.0,
) -> Report:
    """Rewrite the page whenever a run has changed, until all have ended; Ctrl-C leaves a snapshot."""
    try:
        while True:
            seen = _state(runs)
            report = write_page(runs, out, reload_every=reload)
            on_page(report)
            if not report.unfinished:
                return report
            while _state(runs) == seen:
                time.sleep(every)
    except KeyboardInterrupt:
        return write_page(runs, out)


def check_export(folder: Path | None, columns: str | None = None) -> Sequence[str]:
    """Return the columns of :func:`export`; reject a folder it could not write to before anything is written."""
    if folder is None:
        if columns is not None:
            raise TDPFedError("--columns: has no effect without --export")
        return ()
    figures.check()
    if folder.exists() and not folder.is_dir():
        raise TDPFedError(f"--export: {str(folder)!r} is a file, must be a folder")
    return table.PAPER if columns is None else table.paper_columns(columns)


def export(groups: Sequence[Group], folder: Path, columns: Sequence[str] = table.PAPER) -> list[Path]:
    """Write the figures as PNG, SVG and PDF and the tables as CSV, Markdown and LaTeX; return the files.

    A LaTeX table of results has only the given columns beside the method, so that it fits a page.
    """
    written: list[Path] = []
    datasets = list(dict.fromkeys(group.dataset for group in groups))
    plans = [(group, plan) for group in groups if isinstance(plan := plan_of(group.runs[0]), FactorPlan)]
    whole = {"results": table.results(groups), "runs": table.single_runs(groups)}
    short = {name: table.for_paper(made, columns) for name, made in whole.items()}
    of_plans = {"plan": table.plan_rows(plans)} if plans else {}
    formats = (("csv", table.to_csv, whole), ("md", table.to_markdown, whole), ("tex", table.to_latex, short))
    with write_errors("--export", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for ending, write, tables in formats:
            for name, made in (tables | of_plans).items():
                written.append(folder / f"{name}.{ending}")
                write_file(written[-1], write(made), field="--export")
        for number, dataset in enumerate(datasets):
            same = [_slug(other) for other in datasets].count(_slug(dataset)) > 1
            prefix = "" if len(datasets) == 1 else f"{_slug(dataset)}-{number}-" if same else f"{_slug(dataset)}-"

            def save(name: str, figure: "Figure", prefix: str = prefix) -> None:
                figure.draw_without_rendering()
                figure.set_layout_engine("none")  # laid out once, for all formats
                for ending in FORMATS:
                    written.append(folder / f"{prefix}{_slug(name)}.{ending}")
                    stamp = {"svg": "Date", "pdf": "CreationDate"}.get(ending)  # reproducible: no date
                    drawn = BytesIO()
                    figure.savefig(drawn, format=ending, metadata={stamp: None} if stamp else None)
                    write_file(written[-1], drawn.getvalue(), field="--export")

            figures.draw([group for group in groups if group.dataset == dataset], save)
    return written


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]


def _state(runs: Sequence[Path]) -> list[tuple[Path, int, int]]:
    """Return times and sizes of the files of all runs, which change when a run starts or writes."""
    found = []
    names = (CONFIG, METRICS, REFUSALS, SUMMARY)
    for path in [run / name for given in runs for run in find_runs(given) for name in names]:
        try:
            stat = path.stat()
            found.append((path, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((path, 0, 0))
    return found
