"""The command line: thin, it turns arguments into calls of the library and results into tables or JSON.

``--json`` prints one JSON object as the last line of standard output and nothing else there. Bad input is one line on
standard error and exit status 2.
"""

import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import tdpfed
from tdpfed.errors import TDPFedError

app = typer.Typer(
    name="tdpfed", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Communication-efficient personalised federated learning: clients keep their models, only CP factors travel.",
)  # fmt: skip
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List data sets, or download one.")
app.add_typer(data, name="data")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DataRoot = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where data sets lie; then $TDPFED_DATA and the user cache.")
]


def main() -> None:
    """Run the command line; a :class:`TDPFedError` becomes a line on standard error and exit status 2."""
    try:
        app()
    except TDPFedError as error:
        _fail(str(error))
    except (MemoryError, RuntimeError) as error:  # PyTorch's own error for a full memory is a RuntimeError
        if "allocate" not in str(error) and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        _fail(f"out of memory ({str(error).splitlines()[0] if str(error) else 'no more to be had'})")


def _fail(message: str) -> None:
    print("error:", " ".join(message.splitlines()), file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _find_own_code(model: str) -> None:
    """Let ``package.module:factory`` be found in the working directory, after everything that is installed."""
    if ":" in model:
        sys.path.append(os.getcwd())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tdpfed {tdpfed.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


@app.command()
def run(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[PRESET or FILE.toml]",
            help="digits (default), mnist, mnist-paper, cifar10-paper, qmnist-writers, or your own TOML file.",
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the configuration; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the run; runs/NAME-ALGORITHM-SEED-TIME by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Go on with the run in this folder from its last checkpoint.")
    ] = None,
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Train a federation in simulation, and write a run folder; or go on with one that was stopped."""
    from tdpfed.config import load_config
    from tdpfed.display import progress, summary_table
    from tdpfed.session import Session

    if resume is not None:
        if source is not None or set_ or out is not None:
            raise TDPFedError("--resume: goes on as configured, so no preset, --set or --out may be given with it")
        sys.path.append(os.getcwd())
        session = Session.resume(resume, data_root)
    else:
        config = load_config(source or "digits", set_)
        _find_own_code(config.model.name)
        algorithm, now = config.algorithm["name"], datetime.now()
        name = f"{Path(source or config.data.name).stem}-{algorithm}-{config.run.seed}-{now:%Y%m%d-%H%M%S}"
        session = Session.begin(config, out or Path("runs") / name, data_root)
    for warning in session.warnings:
        print(f"warning: {warning}", file=sys.stderr)  # noqa: T201
    summary = session.run(progress)
    path = session.folder.path
    if json_:
        _print_json({**summary, "folder": str(path)})
    else:
        Console().print(summary_table(summary, str(path)))
    if summary["status"] == "interrupted":
        print(f"interrupted; go on with: tdpfed run --resume {path}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130)


@app.command()
def keys(
    algorithm: Annotated[str, typer.Argument(metavar="[ALGORITHM]", help="Whose hyper-parameters to list.")] = "tdpfed",
    json_: Json = False,
) -> None:
    """List every key of the configuration, with its default and its meaning."""
    from tdpfed.config import describe

    rows = describe(algorithm)
    if json_:
        _print_json({key: {"default": default, "meaning": meaning} for key, default, meaning in rows})
        return
    table = Table("key", "default", "meaning")
    for key, default, meaning in rows:
        table.add_row(key, "-" if default is None else json.dumps(default), meaning)
    Console().print(table)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="dnn, vgg8, ... or your own as package.module:factory.")
    ],
    compression: Annotated[float, typer.Option(help="Compression rate the ranks are chosen for.")] = 2.0,
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=R", help="Explicit rank of the matching parameters; repeatable."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Factorise only matching parameters; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Keep matching parameters dense; repeatable.")
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="Input shape without the batch; the model's own by default.")
    ] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes; the model's own by default.")] = None,
    json_: Json = False,
) -> None:
    """Show ranks, parameter counts and compression rate of each layer (the paper's Table I)."""
    from tdpfed.display import plan_table
    from tdpfed.models import from_spec
    from tdpfed.plan import FactorPlan

    shape = None if input_shape is None else [_whole("--input-shape", size) for size in input_shape.split(",")]
    ranks = dict(_pair("--rank", text) for text in rank or [])
    _find_own_code(model)
    # Shapes are enough, except that a factory of the user's own may want real tensors.
    with torch.device("cpu" if ":" in model else "meta"):
        built = from_spec(model, shape, classes)
    made = FactorPlan.of(built, compression, ranks=ranks, include=include or ("*",), exclude=exclude or ())
    if not json_:
        Console().print(plan_table(made, f"{model}, compression {compression:g}"))
        return
    keys = ("name", "shape", "rank", "dense", "factored", "rate")
    _print_json(
        {
            "model": model,
            "compression": compression,
            "layers": [{key: getattr(row, key) for key in keys} for row in made.rows()],
            "total": {"dense": made.dense.size, "factored": made.factors.size, "rate": made.compression_rate},
        }
    )


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, finished or in progress.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; RUN/report.html for one run, else report.html.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Also write the figures (PNG, SVG, PDF) and the tables (CSV, Markdown, LaTeX)."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow runs in progress: write the page anew as they go on.")
    ] = False,
    json_: Json = False,
) -> None:
    """Make one HTML page of runs that works offline: curves, clients, results, plan and configuration."""
    from tdpfed.report import Report, follow, write_page
    from tdpfed.report import export as write_exports

    told: set[str] = set()

    def tell(made: Report) -> None:
        follows = [f"following the run in {made.page}; Ctrl-C ends that"] if watch and made.running else []
        for note in [note for note in [*made.notes, *follows] if note not in told]:
            told.add(note)
            print(f"note: {note}", file=sys.stderr)  # noqa: T201

    made = follow(runs, out, tell) if watch else write_page(runs, out)
    tell(made)
    files = [] if export is None else write_exports(made.groups, export)
    if json_:
        _print_json({"page": str(made.page), "files": [str(file) for file in files], "notes": list(made.notes)})
    else:
        typer.echo(f"{made.page}" + (f", and {len(files)} files in {export}" if files else ""))


