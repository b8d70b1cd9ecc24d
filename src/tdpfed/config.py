"""Configuration: TOML in sections, checked strictly, from a preset or a file with single values overridden.

An ``[algorithm]`` table names the method and sets its hyper-parameters. A file may also hold ``[algorithms.NAME]``
tables: settings that count only when that method is chosen, so that one file serves several methods side by side.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tdpfed.algorithms import ALGORITHMS, Algorithm
from tdpfed.errors import TDPFedError, unknown


class Section(BaseModel):
    """A section of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


S = TypeVar("S", bound=Section)


class Run(Section):
    """How long and where to run."""

    rounds: int = Field(50, ge=1, description="communication rounds")
    seed: int = Field(0, ge=0, lt=2**63, description="every random draw follows from it")
    evaluate_every: int = Field(1, ge=1, description="evaluate after every so many rounds, and after the last")
    diagnostics_every: int = Field(0, ge=0, description="measure the paper's convergence quantities; 0: never")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU if there is one")
    runner: Literal["batched", "loop"] = Field("batched", description="all clients at once, or one after another")
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="CPU threads; auto: all, but one where the model is too small to share"
    )
    chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="clients computed together; auto: as many as fit"
    )
    loggers: list[Literal["tensorboard", "mlflow"]] = Field([], description="where else records go, as a list")


class Data(Section):
    """Which data, and how they are dealt to clients."""

    name: str = Field("digits", description="a data set of the package, or a path to an .npz or .parquet file")
    options: dict[str, Any] = Field({}, description="options of the data set, as alpha and beta of synthetic")
    clients: int | None = Field(None, ge=1, description="number of clients; 20, or all natural ones")
    partition: Literal["iid", "classes", "dirichlet", "natural"] | None = Field(
        None, description="how samples are dealt; natural where clients are given with the data, otherwise classes"
    )
    per_client: int = Field(2, ge=1, description="classes: how many classes a client holds")
    alpha: float = Field(0.5, gt=0, le=1e6, description="dirichlet: concentration; smaller is less alike")
    size_skew: float | None = Field(
        None, ge=0, le=10, description="iid and classes: how unequal the shares are; 0 is equal"
    )
    min_samples: int = Field(1, ge=1, description="least number of samples per client")
    max_samples: int | None = Field(None, ge=2, description="cap on samples per client, to study scarce data")
    split: Literal["client", "official"] | None = Field(
        None, description="hold out a part of each client, or the official one; a file's own test_mask if it has one"
    )
    test_fraction: float = Field(0.25, gt=0, lt=1, description="client split: share held out")
    normalize: Literal["standard", "unit", "none"] = Field("standard", description="scaling of the inputs")
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
    algorithm: dict[str, Any] = {}
    participation: Participation = Participation()
    wire: Wire = Wire()
    robust: Robust = Robust()
    privacy: Privacy = Privacy()
    checkpoint: Checkpoint = Checkpoint()

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
    folder = resources.files("tdpfed") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_config(source: str = "digits", overrides: list[str] | None = None) -> Config:
    """Read a preset by name or a TOML file by path, apply ``section.key=value`` overrides, and check it all."""
    values = _overridden(_read(source), overrides)
    if source in presets() and values["data"].get("name") != _read(source)["data"]["name"]:
        # What a preset says of its own data set does not fit another one.
        values = _overridden({**_read(source), "data": {}}, overrides)
    return parse_config(values)


def parse_config(values: Mapping[str, Any]) -> Config:
    """Check plain nested values, fill in every default, and return the resolved configuration."""
    values = dict(values)
    algorithm = values.pop("algorithm", {})
    tables = values.pop("algorithms", {})
    if not isinstance(algorithm, Mapping) or not isinstance(tables, Mapping):
        raise TDPFedError("algorithm: a single value given, must be a table with a name and hyper-parameters")
    for name, table in tables.items():
        if name not in ALGORITHMS:
            raise unknown("algorithms", name, ALGORITHMS)
        checked_section(_hyper_model(name), table, f"algorithms.{name}")
    name = algorithm.get("name", "tdpfed")
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise unknown("algorithm.name", name, ALGORITHMS)
    given = {**tables.get(name, {}), **{key: value for key, value in algorithm.items() if key != "name"}}
    lists = {key for key, field in _hyper_model(name).model_fields.items() if get_origin(field.annotation) is tuple}
    given = {key: [value] if key in lists and isinstance(value, str) else value for key, value in given.items()}
    hyper = checked_section(_hyper_model(name), given, "algorithm")
    config = checked_section(Config, {**values, "algorithm": {"name": name, **hyper.model_dump()}}, "")
    config.make_algorithm()  # ranges that only the algorithm knows
    return config


def describe(algorithm: str) -> list[tuple[str, Any, str]]:
    """Return every key with its default and its meaning, for a configuration with the given algorithm.

    Where a key takes one of a few words, its meaning ends with them.
    """
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    sections: dict[str, type[BaseModel]] = {
        key: field.annotation for key, field in Config.model_fields.items() if isinstance(field.annotation, type)
    }
    sections["algorithm"] = _hyper_model(algorithm)
    rows = [("algorithm.name", algorithm, f"the method ({', '.join(ALGORITHMS)})")]
    for section, model in sections.items():
        for key, field in model.model_fields.items():
            meaning = f"{field.description}{_words(field.annotation)}"
            rows.append((f"{section}.{key}", field.get_default(call_default_factory=True), meaning))
    return rows


def _words(hint: Any) -> str:
    """Return the words a key takes, as ``(one, two)``, or nothing."""
    words = get_args(hint) if get_origin(hint) is Literal else [w for part in get_args(hint) for w in get_args(part)]
    texts = [word for word in words if isinstance(word, str)]
    return f" ({', '.join(texts)})" if texts else ""


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
def _hyper_model(name: str) -> type[Section]:
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


def checked_section(section: type[S], values: Mapping[str, Any], where: str) -> S:
    """Return the section of ``values``, or raise an error that names the key below ``where``."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            *above, name = path
            raise unknown(".".join([where, *above]).strip(".") or "section", name, _keys(section, above)) from None
        # A value that may be one of several kinds has an error for each, under the same key.
        depth = 1 if where else 2
        key = ".".join([where, *path[:depth]]).strip(".")
        reasons = [
            one["msg"].removeprefix("Input should be ")
            for one in error.errors()
            if one["loc"][:depth] == first["loc"][:depth]
        ]
        raise TDPFedError(f"{key}: {first['input']!r} given, must be {' or '.join(reasons)}") from None


def _keys(section: type[BaseModel], above: list[str]) -> list[str]:
    """Return the keys of the section that lies at ``above``."""
    for part in above:
        inner = section.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
    return list(section.model_fields)


def _read(source: str) -> dict[str, Any]:
    names = presets()
    if source in names:
        return tomllib.loads((resources.files("tdpfed") / "presets" / f"{source}.toml").read_text())
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
    for override in overrides or []:
        _override(values, override)
    return values


def _override(values: dict[str, Any], text: str) -> None:
    key, equals, raw = text.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not sections or not all((*sections, name)):
        raise TDPFedError(f"--set: {text!r} given, must be section.key=value, as in run.rounds=60")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise TDPFedError(f"--set: {key.strip()!r} goes below a single value, must be section.key=value")
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
