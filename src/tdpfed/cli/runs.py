"""Commands that run things, and the one that shows what came out."""

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tdpfed.cli.base import (
    DataRoot,
    Json,
    Set,
    Source,
    app,
    find_code_of,
    find_own_code,
    print_json,
    search_here,
    tell,
)
from tdpfed.errors import TDPFedError

if TYPE_CHECKING:
    from tdpfed.runs.grid import Cell


@app.command()
def run(
    source: Source = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run; runs/NAME-ALGORITHM-SEED-TIME by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder from its last checkpoint.")
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Train a federation in simulation, and write a run folder; or go on with one that was stopped.

    In several processes: torchrun --nproc-per-node 2 -m tdpfed run ..., with the same numbers.
    """
    from tdpfed.cli.display import no_progress, progress, summary_table
    from tdpfed.config import load_config
    from tdpfed.engine.ranks import joined
    from tdpfed.runs.folder import file_name
    from tdpfed.runs.grid import begin_seeds, has_seeds
    from tdpfed.runs.session import Session

    with joined() as ranks:
        if resume is not None:
            if source is not None or set_ or out is not None:
                raise TDPFedError("--resume: goes on as configured, so no preset, --set or --out may be given with it")
            search_here()
            if has_seeds(resume):
                ranks.alone("a run of several seeds")
                return _run_seeds(resume, data_root, json_)
            session = Session.resume(resume, data_root, ranks)
        else:
            with ranks.agreement():
                find_code_of(source or "digits", set_)
                config = load_config(source or "digits", set_)
            method, now = file_name(config.method_name), datetime.now()
            name = f"{Path(source or config.data.name).stem}-{method}-{config.run.seed}-{now:%Y%m%d-%H%M%S}"
            if config.run.seeds > 1:
                ranks.alone("run.seeds above 1")
                return _run_seeds(begin_seeds(config, out or Path("runs") / name), data_root, json_)
            session = Session.begin(config, out or Path("runs") / name, data_root, ranks)
        if not ranks.leads:
            session.run(no_progress)
            return None
        tell(f"warning: {warning}" for warning in session.warnings)
        summary = session.run(progress)
    path = session.folder.path
    if json_:
        print_json({**summary, "folder": str(path)})
    else:
        Console().print(summary_table(summary, str(path)))
    if summary["status"] == "interrupted":
        tell([f"interrupted; {_go_on(path, data_root)}"])
        raise typer.Exit(130)
    return None


@app.command()
def compare(
    source: Source = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="The methods: names that tdpfed keys lists under algorithm.name, or your own as package.module:Class.",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds, from run.seed on.")] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="SECTION.KEY=V,W,...", help="Run each value of a setting; repeatable, all combinations."),
    ] = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the runs and results; runs/compare-NAME by default.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Accuracy whose cost is compared, as 0.95; what all runs reach by default.")
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Run methods side by side over several seeds, or go on with that; end with a table and a page."""
    from tdpfed.algorithms import COMPARED
    from tdpfed.report.compare import cells_of, check_target

    check_target(target)
    names = ",".join(COMPARED) if algorithms is None else algorithms
    find_own_code(names)
    find_code_of(source or "digits", set_)
    cells, notes = cells_of(source or "digits", names, seeds, sweep or [], set_ or [])
    tell(f"note: {note}" for note in notes)
    find_own_code(*(cell.config.model.name for cell in cells))
    folder = out or Path("runs") / f"compare-{Path(source or 'digits').stem}"
    _grid(cells, folder, data_root, json_, "the same command goes on from here", target, notes)


def _run_seeds(folder: Path, data_root: Path | None, json_: bool) -> None:
    from tdpfed.runs.grid import seeds_in

    _grid(seeds_in(folder), folder, data_root, json_, _go_on(folder, data_root))


def _go_on(folder: Path, data_root: Path | None) -> str:
    root = [] if data_root is None else ["--data-root", str(data_root)]
    return f"go on with: {shlex.join(['tdpfed', 'run', '--resume', str(folder), *root])}"


def _grid(
    cells: "Sequence[Cell]",
    folder: Path,
    data_root: Path | None,
    json_: bool,
    again: str,
    target: float | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Run what is not finished of these cells, and show what they come to."""
    from tdpfed.cli.display import comparison_table, grid_progress
    from tdpfed.report.compare import CAPTION, conclude
    from tdpfed.runs.grid import run_cells

    try:
        with grid_progress(cells) as show:
            outcomes = run_cells(cells, folder, data_root, on_start=show.start, on_round=show.round, on_end=show.end)
    except KeyboardInterrupt:
        tell([f"interrupted; {again}"])
        raise typer.Exit(130) from None
    made = conclude(outcomes, folder, target)
    if json_:
        print_json({"folder": str(folder), **made.as_json(), "notes": [*notes, *made.notes]})
    elif made.groups:
        seeds = len({cell.config.run.seed for cell in cells})
        title = f"{', '.join(dict.fromkeys(group.dataset for group in made.groups))}, seeds: {seeds}"
        console = Console()
        console.print(comparison_table(made.table, title, CAPTION, console.width))
        typer.echo("\n".join(str(file) for file in made.files.values()))
    tell(f"note: {note}" for note in made.notes)
    tell(f"failed: {', '.join(names)}: {error}" for error, names in made.failed.items())
    if made.failed:
        raise typer.Exit(1)


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="mnist|cifar10", help="Which of the paper's data sets.")],
    table: Annotated[list[int] | None, typer.Option(metavar="1..4", help="Only this table; repeatable.")] = None,
    figure: Annotated[list[int] | None, typer.Option(metavar="2..5", help="Only this figure; repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds; the paper's 800 by default.")] = None,
    seeds: Annotated[int, typer.Option(help="How often each experiment is run, from seed 0 on.")] = 3,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write to; runs/reproduce-NAME by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs that the folder holds.")] = False,
    no_run: Annotated[
        bool,
        typer.Option(
            "--no-run", help="Compute nothing; write what the folder's finished runs give, wherever they were computed."
        ),
    ] = False,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Make the paper's tables and figures anew, its numbers beside ours."""
    from tdpfed.cli.display import grid_progress
    from tdpfed.paper import experiment
    from tdpfed.report.figures import check
    from tdpfed.runs.grid import finished, run_cells

    study = experiment.find(name)
    folder = out or Path("runs") / f"reproduce-{name}"
    asked = experiment.choose(study, table or (), figure or ())
    tables, figures = experiment.choose(study, *experiment.with_earlier(folder, *asked))
    if figures:
        check("--figure")  # now, and not after all the runs
    needed = study.needed(tables, figures)
    cells = experiment.cells_of(study, needed, rounds, seeds, set_ or ())
    tell(f"warning: {line}" for line in experiment.overruled(study, needed, rounds, set_ or ()))
    if no_run:
        cells = finished(cells, folder / "runs")
    elif not resume and (folder / "runs").is_dir() and any((folder / "runs").iterdir()):
        raise TDPFedError(f"--out: {str(folder)!r} holds runs already; add --resume to go on, or give a new folder")
    try:
        with grid_progress(cells) as show:
            outcomes = run_cells(
                cells, folder / "runs", data_root, on_start=show.start, on_round=show.round, on_end=show.end
            )
    except KeyboardInterrupt:
        tell(["interrupted; go on with the same command and --resume"])
        raise typer.Exit(130) from None
    files = experiment.write(study, folder, outcomes, tables, figures, set_ or ())
    failed = {outcome.cell.name: outcome.error for outcome in outcomes if outcome.error is not None}
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files], "failed": failed})
    else:
        typer.echo("\n".join(str(file) for file in files))
    tell(f"failed: {cell}: {error}" for cell, error in failed.items())
    if failed:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, finished or in progress; or a folder of them, as compare makes it."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; RUN/report.html by default, or ./report.html for several. Missing folders are made.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write the figures (PNG, SVG, PDF) and the tables (CSV, Markdown, LaTeX) here."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow runs in progress: write the page anew as they go on.")
    ] = False,
    json_: Json = False,
) -> None:
    """Make one HTML page of runs that works offline: curves, clients, results, plan and configuration."""
    from tdpfed.report import Report, check_export, follow, write_page
    from tdpfed.report import export as write_exports

    if export is not None:
        check_export(export)
    told: set[str] = set()

    def tell_notes(made: Report) -> None:
        follows = [f"following in {made.page}; Ctrl-C ends that"] if watch and made.unfinished else []
        new = [note for note in dict.fromkeys([*made.notes, *follows]) if note not in told]
        told.update(new)
        tell(f"note: {note}" for note in new)

    made = follow(runs, out, tell_notes) if watch else write_page(runs, out)
    tell_notes(made)
    files = [] if export is None else write_exports(made.groups, export)
    if json_:
        print_json({"page": str(made.page), "files": [str(file) for file in files], "notes": list(made.notes)})
    else:
        typer.echo(f"{made.page}" + (f", and {len(files)} files in {export}" if files else ""))
