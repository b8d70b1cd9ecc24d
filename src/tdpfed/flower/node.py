"""How a node handles a message: it introduces itself, trains a round or evaluates. Independent of Flower.

Every message starts a new process, so modules that a single round does not need are not imported: gradients come from
plain autograd, with the same numbers as ``torch.func``, because the first use of ``torch.func`` takes longer than a
round of a small model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

import tdpfed
from tdpfed.algorithms.base import CHOICE, Algorithm, held_out_of
from tdpfed.config import Config
from tdpfed.core.draws import HeldOut, length_in_pass, own_indices
from tdpfed.core.extras import extras_of
from tdpfed.core.local import Batch
from tdpfed.core.objective import Objective
from tdpfed.core.plain import PlainLocal
from tdpfed.core.recipe import Optimizer
from tdpfed.core.state import State, Turn, own_entries
from tdpfed.core.threads import threads_for
from tdpfed.errors import TDPFedError, wrong
from tdpfed.flower.kept import Kept
from tdpfed.flower.private import PrivateStore, starts_of, state_folder
from tdpfed.flower.settings import read_settings
from tdpfed.flower.task import NodeData, Task, client_id, data_of, objective_of
from tdpfed.server.round import diverged, initial_state
from tdpfed.wire import Expected, Form, decode, encode, validate, whole_parts
from tdpfed.wire.channel import Channel
from tdpfed.wire.downlink import Downlink

EVALUATION_BATCH = 1024
"""Samples in one forward pass of an evaluation."""

Metrics = dict[str, float]
Fields = Mapping[str, Any]
Bytes = Callable[[int], bytes]
"""Returns the bytes of a message, given the most bytes it may have."""


class CopyError(TDPFedError):
    """A message holds changes of entries that this node does not have."""


@dataclass(frozen=True)
class Side:
    """What server and nodes both build from the configuration: the same initial state on every machine."""

    config: Config
    objective: Objective
    algorithm: Algorithm
    channel: Channel
    downlink: Downlink
    server: State  # before round 1
    start: Tensor  # (P,) the initial model, known to both sides

    @classmethod
    def of(cls, task: Task, config: Config, nodes: int, device: torch.device) -> "Side":
        """Build model, algorithm and wire, and the state before round 1."""
        seed = config.run.seed
        objective = objective_of(task, seed)
        objective.model.to(device)
        algorithm = config.make_algorithm().bind(objective.layout, nodes)
        channel, downlink = Channel(algorithm, config.wire, seed), Downlink(algorithm, config.wire, seed)
        config.server.check(algorithm)
        config.optimizer.over(config.run.rounds).check_for(algorithm.name, algorithm.follows)
        server, start = initial_state(algorithm, objective.initial(), seed)
        server = server | config.server.start(server, algorithm) | downlink.start(server)
        return cls(config, objective, algorithm, channel, downlink, server, start)

    def turn(self, round_: int, client: int) -> Turn:
        """Return the turn that determines a client's random draws."""
        return Turn(self.config.run.seed, round_, torch.tensor(client, device=self.start.device))

    def broadcast(self, server: State, round_: int, client: int) -> State:
        """Return what the server sends to a client that trains."""
        return self.algorithm.broadcast(server, self.turn(round_, client))

    def kept(self) -> Kept:
        """Return what a client keeps before its first round."""
        copy = {name: self.server[name] for name in self.algorithm.down()} if self.downlink.changes else {}
        return Kept(self.algorithm.init_private(self.start), self.channel.start(self.start), copy=copy)

    def shipped(self, server: State) -> tuple[State, Form]:
        """Return what the server sends to clients that evaluate: its state if it may send all of it, or its model."""
        if self._sends_state:
            own = own_entries(server)
            return own, Form.whole({name: entry for name, entry in self.algorithm.down().items() if name in own})
        shipped = self.algorithm.global_model(server)
        assert shipped is not None
        return {"w": shipped}, Form.whole({"w": self.algorithm.layout})

    def global_model(self, received: State) -> Tensor:
        """Return the global model from what :meth:`shipped` sent."""
        model = self.algorithm.global_model(received) if self._sends_state else received["w"]
        assert model is not None
        return model

    @property
    def optimizer(self) -> Optimizer:
        """How clients take their steps."""
        return self.config.optimizer.over(self.config.run.rounds)

    @property
    def _sends_state(self) -> bool:
        return own_entries(self.server).keys() <= self.algorithm.down().keys()


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
            outputs = objective.outputs(self.side.start, data.x[:2].clone())
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

    def train(self, fields: Fields, data: Bytes) -> tuple[bytes | None, Metrics]:
        """Train a round: write what the client keeps, return the upload and metrics."""
        round_, session, settled, counted = (_count(fields, n) for n in ("round", "session", "settled", "counted"))
        side, algorithm, store = self.side, self.side.algorithm, self._store(fields)
        turn, reports = side.turn(round_, self.client), bool(fields.get("report")) and algorithm.communicates
        dense, changes = self._arrived(data, round_)
        with store.locked():
            before = self._kept(store.before(round_, session))
            copy = self._copy(dense, changes, before) if side.downlink.changes else {}
            message = side.broadcast(copy, round_, self.client) if side.downlink.changes else dense
            local = self._local(turn)
            own, upload, metrics = self._algorithm(round_).checked_update(message, before.own, local)
            after, parts = Kept(own, before.resolved(counted), copy=copy, round=round_), None
            if reports and side.channel.changes:
                after, parts = self._sent(after, upload, message)
            if not all(bool(v.isfinite().all()) for part in (after.state, upload, metrics) for v in part.values()):
                raise diverged(algorithm, round_)
            store.save(round_, session, after.state, settled)
        found: Metrics = {"loss": float(metrics["loss"])}
        if fields.get("evaluate"):
            found |= self._score("local", algorithm.local_model(own, upload))
        if not reports:
            return None, found
        form = side.channel.form
        if parts is None:
            parts = whole_parts(upload, form, kind="up", round_=round_, client=self.client, seed=self.config.run.seed)
        samples = len(self.data.x)
        return encode(parts, form, kind="up", round_=round_, client=self.client, samples=samples), found

    def evaluate(self, fields: Fields, data: Bytes) -> Metrics:
        """Evaluate this client's personalized model and the global model on its own test samples."""
        round_, side = _count(fields, "round"), self.side
        kept = self._kept(self._store(fields).upto(round_))
        found = self._score("personalized", side.algorithm.personalized(kept.own))
        if side.algorithm.candidates:
            found[CHOICE] = float(kept.own[CHOICE])
        if side.algorithm.global_model(side.server) is not None:
            _, form = side.shipped(side.server)
            found |= self._score("global", side.global_model(self._received(data(form.bytes), form, round_)))
        return found

    def _store(self, fields: Fields) -> PrivateStore:
        folder = state_folder(self.node_config, fields.get("run"), self.client)
        return PrivateStore(folder, starts_of(fields.get("starts")))

    def _kept(self, state: State | None) -> Kept:
        return self.side.kept() if state is None else Kept.of(_on(state, self.device))

    def _arrived(self, data: Bytes, round_: int) -> tuple[State, dict[int, State]]:
        """Return the dense entries that the server sent, or the changes of the rounds that this node missed."""
        downlink, size = self.side.downlink, self.side.downlink.form.bytes
        if not self.side.algorithm.communicates:
            return {}, {}
        whole = data(downlink.dense.bytes)
        if not downlink.changes or len(whole) >= downlink.dense.bytes:  # changes are only sent if they are shorter
            return self._received(whole, downlink.dense, round_), {}
        messages = [whole[start : start + size] for start in range(0, len(whole), size)] or [whole]
        rounds = range(round_ - len(messages) + 1, round_ + 1)
        return {}, {n: self._received(one, downlink.form, n) for n, one in zip(rounds, messages, strict=True)}

    def _copy(self, dense: State, changes: dict[int, State], before: Kept) -> State:
        """Return the server's entries: the dense ones, or the client's copy with the changes that it does not have."""
        if dense:
            return dense
        if before.round < min(changes) - 1:
            raise CopyError(f"changes from round {min(changes)} on, but this node's copy is of round {before.round}")
        copy = before.copy
        for round_, change in changes.items():
            if round_ > before.round:
                copy = {name: value + change[name] for name, value in copy.items()}
        return copy

    def _received(self, data: bytes, form: Form, round_: int) -> State:
        """Return the entries, or their changes, that the server sent in a message of a round."""
        expected = Expected(kind="down", round=round_, form=form, clients={self.client})
        return _on(validate(decode(data, form.bytes), expected), self.device)

    def _sent(self, after: Kept, upload: State, message: State) -> tuple[Kept, list[Tensor]]:
        """Return what the client keeps after an upload, and the numbers that it sends."""
        channel = self.side.channel
        own, unchanged, kept = (
            {name: value[None] for name, value in state.items()}
            for state in (upload, self.side.algorithm.unchanged(message), after.wire)
        )
        sent = channel.send(own, unchanged, kept)
        back = channel.returned(sent.kept, sent.seen, unchanged)
        lost = {name: value[0] for name, value in back.items() if value is not sent.kept[name]}
        wire = {name: value[0] for name, value in sent.kept.items()}
        return replace(after, wire=wire, lost=lost), [part[0] for part in sent.parts]

    def _local(self, turn: Turn) -> PlainLocal:
        """Return the local work of a turn: the same draws as in simulation, from this node's own samples."""
        data, objective, algorithm = self.data, self.side.objective, self._algorithm(int(turn.round))
        first, size = torch.tensor([[0], [len(data.x)]], device=self.device)
        held_out, length, draws = self._held_out(size), algorithm.batch_size, algorithm.draws
        passing = None if self.side.algorithm.epochs is None else int(size - held_out.sizes_in(size, turn.round))

        @cache
        def drawn(draws: int) -> Tensor:
            clients = turn.clients[None]
            by_pass = passing is not None
            return own_indices(turn.seed, turn.round, clients, first, size, draws, length, held_out, by_pass=by_pass)[0]

        def batch(step: int) -> Batch:
            index = drawn(draws * (step // draws + 1))[step]
            index = index if passing is None else index[: length_in_pass(step, passing, length)]
            return data.x[index], data.y[index]

        extras = extras_of(
            turn, (data.x, data.y), first, size, expected=draws, batch_size=length, held_out=held_out, public=None,
            passing=passing,
        )  # fmt: skip
        product, scores = objective.hessian_product, objective.per_sample
        return PlainLocal(turn, algorithm.tau, batch, objective.gradient, extras, product, self.side.optimizer, scores)

    def _algorithm(self, round_: int) -> Algorithm:
        """Return the method for the number of samples that this node trains on in a round."""
        size = torch.tensor(len(self.data.x))
        return self.side.algorithm.of_size(int(size - self._held_out(size).sizes_in(size, round_)))

    def _held_out(self, size: Tensor) -> HeldOut:
        """Return which of this node's training samples are held out; some must be left to train on."""
        held_out = held_out_of(self.side.algorithm, self.config.data.validation)
        if held_out.share and bool(held_out.sizes(size) >= size):
            allowed = f"0, or data with at least 2 training samples: this node has {int(size)}"
            asks = "evaluation" if self.side.algorithm.candidates else "algorithm"
            section = "data" if self.config.data.validation else asks
            raise wrong(f"{section}.validation", held_out.share, allowed)
        return held_out

    def _score(self, name: str, theta: Tensor) -> Metrics:
        """Return the number of correct predictions and the summed loss on the test samples."""
        objective, correct, loss = self.side.objective, 0, 0.0
        with torch.no_grad():
            pairs = zip(self.data.x_test.split(EVALUATION_BATCH), self.data.y_test.split(EVALUATION_BATCH), strict=True)
            for x, y in pairs if len(self.data.y_test) else ():
                outputs = objective.outputs(theta, x.clone())  # a model may change its inputs in place
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
