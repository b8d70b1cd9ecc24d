"""Commands for a deployment on Flower: a new app, keys, and a whole federation on one machine."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tdpfed.cli.base import Json, Set, app, find_own_code, print_json, tell
from tdpfed.errors import TDPFedError

flower = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None,
    help="Deploy on Flower: make an app, keys, or a whole federation on this machine.",
)  # fmt: skip
app.add_typer(flower, name="flower")


@flower.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder; its name is the app's.")],
    json_: Json = False,
) -> None:
    """Make a new Flower app: task.py for your model and data, and a configuration; needs no network."""
    _need_flower()
    from tdpfed.flower.app import init_app

    files = init_app(folder)
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files]})
        return
    typer.echo("\n".join(str(file) for file in files))
    told = shlex.join(["--app", str(folder), "--node-config", "data=/PATH/TO/node-{partition-id}.npz"])
    tell([f"next: change task.py, then try it here with: tdpfed flower demo {told}"])


@flower.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder for keys and certificates.")],
    nodes: Annotated[int, typer.Option(help="How many nodes get a key pair.")] = 3,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Host name or address of the SuperLink, beside loopback; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    json_: Json = False,
) -> None:
    """Make a certificate authority, a server certificate and node keys for a trial federation."""
    _need_flower()
    from tdpfed.flower.keys import make_keys

    files = make_keys(folder, nodes, host or (), days)
    if json_:
        print_json({"folder": str(folder), "files": [str(file) for file in files]})
        return
    typer.echo("\n".join(str(file) for file in files))
    tell([
        "server.key stays on the server, node-K.key on node K, ca.key off both; every node needs ca.pem",
        f"register a node: flwr supernode register {folder / 'node-0.pub'}",
    ])  # fmt: skip


@flower.command()
def demo(
    nodes: Annotated[
        int | None, typer.Option(help="How many SuperNodes, each a client; 3, or with --app as the app has it.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Communication rounds; 3, or with --app as the app has it.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A method as in tdpfed compare; the default of tdpfed keys, or with --app as the app has it.",
        ),
    ] = None,
    set_: Set = None,
    own: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="Your own app, of tdpfed flower init, in place of the digits."),
    ] = None,
    node_config: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUE...", help="With --app: what nodes are told; {partition-id} in a value is each one's own."
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for it all; runs/flower-ALGORITHM-TIME by default.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and node authentication. For comparison only.")
    ] = False,
    json_: Json = False,
) -> None:
    """Run a federation on this machine: a SuperLink and SuperNodes as real processes, with TLS and authentication."""
    _need_flower()
    from tdpfed.cli.display import percent, summary_table
    from tdpfed.flower.demo import plan, run_demo

    find_own_code(algorithm or "")
    asked = plan(out, nodes, rounds, algorithm, set_ or (), own, node_config, insecure)
    work = asked.work
    try:
        with _progress(asked.rounds) as (say, on_round):
            summary = run_demo(asked, say, on_round)
    except KeyboardInterrupt:
        tell([f"interrupted; all processes are ended, logs are in {work / 'logs'}"])
        raise typer.Exit(130) from None
    if json_:
        print_json({**summary, "folder": str(asked.run)})
    else:
        Console().print(summary_table(summary, str(asked.run)))
        tell([f"run folder: {asked.run}"])  # a narrow table breaks it
    speed = summary["rounds_per_minute"]
    if speed is not None:
        own_code = f"{percent(summary['own_share'])} of it in tdpfed's own code, imports apart"
        tell([f"{speed:.1f} rounds per minute without evaluations, {own_code}"])
    if own is None:
        tell([f"personalised models: {work}/node-K/state", f"the same in simulation: {asked.same}"])
    if summary["status"] != "finished":
        tell([f"the run {summary['status']}: {summary['error']} (logs in {work / 'logs'})"])
        raise typer.Exit(1)


@contextmanager
def _progress(rounds: int) -> Iterator[tuple[Callable[[str], None], Callable[[Mapping[str, Any]], None]]]:
    """Show a bar on a terminal, lines elsewhere; yield what to call to say something, and after each round."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("rounds", total=rounds, state="")

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        def on_round(line: Mapping[str, Any]) -> None:
            lost = f", {len(line['lost'])} lost" if line["lost"] else ""
            refused = f", {len(line['refused'])} refused" if line["refused"] else ""
            state = f"{line['replies']} replies{lost}{refused}, {line['seconds']:.1f} s"
            bar.update(task, completed=line["round"], state=state)
            if not console.is_terminal:
                say(f"round {line['round']} of {rounds}: {state}")

        yield say, on_round


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise TDPFedError("flower: needs Flower, which is not installed; pip install 'tdpfed[flower]'")
