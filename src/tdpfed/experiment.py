"""From a configuration to a simulation ready to run: data, model and algorithm put together."""

from pathlib import Path

import torch

from tdpfed.config import Config
from tdpfed.data import make_federation
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.simulate import Participation, Simulation
from tdpfed.models import from_spec

SMALL = 500_000
"""Parameters of all clients together up to which one thread does."""


def prepare(config: Config, data_root: Path | None = None) -> Simulation:
    """Load and deal the data, build the model, and return the simulation at round 0; nothing is written."""
    device, seed = config.device(), config.run.seed
    data = config.data.model_dump(exclude={"name", "seed"})
    federation = make_federation(
        config.data.name, root=data_root, seed=seed if config.data.seed is None else config.data.seed, **data
    )
    every = config.run.diagnostics_every
    return Simulation(
        from_spec(config.model.name, federation.input_shape, federation.classes, seed=seed),
        federation.to(device),
        config.make_algorithm(),
        seed=seed,
        participation=Participation(**config.participation.model_dump()),
        runner=config.run.runner,
        chunk=None if config.run.chunk == "auto" else config.run.chunk,
        diagnostics=Diagnostics(every=every) if every else None,
        codec=config.wire.codec,
    )


def threads(config: Config, simulation: Simulation) -> int:
    """Return how many CPU threads to use: on small vectors a second one costs more in waiting than it computes."""
    if config.run.threads != "auto":
        return config.run.threads
    values = simulation.federation.clients * simulation.objective.layout.size
    return torch.get_num_threads() if values > SMALL else 1
