"""Builds a simulation from a configuration: data, model and algorithm."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tdpfed.config import Config
from tdpfed.config.sections import Data
from tdpfed.core.setting import plain, settings_of
from tdpfed.core.threads import threads_for
from tdpfed.data import Federation, make_federation
from tdpfed.data.build import BY_CLASS
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.processes import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec
from tdpfed.runs.described import check_named

CONFIG_KEYS = {
    "data set": "data.name", "classes per client": "data.per_client", "dirichlet alpha": "data.alpha",
    "model": "model.name",
}  # fmt: skip
"""Configuration keys for the field names in errors of the data and model builders."""


def prepare(
    config: Config, data_root: Path | None = None, state_folder: Path | None = None, ranks: Ranks = ALONE
) -> Simulation:
    """Load and partition the data, build the model, and return the simulation at round 0; nothing is written.

    Private state that does not fit in memory is stored on the disk of ``state_folder``.
    """
    check_named(config)
    device, seed = config.device(), config.run.seed
    if device.type == "cuda":
        ranks.check_devices()
    federation = federation_of(config, data_root)
    with _config_keys():
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
        wire=config.wire,
        server_step=config.server,
        optimizer=config.optimizer.over(config.run.rounds),
        loss=config.task.loss,
        metrics=config.task.metrics,
        train_loss=config.run.train_loss,
        received=config.evaluation.received,
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
    """Load the data set of a configuration and partition it among the clients."""
    data = plain(config.data)
    name, seed = data.pop("name"), data.pop("seed")
    if config.data.partition != "dirichlet":
        del data["alpha"]
    if config.data.partition not in (None, *BY_CLASS):
        del data["per_client"]
    with _config_keys():
        return make_federation(name, root=data_root, seed=config.run.seed if seed is None else seed, **data)


@contextmanager
def _config_keys() -> Iterator[None]:
    """Make errors of the data and model builders name the configuration key."""
    try:
        yield
    except TDPFedError as error:
        field = error.field or ""
        if field in CONFIG_KEYS:
            raise error.at(CONFIG_KEYS[field]) from error
        if field.partition(".")[0] in {item.name for item in settings_of(Data)}:
            raise error.within("data") from error
        raise


def threads(config: Config, simulation: Simulation) -> int:
    """Return how many CPU threads to use: with small models a second thread waits more than it computes."""
    if config.run.threads != "auto":
        return config.run.threads
    asked = config.participation
    clients = simulation.federation.clients if asked.train == "all" or asked.clients is None else asked.clients
    return threads_for(clients * simulation.objective.layout.size)
