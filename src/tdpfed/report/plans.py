"""The factor plan of a run, computed from its configuration without loading data or importing user code."""

import torch

from tdpfed.algorithms import Algorithm
from tdpfed.config import Config, parse_config
from tdpfed.core.layout import Layout
from tdpfed.cp.plan import FactorPlan
from tdpfed.data import available
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec
from tdpfed.report.read import Run


def plan_of(run: Run) -> FactorPlan | str | None:
    """Return the plan, or a text that says why it cannot be shown; None for a method without factors."""
    if ":" in (name := str(run.setting("algorithm.name"))):
        return _not_imported("method", name)
    try:
        config = parse_config(run.config)
        method = config.make_algorithm()
        if type(method).plan is Algorithm.plan:
            return None
        if ":" in config.model.name:
            return _not_imported("model", config.model.name)
        shape, classes = _input(config)
        with torch.device("meta"):
            model = from_spec(config.model.name, shape, classes)
        return method.bind(Layout.of(model), 1).plan
    except TDPFedError as error:
        return str(error)


def _not_imported(kind: str, name: str) -> str:
    return f"{name} is a custom {kind}, which a report does not import; use tdpfed plan"


def _input(config: Config) -> tuple[tuple[int, ...], int]:
    """Return the sample shape and the number of classes of a data set."""
    name, options = config.data.name, config.data.options
    if name not in (known := available()):
        raise TDPFedError(f"the shape of {name!r} is not known without its data; use tdpfed plan --input-shape")
    shape, classes = known[name].shape, known[name].classes
    given = options.get("dimension", shape[0]), options.get("classes", classes)
    if name == "synthetic" and all(type(value) is int for value in given):
        shape, classes = (given[0],), given[1]
    return shape, classes
