"""A federation inside the test's own process: Flower's message objects, no network and no processes."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file
from torch import nn

from tdpfed.config import Config, load_config
from tdpfed.engine.simulation import Simulation
from tdpfed.flower import client_app, envelope
from tdpfed.flower.private import PrivateStore
from tdpfed.flower.server_app import run_server
from tdpfed.flower.settings import Flower, as_run_config
from tdpfed.models import build
from tdpfed.runs.prepare import prepare

NODES = 3
QUICK = ("algorithm.name=fedavg", "algorithms.fedavg.tau=2")
Tamper = Callable[[Message], Message | None]


class Killed(BaseException):
    """What ends a server in the middle of a round."""


def stop_at(round_: int) -> Tamper:
    """Return what kills the server when the first reply of a round is looked at."""

    def tamper(message: Message) -> Message:
        if message.metadata.group_id == str(round_):
            raise Killed
        return message

    return tamper


class DigitsTask:
    """The digits of a simulation's federation, dealt as there."""

    def __init__(self, simulation: Simulation) -> None:
        self.federation = simulation.federation

    def model(self) -> nn.Module:
        return build("dnn", (1, 8, 8), 10)

    def load(self, node_config: Any) -> Any:
        x, y, x_test, y_test = self.federation.client(node_config["partition-id"])
        return x, y.numpy(), x_test, y_test


def digits(*overrides: str) -> Config:
    """Three clients on the embedded data set, three rounds, in simulation one client after another as on nodes."""
    few = ["run.rounds=3", "run.evaluate_every=3", "run.runner=loop", f"data.clients={NODES}", "data.per_client=4"]
    return load_config("digits", [*few, "data.max_samples=", *overrides])


def simulated(config: Config, rounds: int = 3) -> Simulation:
    simulation = prepare(config)
    for _ in range(rounds):
        simulation.step()
    return simulation


def run_config(config: Config, out: Path, **flower: Any) -> dict[str, Any]:
    """Return Flower's flat dict."""
    tables = as_run_config(
        config, Flower(**{"nodes": NODES, "out": str(out), "deadline": 60.0, "wait": 60.0, **flower})
    )
    return flat(tables)


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": str(value) if isinstance(value, list | dict) else value
        for section, table in tables.items()
        for name, value in table.items()
    }


def is_nudge(message: Message) -> bool:
    return bool(envelope.fields_of(message).get(envelope.NUDGE))


class FakeGrid(Grid):
    """Hands messages to ClientApps at once; ``tamper`` may change a node's replies, or swallow them with None."""

    def __init__(
        self,
        task: Any,
        configuration: dict[str, Any],
        state: Path,
        nodes: Iterable[int] = range(NODES),
        tamper: dict[int, Tamper] | None = None,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app: ClientApp = client_app(task)
        self.contexts = {
            100 + k: Context(
                run_id=1, node_id=100 + k, node_config={"partition-id": k, "state-dir": str(state)},
                state=RecordDict(), run_config=configuration,
            )
            for k in nodes
        }  # fmt: skip
        self.offline: set[int] = set()
        self.tamper = tamper or {}
        self.replies: dict[str, Message] = {}
        self.sent: list[Message] = []  # what nodes sent, as it left them
        self.asked: list[Message] = []

    def set_run(self, run: Run) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Run:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in self.contexts if node not in self.offline]

    def get_nodes(self) -> Any:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            number = f"message-{len(self.asked)}"
            message.metadata.__dict__["_message_id"] = number
            self.asked.append(message)
            numbers.append(number)
            node = message.metadata.dst_node_id
            if is_nudge(message):  # the app waits for the right moment, a grid does not
                self.replies[number] = Message(RecordDict(), reply_to=message)
                continue
            try:
                answer = self.app(message, self.contexts[node])
            except Exception as error:
                reason = f"{type(error)}:<'{error}'>"  # as Flower's own process has it
                answer = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
            answer.metadata.__dict__["_src_node_id"] = node
            if message.metadata.message_type == "train" and node - 100 in self.tamper:
                changed = self.tamper[node - 100](answer)
                if changed is None:
                    continue
                answer = changed
            self.sent.append(answer)
            self.replies[number] = answer
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in message_ids if number in self.replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


class Case:
    """A configuration, its simulation, and runs of it on a grid inside this process."""

    def __init__(self, folder: Path, *overrides: str, **flower: Any) -> None:
        self.folder, self.config = folder, digits(*overrides)
        self.simulation = simulated(self.config, self.config.run.rounds)
        self.task = DigitsTask(self.simulation)
        self.settings = run_config(self.config, folder / "run", **flower)

    def grid(self, **options: Any) -> FakeGrid:
        return FakeGrid(self.task, self.settings, self.folder / "state", **options)

    def run(self, grid: FakeGrid | None = None, changed: dict[str, Any] | None = None) -> dict[str, Any]:
        return run_server(self.task, grid or self.grid(), {**self.settings, **(changed or {})})

    def state(self, client: int) -> PrivateStore:
        (run,) = (self.folder / "state").iterdir()
        return PrivateStore(run / f"client-{client}")

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "run" / name).read_text().splitlines()]


def worst(folder: Path, simulation: Simulation) -> float:
    """Return the largest difference between the global model of a run and of a simulation."""
    made, shipped = load_file(folder / "run" / "global.safetensors"), simulation.global_model()
    assert shipped is not None
    wanted = simulation.objective.state_dict(shipped)
    return max(float((made[name] - value).abs().max()) for name, value in wanted.items())


def worst_between(one: Path, other: Path) -> float:
    left, right = (load_file(folder / "run" / "global.safetensors") for folder in (one, other))
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def bytes_of(message: Message) -> bytes:
    """Return everything that Flower puts on the wire for the content of a message."""
    return b"".join(value.deflate() for value in get_all_nested_objects(message).values())


def global_vector(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return torch.cat([value.flatten() for value in load_file(folder / "global.safetensors").values()])


def as_vector(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([state[name].flatten() for name in sorted(state)])
