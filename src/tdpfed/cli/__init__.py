"""The command line: thin, it turns arguments into calls of the library and results into tables or JSON.

``--json`` prints one JSON object as the last line of standard output and nothing else there. Bad input is a line on
standard error for each mistake, and exit status 2.
"""

import os
import sys
from typing import Annotated

import typer

import tdpfed
from tdpfed.cli import flower, runs, tools
from tdpfed.cli.base import app
from tdpfed.errors import TDPFedError, each

__all__ = ["app", "flower", "main", "runs", "tools"]


def main() -> None:
    """Run the command line; a :class:`TDPFedError` becomes lines on standard error and exit status 2."""
    try:
        app(prog_name="tdpfed")
    except TDPFedError as error:
        _fail(*map(str, each(error)))
    except (MemoryError, RuntimeError) as error:  # PyTorch's own error for a full memory is a RuntimeError
        import torch

        if "allocate" not in str(error) and not isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        _fail(f"out of memory ({str(error).splitlines()[0] if str(error) else 'no more to be had'})")


def _fail(*messages: str) -> None:
    for message in messages:
        print("error:", " ".join(message.splitlines()), file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
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
    from tdpfed.engine.ranks import under_torchrun

    if under_torchrun():
        raise TDPFedError(f"torchrun: {context.invoked_subcommand!r} given, in several processes only 'run' works")
