"""From Flower's run configuration to ours: the keys of a simulation's TOML, and a section for deployments alone.

Flower keeps a flat dict of single values, ``{"run.rounds": 3}``; lists and tables are given as text, ``'["a", "b"]'``.
What a simulation can be asked for but a deployment cannot keep is refused here, with the reason.
"""

import tomllib
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from tdpfed.config.errors import checked
from tdpfed.config.loading import Config, Privacy, parse_config, table_at
from tdpfed.config.sections import Section
from tdpfed.engine.checks import check_settings
from tdpfed.errors import TDPFedError, raise_all
from tdpfed.server.participation import Participation
from tdpfed.server.robust import Rule


class Flower(Section):
    """What only a deployment has."""

    nodes: int = Field(2, ge=1, le=10**6, description="clients of the federation: partition-id 0 to nodes - 1")
    wait: float = Field(
        600.0, gt=0, description="seconds to wait for all nodes at the start, and for those a round cannot do without"
    )
    deadline: float = Field(600.0, gt=0, description="seconds a round waits for replies")
    max_samples: int = Field(
        100_000, ge=1, lt=2**40, description="most samples that a node may say it has: they are its weight"
    )
    samples: list[int] | None = Field(
        None, description="training samples of each client, where the operator knows them; a node must say the same"
    )
    out: str = Field(
        "runs/flower", min_length=1, description="run folder on the server; one that was begun is gone on with"
    )
    insecure: bool = Field(False, description="the federation has no TLS and no node authentication: for trials")
    secure_aggregation: bool = Field(False, description="not available: says why")


NEEDS_TASK = "comes from the app's task.py in a deployment, must be left out"

REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("participation.dropout", 0.0, "0: real nodes are lost by themselves"),
    ("robust.attack", None, "left out: attackers are for simulation"),
    ("run.precision", "float32", "'float32': nodes compute in it"),
    ("run.diagnostics_every", 0, "0: the server does not see what they are made of"),
    ("run.seeds", 1, "1: a deployment is one run"),
    ("run.evaluate_clients", None, "left out: all nodes that are there evaluate"),
    ("engine.state", "auto", "left out: every node keeps its own state, under its state-dir"),
    *(
        (f"privacy.{key}", field.default, "left out: every node knows the seed, and with it the noise")
        for key, field in Privacy.model_fields.items()
    ),
)


def read_settings(run_config: Mapping[str, Any]) -> tuple[Config, Flower]:
    """Return the checked configuration of a deployment."""
    values: dict[str, Any] = {}
    for key, value in run_config.items():
        _put(values, key, value)
    errors: list[TDPFedError] = []
    flower = checked(Flower, values.pop("flower", {}), "flower", errors)
    raise_all(errors)
    assert flower is not None
    for section in ("data", "model"):
        for key, given in values.get(section, {}).items():
            raise TDPFedError(f"{section}.{key}: {given!r} given, {NEEDS_TASK}")
    config = parse_config({**values, "data": {"name": "own data"}, "model": {"name": "own model"}})
    for key, allowed, why in REFUSED:
        section, _, name = key.partition(".")
        given = getattr(getattr(config, section), name)
        if given != allowed:
            raise TDPFedError(f"{key}: {given!r} given, must be {why}")
    _refuse_secure_aggregation(config, flower)
    if flower.samples is not None and (len(flower.samples) != flower.nodes or min(flower.samples) < 1):
        raise TDPFedError(
            f"flower.samples: {flower.samples!r} given, must be a number of at least 1 for each of the "
            f"{flower.nodes} nodes"
        )
    participation = Participation(**config.participation.model_dump())
    check_settings(config.run.seed, "loop", None, "float32", participation, rule_of(config), flower.nodes)
    return config, flower


def rule_of(config: Config) -> Rule:
    """Return how the server averages."""
    given = config.robust.model_dump()
    return Rule(**{key: value for key, value in given.items() if not key.startswith("attack")})


def as_run_config(config: Config, flower: Flower) -> dict[str, Any]:
    """Return settings, but data and model, as tables of Flower's run configuration: ``read_settings`` reversed."""
    given = {**config.model_dump(exclude={"data", "model"}), "flower": flower.model_dump()}
    return {section: {k: v for k, v in table.items() if v is not None} for section, table in given.items()}


def flat(tables: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return nested tables as Flower's flat dict."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def _refuse_secure_aggregation(config: Config, flower: Flower) -> None:
    if not flower.secure_aggregation:
        return
    rule, algorithm = rule_of(config), config.make_algorithm()
    if rule.name != "mean" or rule.clip is not None or rule.gauge is not None:
        why = "robust rules look at each client's upload, and under secure aggregation the server sees only the sum"
    elif not algorithm.communicates or algorithm.shared_seed:
        why = f"{algorithm.name!r} has no common vector that could be summed under masks"
    elif not algorithm.summable:
        why = (
            f"with these settings {algorithm.name!r} needs each client's upload, and under secure aggregation the "
            "server sees only the sum"
        )
    else:
        why = (
            "the average would fit, but Flower's SecAgg+ works only with its older client and strategy interface, "
            "lets a client scale its own vector by a weight that nobody checks and bypasses the gate"
        )
    raise TDPFedError(f"flower.secure_aggregation: True given, must be False: {why} (docs/deployment.md)")


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested tables; text that begins like a list or table is read as one."""
    *sections, name = key.split(".")
    if not sections:
        raise TDPFedError(f"configuration: {key!r} given, must be section.key, as in run.rounds")
    table = table_at(values, sections, f"configuration: {key!r}")
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise TDPFedError(f"{key}: {value!r} given, must be a list or table in TOML ({error})") from None
    table[name] = value
