"""The factor plan of a run from its configuration alone: data set and model by name, no data and no code of others."""

import torch

from tdpfed.algorithms import ALGORITHMS, Algorithm
from tdpfed.config.loading import Config, parse_config
from tdpfed.core.layout import Layout
from tdpfed.cp.plan import FactorPlan
from tdpfed.data import available
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec
from tdpfed.report.read import Run


def plan_of(run: Run) -> FactorPlan | str | None:
    """Return the plan, or in words why it cannot be shown; None for a method without factors."""
    method = ALGORITHMS.get(run.algorithm)
    if method is None or method.plan is Algorithm.plan:  # it has none of its own
        return None
    try:
        config = parse_config(run.config)
        if ":" in config.model.name:
            return f"{config.model.name} is a model of your own, which a report does not import; see tdpfed plan"
        shape, classes = _input(config)
        with torch.device("meta"):
            model = from_spec(config.model.name, shape, classes)
        return config.make_algorithm().bind(Layout.of(model), population=1).plan
    except TDPFedError as error:
        return str(error)


def _input(config: Config) -> tuple[tuple[int, ...], int]:
    """Return shape and classes of a data set by name."""
    name, options = config.data.name, config.data.options
    if name not in (known := available()):
        raise TDPFedError(f"the shape of {name!r} is not known without its data; see tdpfed plan --input-shape")
    shape, classes = known[name].shape, known[name].classes
    given = options.get("dimension", shape[0]), options.get("classes", classes)
    if name == "synthetic" and all(type(value) is int for value in given):
        shape, classes = (given[0],), given[1]
    return shape, classes
