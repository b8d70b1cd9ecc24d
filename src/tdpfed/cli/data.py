"""Commands about data: the data sets, and the federation that a configuration makes of one."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tdpfed.cli.base import DataRoot, Json, Set, Source, app, find_code_of, print_json

if TYPE_CHECKING:
    from tdpfed.runs.data_card import DataCard

MOST_COLUMNS = 20
"""Most classes that each have a column of their own."""
MOST_NAMED = 5
"""Most classes that are named for a client if there are more."""

data = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="List data sets, download one, or show who has which samples."
)
app.add_typer(data, name="data")


@data.command("list")
def data_list(data_root: DataRoot = None, json_: Json = False) -> None:
    """List the data sets: samples, shape, classes and location."""
    from tdpfed.cli.display import show
    from tdpfed.data import available

    listings = available(data_root)
    if json_:
        print_json(
            {name: {**asdict(entry), "path": entry.path and str(entry.path)} for name, entry in listings.items()}
        )
        return
    table = Table("data set", "samples", "shape", "classes", "location")
    for name, entry in listings.items():
        where = "embedded" if entry.embedded else str(entry.path or "not found; tdpfed data get " + name)
        samples = "-" if entry.samples is None else f"{entry.samples:,}"
        table.add_row(name, samples, "x".join(map(str, entry.shape)), str(entry.classes), where)
    show(table)


@data.command("get")
def data_get(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set listed by `tdpfed data list`.")],
    data_root: DataRoot = None,
    json_: Json = False,
) -> None:
    """Find a data set, or download it and verify its checksum; then check that it can be read."""
    from tdpfed.data import load

    found = load(name, data_root)
    result = {"name": found.name, "samples": len(found.y), "shape": found.x.shape[1:], "classes": found.classes}
    if json_:
        print_json(result)
    else:
        Console().print(", ".join(f"{key} {value}" for key, value in result.items()))


@data.command("show")
def data_show(source: Source = None, set_: Set = None, data_root: DataRoot = None, json_: Json = False) -> None:
    """Show the clients of a configuration: their ids, their samples, and how many each has of which class."""
    from tdpfed.config import load_config
    from tdpfed.runs.data_card import DataCard
    from tdpfed.runs.prepare import federation_of

    find_code_of(source or "digits", set_)
    card = DataCard.of(federation_of(load_config(source or "digits", set_), data_root))
    if json_:
        sizes = zip(card.ids, card.train_size, card.test_size, strict=True)
        clients: list[dict[str, Any]] = [{"id": name, "train": train, "test": test} for name, train, test in sizes]
        for client, counts in zip(clients, card.class_counts, strict=False):  # no counts without classes
            client["classes"] = counts
        print_json({"name": card.name, "shape": card.input_shape, "classes": card.labels, "clients": clients})
        return
    shape, samples = "x".join(map(str, card.input_shape)), sum(card.train_size + card.test_size)
    typer.echo(f"{card.name}: {len(card.ids):,} clients, {samples:,} samples of {shape}")
    console = Console()
    Console(width=console.width if console.is_terminal else 10_000).print(_clients_table(card))


def _clients_table(card: "DataCard") -> Table:
    """Return a row for each client, with a column for each class or, if there are many, its most frequent ones."""
    few = bool(card.class_counts) and card.classes <= MOST_COLUMNS
    table = Table("client", box=SIMPLE_HEAD)
    for column in ("train", "test", *(card.labels if few else ["classes"] if card.class_counts else [])):
        table.add_column(_plain(column), justify="right")
    if card.class_counts and not few:
        table.add_column("most frequent")
    for k, (name, train, test) in enumerate(zip(card.ids, card.train_size, card.test_size, strict=True)):
        counts = card.class_counts[k] if card.class_counts else ()
        table.add_row(_plain(name), f"{train:,}", f"{test:,}", *(_each(counts) if few else _most(counts, card.labels)))
    table.add_section()
    totals = [sum(column) for column in zip(*card.class_counts, strict=True)]
    sizes = f"{sum(card.train_size):,}", f"{sum(card.test_size):,}"
    table.add_row("all", *sizes, *(_each(totals) if few else _most(totals, card.labels)))
    return table


def _each(counts: Sequence[int]) -> list[str]:
    return [f"{n:,}" if n else "-" for n in counts]


def _most(counts: Sequence[int], labels: Sequence[str]) -> list[str]:
    """Return how many classes there are, and the most frequent ones; nothing without counts."""
    if not counts:
        return []
    order = sorted((i for i, n in enumerate(counts) if n), key=lambda i: -counts[i])
    named = ", ".join(f"{_plain(labels[i])}: {counts[i]:,}" for i in order[:MOST_NAMED])
    return [str(len(order)), named + (", ..." if len(order) > MOST_NAMED else "")]


def _plain(text: str) -> str:
    """Return a name from a file as it may be shown in a terminal."""
    return escape("".join(one if one.isprintable() else repr(one)[1:-1] for one in text))
