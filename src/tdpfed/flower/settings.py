"""Read Flower's run configuration: the keys of a simulation's TOML, and a section that only deployments have.

Flower keeps a flat dict of single values, ``{"run.rounds": 3}``; lists and tables are given as text, ``'["a", "b"]'``.
Settings that a simulation supports but a deployment does not are refused here, with the reason.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tdpfed.config import Config
from tdpfed.config.loading import checked_config, parse_toml, put
from tdpfed.config.sections import Privacy, Section
from tdpfed.core.setting import build, default_of, plain, setting, settings_of
from tdpfed.engine.checks import check_settings
from tdpfed.errors import TDPFedError, each, raise_all, wrong
from tdpfed.server.robust import Rule

OWN_CODE = "TDPFED_OWN_CODE"
"""The environment variable with a folder that is searched for the user's own method, after installed packages."""


WEIGHT_CAP = 3.0
"""``robust.weight_cap`` in a deployment: a client counts at most three times as much as the median client."""


@dataclass(frozen=True, kw_only=True)
class Flower(Section):
    """The settings that only deployments have."""

    nodes: int = setting(2, "number of clients: partition-id 0 to nodes - 1", least=1, most=10**6)
    wait: float = setting(
        600.0, "seconds to wait for all nodes at the start, and for enough nodes before each round", above=0
    )
    deadline: float = setting(600.0, "seconds that a round waits for replies", above=0)
    max_samples: int = setting(
        100_000, "most samples that a node may report: they are its weight in the average", least=1, below=2**40
    )
    samples: tuple[int, ...] | None = setting(
        None, "training samples of each client, if the operator knows them; a node must report the same number", least=1
    )
    out: str = setting("runs/flower", "run folder on the server; a run already in it is resumed")
    insecure: bool = setting(False, "run without TLS and node authentication: for trials only")
    secure_aggregation: bool = setting(False, "not available; setting it reports the reason")

    def __post_init__(self) -> None:
        super().__post_init__()
        errors = [] if self.out else [wrong("out", self.out, "the path of a folder")]
        if self.samples is not None and len(self.samples) != self.nodes:
            errors.append(wrong("samples", self.samples, f"a number for each of the {self.nodes} nodes"))
        raise_all(errors)

    @property
    def sizes(self) -> Tensor | None:
        """The training samples of each client, ``(K,)``, if the operator knows them."""
        return None if self.samples is None else torch.tensor(self.samples)


NEEDS_TASK = "comes from the app's task.py in a deployment, must be left out"

REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("participation.dropout", 0.0, "0: real nodes drop out on their own"),
    ("robust.attack", None, "left out: attacks exist only in simulation"),
    ("run.precision", "float32", "'float32': nodes compute in this precision"),
    ("run.diagnostics_every", 0, "0: the server does not have the values they need"),
    ("run.seeds", 1, "1: a deployment is one run"),
    ("run.train_loss", False, "false: nodes evaluate on test samples only"),
    ("evaluation.received", False, "false: nodes evaluate after their training only"),
    ("run.evaluate_clients", None, "left out: all connected nodes evaluate"),
    ("engine.state", "auto", "left out: every node keeps its own state, under its state-dir"),
    *(
        (f"privacy.{item.name}", default_of(item), "left out: every node knows the seed and therefore the noise")
        for item in settings_of(Privacy)
    ),
)

VALIDATION = ("data", "validation")
"""The only key about data that a deployment has: what a node holds out of its own samples."""


