"""What the commands share: the app, common options, and output."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

# Help is plain text; without this, typer before 0.21, which Flower requires, would insert rich markup into it.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="tdpfed", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Communication-efficient personalized federated learning: clients keep their models and upload CP factors.",
)  # fmt: skip

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[PRESET or FILE.toml]",
        help="digits (default), mnist, robust-recommended or another that tdpfed preset lists, or your own TOML file.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a value of the configuration, or take it back with nothing after =; repeatable.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DataRoot = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Searched first for data sets, before $TDPFED_DATA and the user cache."),
]


def find_own_code(*names: str) -> None:
    """Search the working directory for ``package.module:name``, after installed packages."""
    if any(":" in name for name in names):
        search_here()


def search_here() -> None:
    """Search the working directory for modules, after installed packages."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def find_code_of(source: str, overrides: Sequence[str] | None = None) -> None:
    """Search the working directory for methods and models that a configuration names as ``package.module:name``."""
    from tdpfed.config.loading import own_code, raw_config

    find_own_code(*own_code(raw_config(source, overrides)))


def print_stderr(lines: Iterable[str]) -> None:
    """Print lines on standard error."""
    for line in lines:
        print(line, file=sys.stderr)  # noqa: T201


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    typer.echo(json.dumps(value))
