"""A federation on one machine in one command: real processes on loopback, from the keys to the summary.

Without ``--app`` it trains on the embedded digits, partitioned as ``tdpfed run`` partitions them: each node reads its
own samples, and only those, from a separate file.
"""

import json
import shlex
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from tdpfed.algorithms import DEFAULT
from tdpfed.config import Config, flat, toml_value
from tdpfed.config.loading import CONFIG_BYTES, checked_config, parse_toml, raw_config, value_of
from tdpfed.errors import TDPFedError, raise_all
from tdpfed.files import read_file, write_errors
from tdpfed.flower.app import init_app
from tdpfed.flower.guard import private_folder
from tdpfed.flower.server_app import ROUNDS
from tdpfed.flower.services import LocalFederation
from tdpfed.flower.settings import Flower, as_run_config, read_settings, refused
from tdpfed.flower.watch import Complaints, Notify, OnRound, failure_of, follow, speed
from tdpfed.runs.folder import SUMMARY, RunFolder, file_name
from tdpfed.runs.prepare import federation_of

CLASSES = 10
MOST_NODES = 64
"""Most nodes of a demo: each is three processes."""

OPTIONS = {
    "flower.out": "--out", "flower.nodes": "--nodes", "flower.insecure": "--insecure", "run.rounds": "--rounds",
    "algorithm.name": "--algorithm", "data.clients": "--nodes",
}  # fmt: skip
"""Keys that can be set only by a command-line option, not by ``--set``."""


@dataclass(frozen=True)
class Demo:
    """The settings of a demo and the folder it writes to."""

    work: Path
    nodes: int = 3
    rounds: int = 3
    algorithm: str = DEFAULT
    overrides: tuple[str, ...] = ()
    app: Path | None = None
    node_config: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        for field, value, most in (("--nodes", self.nodes, MOST_NODES), ("--rounds", self.rounds, 10_000)):
            if not 1 <= value <= most:
                raise TDPFedError(f"{field}: {value} given, must be at least 1 and at most {most}")
        if self.node_config and self.app is None:
            raise TDPFedError(f"--node-config: {self.node_config!r} given, must be left out without --app")

    @property
    def settings(self) -> list[str]:
        """The settings that override the preset ``digits``."""
        short = [f"run.rounds={self.rounds}", f"run.evaluate_every={self.rounds}", f"algorithm.name={self.algorithm}"]
        partition = [f"data.clients={self.nodes}", f"data.per_client={max(2, -(-CLASSES // self.nodes))}"]
        return [*short, *partition, *self.overrides]

    @property
    def same(self) -> str:
        """The command that runs the same experiment in simulation, with the arithmetic of nodes: one by one."""
        settings = [*(setting for setting in self.settings if not _is_flower_key(setting)), "run.runner=loop"]
        return shlex.join(["tdpfed", "run", "digits", *(part for text in settings for part in ("--set", text))])

    @property
    def run(self) -> Path:
        """The run folder of the server."""
        return self.work.resolve() / "run"


def plan(
    out: Path | None, nodes: int | None, rounds: int | None, algorithm: str | None, overrides: Sequence[str] = (),
    app: Path | None = None, node_config: str = "", insecure: bool = False,
) -> Demo:  # fmt: skip
    """Return a demo; missing values come from the app or, without one, from the defaults of :class:`Demo`."""
    own: dict[str, Any] = {}
    if app is not None:
        config, flower = _read_app(app)[1]
        own = {"nodes": flower.nodes, "rounds": config.run.rounds, "algorithm": config.method_name}
    given = {"nodes": nodes, "rounds": rounds, "algorithm": algorithm}
    own |= {key: value for key, value in given.items() if value is not None}
    name = own.get("algorithm", Demo.algorithm)
    work = out or Path("runs") / f"flower-{file_name(name)}-{datetime.now():%Y%m%d-%H%M%S}"
    return Demo(work, **own, overrides=tuple(overrides), app=app, node_config=node_config, insecure=insecure)


def run_demo(demo: Demo, notify: Notify, on_round: OnRound) -> dict[str, Any]:
    """Run a demo to its end and return the summary; all processes are stopped, whatever happens."""
    RunFolder.check(demo.work)
    _check_overrides(demo)
    settings = [node_settings(demo, number) for number in range(demo.nodes)]
    with write_errors("--out", demo.work):
        app, overrides = _own_app(demo) if demo.app else _digits_app(demo)
    own = Path.cwd() if ":" in demo.algorithm else None  # where the user's own method may be
    with interruptible(), LocalFederation(demo.work, demo.nodes, demo.insecure, own) as federation:
        if demo.insecure:
            notify("INSECURE: no TLS and no node authentication, as requested")
        federation.prepare()
        notify(f"starting a SuperLink on {federation.address}")
        federation.start_superlink()
        notify(f"registering and starting {demo.nodes} SuperNodes")
        federation.register()
        for number in range(demo.nodes):
            federation.start_node(number, settings[number])
        process = federation.submit(app, overrides)
        complaints = Complaints(federation.processes.logs, demo.nodes, notify)

        def running() -> bool:
            complaints.look()
            return process.poll() is None

        follow(demo.run / ROUNDS, running, on_round)
        return _summary(demo, federation)


