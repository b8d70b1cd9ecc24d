"""Commands that run experiments, and the one that reports their results."""

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
    print_stderr,
    search_here,
)
from tdpfed.errors import TDPFedError

if TYPE_CHECKING:
    from tdpfed.config import Config
    from tdpfed.runs.grid import Cell
    from tdpfed.runs.session import Session


@app.command()
def run(
    source: Source = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run; runs/NAME-ALGORITHM-SEED-TIME by default.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Resume the run in this folder from its last checkpoint; with --set run.rounds=N, extend it.",
        ),
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Train a federation in simulation and write a run folder; or resume a run that was stopped.

    In several processes, with the same results: torchrun --nproc-per-node 2 -m tdpfed run ...
    """
    from tdpfed.cli.display import summary_table
    from tdpfed.config import load_config
    from tdpfed.engine.processes import joined
    from tdpfed.runs.folder import file_name
    from tdpfed.runs.grid import has_seeds
    from tdpfed.runs.progress import no_progress, progress, say_stopping
    from tdpfed.runs.session import Session

    with joined() as ranks:
        if resume is not None:
            if source is not None or out is not None:
                raise TDPFedError(
                    "--resume: uses the configuration of the run, so no preset and no --out may be given with it"
                )
            search_here()
            if has_seeds(resume):
                if set_:
                    raise TDPFedError("--resume: a run of several seeds takes no --set; resume the run of each seed")
                ranks.alone("a run of several seeds")
                return _run_seeds(resume, data_root, json_)
            session = Session.resume(resume, data_root, ranks, set_ or ())
        else:
            with ranks.agreement():
                find_code_of(source or "digits", set_)
                config = load_config(source or "digits", set_)
            method, now = file_name(config.method_name), datetime.now()
            name = f"{Path(source or config.data.name).stem}-{method}-{config.run.seed}-{now:%Y%m%d-%H%M%S}"
            if config.run.seeds > 1:
                ranks.alone("run.seeds above 1")
                return _run_seeds(out or Path("runs") / name, data_root, json_, config)
            session = Session.begin(config, out or Path("runs") / name, data_root, ranks)
        if not ranks.leads:
            session.run(no_progress)
            return None
        print_stderr(f"warning: {warning}" for warning in session.warnings)
        summary = session.run(progress, say_stopping)
    path = session.folder.path
    if json_:
        print_json({**summary, "folder": str(path)})
    else:
        Console().print(summary_table(summary, str(path)))
        if resume is None and summary["status"] == "finished" and (command := _alternative(session, source, set_)):
            Console(soft_wrap=True).print(f"The same experiment with factored updates:\n  {command}", markup=False)
    if summary["status"] == "interrupted":
        print_stderr([f"interrupted; {_resume_hint(path, data_root)}"])
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
    seeds: Annotated[int, typer.Option(help="Number of seeds, starting at run.seed.")] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SECTION.KEY=V,W,...", help="Run every value of a setting; repeatable, for all combinations."
        ),
    ] = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the runs and results; runs/compare-NAME by default.")
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Compare the cost of this accuracy, as in 0.95; one that all runs reach by default."),
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Compare methods over several seeds, or resume a comparison; write a table and an HTML page."""
    from tdpfed.algorithms import COMPARED
    from tdpfed.files import lock_folder
    from tdpfed.runs.grid import check_cells
    from tdpfed.studies.compare import cells_of, check_target

    check_target(target)
    names = ",".join(COMPARED) if algorithms is None else algorithms
    find_own_code(names)
    find_code_of(source or "digits", set_)
    cells, notes = cells_of(source or "digits", names, seeds, sweep or [], set_ or [])
    print_stderr(f"note: {note}" for note in notes)
    find_own_code(*(cell.config.model.name for cell in cells))
    folder = out or Path("runs") / f"compare-{Path(source or 'digits').stem}"
    check_cells(cells, folder)
    with lock_folder(folder, field="--out"):
        _grid(cells, folder, data_root, json_, "the same command resumes", target, notes)


