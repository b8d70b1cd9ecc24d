"""TensorBoard and MLflow beside a run's own files, where ``run.loggers`` asks for them.

Each gets the configuration before the first record, the numbers of every record (step = round) and the summary. What
they do is never a reason for a run to stop: one that fails is named once on standard error, and left out from then on.
A resumed run goes on where the other one was: TensorBoard drops what came after, MLflow keeps the first of each step.
"""

import contextlib
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from tdpfed.config import Config, flat, to_toml, toml_value
from tdpfed.errors import TDPFedError
from tdpfed.files import write_file
from tdpfed.server.records import Record

T = TypeVar("T")
Values = Mapping[str, float]
STATES = {"finished": "FINISHED", "privacy budget spent": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
"""A run's ends in MLflow's words."""
AT_ONCE = 100
"""Values that MLflow takes in one request."""


class Logger(Protocol):
    """What a logger does: numbers at a step, and the end of a run; its configuration it gets when it is made."""

    def log(self, values: Values, step: int) -> None:
        """Note numbers by name."""

    def close(self, status: str) -> None:
        """Note how the run ended."""


class Loggers:
    """The loggers of a run; made when there is something to log."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.check(config)
        self.config, self.folder = config, folder
        self._names: list[str] = list(dict.fromkeys(config.run.loggers))
        self._made: dict[str, Logger] = {}

    @staticmethod
    def check(config: Config) -> None:
        """Refuse loggers whose package is missing."""
        for name in config.run.loggers:
            if importlib.util.find_spec(name) is None:
                raise TDPFedError(
                    f"run.loggers: {name!r} needs a package that is not installed; pip install 'tdpfed[{name}]'"
                )

    def record(self, record: Record) -> None:
        """Log the numbers of a record."""
        for name in list(self._names):
            with self._harmless(name):
                self._logger(name, record.round).log(scalars(record.as_dict()), record.round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Log the summary, under names of its own, and close the loggers."""
        values = {f"summary/{key}": value for key, value in scalars(summary).items()}
        for name in list(self._names):
            with self._harmless(name):
                logger = self._logger(name, None)
                logger.log(values, summary["rounds"])
                logger.close(summary["status"])
        self._made.clear()

    def _logger(self, name: str, first: int | None) -> Logger:
        if name not in self._made:
            make = TensorBoard if name == "tensorboard" else MLflow
            self._made[name] = make(self.config, self.folder, first)
        return self._made[name]

    @contextlib.contextmanager
    def _harmless(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._names.remove(name)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: {name} is left out from here on ({text}); the run goes on", file=sys.stderr)  # noqa: T201


class TensorBoard:
    """Event files in ``RUN/tensorboard``: scalars, the configuration as text and as hyper-parameters."""

    def __init__(self, config: Config, folder: Path, first: int | None) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        path = folder / "tensorboard"
        old = path.exists() and any(path.iterdir())
        # Whatever an earlier session wrote of this round and of later ones does not count any more.
        self._writer = cast(Any, SummaryWriter(path, purge_step=first if old else None))
        self._writer.add_text("config", "\n".join(f"    {line}" for line in to_toml(config).splitlines()))
        shown = [f"summary/{name}" for name in ("personalized_accuracy", "global_accuracy", "uplink_bytes")]
        experiment, start, self._end = hparams(settings(config), dict.fromkeys(shown, 0.0))
        for summary in (experiment, start):
            self._writer.file_writer.add_summary(summary)

    def log(self, values: Values, step: int) -> None:
        """Write scalars, so that they can be seen at once."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Write how the run ended, and close the file."""
        self._writer.add_text("status", status)
        self._writer.file_writer.add_summary(self._end)
        self._writer.close()


class MLflow:
    """A run of MLflow: files under ``RUN/mlruns``, or wherever ``MLFLOW_TRACKING_URI`` says.

    Its id is kept in ``RUN/mlflow.json``, for a session that resumes.
    """

    def __init__(self, config: Config, folder: Path, first: int | None) -> None:
        del first  # what is there stays, and is not written again
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks for that since it favours databases
        self._client = MlflowClient(uri or (folder / "mlruns").resolve().as_uri())
        self._steps: dict[str, int] = {}
        note = folder / "mlflow.json"
        noted = json.loads(note.read_text(encoding="utf-8")) if note.exists() else {}
        if noted and noted["tracking_uri"] == uri:
            self._run = noted["run_id"]
            self._go_on()
        else:
            self._run = self._new(config, folder.resolve().name)
            write_file(note, json.dumps({"tracking_uri": uri, "run_id": self._run}) + "\n", field="run.loggers")

    def _new(self, config: Config, name: str) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name("tdpfed")
        experiment = self._client.create_experiment("tdpfed") if known is None else known.experiment_id
        run: str = self._client.create_run(experiment, run_name=name).info.run_id
        for part in _parts([Param(key, str(value)) for key, value in settings(config).items()]):
            self._client.log_batch(run, params=part)
        return run

    def _go_on(self) -> None:
        """Read which steps an earlier session has logged."""
        for name in self._client.get_run(self._run).data.metrics:
            self._steps[name] = max(one.step for one in self._client.get_metric_history(self._run, name))
        self._client.update_run(self._run, "RUNNING")

    def log(self, values: Values, step: int) -> None:
        """Send metrics; none twice for one step."""
        from mlflow.entities import Metric

        new, now = [name for name in values if step > self._steps.get(name, -1)], int(1000 * time.time())
        for part in _parts([Metric(name, values[name], now, step) for name in new]):
            self._client.log_batch(self._run, metrics=part)
        self._steps |= dict.fromkeys(new, step)

    def close(self, status: str) -> None:
        """Set how the run ended."""
        self._client.set_tag(self._run, "status", status)
        self._client.set_terminated(self._run, STATES.get(status, "FINISHED"))


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among values, those of tables below the table's name; what is not finite is left out."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[key] = value
    return {key: value for key, value in found.items() if key != "round"}


def settings(config: Config) -> dict[str, str | float]:
    """Return the settings that have a value, by full keys; lists and tables as TOML."""
    values = flat(config.as_dict())
    return {k: v if isinstance(v, int | float | str) else toml_value(v) for k, v in values.items() if v is not None}


def _parts(values: Sequence[T]) -> Iterator[Sequence[T]]:
    yield from (values[begin : begin + AT_ONCE] for begin in range(0, len(values), AT_ONCE))
