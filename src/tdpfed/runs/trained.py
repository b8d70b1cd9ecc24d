"""A run folder read back in Python: its models, ready for raw inputs, its records as tables, and figures of them.

Nothing is written and no data set is needed. The model's code must be found: by its name in ``config.toml``, imported
as ``package.module:factory`` where it is the user's own, or given as an object.
"""

import copy
import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tdpfed.algorithms.base import Algorithm
from tdpfed.config import Config, parse_config
from tdpfed.config.loading import parse_toml
from tdpfed.core.objective import Objective
from tdpfed.core.state import own_entries
from tdpfed.core.tasks import Task
from tdpfed.data.federation import Values, unknown_client
from tdpfed.errors import TDPFedError
from tdpfed.files import read_file
from tdpfed.models import from_spec
from tdpfed.runs import frozen
from tdpfed.runs.checkpoints import Checkpoints, Snapshot
from tdpfed.runs.data_card import DataCard
from tdpfed.runs.described import IN_PYTHON
from tdpfed.runs.export import Format, check_format, metadata, write_model
from tdpfed.runs.folder import CONFIG, METRICS, SUMMARY, RunFolder
from tdpfed.runs.newcomer import ROUNDS, Personalized, Raw, personalize
from tdpfed.runs.raw_model import RawModel
from tdpfed.runs.seals import is_sealed, lines_of
from tdpfed.runs.snapshot import check_layout
from tdpfed.server.records import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

FIELD = "RUN"
"""The name of the folder in errors, as on the command line."""


def load_run(folder: Path | str, *, model: nn.Module | None = None) -> "TrainedRun":
    """Return the run in a folder, as :func:`tdpfed.simulate` and ``tdpfed run`` write it.

    ``model`` is a module of the run's architecture: needed if the run was given its model as an object in Python. Its
    parameters do not matter.
    """
    return TrainedRun(Path(folder), model)


