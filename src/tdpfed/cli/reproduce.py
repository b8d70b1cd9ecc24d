"""The command that repeats published experiments: the paper's, and those of a public benchmark."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tdpfed.cli.base import DataRoot, Json, Set, app, find_own_code, print_json, print_stderr
from tdpfed.errors import TDPFedError, unknown

if TYPE_CHECKING:
    from tdpfed.paper.leaderboard import Plan
    from tdpfed.runs.grid import Cell, CellResult
    from tdpfed.runs.session import Session

AGAIN = "interrupted; resume with the same command and --resume"


@app.command()
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            metavar="mnist|cifar10|pfllib", help="One of the paper's data sets, or PFLlib's benchmark on Fashion-MNIST."
        ),
    ],
    table: Annotated[list[int] | None, typer.Option(metavar="1..4", help="Paper: only this table; repeatable.")] = None,
    figure: Annotated[
        list[int] | None, typer.Option(metavar="2..5", help="Paper: only this figure; repeatable.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(metavar="pathological|dirichlet", help="Benchmark: only this distribution; repeatable."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...", help="Benchmark: only these methods, or others, also your own as package.module:Class."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(help="Benchmark: trials that choose the rates of each method, 4 by default; 1 does not tune."),
    ] = None,
    tuning_rounds: Annotated[
        int | None, typer.Option(help="Benchmark: rounds of a trial; a tenth of the rounds by default.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Communication rounds; by default the paper's 800, 500 for the benchmark.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of seeds for each experiment, starting at 0.")] = 3,
    device: Annotated[
        str | None, typer.Option(metavar="auto|cpu|cuda", help="Where to run; the same as --set run.device=...")
    ] = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to write to; runs/reproduce-NAME by default.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the runs in the folder.")] = False,
    no_run: Annotated[
        bool,
        typer.Option(
            "--no-run",
            help="Compute nothing; write the results of finished runs in the folder, even of runs computed elsewhere.",
        ),
    ] = False,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Repeat published experiments, with the published numbers next to the new ones: the paper's, or a benchmark's."""
    from tdpfed.paper import leaderboard
    from tdpfed.paper.published import STUDIES

    folder = out or Path("runs") / f"reproduce-{name}"
    overrides = [*(set_ or ()), *([] if device is None else [f"run.device={device}"])]
    of_paper, of_board = {"--table": table, "--figure": figure}, {
        "--setting": setting, "--methods": methods, "--trials": trials, "--tuning-rounds": tuning_rounds,
    }  # fmt: skip
    if name not in (*STUDIES, *leaderboard.NAMES):
        raise unknown("experiments", name, (*STUDIES, *leaderboard.NAMES))
    for option, given in (of_board if name in STUDIES else of_paper).items():
        if given:
            raise TDPFedError(f"{option}: {given!r} given, which has no meaning for {name!r}; must be left out")
    if name in STUDIES:
        files, failed = _paper(
            name, table or (), figure or (), rounds, seeds, overrides, folder, resume, no_run, data_root
        )
    else:
        find_own_code(methods or "")
        made = leaderboard.plan(
            leaderboard.load_board(name), settings=setting or (), methods=methods, rounds=rounds, seeds=seeds,
            trials=4 if trials is None else trials, tuning_rounds=tuning_rounds, overrides=overrides,
        )  # fmt: skip
        files, failed = _board(made, folder, resume, no_run, data_root)
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files], "failed": failed})
    else:
        typer.echo("\n".join(str(file) for file in files))
    print_stderr(f"failed: {cell}: {error}" for cell, error in failed.items())
    if failed:
        raise typer.Exit(1)


def _paper(
    name: str,
    table: Sequence[int],
    figure: Sequence[int],
    rounds: int | None,
    seeds: int,
    overrides: Sequence[str],
    folder: Path,
    resume: bool,
    no_run: bool,
    data_root: Path | None,
) -> tuple[list[Path], dict[str, str]]:
    """Run what the paper's tables and figures need; return the files written, and the errors of failed runs."""
    from tdpfed.files import lock_folder
    from tdpfed.paper import study as studies
    from tdpfed.report.figures import check
    from tdpfed.runs.grid import check_cells, finished

    study = studies.find(name)
    chosen = studies.choose(study, table, figure)
    tables, figures = studies.choose(study, *studies.with_earlier(folder, *chosen))
    if figures:
        check("--figure")  # fail now, not after all the runs
    needed = study.needed(tables, figures)
    cells = studies.cells_of(study, needed, rounds, seeds, overrides, figures)
    print_stderr(f"warning: {line}" for line in studies.overruled(study, needed, rounds, overrides))
    if no_run:
        cells = finished(cells, folder / "runs")
    elif not resume:
        _refuse_runs(folder)
    check_cells(cells, folder / "runs")
    with lock_folder(folder, field="--out"):
        results = _run(cells, folder / "runs", data_root)
        files = studies.write(study, folder, results, tables, figures, overrides)
    return files, _failed(results)


