"""How a node handles a message: it introduces itself, trains a round or evaluates. Independent of Flower.

Every message starts a new process, so modules that a single round does not need are not imported: gradients come from
plain autograd, with the same numbers as ``torch.func``, because the first use of ``torch.func`` takes longer than a
round of a small model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

import tdpfed
from tdpfed.algorithms.base import Algorithm
from tdpfed.config import Config
from tdpfed.core.draws import batch_indices
from tdpfed.core.local import Batch
from tdpfed.core.objective import Objective
from tdpfed.core.plain import PlainLocal
from tdpfed.core.state import State, Turn, layouts_of
from tdpfed.core.threads import threads_for
from tdpfed.errors import TDPFedError
from tdpfed.flower.private import PrivateStore, starts_of, state_folder
from tdpfed.flower.settings import read_settings
from tdpfed.flower.task import NodeData, Task, client_id, data_of, objective_of
from tdpfed.server.round import diverged, initial_state
from tdpfed.wire import Expected, Layouts, decode, encode, encoded_size, validate

EVALUATION_BATCH = 1024
"""Samples in one forward pass of an evaluation."""

Metrics = dict[str, float]
Fields = Mapping[str, Any]
Wire = Callable[[int], bytes]
"""Returns the bytes of a message, given the most bytes it may have."""


@dataclass(frozen=True)
class Side:
    """What server and nodes both build from the configuration: the same initial state on every machine."""

    config: Config
    objective: Objective
    algorithm: Algorithm
    server: State  # before round 1
    start: Tensor  # (P,) the initial model, known to both sides

    @classmethod
    def of(cls, task: Task, config: Config, nodes: int, device: torch.device) -> "Side":
        """Build model and algorithm, and the state before round 1."""
        objective = objective_of(task, config.run.seed)
        objective.model.to(device)
        algorithm = config.make_algorithm().bind(objective.layout, nodes)
        return cls(config, objective, algorithm, *initial_state(algorithm, objective.initial(), config.run.seed))

    def turn(self, round_: int, client: int) -> Turn:
        """Return the turn that determines a client's random draws."""
        return Turn(self.config.run.seed, round_, torch.tensor(client, device=self.start.device))

    def broadcast(self, server: State, round_: int, client: int) -> State:
        """Return what the server sends to a client that trains."""
        return self.algorithm.broadcast(server, self.turn(round_, client))

    def shipped(self, server: State) -> tuple[State, Layouts]:
        """Return what the server sends to clients that evaluate: its state if it may send all of it, or its model."""
        if self._sends_state:
            layouts = layouts_of(self.algorithm.down())
            return server, {name: layouts[name] for name in server}
        shipped = self.algorithm.global_model(server)
        assert shipped is not None
        return {"w": shipped}, {"w": self.algorithm.layout}

    def global_model(self, received: State) -> Tensor:
        """Return the global model from what :meth:`shipped` sent."""
        model = self.algorithm.global_model(received) if self._sends_state else received["w"]
        assert model is not None
        return model

    @property
    def _sends_state(self) -> bool:
        return self.server.keys() <= self.algorithm.down().keys()

    def expected(self, state: State, layouts: Layouts, round_: int, client: int) -> tuple[Expected, int]:
        """Return the message that a client expects when ``state`` was sent, and its size in bytes."""
        lengths = {name: value.shape[-1] for name, value in state.items()}
        size = encoded_size(lengths, layouts, "float32", kind="down", round_=round_, client=client, samples=0)
        return Expected(
            kind="down", round=round_, lengths=lengths, layouts=layouts, codec="float32", clients={client}
        ), size


