"""TensorBoard, MLflow and Weights & Biases loggers, enabled by ``run.loggers`` in addition to a run's own files.

Each logs the configuration before the first record, the numbers of every record (step = round) and the summary. A
logger that fails does not stop the run: it is reported once on standard error and disabled. A resumed run continues the
same logs: TensorBoard discards later steps, MLflow keeps the first value of each step, and so does Weights & Biases.
"""

import contextlib
import importlib.util
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from tdpfed.config import Config, flat, to_toml, toml_value
from tdpfed.errors import TDPFedError
from tdpfed.files import make_folder, read_file, write_file
from tdpfed.server.records import Record

T = TypeVar("T")
Values = Mapping[str, float]
MLFLOW_STATUS = {
    "finished": "FINISHED",
    "privacy budget spent": "FINISHED",
    "interrupted": "KILLED",
    "failed": "FAILED",
}
"""MLflow's status for each status of a run."""
VALUES_PER_REQUEST = 100
"""Most values that MLflow accepts in one request."""


class Logger(Protocol):
    """Logs numbers at a step, and the end of a run; the constructor logs the configuration."""

    def log(self, values: Values, step: int) -> None:
        """Log numbers by name."""

    def close(self, status: str) -> None:
        """Log the final status of the run."""


class Loggers:
    """The loggers of a run, created when there is something to log."""

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
            with self._disable_on_error(name):
                self._logger(name, record.round).log(scalars(record.as_dict()), record.round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """Log the summary under ``summary/`` and close the loggers."""
        values = {f"summary/{key}": value for key, value in scalars(summary).items()}
        for name in list(self._names):
            with self._disable_on_error(name):
                logger = self._logger(name, None)
                logger.log(values, summary["rounds"])
                logger.close(summary["status"])
        self._made.clear()

    def _logger(self, name: str, first: int | None) -> Logger:
        if name not in self._made:
            self._made[name] = MADE[name](self.config, self.folder, first)
        return self._made[name]

    @contextlib.contextmanager
    def _disable_on_error(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._names.remove(name)
            text = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"warning: {name} is disabled from now on ({text}); the run continues", file=sys.stderr)  # noqa: T201


class TensorBoard:
    """Event files in ``RUN/tensorboard``: scalars, and the configuration as text and as hyper-parameters."""

    def __init__(self, config: Config, folder: Path, first: int | None) -> None:
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        path = folder / "tensorboard"
        make_folder(path)
        old = path.exists() and any(path.iterdir())
        # Discards what an earlier session wrote for this round and later ones.
        self._writer = cast(Any, SummaryWriter(path, purge_step=first if old else None))
        self._writer.add_text("config", "\n".join(f"    {line}" for line in to_toml(config).splitlines()))
        shown = [f"summary/{name}" for name in ("personalized_accuracy", "global_accuracy", "uplink_bytes")]
        experiment, start, self._end = hparams(settings(config), dict.fromkeys(shown, 0.0))
        for summary in (experiment, start):
            self._writer.file_writer.add_summary(summary)

    def log(self, values: Values, step: int) -> None:
        """Write scalars and flush them."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Write the final status and close the file."""
        self._writer.add_text("status", status)
        self._writer.file_writer.add_summary(self._end)
        self._writer.close()


class MLflow:
    """A run of MLflow: files under ``RUN/mlruns``, or at ``MLFLOW_TRACKING_URI``.

    Its id is kept in ``RUN/mlflow.json``, so that a resumed run continues it.
    """

    def __init__(self, config: Config, folder: Path, first: int | None) -> None:
        del first  # logged steps are kept, and not logged again
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            make_folder(folder / "mlruns")
            os.environ.setdefault(
                "MLFLOW_ALLOW_FILE_STORE", "true"
            )  # MLflow prefers databases and requires this for files
        self._client = MlflowClient(uri or (folder / "mlruns").resolve().as_uri())
        self._steps: dict[str, int] = {}
        note = folder / "mlflow.json"
        noted = json.loads(read_file(note, follow=False)) if note.exists() else {}
        if noted and noted["tracking_uri"] == uri:
            self._run = noted["run_id"]
            self._continue_run()
        else:
            self._run = self._new_run(config, folder.resolve().name)
            write_file(note, json.dumps({"tracking_uri": uri, "run_id": self._run}) + "\n", field="run.loggers")

    def _new_run(self, config: Config, name: str) -> str:
        from mlflow.entities import Param

        known = self._client.get_experiment_by_name("tdpfed")
        experiment = self._client.create_experiment("tdpfed") if known is None else known.experiment_id
        run: str = self._client.create_run(experiment, run_name=name).info.run_id
        for part in _requests([Param(key, str(value)) for key, value in settings(config).items()]):
            self._client.log_batch(run, params=part)
        return run

    def _continue_run(self) -> None:
        """Read which steps an earlier session has logged, and mark the run as running."""
        for name in self._client.get_run(self._run).data.metrics:
            self._steps[name] = max(one.step for one in self._client.get_metric_history(self._run, name))
        self._client.update_run(self._run, "RUNNING")

    def log(self, values: Values, step: int) -> None:
        """Send metrics, each once per step."""
        from mlflow.entities import Metric

        new, now = [name for name in values if step > self._steps.get(name, -1)], int(1000 * time.time())
        for part in _requests([Metric(name, values[name], now, step) for name in new]):
            self._client.log_batch(self._run, metrics=part)
        self._steps |= dict.fromkeys(new, step)

    def close(self, status: str) -> None:
        """Set the final status of the run."""
        self._client.set_tag(self._run, "status", status)
        self._client.set_terminated(self._run, MLFLOW_STATUS.get(status, "FINISHED"))


class WandB:
    """A run of Weights & Biases, as its own settings say: online, or with ``WANDB_MODE=offline`` in ``RUN/wandb``.

    Its id is kept in ``RUN/wandb.json``, so that a resumed run continues it.
    """

    def __init__(self, config: Config, folder: Path, first: int | None) -> None:
        del first  # logged steps are kept, and not logged again
        import wandb

        note = folder / "wandb.json"
        noted = json.loads(read_file(note, follow=False)) if note.exists() else {"id": secrets.token_hex(4)}
        make_folder(folder / "wandb")
        offline = os.environ.get("WANDB_MODE", "") not in ("", "online", "shared")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "tdpfed"), name=folder.resolve().name, id=noted["id"],
            resume=None if offline else "allow", dir=folder, config=settings(config), reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True),
        )  # fmt: skip
        self._last = int(noted.get("step", -1))
        self._note, self._id = note, noted["id"]
        self._remember()

    def _remember(self) -> None:
        write_file(self._note, json.dumps({"id": self._id, "step": self._last}) + "\n", field="run.loggers")

    def log(self, values: Values, step: int) -> None:
        """Send metrics, each once per step; those of the summary belong to no step."""
        last = {name: value for name, value in values.items() if name.startswith("summary/")}
        if last:
            self._run.summary.update(last)
        elif step > self._last:
            self._run.log(dict(values), step=step)
            self._last = step
            self._remember()

    def close(self, status: str) -> None:
        """Set the final status and close the run."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if MLFLOW_STATUS.get(status, "FINISHED") == "FINISHED" else 1)


MADE: Mapping[str, Callable[[Config, Path, int | None], Logger]] = {
    "tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB,
}  # fmt: skip
"""The loggers by name, which is that of their package and of their extra."""


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers among values; those of nested tables are named ``table/name``."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}/{name}": number for name, number in scalars(value).items()}
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[key] = value
    return {key: value for key, value in found.items() if key != "round"}


def settings(config: Config) -> dict[str, str | float]:
    """Return the settings that have a value, by full key; lists and tables as TOML text."""
    values = flat(config.as_dict())
    return {k: v if isinstance(v, int | float | str) else toml_value(v) for k, v in values.items() if v is not None}


def _requests(values: Sequence[T]) -> Iterator[Sequence[T]]:
    yield from (values[begin : begin + VALUES_PER_REQUEST] for begin in range(0, len(values), VALUES_PER_REQUEST))
