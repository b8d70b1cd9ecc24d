"""Configuration: TOML in sections, checked strictly, from a preset or a file with single values overridden.

An ``[algorithm]`` table names the method and sets its hyper-parameters. A file may also hold ``[algorithms.NAME]``
tables: settings that count only when that method is chosen, so that one file serves several methods side by side.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin, get_type_hints

import torch
from pydantic import Field, create_model

from tdpfed.algorithms import ALGORITHMS, Algorithm
from tdpfed.algorithms.base import check_hyper
from tdpfed.config.errors import checked
from tdpfed.config.sections import Engine, Section
from tdpfed.errors import TDPFedError, raise_all, unknown


class Run(Section):
    """How long and where to run."""

    rounds: int = Field(50, ge=1, description="communication rounds")
    seed: int = Field(0, ge=0, lt=2**63, description="every random draw follows from it")
    seeds: int = Field(
        1, ge=1, le=1000, description="how many runs, with seeds from run.seed on; on a GPU they are computed together"
    )
    evaluate_every: int = Field(1, ge=1, description="evaluate after every so many rounds, and after the last")
    evaluate_clients: int | None = Field(None, ge=1, description="evaluate only so many clients, drawn by the seed")
    diagnostics_every: int = Field(0, ge=0, description="measure the paper's convergence quantities; 0: never")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU if there is one")
    runner: Literal["batched", "loop"] = Field("batched", description="all clients at once, or one after another")
    threads: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: all, but one where the model is too small to share"
    )
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="clients computed together, on a CPU by each thread; auto: as many as fit"
    )
    precision: Literal["float32", "tf32", "bf16"] = Field(
        "float32",
        description="how matrices are multiplied; tf32: on a GPU with 10 bits, bf16: the model's own layers with 7",
    )
    loggers: list[Literal["tensorboard", "mlflow"]] = Field([], description="where else records go, as a list")


class Data(Section):
    """Which data, and how they are dealt to clients."""

    name: str = Field("digits", description="a data set of the package, or a path to an .npz or .parquet file")
    options: dict[str, Any] = Field({}, description="options of the data set, as alpha and beta of synthetic")
    clients: int | None = Field(None, ge=1, description="number of clients; 20, or all natural ones")
    partition: Literal["iid", "classes", "classes-in-turn", "dirichlet", "natural"] | None = Field(
        None,
        description="how samples are dealt; natural where the data have clients, otherwise classes, drawn at random",
    )
    per_client: int = Field(2, ge=1, description="classes and classes-in-turn: how many classes a client holds")
    alpha: float = Field(0.5, gt=0, le=1e6, description="dirichlet: concentration; smaller is less alike")
    size_skew: float | None = Field(
        None, ge=0, le=10, description="iid, classes and classes-in-turn: how unequal the shares are; 0 is equal"
    )
    min_samples: int = Field(1, ge=1, description="least number of samples per client")
    max_samples: int | None = Field(None, ge=2, description="cap on samples per client, to study scarce data")
    split: Literal["client", "official"] | None = Field(
        None, description="hold out a part of each client, or the official one; a file's own test_mask if it has one"
    )
    test_fraction: float = Field(0.25, gt=0, lt=1, description="client split: share held out")
    normalize: Literal["standard", "feature", "unit", "none"] = Field(
        "standard",
        description="scaling of the inputs: mean 0, variance 1 by channel (standard) or pixel (feature); unit: 0 to 1",
    )
    augment: Literal["none", "flip", "flip-shift"] = Field(
        "none", description="training images as they are drawn: mirrored at random, and moved by up to 4 pixels"
    )
    seed: int | None = Field(None, ge=0, description="seed of the partition; run.seed by default")


class Model(Section):
    """Which model the clients train."""

    name: str = Field("dnn", description="a model of the package, or your own as package.module:factory")


class Participation(Section):
    """Who takes part in a round."""

    clients: int | None = Field(None, ge=1, description="clients chosen per round; all by default")
    sampling: Literal["fixed", "poisson"] = Field(
        "fixed", description="exactly so many, or each client by itself with the same chance, so many on average"
    )
    train: Literal["all", "selected"] = Field(
        "selected", description="whether the others train too, or only the chosen"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that a chosen client is lost for the round")
    quorum: int = Field(0, ge=0, description="accepted uploads a round needs")
    below_quorum: Literal["repeat", "stop"] = Field(
        "repeat", description="what happens to a round with too few: tried again with other draws, or the run stops"
    )
    attempts: int = Field(10, ge=1, le=10**6, description="how often a round is tried in all before the run stops")


class Wire(Section):
    """How uploads travel."""

    codec: Literal["float32", "float16", "bfloat16", "int8"] = Field(
        "float32", description="numbers of an upload; int8 has a scale per factor column and rounds at random"
    )


class Robust(Section):
    """What the server does against bad uploads, and which it meets in simulation."""

    name: Literal["mean", "median", "trimmed-mean", "krum", "multi-krum"] = Field("mean", description="how to average")
    fraction: float = Field(0.2, ge=0, lt=0.5, description="trimmed-mean: share cut at each end of every coordinate")
    byzantine: int = Field(1, ge=0, description="krum and multi-krum: how many clients may be bad")
    keep: int | None = Field(None, ge=1, description="multi-krum: how many uploads are averaged; all but the bad ones")
    clip: Annotated[float, Field(gt=0)] | Literal["median"] | None = Field(
        None, description="longest update let through; median: that of the clients' updates"
    )
    gauge: float | None = Field(None, gt=0, description="longest relative distance of a factor from the broadcast one")
    attack: Literal["sign-flip", "noise", "scale", "label-flip", "alie", "gauge"] | None = Field(
        None, description="what hostile clients do in simulation"
    )
    attack_fraction: float = Field(0.2, ge=0, le=1, description="share of the clients that is hostile")
    attack_strength: float | None = Field(None, gt=0, description="how strong the attack is; its own by default")


class Privacy(Section):
    """Client-level differential privacy; on where clip and noise are given."""

    clip: float | None = Field(None, gt=0, description="longest update of a client, in the Euclidean norm")
    noise: float | None = Field(
        None, ge=1e-3, le=1e6, description="noise multiplier: deviation of the sum's noise over the clip"
    )
    delta: float = Field(1e-5, ge=1e-10, lt=1, description="chance that epsilon does not hold")
    epsilon: float | None = Field(None, gt=0, description="budget: the run ends before it is exceeded")


class Checkpoint(Section):
    """How a run survives being killed."""

    every: int = Field(10, ge=0, description="save the state after every so many rounds, and after the last; 0: never")
    keep: int = Field(2, ge=1, description="how many of the newest checkpoints to keep")


class Config(Section):
    """A whole configuration."""

    run: Run = Run()
    data: Data = Data()
    model: Model = Model()
    algorithm: dict[str, Any] = Field({})
    participation: Participation = Participation()
    wire: Wire = Wire()
    robust: Robust = Robust()
    privacy: Privacy = Privacy()
    checkpoint: Checkpoint = Checkpoint()
    engine: Engine = Engine()

    def make_algorithm(self) -> Algorithm:
        """Return the chosen algorithm with its hyper-parameters."""
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in self.algorithm.items() if name != "name"}
        try:
            make: Callable[..., Algorithm] = ALGORITHMS[self.algorithm["name"]]
            return make(**values)
        except TDPFedError as error:
            raise TDPFedError(f"algorithm.{error}") from None

    def device(self) -> torch.device:
        """Return where to compute."""
        if self.run.device == "cuda" and not torch.cuda.is_available():
            raise TDPFedError("run.device: 'cuda' given, but PyTorch sees no GPU; allowed here: auto, cpu")
        wanted = "cuda" if self.run.device == "auto" and torch.cuda.is_available() else self.run.device
        return torch.device("cpu" if wanted == "auto" else wanted)


def presets() -> list[str]:
    """Return the names of the presets."""
    folder = resources.files("tdpfed.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_config(source: str = "digits", overrides: list[str] | None = None) -> Config:
    """Read a preset by name or a TOML file by path, apply ``section.key=value`` overrides, and check it all."""
    values = _overridden(_read(source), overrides)
    if source in presets() and values["data"].get("name") != _read(source)["data"]["name"]:
        # What a preset says of its own data set does not fit another one.
        values = _overridden({**_read(source), "data": {}}, overrides)
    return parse_config(values)


def preset_text(name: str) -> str:
    """Return a preset as it is written."""
    if name not in presets():
        raise unknown("preset", name, presets())
    return (resources.files("tdpfed.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def parse_config(values: Mapping[str, Any]) -> Config:
    """Check plain nested values, fill in every default, and return the resolved configuration.

    Whatever is wrong is told at once, not only the first of it.
    """
    values = dict(values)
    algorithm = values.pop("algorithm", {})
    tables = values.pop("algorithms", {})
    if not isinstance(algorithm, Mapping) or not isinstance(tables, Mapping):
        raise TDPFedError("algorithm: a single value given, must be a table with a name and hyper-parameters")
    errors: list[TDPFedError] = []
    for name, table in tables.items():
        if name in ALGORITHMS:
            checked(hyper_model(name), table, f"algorithms.{name}", errors)
        else:
            errors.append(unknown("algorithms", name, ALGORITHMS))
    name = algorithm.get("name", "tdpfed")
    hyper: dict[str, Any] = {}
    if not isinstance(name, str) or name not in ALGORITHMS:
        errors.append(unknown("algorithm.name", name, ALGORITHMS))
    elif isinstance(own := tables.get(name, {}), Mapping):
        hyper = _hyper(name, {**own, **{key: value for key, value in algorithm.items() if key != "name"}}, errors)
    config = checked(Config, {**values, "algorithm": {"name": name, **hyper}}, "", errors)
    raise_all(errors)
    assert config is not None
    config.make_algorithm()  # what only the algorithm knows
    return config


def _hyper(name: str, given: dict[str, Any], errors: list[TDPFedError]) -> dict[str, Any]:
    """Return a method's hyper-parameters, all of them; what is wrong with them is added to ``errors``."""
    fields, hints = hyper_model(name).model_fields, get_type_hints(ALGORITHMS[name])
    lists = {key for key, field in fields.items() if get_origin(field.annotation) is tuple}
    given = {key: [value] if key in lists and isinstance(value, str) else value for key, value in given.items()}
    section = checked(hyper_model(name), given, "algorithm", errors)
    if section is None:
        return {}
    for item in ALGORITHMS[name].hyper_parameters():
        try:
            check_hyper(item, hints[item.name], getattr(section, item.name))
        except TDPFedError as error:
            errors.append(TDPFedError(f"algorithm.{error}"))
    return section.model_dump()


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML; keys without a value are left out."""
    lines: list[str] = []
    for section, values in config.model_dump().items():
        lines += [
            f"[{section}]",
            *(f"{key} = {toml_value(value)}" for key, value in values.items() if value is not None),
            "",
        ]
    return "\n".join(lines)


@cache
def hyper_model(name: str) -> type[Section]:
    """Return the ``[algorithm]`` section of a method, its name left out."""
    algorithm = ALGORITHMS[name]
    hints = get_type_hints(algorithm)
    fields: dict[str, Any] = {
        item.name: (
            hints[item.name],
            Field(item.default, description=item.metadata["doc"], strict=_strict(hints[item.name])),
        )
        for item in algorithm.hyper_parameters()
    }
    return create_model(name, __base__=Section, **fields)


def _strict(hint: Any) -> bool | None:
    return False if get_origin(hint) is tuple else None  # TOML has lists only


def _read(source: str) -> dict[str, Any]:
    names = presets()
    if source in names:
        return tomllib.loads(preset_text(source))
    path = Path(source)
    if path.suffix != ".toml":
        raise unknown("preset", source, [*names, "a path ending in .toml"])
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TDPFedError(f"configuration: cannot read {source!r} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TDPFedError(f"configuration: {source!r} is no valid TOML ({error})") from None


def _overridden(values: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    errors: list[TDPFedError] = []
    for override in overrides or []:
        try:
            _override(values, override)
        except TDPFedError as error:
            errors.append(error)
    raise_all(errors)
    return values


def table_at(values: dict[str, Any], sections: Sequence[str], given: str) -> dict[str, Any]:
    """Return the table below nested ``values`` that a key belongs into, made where there is none."""
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise TDPFedError(f"{given} goes below a single value, must be section.key=value")
    return values


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not sections or not all((*sections, name)):
        raise TDPFedError(f"--set: {text!r} given, must be section.key=value, as in run.rounds=60")
    table = table_at(values, sections, f"--set: {key.strip()!r}")
    try:
        table[name] = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        table[name] = raw.strip()  # a bare word is a string


def toml_value(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, dict):
        inner = ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return json.dumps(value, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # the one escape TOML wants and JSON does not
