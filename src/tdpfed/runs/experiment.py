"""From a configuration to a simulation ready to run: data, model and algorithm put together."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tdpfed.config.loading import Config, Data
from tdpfed.core.threads import threads_for
from tdpfed.data import make_federation
from tdpfed.engine.diagnostics import Diagnostics
from tdpfed.engine.ranks import ALONE, Ranks
from tdpfed.engine.simulation import Simulation
from tdpfed.errors import TDPFedError
from tdpfed.models import from_spec
from tdpfed.server.gate import Attack
from tdpfed.server.participation import Participation
from tdpfed.server.privacy import Privacy
from tdpfed.server.robust import Rule


def prepare(
    config: Config, data_root: Path | None = None, state_folder: Path | None = None, ranks: Ranks = ALONE
) -> Simulation:
    """Load and deal the data, build the model, and return the simulation at round 0; nothing is written.

    State that does not fit into memory goes to the disk of ``state_folder``. Of several ``ranks`` this is one.
    """
    device, seed = config.device(), config.run.seed
    if device.type == "cuda":
        ranks.check_devices()
    data = config.data.model_dump(exclude={"name", "seed"})
    with _full_names():
        federation = make_federation(
            config.data.name, root=data_root, seed=seed if config.data.seed is None else config.data.seed, **data
        )
        model = from_spec(config.model.name, federation.input_shape, federation.classes, seed=seed)
    every, robust, kind = config.run.diagnostics_every, config.robust.model_dump(), config.robust.attack
    return Simulation(
        model,
        federation.to(device),
        config.make_algorithm(),
        seed=seed,
        participation=Participation(**config.participation.model_dump()),
        runner=config.run.runner,
        chunk=None if config.run.chunk == "auto" else config.run.chunk,
        diagnostics=Diagnostics(every=every) if every else None,
        codec=config.wire.codec,
        rule=Rule(**{key: value for key, value in robust.items() if not key.startswith("attack")}),
        attack=None if kind is None else Attack(kind, robust["attack_fraction"], robust["attack_strength"]),
        privacy=_privacy(config),
        precision=config.run.precision,
        evaluate_clients=config.run.evaluate_clients,
        state=config.engine.state,
        state_folder=state_folder,
        ranks=ranks,
    )


def _privacy(config: Config) -> Privacy | None:
    given = config.privacy
    if given.clip is None and given.noise is None:
        if given.epsilon is not None:
            raise TDPFedError(f"privacy.epsilon: {given.epsilon} given, but no clip and no noise; give both")
        return None
    for field, value in (("clip", given.clip), ("noise", given.noise)):
        if value is None:
            raise TDPFedError(f"privacy.{field}: none given, clip and noise belong together")
    return Privacy(**given.model_dump())


@contextmanager
def _full_names() -> Iterator[None]:
    """Let errors of the data and model builders name the key of the configuration."""
    try:
        yield
    except TDPFedError as error:
        field, _, rest = str(error).partition(":")
        full = {"data set": "data.name", "classes per client": "data.per_client", "model": "model.name"}
        full |= {key: f"data.{key}" for key in Data.model_fields}
        raise TDPFedError(f"{full.get(field, field)}:{rest}") from error


def threads(config: Config, simulation: Simulation) -> int:
    """Return how many CPU threads to use: on small vectors a second one costs more in waiting than it computes."""
    if config.run.threads != "auto":
        return config.run.threads
    asked = config.participation
    clients = simulation.federation.clients if asked.train == "all" or asked.clients is None else asked.clients
    return threads_for(clients * simulation.objective.layout.size)
