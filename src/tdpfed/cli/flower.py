"""Commands for deployment on Flower: a new app, keys, the services, and a complete federation on one machine."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tdpfed.cli.base import Json, Set, app, find_own_code, print_json, print_stderr
from tdpfed.errors import TDPFedError

flower = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    help="Deploy on Flower: create an app or keys, start services, or run a federation on this machine.",
)  # fmt: skip
app.add_typer(flower, name="flower")

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
Runtime = Annotated[
    Path,
    typer.Option(
        metavar="DIR", help="Folder for the service's own secrets, made anew whenever it starts; one for each."
    ),
]


@flower.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder; the app is named after it.")],
    json_: Json = False,
) -> None:
    """Create a Flower app: task.py for your model and data, and a configuration; works offline."""
    _require_flower()
    from tdpfed.flower.app import init_app

    files = init_app(folder)
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files]})
        return
    typer.echo("\n".join(str(file) for file in files))
    options = shlex.join(["--app", str(folder), "--node-config", "data=/PATH/TO/node-{partition-id}.npz"])
    print_stderr([f"next: edit task.py, then try it here with: tdpfed flower demo {options}"])


@flower.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder for keys and certificates.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes, each with a key pair.")] = 3,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Host name or address of the SuperLink, in addition to loopback; repeatable."
        ),
    ] = None,
    days: Annotated[int, typer.Option(help="Days that the certificates are valid.")] = 365,
    json_: Json = False,
) -> None:
    """Create a certificate authority, a server certificate, an operator's key and node keys for a trial federation."""
    _require_flower()
    from tdpfed.flower.keys import make_keys

    files = make_keys(folder, nodes, host or (), days)
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files]})
        return
    typer.echo("\n".join(str(file) for file in files))
    print_stderr([
        "keep server.key and operator.key on the server, node-K.key on node K, and ca.key on neither; every node needs "
        "ca.pem; who has operator.key can run code on every node",
        f"register a node: flwr supernode register {folder / 'node-0.pub'}",
    ])  # fmt: skip


@flower.command(context_settings=PASSED_ON)
def superlink(
    context: typer.Context,
    runtime: Runtime,
    operator: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The operator's key: operator.key of tdpfed flower keys.")
    ] = None,
    open_: Annotated[
        bool,
        typer.Option("--open", help="Instead of --operator: whoever reaches the port can run code on every node."),
    ] = False,
) -> None:
    """Start a SuperLink that runs apps for the operator only; all other options are those of flower-superlink."""
    _require_flower()
    from tdpfed.flower.guard import superlink_command

    if (operator is None) != open_:
        raise TDPFedError("--operator: must be given, or --open instead of it")
    _become(superlink_command(runtime, operator, context.args))


@flower.command(context_settings=PASSED_ON)
def supernode(context: typer.Context, runtime: Runtime) -> None:
    """Start a SuperNode that gives tasks to its own apps only; all other options are those of flower-supernode."""
    _require_flower()
    from tdpfed.flower.guard import supernode_command

    _become(supernode_command(runtime, context.args))


@flower.command()
def login(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the SuperLink, as in Flower's config.toml.")
    ],
    operator: Annotated[Path, typer.Option(metavar="FILE", help="The operator's key.")],
) -> None:
    """Let Flower's commands (flwr run, flwr supernode register, ...) send the operator's key to a SuperLink."""
    _require_flower()
    from flwr.supercore.utils import get_flwr_home

    from tdpfed.flower.guard import log_in

    typer.echo(str(log_in(address, operator, get_flwr_home())))


@flower.command()
def demo(
    nodes: Annotated[
        int | None, typer.Option(help="Number of SuperNodes, each a client; 3 by default, or the app's value.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds; 3 by default, or the app's value.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The method, as in tdpfed compare; by default that of tdpfed keys, or the app's value.",
        ),
    ] = None,
    set_: Set = None,
    own: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="Your own app, made by tdpfed flower init, instead of the digits."),
    ] = None,
    node_config: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE...",
            help="With --app: the configuration of each node; {partition-id} is replaced by its number.",
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for all files; runs/flower-ALGORITHM-TIME by default.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Run without TLS and node authentication. For comparison only.")
    ] = False,
    json_: Json = False,
) -> None:
    """Run a federation on this machine: a SuperLink and SuperNodes as real processes, with TLS and authentication."""
    _require_flower()
    from tdpfed.cli.display import summary_table
    from tdpfed.flower.demo import plan, run_demo
    from tdpfed.runs.progress import percent

    find_own_code(algorithm or "")
    planned = plan(out, nodes, rounds, algorithm, set_ or (), own, node_config, insecure)
    work = planned.work
    try:
        with _progress(planned.rounds) as (notify, on_round):
            summary = run_demo(planned, notify, on_round)
    except KeyboardInterrupt:
        print_stderr([f"interrupted; all processes are stopped, logs are in {work / 'logs'}"])
        raise typer.Exit(130) from None
    if json_:
        print_json({**summary, "folder": str(planned.run)})
    else:
        Console().print(summary_table(summary, str(planned.run)))
        print_stderr([f"run folder: {planned.run}"])  # a narrow table would break the line
    speed = summary["rounds_per_minute"]
    if speed is not None:
        own_code = f"{percent(summary['own_share'])} of the time in tdpfed's own code, without imports"
        print_stderr([f"{speed:.1f} rounds per minute without evaluations, {own_code}"])
    if own is None:
        print_stderr([f"personalized models: {work}/node-K/state", f"the same in simulation: {planned.same}"])
    if summary["status"] != "finished":
        print_stderr([f"the run {summary['status']}: {summary['error']} (logs in {work / 'logs'})"])
        raise typer.Exit(1)


@contextmanager
def _progress(rounds: int) -> Iterator[tuple[Callable[[str], None], Callable[[Mapping[str, Any]], None]]]:
    """Show a bar on a terminal, lines elsewhere; yield functions to call with a notice and after each round."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rounds", total=rounds, state="")

        def notify(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        def on_round(line: Mapping[str, Any]) -> None:
            lost = f", {len(line['lost'])} lost" if line["lost"] else ""
            refused = f", {len(line['refused'])} refused" if line["refused"] else ""
            state = f"{line['replies']} replies{lost}{refused}, {line['seconds']:.1f} s"
            bar.update(task, completed=line["round"], state=state)
            if not console.is_terminal:
                notify(f"round {line['round']} of {rounds}: {state}")

        yield notify, on_round


def _become(command: list[str]) -> None:
    """Replace this process by a service of Flower's; a child of it starts its apps."""
    from tdpfed.flower.guard import search_path

    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, "PATH": search_path()})


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise TDPFedError("flower: Flower is not installed, must be: pip install 'tdpfed[flower]'")
