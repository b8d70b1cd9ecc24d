"""The command that tunes methods alike."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tdpfed.cli.base import DataRoot, Json, Set, Source, app, find_code_of, find_own_code, print_json, print_stderr

if TYPE_CHECKING:
    from tdpfed.studies.tune import Search

TUNED, TRIALS = "tuned.toml", "trials.csv"
"""The files that are written: a configuration, and all trials."""


@app.command()
def tune(
    source: Source = None,
    algorithms: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="The methods: names that tdpfed keys lists under algorithm.name, or your own as package.module:Class.",
        ),
    ] = None,
    trials: Annotated[
        int, typer.Option(help="Trials of each method; the first has the configuration's own values.")
    ] = 8,
    seeds: Annotated[int, typer.Option(help="Number of seeds of a trial, starting at run.seed + 1000.")] = 2,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the trials and results; runs/tune-NAME by default.")
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Choose learning rates and a few keys of methods by validation accuracy, with as many trials for each; or resume.

    Writes a configuration for tdpfed compare: tuned.toml in the folder.
    """
    from tdpfed.algorithms import COMPARED
    from tdpfed.cli.display import grid_progress
    from tdpfed.files import lock_folder, write_file
    from tdpfed.runs.grid import CellResult, check_cells, run_cells
    from tdpfed.runs.progress import say_stopping
    from tdpfed.studies.tune import as_csv, as_toml, searches

    source, names = source or "digits", ",".join(COMPARED) if algorithms is None else algorithms
    find_own_code(names)
    find_code_of(source, set_)
    found, notes = searches(source, names, trials, seeds, set_ or (), data_root)
    print_stderr(f"note: {note}" for note in notes)
    folder = out or Path("runs") / f"tune-{Path(source).stem}"
    cells = [cell for one in found for trial in one.trials for cell in trial.cells]
    check_cells(cells, folder)
    with lock_folder(folder, field="--out"):
        try:
            with grid_progress(cells) as show:

                def end(result: CellResult) -> None:
                    show.end(result)
                    if result.error is None:  # a finished trial needs none
                        shutil.rmtree(result.path / "checkpoints", ignore_errors=True)

                results = run_cells(
                    cells, folder, data_root, on_start=show.start, on_round=show.round, on_end=end,
                    on_stop=say_stopping,
                )  # fmt: skip
        except KeyboardInterrupt:
            print_stderr(["interrupted; the same command resumes"])
            raise typer.Exit(130) from None
        files = {name: folder / name for name in (TUNED, TRIALS)}
        write_file(files[TUNED], as_toml(found, folder, source, set_ or ()), field="--out")
        write_file(files[TRIALS], as_csv(found, folder), field="--out")
    edges = [f"{one.name}: {text}" for one in found if (best := one.best(folder)) for text in one.at_edge(best)]
    lost = [one.name for one in found if one.best(folder) is None]
    errors = {result.cell.name: result.error for result in results if result.error is not None}
    if json_:
        shown = {name: str(path) for name, path in files.items()}
        rows = [row for one in found for row in one.rows(folder)]
        print_json({"folder": str(folder), "files": shown, "trials": rows, "notes": [*notes, *edges], "failed": errors})
    else:
        Console().print(_table(found, folder))
        typer.echo("\n".join(str(path) for path in files.values()))
    print_stderr(f"note: {text}" for text in edges)
    print_stderr(f"failed: {name}: {error}" for name, error in errors.items())
    if lost:
        raise typer.Exit(1)


def _table(found: "Sequence[Search]", folder: Path) -> Table:
    """Return what was chosen for each method."""
    from tdpfed.runs.progress import percent

    table = Table(title="Validation accuracy, mean of the seeds", box=None, padding=(0, 2, 0, 0), title_justify="left")
    for column in ("method", "own values", "best trial", "its values"):
        table.add_column(column, justify="right" if column in ("own values", "best trial") else "left", overflow="fold")
    for one in found:
        best, first = one.best(folder), percent(one.trials[0].score(folder))
        values = {} if best is None else one.values(best)
        text = ", ".join(f"{key.removeprefix('algorithm.')} {value:g}" for key, value in values.items())
        score = "failed" if best is None else percent(best.score(folder))
        table.add_row(escape(one.name), first, score, text)
    return table
