"""Loggers get what the run's own files get, each step once, and never stop a run."""

import json
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tdpfed.config import Config, load_config
from tdpfed.errors import TDPFedError
from tdpfed.runs import loggers
from tdpfed.runs.loggers import Loggers, scalars, settings
from tdpfed.runs.session import Session
from tdpfed.server.records import Record

TINY = (
    "run.rounds=8", "run.evaluate_every=1", "data.clients=4", "data.max_samples=40", "data.per_client=5",
    "algorithm.name=fedavg", "algorithm.tau=2", "checkpoint.every=3",
)  # fmt: skip


def config(*names: str, more: tuple[str, ...] = ()) -> Config:
    return load_config("digits", [*TINY, f"run.loggers={json.dumps(names)}", *more])


def record(round_: int, **more: Any) -> Record:
    values = {
        "round": round_, "minibatch_loss": 1 / round_, "personalized_accuracy": 0.5, "local_accuracy": 0.5,
        "global_accuracy": None, "personalized_loss": float("nan"), "global_loss": None, "client_accuracy": [0.5, None],
        "uplink_bytes": 100 * round_, "downlink_bytes": 0, "participants": 2, "seconds": 0.1 * round_,
    }  # fmt: skip
    return Record(**values | more)


def run(path: Path, chosen: Config | None, stop_after: int | None = None) -> dict[str, Any]:
    """Begin a run, or resume it where no configuration is given; return its summary."""

    @contextmanager
    def stopping(simulation: Any, rounds: int, records: Any) -> Any:
        def on_round(current: Any) -> None:
            if current.round == stop_after:
                raise KeyboardInterrupt

        yield on_round

    session = Session.resume(path, None) if chosen is None else Session.begin(chosen, path, None)
    return session.run(stopping)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def events(path: Path) -> EventAccumulator:
    found = EventAccumulator(str(path / "tensorboard"))
    found.Reload()
    return found


def test_only_numbers_are_scalars() -> None:
    values = scalars(record(3, diagnostics={"drift": 2.0, "bad": float("inf")}).as_dict())
    assert values == {
        "minibatch_loss": 1 / 3, "personalized_accuracy": 0.5, "local_accuracy": 0.5, "uplink_bytes": 300,
        "downlink_bytes": 0, "participants": 2, "seconds": pytest.approx(0.3), "rejected": 0, "diagnostics/drift": 2.0,
    }  # fmt: skip
    assert scalars({"flag": True, "word": "x", "none": None, "list": [1]}) == {}


def test_every_setting_with_a_value_is_a_hyper_parameter() -> None:
    found = settings(config("tensorboard"))
    assert (found["run.rounds"], found["algorithm.name"], found["algorithm.eta"]) == (8, "fedavg", 0.05)
    assert found["run.loggers"] == '["tensorboard"]'
    assert "participation.clients" not in found


@pytest.mark.parametrize(
    ("given", "words"),
    [('["aim"]', "'tensorboard', 'mlflow' or 'wandb'"), ("3", "a list of"), ("[1]", "run.loggers")],
)
def test_unknown_loggers_are_refused(given: str, words: str) -> None:
    with pytest.raises(TDPFedError, match=r"run\.loggers") as error:
        load_config("digits", [f"run.loggers={given}"])
    assert words in str(error.value)


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_a_missing_package_names_its_extra_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TDPFedError, match=rf"run\.loggers: '{name}' .*pip install 'tdpfed\[{name}\]'"):
        run(tmp_path / "run", config(name))
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_what_the_run_has(tmp_path: Path) -> None:
    summary = run(tmp_path, config("tensorboard", "tensorboard"))
    found = events(tmp_path)
    for name in ("personalized_accuracy", "minibatch_loss", "uplink_bytes", "seconds"):
        expected = [(line["round"], pytest.approx(line[name])) for line in lines(tmp_path)]
        assert [(one.step, one.value) for one in found.Scalars(name)] == expected
    (last,) = found.Scalars("summary/best_personalized_accuracy")
    assert (last.step, last.value) == (8, pytest.approx(summary["best_personalized_accuracy"]))
    assert b"tau = 2" in found.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    data = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"algorithm.eta" in data


