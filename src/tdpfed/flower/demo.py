"""A federation on one machine in one command: real processes on loopback, from the keys to the summary.

Without an app of the user's own it trains on the embedded digits, dealt as ``tdpfed run`` would deal them: each node
finds its share, and only that, in a file of its own.
"""

import json
import shlex
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tdpfed.config import Config, load_config, toml_value
from tdpfed.data import make_federation
from tdpfed.engine.folder import SUMMARY, RunFolder
from tdpfed.errors import TDPFedError
from tdpfed.flower.app import init_app
from tdpfed.flower.federation import LocalFederation
from tdpfed.flower.server_app import ROUNDS
from tdpfed.flower.settings import Flower, as_run_config, flat, read_settings

CLASSES = 10
MOST = 64
"""Nodes of a demo: each is three processes."""

Tell = Callable[[str], None]
OnRound = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Demo:
    """What to run, and where."""

    work: Path
    nodes: int = 3
    rounds: int = 3
    algorithm: str = "tdpfed"
    overrides: tuple[str, ...] = ()
    app: Path | None = None
    node_config: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        for field, value, most in (("--nodes", self.nodes, MOST), ("--rounds", self.rounds, 10_000)):
            if not 1 <= value <= most:
                raise TDPFedError(f"{field}: {value} given, must be at least 1 and at most {most}")
        if self.node_config and self.app is None:
            raise TDPFedError(f"--node-config: {self.node_config!r} given, must be left out without --app")

    @property
    def settings(self) -> list[str]:
        """What is set on top of the preset ``digits``."""
        few = [f"run.rounds={self.rounds}", f"run.evaluate_every={self.rounds}", f"algorithm.name={self.algorithm}"]
        dealt = [f"data.clients={self.nodes}", f"data.per_client={max(2, -(-CLASSES // self.nodes))}"]
        return [*few, *dealt, *self.overrides]

    @property
    def same(self) -> str:
        """The command that is the same experiment in simulation."""
        told = [part for setting in self.settings if not _own_key(setting) for part in ("--set", setting)]
        return shlex.join(["tdpfed", "run", "digits", *told])

    @property
    def run(self) -> Path:
        """The run folder of the server."""
        return self.work.resolve() / "run"


def run_demo(demo: Demo, tell: Tell, on_round: OnRound) -> dict[str, Any]:
    """Run a demo to its end and return the summary; no process is left, whatever happens."""
    RunFolder.check(demo.work)
    told = [node_settings(demo, number) for number in range(demo.nodes)]
    try:
        app, overrides = _own_app(demo) if demo.app else _digits_app(demo)
    except OSError as error:
        raise TDPFedError(f"--out: cannot write to {str(demo.work)!r} ({error.strerror})") from None
    with interruptible(), LocalFederation(demo.work, demo.nodes, demo.insecure) as federation:
        if demo.insecure:
            tell("INSECURE: no TLS and no node authentication, as asked for")
        federation.prepare()
        tell(f"starting a SuperLink on {federation.address}")
        federation.start_superlink()
        tell(f"registering and starting {demo.nodes} SuperNodes")
        federation.register()
        for number in range(demo.nodes):
            federation.start_node(number, told[number])
        process = federation.submit(app, overrides)
        follow(demo.run / ROUNDS, lambda: process.poll() is None, on_round)
        return _summary(demo, federation)


def deal(config: Config, demo: Demo) -> None:
    """Write each node's share of the digits to a file of its own."""
    if config.data.augment != "none":
        raise TDPFedError(
            f"data.augment: {config.data.augment!r} given, must be 'none': nodes draw samples as they are"
        )
    options = config.data.model_dump(exclude={"name", "seed"})
    seed = config.run.seed if config.data.seed is None else config.data.seed
    federation = make_federation(config.data.name, seed=seed, **options)
    for number in range(demo.nodes):
        folder = demo.work / f"node-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        x, y, x_test, y_test = (part.numpy() for part in federation.client(number))
        np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x_test, y_test=y_test)


def node_settings(demo: Demo, number: int) -> dict[str, Any]:
    """Return what a node is told beside its number."""
    if demo.app is None:
        return {"data": str(demo.work.resolve() / f"node-{number}" / "data.npz")}
    try:
        pairs = [pair.partition("=") for pair in shlex.split(demo.node_config)]
    except ValueError as error:
        raise TDPFedError(f"--node-config: {demo.node_config!r} given, which cannot be read ({error})") from None
    if not all(name and equals for name, equals, _ in pairs):
        raise TDPFedError(f"--node-config: {demo.node_config!r} given, must be key=value pairs with spaces between")
    return {name: _value(text) for name, _, text in pairs}


