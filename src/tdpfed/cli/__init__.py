"""The command line: it turns arguments into library calls and results into tables or JSON.

``--json`` prints one JSON object to standard output and nothing else there. Invalid input prints one line for each
error to standard error and exits with status 2.
"""

import os
import sys
from typing import Annotated

import typer

import tdpfed
from tdpfed.cli import data, flower, models, reproduce, runs, tools, tune
from tdpfed.cli.base import app
from tdpfed.errors import TDPFedError, each

__all__ = ["app", "data", "flower", "main", "models", "reproduce", "runs", "tools", "tune"]


def main() -> None:
    """Run the command line; a :class:`TDPFedError` becomes lines on standard error and exit status 2."""
    try:
        app(prog_name="tdpfed")
    except TDPFedError as error:
        _fail(*map(str, each(error)))
    except (MemoryError, RuntimeError) as error:  # PyTorch may report exhausted memory as a RuntimeError
        import torch

        if "allocate" not in str(error) and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        _fail(f"out of memory ({str(error).splitlines()[0] if str(error) else 'no details given'})")


def _fail(*messages: str) -> None:
    for message in messages:
        print("error:", " ".join(message.splitlines()), file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"tdpfed {tdpfed.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version
    if "TORCHELASTIC_RUN_ID" not in os.environ or context.invoked_subcommand == "run":
        return
    from tdpfed.engine.processes import under_torchrun

    if under_torchrun():
        raise TDPFedError(f"torchrun: {context.invoked_subcommand!r} given, must be 'run' in several processes")