def read_settings(run_config: Mapping[str, Any]) -> tuple[Config, Flower]:
    """Return the checked configuration of a deployment; all errors are reported together."""
    if (folder := os.environ.get(OWN_CODE)) and folder not in sys.path:
        sys.path.append(folder)
    values: dict[str, Any] = {}
    errors: list[TDPFedError] = []
    for key, value in run_config.items():
        try:
            _put(values, key, value)
        except TDPFedError as error:
            errors.append(error)
    flower = build(Flower, values.pop("flower", {}), "flower", errors)
    held_out = {}
    for section in ("data", "model"):
        for key, given in values.pop(section, {}).items():
            if (section, key) == VALIDATION:
                held_out[key] = given
                continue
            errors.append(TDPFedError(f"{given!r} given, {NEEDS_TASK}", field=f"{section}.{key}", value=given))
    errors += refused(values)
    config = checked_config(
        {**values, "data": {"name": "own data", **held_out}, "model": {"name": "own model"}}, errors
    )
    if config is not None and flower is not None:
        errors += _secure_aggregation(config, flower) + _sampling(config, flower)
        if config.method.per_sample or config.method.public_samples:
            why = "another: a node has no public sample and no values per sample, which it needs"
            errors.append(wrong("algorithm.name", config.method_name, why))
        try:
            check_settings(
                config.run.seed, "loop", None, "float32", config.participation, rule_of(config), flower.nodes
            )
        except TDPFedError as error:
            errors += each(error)
    raise_all(errors)
    assert config is not None
    assert flower is not None
    return config, flower


def refused(values: dict[str, Any]) -> list[TDPFedError]:
    """Remove settings that a deployment does not support from ``values``, and return an error for each of them."""
    errors = []
    for key, allowed, must_be in REFUSED:
        section, _, name = key.partition(".")
        table = values.get(section)
        given = table.pop(name, allowed) if isinstance(table, dict) else allowed
        if given != allowed:
            errors.append(wrong(key, given, must_be))
    return errors


def rule_of(config: Config) -> Rule:
    """Return the server's averaging rule: samples are declared by the nodes, and therefore capped unless asked for."""
    rule = config.robust.rule
    return replace(rule, weight_cap=WEIGHT_CAP) if rule.weight_cap == "auto" else rule


def as_run_config(config: Config, flower: Flower) -> dict[str, Any]:
    """Return all settings except data and model as tables of Flower's run configuration; inverts ``read_settings``."""
    tables = {name: table for name, table in config.as_dict().items() if name not in ("data", "model")}
    if config.data.validation:
        section, key = VALIDATION
        tables[section] = {key: config.data.validation}
    tables["flower"] = plain(flower)
    return {section: {k: v for k, v in table.items() if v is not None} for section, table in tables.items()}


def _secure_aggregation(config: Config, flower: Flower) -> list[TDPFedError]:
    """Return the reason why secure aggregation is not available, if it is requested."""
    if not flower.secure_aggregation:
        return []
    rule, method, wire = rule_of(config), config.make_algorithm(), config.wire
    if wire.update != "dense" or wire.number_format in ("int8", "int4"):
        sent = wire.update if wire.update != "dense" else wire.number_format
        why = (
            f"uploads travel as {sent!r} (section wire), whose numbers cannot be added without seeing each message; "
            "the sum of the models needs dense uploads in floating point"
        )
    elif rule.name != "mean" or rule.clip is not None or rule.gauge is not None:
        why = "robust rules need each client's upload, and under secure aggregation the server sees only the sum"
    elif not method.summable:
        why = f"{method.name!r} as configured needs more than the sum of the uploads, which is all the server would see"
    else:
        why = (
            "the average would fit, but Flower's SecAgg+ works only with its older client and strategy interface, "
            "lets a client scale its own vector by an unchecked weight and bypasses the validation of uploads"
        )
    return [wrong("flower.secure_aggregation", True, f"False: {why} (docs/deployment.md)")]


def _sampling(config: Config, flower: Flower) -> list[TDPFedError]:
    """Return errors of a sampling by samples, which must not depend on what a node says of itself."""
    if config.participation.sampling != "samples":
        return []
    if flower.sizes is None:
        allowed = "a number for each node with participation.sampling 'samples': a node could claim any number"
        return [wrong("flower.samples", None, allowed)]
    method = config.make_algorithm()
    return config.participation.refusals(flower.sizes, method.weights if method.averages else "uniform")


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a full key in nested tables; text that begins like a list or table is read as one."""
    if "." not in key:
        raise wrong("configuration", key, "section.key, as in run.rounds")
    if isinstance(value, str) and value.startswith(("[", "{")):
        try:
            value = parse_toml(f"value = {value}")["value"]
        except TDPFedError as error:
            raise wrong(key, value, f"a list or table in TOML ({error})") from None
    put(values, key, value, "configuration")