def test_without_loggers_nothing_is_written(tmp_path: Path) -> None:
    run(tmp_path, config())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoints", "config.toml", "federation.json", "metrics.jsonl", "summary.json",
    ]  # fmt: skip


def test_after_a_resume_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    assert run(tmp_path, config("tensorboard"), stop_after=5)["status"] == "interrupted"
    assert [one.step for one in events(tmp_path).Scalars("seconds")] == [1, 2, 3, 4, 5]
    assert run(tmp_path, None)["status"] == "finished"
    found = events(tmp_path)
    expected = [(line["round"], pytest.approx(line["seconds"])) for line in lines(tmp_path)]
    assert [(one.step, one.value) for one in found.Scalars("seconds")] == expected
    assert [one.step for one in found.Scalars("summary/rounds")] == [8]  # that of round 5 was of what is gone


class Client:
    """As much of MLflow's client as we use; what it was sent stays with its address."""

    stores: dict[str, dict[str, Any]]

    def __init__(self, uri: str) -> None:
        self.store = self.stores.setdefault(uri, {"experiments": {}, "runs": {}})

    def get_experiment_by_name(self, name: str) -> Any:
        known = self.store["experiments"].get(name)
        return None if known is None else types.SimpleNamespace(experiment_id=known)

    def create_experiment(self, name: str) -> str:
        return str(self.store["experiments"].setdefault(name, "1"))

    def create_run(self, experiment: str, run_name: str) -> Any:
        assert experiment == "1"
        name = f"id-{run_name}-{len(self.store['runs'])}"
        self.store["runs"][name] = {"params": {}, "metrics": [], "status": "RUNNING", "tags": {}}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=name))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) + len(params) <= 100
        self.store["runs"][run_id]["params"] |= dict(params)
        self.store["runs"][run_id]["metrics"] += metrics

    def get_run(self, run_id: str) -> Any:
        latest = {name: value for name, value, _, _ in self.store["runs"][run_id]["metrics"]}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=latest))

    def get_metric_history(self, run_id: str, name: str) -> list[Any]:
        return [types.SimpleNamespace(step=m[3]) for m in self.store["runs"][run_id]["metrics"] if m[0] == name]

    def update_run(self, run_id: str, status: str) -> None:
        self.store["runs"][run_id]["status"] = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self.store["runs"][run_id]["status"] = status

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        self.store["runs"][run_id]["tags"][key] = value


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """A stand-in for MLflow, which the development set-up does not install."""
    module, tracking, entities = (types.ModuleType(name) for name in ("mlflow", "mlflow.tracking", "mlflow.entities"))
    module.__spec__ = types.SimpleNamespace(name="mlflow")  # type: ignore[assignment]
    client = type("MlflowClient", (Client,), {"stores": {}})
    vars(tracking)["MlflowClient"] = client
    vars(entities).update(Metric=lambda *values: values, Param=lambda key, value: (key, value))
    for name, one in (("mlflow", module), ("mlflow.tracking", tracking), ("mlflow.entities", entities)):
        monkeypatch.setitem(sys.modules, name, one)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return client


def test_mlflow_has_every_step_once_also_after_a_resume(tmp_path: Path, mlflow: type[Client]) -> None:
    path = tmp_path / "run"
    run(path, config("mlflow"), stop_after=5)
    (store,) = mlflow.stores.values()
    (noted,) = store["runs"].values()
    assert noted["status"] == "KILLED"
    run(path, None)
    assert list(mlflow.stores) == [(path / "mlruns").resolve().as_uri()]
    (noted,) = store["runs"].values()
    assert (noted["status"], noted["tags"]) == ("FINISHED", {"status": "finished"})
    assert noted["params"] == {key: str(value) for key, value in settings(config("mlflow")).items()}
    keys = [(name, step) for name, _, _, step in noted["metrics"]]
    assert len(keys) == len(set(keys))
    found = {step: value for name, value, _, step in noted["metrics"] if name == "personalized_accuracy"}
    assert found == {line["round"]: line["personalized_accuracy"] for line in lines(path)}
    assert [step for name, step in keys if name == "summary/rounds"] == [5, 8]