@data.command("list")
def data_list(data_root: DataRoot = None, json_: Json = False) -> None:
    """List the data sets: samples, shape, classes, and where they lie."""
    from tdpfed.data import available

    listings = available(data_root)
    if json_:
        _print_json(
            {name: {**asdict(entry), "path": entry.path and str(entry.path)} for name, entry in listings.items()}
        )
        return
    table = Table("data set", "samples", "shape", "classes", "where")
    for name, entry in listings.items():
        where = "embedded" if entry.embedded else str(entry.path or "not here; tdpfed data get " + name)
        samples = "-" if entry.samples is None else f"{entry.samples:,}"
        table.add_row(name, samples, "x".join(map(str, entry.shape)), str(entry.classes), where)
    Console().print(table)


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set of `tdpfed data list`.")],
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Find a data set or download it with a checksum, and read it once."""
    from tdpfed.data import load

    found = load(name, data_root)
    result = {"name": found.name, "samples": len(found.y), "shape": found.x.shape[1:], "classes": found.classes}
    if json_:
        _print_json(result)
    else:
        Console().print(", ".join(f"{key} {value}" for key, value in result.items()))


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value))


def _pair(option: str, text: str) -> tuple[str, int]:
    pattern, equals, number = text.partition("=")
    if not (pattern and equals):
        raise TDPFedError(f"{option}: {text!r} given, must be PATTERN=R, as in 'conv*=16'")
    return pattern, _whole(option, number)


def _whole(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TDPFedError(f"{option}: {text!r} given, must be a whole number") from None