class Node:
    """A client on its machine, for one message."""

    def __init__(self, task: Task, run_config: Fields, node_config: Fields) -> None:
        self.task, self.node_config = task, node_config
        self.config, self.flower = read_settings(run_config)
        self.client = client_id(node_config, self.flower.nodes)
        self.device = self.config.device()

    @cached_property
    def side(self) -> Side:
        """The common initial state; building it also sets the number of threads."""
        made = Side.of(self.task, self.config, self.flower.nodes, self.device)
        threads = self.config.run.threads
        torch.set_num_threads(threads_for(made.objective.layout.size) if threads == "auto" else threads)
        return made

    @cached_property
    def data(self) -> NodeData:
        """The node's own samples."""
        return data_of(self.task, self.node_config, self.device)

    def hello(self) -> dict[str, int | str]:
        """Return who this node is; the server keeps the number of samples for the whole run."""
        self._check_model()
        return {
            "client": self.client,
            "samples": len(self.data.x),
            "tests": len(self.data.x_test),
            "model": self.side.objective.layout.hash,
            "version": tdpfed.__version__,
        }

    def _check_model(self) -> None:
        """Try the model on two samples, so that errors are reported before the first round."""
        data, objective = self.data, self.side.objective
        try:
            outputs = objective.outputs(self.side.start, data.x[:2])
        except Exception as error:  # the user's own code may raise anything
            raise TDPFedError(f"task.model: cannot take inputs of shape {tuple(data.x.shape[1:])} ({error})") from error
        if objective.loss is not torch.nn.functional.cross_entropy:
            return
        labels = torch.cat([data.y, data.y_test])
        if (
            labels.is_floating_point()
            or outputs.ndim != 2
            or not 0 <= int(labels.min()) <= int(labels.max()) < (outputs.shape[1])
        ):
            raise TDPFedError(
                f"task.load: labels from {labels.min()} to {labels.max()} with outputs of shape {tuple(outputs.shape)} "
                "for two samples, must be class numbers smaller than the number of outputs"
            )

    def train(self, fields: Fields, wire: Wire) -> tuple[bytes | None, Metrics]:
        """Train a round: write the new private state, return the upload and metrics."""
        round_, session, settled = (_count(fields, name) for name in ("round", "session", "settled"))
        side, algorithm = self.side, self.side.algorithm
        turn = side.turn(round_, self.client)
        message: State = {}
        if algorithm.communicates:
            sent = side.broadcast(side.server, round_, self.client)
            message = self._received(wire, sent, layouts_of(algorithm.down()), round_)
        store = self._store(fields)
        with store.locked():
            kept = store.before(round_, session)
            private = algorithm.init_private(side.start) if kept is None else _on(kept, self.device)
            local = PlainLocal(turn, algorithm.tau, self._batches(turn), side.objective.gradient)
            private, upload, metrics = algorithm.checked_update(message, private, local)
            if not all(bool(value.isfinite().all()) for part in (private, upload, metrics) for value in part.values()):
                raise diverged(algorithm, round_)
            store.save(round_, session, private, settled)
        found: Metrics = {"loss": float(metrics["loss"])}
        if fields.get("evaluate"):
            found |= self._score("local", algorithm.local_model(private, upload))
        if not fields.get("report") or not algorithm.communicates:
            return None, found
        return encode(
            upload, layouts_of(algorithm.up()), kind="up", round_=round_, client=self.client,
            samples=len(self.data.x), codec=self.config.wire.codec, seed=self.config.run.seed,
        ), found  # fmt: skip

    def evaluate(self, fields: Fields, wire: Wire) -> Metrics:
        """Evaluate this client's personalized model and the global model on its own test samples."""
        round_, side = _count(fields, "round"), self.side
        kept = self._store(fields).upto(round_)
        private = side.algorithm.init_private(side.start) if kept is None else _on(kept, self.device)
        found = self._score("personalized", side.algorithm.personalized(private))
        if side.algorithm.global_model(side.server) is not None:
            state = self._received(wire, *side.shipped(side.server), round_)
            found |= self._score("global", side.global_model(state))
        return found

    def _store(self, fields: Fields) -> PrivateStore:
        folder = state_folder(self.node_config, fields.get("run"), self.client)
        return PrivateStore(folder, starts_of(fields.get("starts")))

    def _received(self, wire: Wire, sent: State, layouts: Layouts, round_: int) -> State:
        """Return the state that the server sent, which must have the form of ``sent``."""
        expected, size = self.side.expected(sent, layouts, round_, self.client)
        return _on(validate(decode(wire(size), size), expected), self.device)

    def _batches(self, turn: Turn) -> Callable[[int], Batch]:
        """Return the minibatches of a turn: the same draws as in simulation, from this node's own samples."""
        data, algorithm = self.data, self.side.algorithm
        first, size = torch.tensor([[0], [len(data.x)]], device=self.device)

        @cache
        def drawn(draws: int) -> Tensor:
            clients = turn.clients[None]
            return batch_indices(turn.seed, turn.round, clients, first, size, draws, algorithm.batch_size)[0]

        def batch(step: int) -> Batch:
            index = drawn(algorithm.draws * (step // algorithm.draws + 1))[step]
            return data.x[index], data.y[index]

        return batch

    def _score(self, name: str, theta: Tensor) -> Metrics:
        """Return the number of correct predictions and the summed loss on the test samples."""
        objective, correct, loss = self.side.objective, 0, 0.0
        with torch.no_grad():
            pairs = zip(self.data.x_test.split(EVALUATION_BATCH), self.data.y_test.split(EVALUATION_BATCH), strict=True)
            for x, y in pairs if len(self.data.y_test) else ():
                outputs = objective.outputs(theta, x)
                correct += int((outputs.argmax(-1) == y).sum())
                loss += float(objective.loss(outputs, y).double()) * len(y)
        return {f"{name}_correct": correct, f"{name}_loss": loss}


def _count(fields: Fields, name: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise TDPFedError(f"{name}: {value!r} in a message, must be a whole number of at least 0")
    return value


def _on(state: State, device: torch.device) -> State:
    """Return copies in memory that torch aligns: the last bit of a product may depend on the alignment."""
    return {name: value.to(device, copy=True) for name, value in state.items()}