def test_mlflow_goes_where_it_is_told(tmp_path: Path, mlflow: type[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking.example:5000")
    for name in ("one", "two"):
        run(tmp_path / name, config("mlflow"))
    (store,) = mlflow.stores.values()
    assert list(mlflow.stores) == ["http://tracking.example:5000"]
    assert list(store["runs"]) == ["id-one-0", "id-two-1"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://other.example:5000")
    run(tmp_path / "one", None)
    assert list(mlflow.stores["http://other.example:5000"]["runs"]) == ["id-one-0"]


def test_the_real_mlflow_keeps_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run(tmp_path, config("mlflow"), stop_after=5)
    run(tmp_path, None)
    client = tracking.MlflowClient((tmp_path / "mlruns").as_uri())
    noted = client.get_run(json.loads((tmp_path / "mlflow.json").read_text())["run_id"])
    assert noted.info.status == "FINISHED"
    assert noted.data.params["algorithm.eta"] == "0.05"
    history = client.get_metric_history(noted.info.run_id, "personalized_accuracy")
    assert {one.step: one.value for one in history} == {
        line["round"]: line["personalized_accuracy"] for line in lines(tmp_path)
    }
    assert len(history) == 8


@pytest.mark.parametrize("when", ["make", "log", "close"])
def test_a_logger_that_fails_is_named_once_and_the_run_goes_on(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no space\nleft")

    names = {"make": "__init__", "log": "log", "close": "close"}
    monkeypatch.setattr(loggers.TensorBoard, names[when], broken)
    assert run(tmp_path, config("tensorboard"))["status"] == "finished"
    assert len(lines(tmp_path)) == 8
    said = capsys.readouterr().err
    assert said.startswith("warning: tensorboard is disabled")
    assert "(OSError: no space left)" in said
    assert said.count("\n") == 1


def test_ctrl_c_is_no_failure_of_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loggers.TensorBoard, "log", stop)
    with pytest.raises(KeyboardInterrupt):
        Loggers(config("tensorboard"), tmp_path).record(record(1))


class Dashboard:
    """As much of wandb as we use: runs by id, each with its settings, steps and summary."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}

    def Settings(self, **values: Any) -> dict[str, Any]:
        assert values["console"] == "off"  # standard output stays that of the run
        return values

    def init(self, *, id: str, **given: Any) -> Any:  # noqa: A002
        found = self.runs.setdefault(id, {"given": given, "steps": {}, "summary": {}, "exit": None})

        def log(values: dict[str, float], step: int) -> None:
            assert step not in found["steps"]
            found["steps"][step] = values

        def finish(exit_code: int) -> None:
            found["exit"] = exit_code

        return types.SimpleNamespace(log=log, finish=finish, summary=found["summary"])


def test_wandb_has_every_step_once_also_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the package is large, and starts a process of its own."""
    board, module = Dashboard(), types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
    vars(module).update(init=board.init, Settings=board.Settings)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    run(tmp_path, config("wandb"), stop_after=5)
    (noted,) = board.runs.values()
    assert (noted["exit"], noted["summary"]["status"], sorted(noted["steps"])) == (1, "interrupted", [1, 2, 3, 4, 5])
    run(tmp_path, None)
    (noted,) = board.runs.values()  # the same run, continued
    assert noted["given"]["resume"] == "allow"
    assert (noted["exit"], noted["summary"]["status"]) == (0, "finished")
    accuracy = {step: values["personalized_accuracy"] for step, values in noted["steps"].items()}
    assert accuracy == {line["round"]: line["personalized_accuracy"] for line in lines(tmp_path)}
    assert noted["summary"]["summary/rounds"] == 8
    assert noted["given"]["config"] == settings(config("wandb"))


@pytest.mark.slow
def test_the_real_wandb_writes_an_offline_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert run(tmp_path, config("wandb"))["status"] == "finished"
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    assert file.stat().st_size > 0
    found = capsys.readouterr()
    assert not found.out
    assert "disabled" not in found.err
    assert json.loads((tmp_path / "wandb.json").read_text())["step"] == 8