def _alternative(session: "Session", source: str | None, set_: Sequence[str] | None) -> str | None:
    """Return the command of the same run with factored updates; None if it has them, or nothing is uploaded."""
    from tdpfed.algorithms import AVERAGED

    algorithm = session.simulation.algorithm
    if session.config.wire.update == "factors" or not algorithm.communicates:
        return None
    same = algorithm.plan is None and not algorithm.shared_seed
    kept = [one for one in set_ or () if same or not one.startswith(("algorithm.", "wire."))]
    changed = [] if same else [f"algorithm.name={AVERAGED}"]
    values = [*kept, *changed, "wire.update=factors"]
    return shlex.join(["tdpfed", "run", source or "digits", *(part for one in values for part in ("--set", one))])


def _run_seeds(folder: Path, data_root: Path | None, json_: bool, config: "Config | None" = None) -> None:
    """Begin a run with several seeds, or resume it if no configuration is given."""
    from tdpfed.files import lock_folder
    from tdpfed.runs.grid import begin_seeds, check_seeds, seeds_in

    if config is not None:
        check_seeds(config, folder)
    with lock_folder(folder, field="--resume" if config is None else "--out"):
        if config is not None:
            begin_seeds(config, folder)
        _grid(seeds_in(folder), folder, data_root, json_, _resume_hint(folder, data_root))


def _resume_hint(folder: Path, data_root: Path | None) -> str:
    root = [] if data_root is None else ["--data-root", str(data_root)]
    return f"resume with: {shlex.join(['tdpfed', 'run', '--resume', str(folder), *root])}"


def _grid(
    cells: "Sequence[Cell]",
    folder: Path,
    data_root: Path | None,
    json_: bool,
    resume_hint: str,
    target: float | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Run the cells that are not finished, and show the results of all."""
    from tdpfed.cli.display import comparison_table, grid_progress
    from tdpfed.runs.grid import run_cells
    from tdpfed.runs.progress import say_stopping
    from tdpfed.studies.compare import CAPTION, conclude

    try:
        with grid_progress(cells) as show:
            results = run_cells(
                cells, folder, data_root, on_start=show.start, on_round=show.round, on_end=show.end,
                on_stop=say_stopping,
            )  # fmt: skip
    except KeyboardInterrupt:
        print_stderr([f"interrupted; {resume_hint}"])
        raise typer.Exit(130) from None
    made = conclude(results, folder, target)
    if json_:
        print_json({"folder": str(folder), **made.as_json(), "notes": [*notes, *made.notes]})
    elif made.groups:
        seeds = len({cell.config.run.seed for cell in cells})
        title = f"{', '.join(dict.fromkeys(group.dataset for group in made.groups))}, seeds: {seeds}"
        console = Console()
        console.print(comparison_table(made.table, title, CAPTION, console.width))
        typer.echo("\n".join(str(file) for file in made.files.values()))
    print_stderr(f"note: {note}" for note in made.notes)
    print_stderr(f"failed: {', '.join(names)}: {error}" for error, names in made.failed.items())
    if made.failed:
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders, finished or in progress; or a folder of runs, as written by compare."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The page; RUN/report.html by default, ./report.html for several runs. Missing folders are created.",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write the figures (PNG, SVG, PDF) and the tables (CSV, Markdown, LaTeX) here."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="With --export: the columns of the LaTeX tables beside the method, by their headings on the page.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow runs in progress: update the page after every change.")
    ] = False,
    json_: Json = False,
) -> None:
    """Write an HTML page about runs that works offline: curves, clients, results, plan and configuration."""
    from tdpfed.report import Report, check_export, follow, write_page
    from tdpfed.report import export as write_exports

    chosen = check_export(export, columns)
    shown: set[str] = set()

    def show_notes(made: Report) -> None:
        follows = (
            [f"updating {made.page} until all runs end; press Ctrl-C to stop"] if watch and made.unfinished else []
        )
        new = [note for note in dict.fromkeys([*made.notes, *follows]) if note not in shown]
        shown.update(new)
        print_stderr(f"note: {note}" for note in new)

    made = follow(runs, out, show_notes) if watch else write_page(runs, out)
    show_notes(made)
    files = [] if export is None else write_exports(made.groups, export, chosen)
    if json_:
        print_json({"page": str(made.page), "files": [str(file) for file in files], "notes": list(made.notes)})
    else:
        typer.echo(f"{made.page}" + (f", and {len(files)} files in {export}" if files else ""))
