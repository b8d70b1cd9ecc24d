"""The command line: thin, it turns arguments into calls of the library and results into tables or JSON.

``--json`` prints one JSON object as the last line of standard output and nothing else there. Bad input is one line on
standard error and exit status 2.
"""

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import tdpfed
from tdpfed.errors import TDPFedError

app = typer.Typer(
    name="tdpfed", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Communication-efficient personalised federated learning: clients keep their models, only CP factors travel.",
)  # fmt: skip


def main() -> None:
    """Run the command line; a :class:`TDPFedError` becomes a line on standard error and exit status 2."""
    sys.path.insert(0, "")  # as `python -m` does, so that package.module:factory finds the user's own files
    try:
        app()
    except TDPFedError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


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
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A model of the package (dnn, vgg8, ...) or your own as package.module:factory."
        ),
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
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
) -> None:
    """Show ranks, parameter counts and compression rate of each layer (the paper's Table I)."""
    from tdpfed.models import from_spec
    from tdpfed.plan import FactorPlan

    shape = None if input_shape is None else [_whole("--input-shape", size) for size in input_shape.split(",")]
    ranks = dict(_pair("--rank", text) for text in rank or [])
    made = FactorPlan.of(
        from_spec(model, shape, classes), compression, ranks=ranks, include=include or ("*",), exclude=exclude or ()
    )
    rows = made.rows()
    total = {"dense": made.dense.size, "factored": made.factors.size, "rate": made.compression_rate}
    if json_:
        layers = [
            {key: getattr(row, key) for key in ("name", "shape", "rank", "dense", "factored", "rate")} for row in rows
        ]
        _print_json({"model": model, "compression": compression, "layers": layers, "total": total})
        return
    table = Table(title=f"{model}, compression {compression:g}", caption="rank -: the parameter stays dense")
    for column in ("parameter", "shape", "rank", "dense", "factored", "rate"):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    for row in rows:
        size = "x".join(map(str, row.shape))
        table.add_row(row.name, size, str(row.rank or "-"), f"{row.dense:,}", f"{row.factored:,}", f"{row.rate:.2f}")
    table.add_section()
    table.add_row("total", "", "", f"{total['dense']:,}", f"{total['factored']:,}", f"{total['rate']:.2f}")
    Console().print(table)


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