def _board(
    made: "Plan", folder: Path, resume: bool, no_run: bool, data_root: Path | None
) -> tuple[list[Path], dict[str, str]]:
    """Tune the methods of a benchmark, run them, and the best again with factored updates; return files and errors."""
    from tdpfed.files import lock_folder
    from tdpfed.paper import leaderboard, leaderboard_page
    from tdpfed.runs.grid import check_cells

    if no_run:
        if not leaderboard.groups(folder):
            raise TDPFedError(f"--no-run: {str(folder)!r} holds no finished run of this experiment")
        with lock_folder(folder, field="--out"):
            return leaderboard_page.write(made, folder, {}, ()), {}
    if not resume:
        _refuse_runs(folder)
    list(made.configs())  # whatever is wrong with the settings is said before the data are read
    searches = made.searches(data_root)
    tuning = {at: (made.trials_of(searches, at), folder / leaderboard.TUNING / at.name) for at in made.settings}
    for cells, place in tuning.values():
        check_cells(cells, place)
    with lock_folder(folder, field="--out"):
        lost: dict[str, str] = {}
        for at, (cells, place) in tuning.items():
            done = _run(cells, place, data_root, keep_checkpoints=False) if cells else []
            lost |= {f"{at.name}, trial {cell}": error for cell, error in _failed(done).items()}
        dense = made.dense(searches, folder)
        results = _run(dense, folder / leaderboard.RUNS, data_root)
        factored = made.factored(dense, folder)
        results += _run(factored, folder / leaderboard.RUNS, data_root)
        failed = _failed(results)
        told = [f"{cell}: {error}" for cell, error in (lost | failed).items()]
        return leaderboard_page.write(made, folder, searches, told), failed


def _run(
    cells: "Sequence[Cell]", folder: Path, data_root: Path | None, keep_checkpoints: bool = True
) -> "list[CellResult]":
    """Run the cells that are not finished, and show their progress."""
    from tdpfed.cli.display import grid_progress
    from tdpfed.runs.grid import run_cells
    from tdpfed.runs.progress import say_stopping

    try:
        with grid_progress(cells) as show:
            told = _round_times(show.round)

            def end(result: "CellResult") -> None:
                show.end(result)
                if result.error is None and not keep_checkpoints:  # a finished run needs none
                    shutil.rmtree(result.path / "checkpoints", ignore_errors=True)

            return run_cells(
                cells, folder, data_root, on_start=show.start, on_round=told, on_end=end, on_stop=say_stopping
            )
    except KeyboardInterrupt:
        print_stderr([AGAIN])
        raise typer.Exit(130) from None


def _round_times(show: "Callable[[Session], None]") -> "Callable[[Session], None]":
    """Return a function that shows a round, and once for each method and device how long a round takes."""
    from tdpfed.runs.progress import duration, say

    known: dict[tuple[str, str], tuple[int, float]] = {}
    told = set[tuple[str, str]]()

    def after(session: "Session") -> None:
        show(session)
        device = session.simulation.federation.device.type
        key, now = (session.config.method_name, device), (session.simulation.round, session.journal.seconds)
        first = known.setdefault(key, now)
        if now[0] > first[0] and key not in told:
            told.add(key)
            seconds = (now[1] - first[1]) / (now[0] - first[0])
            rounds = session.config.run.rounds
            say(f"{key[0]}: a round takes {seconds:.3g} s on {device}, a run of {rounds} {duration(rounds * seconds)}")

    return after


def _refuse_runs(folder: Path) -> None:
    for inside in (folder / "runs", folder / "tuning"):
        if inside.is_dir() and any(inside.iterdir()):
            raise TDPFedError(
                f"--out: {str(folder)!r} holds runs already; add --resume to resume them, or give a new folder"
            )


def _failed(results: "Sequence[CellResult]") -> dict[str, str]:
    return {result.cell.name: result.error for result in results if result.error is not None}
