"""What the commands share: the app, options that several take, and how they speak."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

# Help is plain text here; typer before 0.21, which Flower asks for, would put marks for rich into it all the same.
typer.core.HAS_RICH = False

app = typer.Typer(
    name="tdpfed", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    help="Communication-efficient personalised federated learning: clients keep their models, only CP factors travel.",
)  # fmt: skip

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[PRESET or FILE.toml]",
        help="digits (default), mnist, mnist-paper, cifar10-paper, qmnist-writers, or your own TOML file.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the configuration; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
DataRoot = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where data sets lie; then $TDPFED_DATA and the user cache.")
]


def find_own_code(*names: str) -> None:
    """Let ``package.module:name`` be found in the working directory, after everything that is installed."""
    if any(":" in name for name in names):
        search_here()


def search_here() -> None:
    """Look for modules in the working directory, too, after everything that is installed."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def find_code_of(source: str, overrides: Sequence[str] | None = None) -> None:
    """Let the methods and the model that a configuration names as ``package.module:name`` be found likewise."""
    from tdpfed.config.loading import own_code, raw_config

    find_own_code(*own_code(raw_config(source, overrides)))


def tell(lines: Iterable[str]) -> None:
    """Say something on standard error."""
    for line in lines:
        print(line, file=sys.stderr)  # noqa: T201


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on standard output."""
    typer.echo(json.dumps(value))
