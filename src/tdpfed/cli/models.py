"""Commands that take trained models out of run folders, and bring new clients in."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tdpfed.cli.base import Json, app, print_json, search_here
from tdpfed.errors import TDPFedError, raise_all, wrong

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder with a checkpoint.")]
Format = Annotated[
    str, typer.Option("--format", metavar="safetensors|onnx", help="Parameters with metadata, or the computation.")
]


@app.command()
def export(
    run: Run,
    client: Annotated[
        str | None, typer.Option(metavar="ID", help="The personalized model of this client, by the id in your data.")
    ] = None,
    global_: Annotated[bool, typer.Option("--global", help="The server's model.")] = False,
    format_: Format = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The file; RUN/global.FORMAT or RUN/client-ID.FORMAT by default."),
    ] = None,
    json_: Json = False,
) -> None:
    """Write a trained model into a file, with the normalization of its data and the names of its classes.

    An ONNX file takes raw inputs. A safetensors file holds the parameters, and what is needed to use them.
    """
    from tdpfed.runs.export import FORMATS
    from tdpfed.runs.trained import load_run

    if (client is None) != global_:
        raise TDPFedError("give --client ID or --global: which model, and not both", field="tdpfed export")
    format_ = _format(format_, FORMATS)
    search_here()
    found = load_run(run)
    file = found.export(_file(run, client, format_, out), client=client, format=format_)  # type: ignore[arg-type]
    if json_:
        print_json({"file": str(file), "client": client, "format": format_, "round": found.round})
    else:
        typer.echo(str(file))


@app.command()
def personalize(
    run: Run,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="The new client's samples: x and y in an .npz or .parquet file.")
    ],
    rounds: Annotated[int, typer.Option(help="Rounds of the method's local work.")] = 10,
    test_fraction: Annotated[
        float, typer.Option(help="Samples held out to measure the accuracy, unless the file has a test_mask.")
    ] = 0.25,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the held-out samples and minibatches; the run's by default.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="algorithm.KEY=VALUE", help="Another hyper-parameter than the run's; repeatable."
        ),
    ] = None,
    format_: Format = "safetensors",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model; new-NAME-OF-DATA.FORMAT in RUN by default.")
    ] = None,
    json_: Json = False,
) -> None:
    """Train a model for a client that was not in training, and show how good it is before and after.

    It starts from the server's model and takes rounds of the method's local work; nothing is uploaded.
    """
    from tdpfed.cli.display import show
    from tdpfed.data import load
    from tdpfed.runs.export import FORMATS, check_format, metadata, write_model
    from tdpfed.runs.progress import shown
    from tdpfed.runs.trained import load_run

    if Path(data).suffix not in (".npz", ".parquet"):
        raise wrong("DATA", data, "a path ending in .npz or .parquet")
    format_ = _format(format_, FORMATS)
    check_format(format_)
    search_here()
    found = load_run(run)
    samples = load(data, classes=found.card.classes)
    owners = [] if samples.owner is None else sorted(set(map(str, samples.owner.tolist())))
    if len(owners) > 1:
        raise wrong("DATA", data, f"of one client; it has samples of {len(owners)}: {', '.join(owners[:5])}")
    if samples.class_names and found.class_names and samples.class_names != found.class_names:
        raise wrong("class_names", list(samples.class_names), f"those of the run: {', '.join(found.class_names)}")
    made = found.personalize(
        samples.x, samples.y, rounds=rounds, test_mask=samples.official_test, test_fraction=test_fraction, seed=seed,
        **_hyper(set_ or []),
    )  # fmt: skip
    client = owners[0] if owners else Path(data).stem
    file = out or _file(run, client, format_, None, "new")
    about = metadata(found.settings, found.card, found.round, client)
    write_model(made.model, file, about, format_)  # type: ignore[arg-type]
    values = {
        "client": client, "start": made.start, "metric": made.metric, "before": made.before, "after": made.after,
        "train_samples": made.train_samples, "test_samples": made.test_samples, "rounds": made.rounds,
        "file": str(file),
    }  # fmt: skip
    if json_:
        print_json(values)
        return
    table = Table(title=f"{found.settings.method.name} for {client}", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(f"{made.metric} before", f"{shown(made.before, made.metric)} ({made.start} model)")
    table.add_row(f"{made.metric} after", f"{shown(made.after, made.metric)} ({made.rounds} rounds)")
    table.add_row("samples", f"{made.train_samples} to train, {made.test_samples} held out")
    table.add_row("model", str(file))
    show(table)


def _format(given: str, allowed: tuple[str, ...]) -> str:
    if given not in allowed:
        raise wrong("--format", given, " or ".join(allowed), allowed)
    return given


def _file(run: Path, client: str | None, format_: str, out: Path | None, kind: str = "client") -> Path:
    from tdpfed.runs.folder import file_name

    return out or run / f"{'global' if client is None else f'{kind}-{file_name(client)}'}.{format_}"


def _hyper(overrides: list[str]) -> dict[str, Any]:
    """Return hyper-parameters given as ``algorithm.key=value``."""
    from tdpfed.config.loading import value_of

    found, errors = dict[str, Any](), []
    for text in overrides:
        key, equals, raw = text.partition("=")
        section, _, name = key.strip().partition(".")
        if not equals or section != "algorithm" or not name or name == "name":
            errors.append(wrong("--set", text, "algorithm.key=value, as in algorithm.tau=50"))
        found[name] = value_of(raw)
    raise_all(errors)
    return found