class TrainedRun:
    """A run on disk, finished or not: its models, records and settings; :func:`load_run` returns it."""

    def __init__(self, path: Path, model: nn.Module | None = None) -> None:
        if not (path / CONFIG).is_file():
            raise TDPFedError(f"{str(path)!r} given, must be a run folder, with a {CONFIG}", field=FIELD)
        self.path, self._given = path, model
        self._text = RunFolder.open(path)[1]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration: a dict for each section, as in ``config.toml``."""
        try:
            return parse_toml(self._text)
        except TDPFedError as error:
            raise TDPFedError(f"{str(self.path / CONFIG)!r} is damaged ({error})", field=FIELD) from None

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary, as in ``summary.json``; empty before the run has ended."""
        file = self.path / SUMMARY
        try:
            found: dict[str, Any] = json.loads(read_file(file))
            if not isinstance(found, dict):
                raise ValueError("no JSON object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise TDPFedError(f"{str(file)!r} is damaged ({error})", field=FIELD) from None
        return found

    @property
    def ids(self) -> tuple[str, ...]:
        """The clients' ids, as they were given with the data."""
        return self.card.ids

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty if they have none."""
        return self.card.class_names

    @property
    def round(self) -> int:
        """The round of the checkpoint that the models are from."""
        return self.snapshot.round

    # -- models

    def personalized(self, client: str) -> RawModel:
        """Return the personalized model of a client, by its id: ready for raw inputs, with a state of its own."""
        number = self._number(client)
        if not bool(self.snapshot.private.touched[number]):
            trained = [name for name, was in zip(self.ids, self.snapshot.private.touched.tolist(), strict=True) if was]
            raise TDPFedError(
                f"{client!r} given, which was not chosen for training in {self.round} rounds, so it has no model; "
                f"allowed: one of the {len(trained)} others that trained, or the global model",
                field="client", value=client, allowed=trained,
            )  # fmt: skip
        rows = own_entries(self.snapshot.private.rows(torch.tensor([number])))
        return self.as_model(self.algorithm.personalized({name: row[0] for name, row in rows.items()}))

    def global_model(self) -> RawModel:
        """Return the server's model, ready for raw inputs; an error if the method has none."""
        theta = self.algorithm.global_model(own_entries(self.snapshot.server))
        if theta is None:
            raise TDPFedError(
                f"{self.algorithm.name!r} has no global model; allowed: the personalized model of a client",
                field="global",
            )
        return self.as_model(theta)

    def as_model(self, theta: Tensor) -> RawModel:
        """Return the model with parameters ``(P,)``, behind the normalization of the run's data."""
        model = copy.deepcopy(self.objective.model).to(theta.dtype)
        model.load_state_dict(self.objective.state_dict(theta))
        return RawModel(model, self.card.normalization, self.card.inputs, tokens=self.card.tokens)

    def export(self, file: Path | str, *, client: str | None = None, format: Format = "safetensors") -> Path:  # noqa: A002
        """Write a client's personalized model, or the global one, into a file: safetensors or ONNX."""
        check_format(format)
        model = self.global_model() if client is None else self.personalized(client)
        write_model(model, Path(file), metadata(self.settings, self.card, self.round, client), format)
        return Path(file)

    def personalize(
        self,
        x: Raw,
        y: Values,
        *,
        rounds: int = ROUNDS,
        test_mask: Values | None = None,
        test_fraction: float = 0.25,
        seed: int | None = None,
        **hyper: Any,
    ) -> Personalized:
        """Return a model for a client that was not in training, from its raw samples, and how good it is.

        The client takes ``rounds`` rounds of the method's local work from the server's model, and uploads nothing.
        Samples of ``test_mask``, or a random ``test_fraction``, are held out to measure the main metric. ``hyper`` are
        hyper-parameters of the method that differ from the run's, such as ``tau=50``; ``seed`` is the run's by default.
        """
        return personalize(
            self, x, y, rounds=rounds, test_mask=test_mask, test_fraction=test_fraction, seed=seed, hyper=hyper
        )

    # -- records

    @cached_property
    def records(self) -> list[Record]:
        """The records, one for each evaluated round; damaged lines are left out."""
        found = []
        try:
            text = read_file(self.path / METRICS).decode("utf-8", "replace")
        except OSError as error:
            raise TDPFedError(f"cannot read {str(self.path / METRICS)!r} ({error.strerror})", field=FIELD) from None
        for _, line in lines_of(text):
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                record = Record.from_dict(json.loads(line))
                found += [] if is_sealed(line) is False else [record]
        return found

    def metrics(self) -> "DataFrame":
        """Return the records as a DataFrame of pandas: a row for each evaluated round, a column for each number."""
        pandas = _package("pandas", "pandas")
        rows = [dict(_scalars(record.as_dict())) for record in self.records]
        return pandas.DataFrame(rows).set_index("round") if rows else pandas.DataFrame()

    def clients(self) -> "DataFrame":
        """Return a DataFrame with a row for each client, by id: its numbers of samples and its main metric.

        It is that of the personalized models after the last evaluated round.
        """
        pandas, card = _package("pandas", "pandas"), self.card
        columns: dict[str, Any] = {"train_samples": card.train_size, "test_samples": card.test_size}
        if self.records:
            columns[self.records[-1].main.name] = self.records[-1].main.clients
        return pandas.DataFrame(columns, index=pandas.Index(card.ids, name="client"))

    def plot(self) -> "Figure":
        """Return a figure of matplotlib: the main metric over the rounds, and over the megabytes uploaded."""
        pyplot = _package("matplotlib.pyplot", "'tdpfed[report]'")
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
        pyplot.close(figure)  # returned, and not shown a second time by a notebook
        for name, field in (("personalized", "personalized"), ("local", "local"), ("global", "common")):
            known = [(one, value) for one in self.records if (value := getattr(one.main, field)) is not None]
            if known:
                values = [value for _, value in known]
                left.plot([one.round for one, _ in known], values, marker=".", label=name)
                right.plot([one.uplink_bytes / 1e6 for one, _ in known], values, marker=".", label=name)
        left.set(xlabel="communication round", ylabel=self.records[-1].main.name if self.records else None)
        right.set(xlabel="uploaded megabytes, all clients")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        if self.records:
            left.legend()
        figure.suptitle(f"{self.settings.method.name} on {self.card.name}")
        return figure  # type: ignore[no-any-return]

    # -- what models and newcomers are made of

    @cached_property
    def settings(self) -> Config:
        """The configuration, checked."""
        try:
            return parse_config(parse_toml(self._text))
        except TDPFedError as error:
            raise error.noting(f"in {str(self.path / CONFIG)!r}") from None

    @cached_property
    def card(self) -> DataCard:
        """What the run folder knows of its data."""
        return DataCard.read(self.path)

    @cached_property
    def objective(self) -> Objective:
        """The run's model as a function of its parameters, with the frozen ones of the run."""
        name, card = self.settings.model.name, self.card
        if self._given is not None:
            model = copy.deepcopy(self._given)
        elif name.endswith(IN_PYTHON):
            raise TDPFedError(
                f"{name.removesuffix(IN_PYTHON)!r} was given in Python, as an object; give a module of the same "
                "architecture: load_run(folder, model=...)",
                field="model.name", value=name,
            )  # fmt: skip
        else:
            try:
                model = from_spec(name, card.input_shape, card.classes, seed=self.settings.run.seed)
            except TDPFedError as error:
                where = "Python must find the module, for example in the working directory, or give load_run(model=...)"
                raise error.at("model.name").noting(where) if ":" in name else error.at("model.name") from error
        frozen.put(self.path, model)
        task = self.settings.task
        known = not any(name.endswith(IN_PYTHON) for name in (task.loss, *task.metrics))
        made = Objective.of(
            model, Task.of(task.loss, task.metrics, card.targets) if known else Task.of(kind=card.targets),
            inputs=card.inputs,
        )  # fmt: skip
        check_layout(self.snapshot, made.layout)
        return made

    @cached_property
    def algorithm(self) -> Algorithm:
        """The run's method, bound to its model."""
        return self.settings.make_algorithm().bind(
            self.objective.layout, len(self.card.ids), max(self.card.train_size, default=0)
        )

    @cached_property
    def snapshot(self) -> Snapshot:
        """The newest good checkpoint."""
        found = Checkpoints(self.path / "checkpoints").load()
        if found is None:
            raise TDPFedError(
                f"{str(self.path)!r} has no checkpoint, so no models; they are saved with checkpoint.every above 0",
                field=FIELD,
            )
        return found[0]

    def _number(self, client: str) -> int:
        if client not in self.ids:
            raise unknown_client(client, self.ids)
        return self.ids.index(client)


def _scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers of a record by name; those of nested tables are named ``table.name``."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}.")
        elif not isinstance(value, list | str):
            yield f"{prefix}{name}", value


def _package(name: str, install: str) -> Any:
    """Import a package that not everybody needs."""
    try:
        return importlib.import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise TDPFedError(f"{package} is not installed; pip install {install}", field=package) from None
