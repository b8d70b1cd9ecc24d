"""From a configuration to a simulation ready to run: data, model and algorithm put together."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tdpfed.config import Config
from tdpfed.config.sections import Data
from tdpfed.core.setting import plain, settings_of
from tdpfed.core.threads import threads_for
from tdpfed.data import Federation, make_federation
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.ranks import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec

FULL_NAMES = {
    "data set": "data.name", "classes per client": "data.per_client", "dirichlet alpha": "data.alpha",
    "model": "model.name",
}  # fmt: skip
"""Keys of the configuration for what the data and model builders call otherwise."""


def prepare(
    config: Config, data_root: Path | None = None, state_folder: Path | None = None, ranks: Ranks = ALONE
) -> Simulation:
    """Load and deal the data, build the model, and return the simulation at round 0; nothing is written.

    State that does not fit into memory goes to the disk of ``state_folder``. Of several ``ranks`` this is one.
    """
    device, seed = config.device(), config.run.seed
    if device.type == "cuda":
        ranks.check_devices()
    with _full_names():
        federation = federation_of(config, data_root)
        model = from_spec(config.model.name, federation.input_shape, federation.classes, seed=seed)
    every = config.run.diagnostics_every
    return Simulation(
        model,
        federation.to(device),
        config.make_algorithm(),
        seed=seed,
        participation=config.participation,
        runner=config.run.runner,
        chunk=None if config.run.chunk == "auto" else config.run.chunk,
        diagnostics=Diagnostics(every=every) if every else None,
        codec=config.wire.codec,
        rule=config.robust.rule,
        attack=config.robust.attacked,
        privacy=config.privacy.asked,
        precision=config.run.precision,
        evaluate_clients=config.run.evaluate_clients,
        state=config.engine.state,
        state_folder=state_folder,
        ranks=ranks,
    )


def federation_of(config: Config, data_root: Path | None = None) -> Federation:
    """Load the data that a configuration names, and deal them."""
    data = plain(config.data)
    name, seed = data.pop("name"), data.pop("seed")
    return make_federation(name, root=data_root, seed=config.run.seed if seed is None else seed, **data)


@contextmanager
def _full_names() -> Iterator[None]:
    """Let errors of the data and model builders name the key of the configuration."""
    try:
        yield
    except TDPFedError as error:
        field = error.field or ""
        if field in FULL_NAMES:
            raise error.at(FULL_NAMES[field]) from error
        if field.partition(".")[0] in {item.name for item in settings_of(Data)}:
            raise error.within("data") from error
        raise


def threads(config: Config, simulation: Simulation) -> int:
    """Return how many CPU threads to use: on small vectors a second one costs more in waiting than it computes."""
    if config.run.threads != "auto":
        return config.run.threads
    asked = config.participation
    clients = simulation.federation.clients if asked.train == "all" or asked.clients is None else asked.clients
    return threads_for(clients * simulation.objective.layout.size)