def deal(config: Config, demo: Demo) -> None:
    """Write each node's share of the digits to a separate file."""
    if config.data.augment != "none":
        raise TDPFedError(f"data.augment: {config.data.augment!r} given, must be 'none': nodes do not augment samples")
    federation = federation_of(config)
    private_folder(demo.work)
    for number in range(demo.nodes):
        folder = private_folder(demo.work / f"node-{number}")
        x, y, x_test, y_test = (part.numpy() for part in federation.client(number))
        np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def node_settings(demo: Demo, number: int) -> dict[str, Any]:
    """Return the configuration of a node; ``{partition-id}`` in a value is replaced by the node's number."""
    if demo.app is None:
        return {"data": str(demo.work.resolve() / f"node-{number}" / "data.npz")}
    try:
        pairs = [pair.partition("=") for pair in shlex.split(demo.node_config)]
    except ValueError as error:
        raise TDPFedError(f"--node-config: {demo.node_config!r} given, must be key=value pairs ({error})") from None
    if not all(name and equals for name, equals, _ in pairs):
        raise TDPFedError(f"--node-config: {demo.node_config!r} given, must be key=value pairs separated by spaces")
    for name in ("partition-id", "num-partitions"):
        if name in (pair[0] for pair in pairs):
            raise TDPFedError(f"--node-config: {name!r} given, must be left out: a demo sets it for each node")
    return {name: value_of(text.replace("{partition-id}", str(number))) for name, _, text in pairs}


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into KeyboardInterrupt, in the background too; later signals are ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in signals:  # nothing interrupts the cleanup
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_overrides(demo: Demo) -> None:
    """Reject settings that the demo makes itself, and settings that the built-in app does not use."""
    for setting in demo.overrides:
        key = setting.partition("=")[0].strip()
        if key in OPTIONS:
            raise TDPFedError(f"--set: {key!r} given, must be given as {OPTIONS[key]} in a demo")
        if demo.app is None and (key.startswith("model.") or key == "data.name"):
            raise TDPFedError(
                f"--set: {key!r} given, must be left out: a demo has its own model and data, or your --app"
            )


def _digits_app(demo: Demo) -> tuple[Path, str]:
    """Check all settings, then write the built-in app and its data; return the app and no overrides."""
    special = [setting for setting in demo.overrides if _is_flower_key(setting)]
    values = raw_config("digits", [setting for setting in demo.settings if setting not in special])
    errors = refused(values)
    config = checked_config(values, errors)
    raise_all(errors)
    assert config is not None
    flower = Flower(nodes=demo.nodes, out=str(demo.run), insecure=demo.insecure, deadline=300.0, wait=300.0)
    tables = as_run_config(config, flower)
    tables |= {"checkpoint": {**tables["checkpoint"], "every": 1}}
    for setting in special:
        key, _, text = setting.partition("=")
        tables["flower"][key.strip().removeprefix("flower.")] = value_of(text)
    read_settings(flat(tables))[0].device()
    deal(config, demo)
    init_app(demo.work / "app", tables)
    return demo.work / "app", ""


def _read_app(app: Path) -> tuple[dict[str, Any], tuple[Config, Flower]]:
    """Return the configuration in an app's pyproject.toml, as written there and as checked settings."""
    file = app / "pyproject.toml"
    try:
        project = parse_toml(read_file(file, most=CONFIG_BYTES).decode())
        known = flat(project["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TDPFedError(
            f"--app: {str(app)!r} is not an app with a configuration ({type(error).__name__}: {error}); "
            "make one with tdpfed flower init DIR"
        ) from None
    try:
        return known, read_settings(known)
    except TDPFedError as error:
        raise error.noting(f"in {file}") from None


def _own_app(demo: Demo) -> tuple[Path, str]:
    """Return the user's app and the changes to its configuration, in the form that Flower accepts."""
    assert demo.app is not None
    known, (config, flower) = _read_app(demo.app)
    has = {
        "flower.nodes": flower.nodes, "flower.insecure": flower.insecure, "run.rounds": config.run.rounds,
        "algorithm.name": config.method_name,
    }  # fmt: skip
    asked = {
        "flower.out": str(demo.run), "flower.nodes": demo.nodes, "flower.insecure": demo.insecure,
        "run.rounds": demo.rounds, "algorithm.name": demo.algorithm,
    }  # fmt: skip
    given = {key: value for key, value in asked.items() if has.get(key) != value}
    for setting in demo.overrides:
        key, _, text = setting.partition("=")
        given[key.strip()] = value_of(text)
    read_settings({**known, **given})[0].device()
    for key in given:
        if key not in known:
            raise TDPFedError(
                f"{OPTIONS.get(key, '--set')}: {key!r} is not in the app's pyproject.toml, and Flower overrides "
                "only keys that are; add it there"
            )
    private_folder(demo.work)
    return demo.app.resolve(), " ".join(f"{key}={_quoted(key, value)}" for key, value in given.items())


def _is_flower_key(setting: str) -> bool:
    """Return whether a setting exists only in deployments."""
    return setting.strip().startswith("flower.")


def _quoted(key: str, value: Any) -> str:
    """Return a value in the form that ``flwr run --run-config`` reads, without escaped quotes."""
    text = toml_value(value) if isinstance(value, list | tuple | dict) else value
    if not isinstance(text, str):
        return toml_value(value)
    quote = '"' if '"' not in text and "\\" not in text else "'"
    if quote in text or "\n" in text:
        raise TDPFedError(f"--set: {key!r} is {text!r}, must not contain both kinds of quotes: Flower cannot read it")
    return f"{quote}{text}{quote}"


def _summary(demo: Demo, federation: LocalFederation) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((demo.run / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise TDPFedError(f"{failure_of(federation.processes.log('run'))} (logs in {demo.work / 'logs'})") from None
    if demo.app is None:
        summary |= {"dataset": "digits", "model": "dnn"}
    lines = (demo.run / ROUNDS).read_text(encoding="utf-8").splitlines() if (demo.run / ROUNDS).exists() else []
    return {**summary, **speed([json.loads(line) for line in lines])}
