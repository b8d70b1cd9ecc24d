"""Commands that show information: configuration keys, presets, factor plans."""

import json
import tomllib
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from tdpfed.cli.base import Json, app, find_own_code, print_json
from tdpfed.errors import TDPFedError

LEAST_COMPRESSION = 1e-6
"""A smaller rate is none: already at 1 and below every parameter stays dense."""


@app.command()
def keys(
    algorithm: Annotated[
        str | None,
        typer.Argument(
            metavar="[ALGORITHM]", help="List the hyper-parameters of this method; your own as package.module:Class."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List every key of the configuration, one per line: default, meaning and allowed values."""
    from tdpfed.algorithms import DEFAULT
    from tdpfed.cli.display import hanging
    from tdpfed.config.keys import describe

    find_own_code(algorithm or "")
    found = describe(algorithm or DEFAULT)
    if json_:
        print_json(
            {key.name: {"allowed": key.allowed, "default": key.default, "meaning": key.meaning} for key in found}
        )
        return
    defaults = ["not set" if key.default is None else json.dumps(key.default) for key in found]
    widths = [max(map(len, column)) for column in ([key.name for key in found], defaults)]
    for key, default in zip(found, defaults, strict=True):
        hanging(f"{key.name:{widths[0]}}  {default:{widths[1]}}  {key.meaning} [{key.allowed}]", sum(widths) + 4)


@app.command()
def preset(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of a preset; all are listed without one.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print a preset as TOML, as the start of your own file; or list the presets."""
    from tdpfed.cli.display import show
    from tdpfed.config import preset_text, presets

    if name is not None:
        text = preset_text(name)
        return print_json(tomllib.loads(text)) if json_ else typer.echo(text, nl=False)
    about = {one: preset_text(one).partition("\n")[0].removeprefix("# ") for one in presets()}
    if json_:
        return print_json(about)
    table = Table("preset", "description")
    for one, description in about.items():
        table.add_row(one, escape(description))
    return show(table)


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="dnn, vgg8, ... or your own as package.module:factory.")
    ],
    compression: Annotated[float, typer.Option(help="Compression rate that determines the ranks.")] = 2.0,
    rank: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=R", help="Explicit rank of the matching parameters; repeatable."),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Factorize only matching parameters; repeatable.")
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
    import torch

    from tdpfed.cli.display import plan_table, show
    from tdpfed.cp.plan import FactorPlan
    from tdpfed.models import from_spec

    shape = None if input_shape is None else [_whole("--input-shape", size) for size in input_shape.split(",")]
    ranks = dict(_pair("--rank", text) for text in rank or [])
    find_own_code(model)
    # Shapes are enough, but a user's own factory may need real tensors.
    with torch.device("cpu" if ":" in model else "meta"):
        built = from_spec(model, shape, classes)
    if 0 < compression < LEAST_COMPRESSION:
        raise TDPFedError(f"--compression: {compression:g} given, must be at least {LEAST_COMPRESSION:g}")
    made = FactorPlan.of(built, compression, ranks=ranks, include=include or ("*",), exclude=exclude or ())
    if not json_:
        show(plan_table(made, f"{model}, compression {compression:g}"))
        return
    keys = ("name", "shape", "rank", "dense", "factored", "rate")
    print_json(
        {
            "model": model,
            "compression": compression,
            "layers": [{key: getattr(row, key) for key in keys} for row in made.rows()],
            "total": {"dense": made.dense.size, "factored": made.factors.size, "rate": made.compression_rate},
        }
    )


def _pair(option: str, text: str) -> tuple[str, int]:
    pattern, equals, number = text.partition("=")
    if not (pattern and equals):
        raise TDPFedError(f"{option}: {text!r} given, must be PATTERN=R, as in 'conv*.weight=16'")
    return pattern, _whole(option, number)


def _whole(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise TDPFedError(f"{option}: {text!r} given, must be a whole number") from None