def follow(file: Path, running: Callable[[], bool], on_round: OnRound) -> None:
    """Call ``on_round`` for each line that appears in a file while something runs."""
    seen, more = 0, True
    while more:
        more = running()  # before the look, so that the last lines are seen
        lines: list[str] = []
        with suppress(FileNotFoundError):
            lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[seen:]:
            on_round(json.loads(line))
        seen = max(seen, len(lines))
        if more:
            time.sleep(0.2)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end things as Ctrl-C does, which works in the background, too; the first one counts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(*_: object) -> None:
        for number in signals:  # whatever is ended now is ended in peace
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _digits_app(demo: Demo) -> tuple[Path, str]:
    """Write the built-in app and its data, once everything has been checked; return it, and nothing to override."""
    special = [setting for setting in demo.overrides if _own_key(setting)]
    config = load_config("digits", [setting for setting in demo.settings if setting not in special])
    flower = Flower(nodes=demo.nodes, out=str(demo.run), insecure=demo.insecure, deadline=300.0, wait=300.0)
    tables = as_run_config(config, flower)
    tables |= {"checkpoint": {**tables["checkpoint"], "every": 1}, "data": {"name": "digits"}}
    for setting in special:
        key, _, text = setting.partition("=")
        tables["flower"][key.strip().removeprefix("flower.")] = _value(text)
    read_settings(flat(tables))
    deal(config, demo)
    init_app(demo.work / "app", tables)
    return demo.work / "app", ""


def _own_app(demo: Demo) -> tuple[Path, str]:
    """Return the user's app and what a demo changes of its configuration, as Flower takes it."""
    assert demo.app is not None
    try:
        project = tomllib.loads((demo.app / "pyproject.toml").read_text(encoding="utf-8"))
        known = flat(project["tool"]["flwr"]["app"]["config"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TDPFedError(
            f"--app: {str(demo.app)!r} is no app with a configuration ({type(error).__name__}: {error}); "
            "make one with tdpfed flower init DIR"
        ) from None
    given = {
        "run.rounds": demo.rounds, "flower.nodes": demo.nodes, "flower.out": str(demo.run),
        "flower.insecure": demo.insecure, "algorithm.name": demo.algorithm,
    }  # fmt: skip
    for setting in demo.overrides:
        key, _, text = setting.partition("=")
        given[key.strip()] = _value(text)
    for key in given:
        if key not in known:
            raise TDPFedError(f"--set: {key!r} does not stand in the app's pyproject.toml, and Flower changes no other")
    read_settings({**known, **given})
    demo.work.mkdir(parents=True, exist_ok=True)
    return demo.app.resolve(), " ".join(f"{key}={_quoted(key, value)}" for key, value in given.items())


def _own_key(setting: str) -> bool:
    """Whether a setting is one that only deployments have."""
    return setting.strip().startswith("flower.")


def _quoted(key: str, value: Any) -> str:
    """Return a value as ``flwr run --run-config`` reads it, which knows no escaped quotes."""
    text = toml_value(value) if isinstance(value, list | tuple | dict) else value
    if not isinstance(text, str):
        return toml_value(value)
    quote = '"' if '"' not in text and "\\" not in text else "'"
    if quote in text or "\n" in text:
        raise TDPFedError(f"--set: {key!r} is {text!r}, which Flower cannot be told: it holds both kinds of quotes")
    return f"{quote}{text}{quote}"


def _value(text: str) -> Any:
    """Return a value as TOML has it; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _summary(demo: Demo, federation: LocalFederation) -> dict[str, Any]:
    try:
        summary: dict[str, Any] = json.loads((demo.run / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        said = [words for line in federation.processes.log("run").splitlines() if (words := line.strip(" ╭─╮│╰╯"))]
        reason = next((line for line in said if "tdpfed:" in line), " ".join(said[-6:]) or "nothing was said")
        raise TDPFedError(f"the run did not start: {reason} (logs in {demo.work / 'logs'})") from None
    lines = (demo.run / ROUNDS).read_text(encoding="utf-8").splitlines() if (demo.run / ROUNDS).exists() else []
    return {**summary, **speed([json.loads(line) for line in lines])}


def speed(rounds: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return rounds per minute, and which part of that time is this package's own.

    That is what the server app did outside of calls to Flower, and the longest time that a node had a message in hand;
    imports, PyTorch's above all, come before that and are not in it.
    """
    whole = sum(line["train_seconds"] for line in rounds)
    own = sum(line["server_seconds"] + (line["client_seconds"] or 0.0) for line in rounds)
    return {
        "rounds_per_minute": 60 * len(rounds) / whole if whole else None,
        "own_share": own / whole if whole else None,
    }
