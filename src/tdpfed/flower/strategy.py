"""The server's side of a federation: its members, and how a round runs, from any round on.

Aggregation is ``Algorithm.aggregate`` with the average of ``[robust]``, weights are the numbers of samples that nodes
report when they join, and every reply is validated by :mod:`tdpfed.wire` before any arithmetic.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from flwr.app import Message

from tdpfed.core.state import State, Turn, layouts_of, lengths_of
from tdpfed.errors import TDPFedError
from tdpfed.flower import envelope
from tdpfed.flower.exchange import Exchange
from tdpfed.flower.node import Metrics, Side
from tdpfed.flower.settings import Flower, rule_of
from tdpfed.server.gate import check_gauge
from tdpfed.server.records import Ledger
from tdpfed.server.round import ServerRound
from tdpfed.wire import Expected, Layouts, Rejected, decode, encode, encoded_size, validate

RETRY = 3.0
"""Seconds between two checks for missing nodes."""

HELLO = 120.0
"""Seconds that a node may take to identify itself, unless ``flower.deadline`` is shorter."""

ASK_AGAIN, ASK_AGAIN_MOST = 5.0, 600.0
"""Seconds until a node that did not answer is asked again: at first, doubling each time, and at most."""

SILENT, AWAY = "does not identify itself and will be asked again:", "is rejected:"
"""Log texts on a node that cannot take part, before the reason; :mod:`tdpfed.flower.watch` searches for them."""

LATE = 10.0
"""Seconds that a message stays valid after the deadline, so that the deadline ends the wait and not Flower's TTL."""

LARGEST = 1e30
"""Bound on a reported loss, so that sums stay finite."""

SLACK = 64
"""Bytes by which a header with wrong numbers may exceed the expected size, so that the error names the numbers."""


@dataclass(frozen=True)
class Member:
    """A client as it was when it joined; later messages do not change it."""

    node: int
    samples: int
    tests: int


@dataclass(frozen=True)
class RoundResult:
    """The result of a round: replies, lost clients and refused uploads."""

    metrics: dict[int, Metrics]  # by client that replied
    lost: dict[int, str]  # by client that did not: the reason
    refused: list[Rejected]
    uplink: int  # bytes of this round's uploads


class Strategy:
    """A federation in progress: the server's state and its members; ``step`` runs one round."""

    def __init__(
        self, side: Side, flower: Flower, run: str, starts: Sequence[int], notify: Callable[[str], None]
    ) -> None:
        self.side, self.flower, self.run, self.starts, self.notify = side, flower, run, tuple(starts), notify
        self.server: State = side.server
        self.round, self.settled = 0, 0
        self.members: dict[int, Member] = {}
        self.ledger = Ledger()
        config = side.config
        self.participation = config.participation
        self.needed = max(1, self.participation.quorum)
        participation = replace(self.participation, quorum=self.needed)
        self.server_round = ServerRound(side.algorithm, config.run.seed, participation, rule_of(config))
        check_gauge(side.algorithm, self.server_round.rule)
        self.refused: list[Rejected] = []  # in the current round
        self._rejected: set[int] = set()
        self._silent: dict[int, tuple[int, float]] = {}  # by node: failed requests, time of the next one
        self._last_error = ""  # of a node that could not join
        self._claims: dict[int, int] = {}  # by client with a disconnected node: a rejected node that claims it

    def gather(self, exchange: Exchange) -> None:
        """Wait until all clients have joined; after ``flower.wait`` seconds, as many as a round needs are enough."""
        end = time.monotonic() + self.flower.wait
        self.greet(exchange)
        while len(self.members) < self.flower.nodes and time.monotonic() < end:
            exchange.pause(RETRY / 3)
            self.greet(exchange)
        if len(self.members) < self.needed:
            raise TDPFedError(
                f"flower.nodes: {len(self.members)} of {self.flower.nodes} clients joined within "
                f"{self.flower.wait:g} seconds, must be at least {self.needed}"
                + (self._last_error and f"; the last error: {self._last_error}")
            )

    def greet(self, exchange: Exchange) -> None:
        """Ask new nodes to identify themselves."""
        online = exchange.online()
        self._rejected &= online  # a restarted node may try again
        self._silent = {node: entry for node, entry in self._silent.items() if node in online}
        postponed = {node for node, (_, when) in self._silent.items() if time.monotonic() < when}
        known = {member.node for member in self.members.values()} | self._rejected | postponed
        new = {node: self._request("query", node, {}, None) for node in online - known}
        for node, answer in exchange.ask(new, min(HELLO, self.flower.deadline)):
            if isinstance(answer, str):
                times = self._silent.get(node, (0, 0.0))[0] + 1
                self._silent[node] = times, time.monotonic() + min(ASK_AGAIN_MOST, ASK_AGAIN * 2 ** min(times - 1, 10))
                self._complain(f"node {node} {SILENT} {answer}")
                continue
            self._silent.pop(node, None)
            try:
                self._admit(node, answer, online)
            except TDPFedError as error:
                self._rejected.add(node)
                self._complain(f"node {node} {AWAY} {error}")
        self._check_claims(online)

    def _complain(self, text: str) -> None:
        self._last_error = text
        self.notify(text)

    def _check_claims(self, online: set[int]) -> None:
        """Stop a resumed run that cannot continue: its clients are connected, but with other node ids than before."""
        connected = sum(member.node in online for member in self.members.values())
        claims = {k: node for k, node in self._claims.items() if node in online and self.members[k].node not in online}
        if self.starts[-1] and claims and connected < self.needed:
            changed = ", ".join(f"{k} (was {self.members[k].node}, now {node})" for k, node in sorted(claims.items()))
            raise TDPFedError(
                f"flower.out: the run was started with other nodes; clients have new node ids: {changed}. A node keeps "
                "its id with its key and the SuperLink's --database; restore both or give another folder"
            )

    def _admit(self, node: int, answer: Message, online: set[int]) -> None:
        fields = envelope.fields_of(answer)
        numbers = [fields.get(name) for name in ("client", "samples", "tests")]
        client, samples, tests = (value if type(value) is int else -1 for value in numbers)
        most, known = self.flower.max_samples, self.flower.samples
        if not 0 <= client < self.flower.nodes or not 0 < samples <= most or not 0 <= tests <= most:
            raise TDPFedError(
                f"client, samples, tests: {numbers} given, must be whole numbers, client below {self.flower.nodes} and "
                f"samples up to flower.max_samples, {most}"
            )
        if known is not None and samples != known[client]:
            raise TDPFedError(f"samples: {samples} given, must be {known[client]} as in flower.samples")
        model = self.side.objective.layout.hash
        if fields.get("model") != model:
            given = str(fields.get("model"))[:64]
            raise TDPFedError(f"model: layout {given!r} given, must be {model!r} as in the server's task.py")
        before = self.members.get(client)
        moved = before is not None and self.flower.insecure and before.node not in online
        if before is not None and (not moved or (before.samples, before.tests) != (samples, tests)):
            if before.node not in online:
                self._claims[client] = node
            raise TDPFedError(f"partition-id: {client} given, must not be that of node {before.node}")
        self.members[client] = Member(node, samples, tests)
        self.notify(f"client {client} is node {node}, with {samples} samples")

    def step(self, exchange: Exchange, evaluate: bool) -> RoundResult:
        """Run one round; with too few accepted uploads, repeat it or stop the run, as configured."""
        self.refused = []
        uploads: dict[int, State] = {}
        for attempt in range(self.participation.attempts):
            if attempt:
                exchange.pause(RETRY)
            self._await(exchange, attempt)
            replies, uploads, result = self._attempt(exchange, attempt, evaluate)
            self.refused += result.refused
            count = len(uploads) if self.side.algorithm.communicates else len(replies)
            if self.server_round.enough(count):
                self._aggregate(uploads)
                self.round += 1
                return replace(result, refused=self.refused)
            for client, reason in result.lost.items():
                self.notify(f"round {self.round + 1}: client {client}: {reason}")
            if self.participation.below_quorum == "stop":
                break
        raise self.server_round.below_quorum(self.round + 1, attempt + 1, count, self.refused)

    def _await(self, exchange: Exchange, attempt: int) -> None:
        """Wait while too few nodes are connected for the round; after ``flower.wait`` seconds try anyway."""
        end, seed = time.monotonic() + self.flower.wait, self.side.config.run.seed
        chosen, _ = self.participation.draw(seed, self.round + 1, self.flower.nodes, attempt)
        self.greet(exchange)
        while len(self._present(exchange, chosen.tolist())) < min(self.needed, len(chosen)) and time.monotonic() < end:
            exchange.pause(RETRY)
            self.greet(exchange)

    def evaluate(self, exchange: Exchange) -> dict[int, Metrics]:
        """Let all connected clients evaluate their own model and the global model."""
        state, layouts = ({}, {}) if self.side.algorithm.global_model(self.server) is None else self._shipped()
        messages = {
            client: self._request("evaluate", member.node, {"round": self.round}, self._down(state, layouts, client))
            for client, member in self._present(exchange, self.members).items()
        }
        answers = exchange.ask(messages, self.flower.deadline)
        return {client: self._metrics(client, answer) for client, answer in answers if not isinstance(answer, str)}

    def _attempt(
        self, exchange: Exchange, attempt: int, evaluate: bool
    ) -> tuple[dict[int, Metrics], dict[int, State], RoundResult]:
        """Try a round: return the metrics of clients that replied, the accepted uploads and the result."""
        number = self.round + 1
        chosen, trained = self.participation.draw(self.side.config.run.seed, number, self.flower.nodes, attempt)
        reporting = set(chosen.tolist())
        messages = {}
        for client, member in self._present(exchange, trained.tolist()).items():
            state = self.side.broadcast(self.server, number, client)
            fields = {
                "round": number, "settled": self.settled, "evaluate": evaluate, "report": client in reporting,
            }  # fmt: skip
            wire = self._down(state, layouts_of(self.side.algorithm.down()), client, number)
            self.ledger.downlink += len(wire or b"")
            messages[client] = self._request("train", member.node, fields, wire)
        self.ledger.client_rounds += len(messages)
        metrics: dict[int, Metrics] = {}
        uploads: dict[int, State] = {}
        lost = {client: "not connected" for client in trained.tolist() if client not in messages}
        refused: list[Rejected] = []
        before = self.ledger.uplink
        for client, answer in exchange.ask(messages, self.flower.deadline):
            if isinstance(answer, str):
                lost[client] = answer
                continue
            try:
                if client in reporting and self.side.algorithm.communicates:
                    uploads[client] = self._accept(client, answer, uploads)
                metrics[client] = self._metrics(client, answer)
            except Rejected as refusal:
                refused.append(_with_client(client, refusal))
        refused += self._refused_by_gauge(uploads)
        self.ledger.rejected += len(refused)
        return metrics, uploads, RoundResult(metrics, lost, refused, self.ledger.uplink - before)

    def _accept(self, client: int, answer: Message, seen: Mapping[int, State]) -> State:
        """Return the validated upload in a reply."""
        number, member, algorithm = self.round + 1, self.members[client], self.side.algorithm
        self.ledger.uplink += envelope.wire_size(answer)
        self.ledger.uploads += 1
        if answer.metadata.src_node_id != member.node:
            raise Rejected("client", f"from node {answer.metadata.src_node_id}", client=client)
        lengths, layouts = lengths_of(algorithm.up()), layouts_of(algorithm.up())
        codec, samples = self.side.config.wire.codec, {client: member.samples}
        limit = encoded_size(lengths, layouts, codec, kind="up", round_=number, client=client, samples=member.samples)
        limit += SLACK
        message = decode(envelope.wire_of(answer, limit, client), limit)
        expected = Expected(
            kind="up", round=number, lengths=lengths, layouts=layouts, codec=codec, clients={client}, seen=seen,
            samples=samples,
        )  # fmt: skip
        return validate(message, expected)

    def _refused_by_gauge(self, uploads: dict[int, State]) -> list[Rejected]:
        """Remove uploads that the gauge refuses, and return the refusals."""
        if not uploads:
            return []
        stacked, turn = self._stacked(uploads)
        _, kept, refused = self.server_round.admitted(stacked, self.server, turn)
        for client in set(uploads) - set(kept.clients.tolist()):
            del uploads[client]
        return refused

    def _aggregate(self, uploads: dict[int, State]) -> None:
        if not uploads:
            return
        stacked, turn = self._stacked(uploads)
        samples = torch.tensor([self.members[client].samples for client in turn.clients.tolist()])
        self.server = self.server_round.aggregate(self.server, stacked, samples, turn)

    def _stacked(self, uploads: Mapping[int, State]) -> tuple[State, Turn]:
        """Return uploads stacked along a client axis, ordered by client and not by arrival."""
        clients = sorted(uploads)
        names = uploads[clients[0]]
        state = {name: torch.stack([uploads[client][name] for client in clients]) for name in names}
        return state, Turn(self.side.config.run.seed, self.round + 1, torch.tensor(clients))

    def _metrics(self, client: int, answer: Message) -> Metrics:
        """Return a client's metrics within bounds: correct predictions are at most its test samples."""
        tests = self.members[client].tests

        def bounds(name: str) -> tuple[float, float]:
            if name.endswith("_correct"):
                return 0, tests
            return (0.0, self.flower.deadline) if name == "seconds" else (-LARGEST, LARGEST)

        return {k: min(max(v, bounds(k)[0]), bounds(k)[1]) for k, v in envelope.metrics_of(answer).items()}

    def _present(self, exchange: Exchange, clients: Any) -> dict[int, Member]:
        online = exchange.online()
        return {k: self.members[k] for k in clients if k in self.members and self.members[k].node in online}

    def _shipped(self) -> tuple[State, Layouts]:
        return self.side.shipped(self.server)

    def _down(self, state: State, layouts: Layouts, client: int, number: int | None = None) -> bytes | None:
        if not state or not self.side.algorithm.communicates:
            return None
        return encode(
            state, layouts, kind="down", round_=self.round if number is None else number, client=client, samples=0,
            codec="float32", seed=self.side.config.run.seed,
        )  # fmt: skip

    def _request(self, kind: str, node: int, fields: Mapping[str, envelope.Plain], wire: bytes | None) -> Message:
        starts = ",".join(map(str, self.starts))
        content = {"run": self.run, "session": len(self.starts), "starts": starts, **fields}
        return envelope.request(kind, node, content, wire, self.flower.deadline + LATE)

    def state(self) -> dict[str, Any]:
        """Return what a restarted server needs in addition to the tensors, as plain values."""
        members = {str(client): asdict(member) for client, member in sorted(self.members.items())}
        return {"members": members, "ledger": asdict(self.ledger), "run": self.run, "nodes": self.flower.nodes}

    def restore(self, round_: int, server: State, meta: Mapping[str, Any]) -> None:
        """Resume from a checkpoint of the same run."""
        for name, mine in (("run", self.run), ("nodes", self.flower.nodes)):
            if meta.get(name) != mine:
                raise TDPFedError(f"checkpoint: {name} {meta.get(name)!r} saved, must be {mine!r}")
        shapes = [{name: value.shape for name, value in state.items()} for state in (server, self.server)]
        if shapes[0] != shapes[1]:
            raise TDPFedError(f"checkpoint: server state {shapes[0]} saved, must be {shapes[1]} as in this run")
        self.server = {name: value.clone() for name, value in server.items()}
        try:
            self.members = {int(client): Member(**member) for client, member in meta["members"].items()}
            self.ledger = Ledger(**meta["ledger"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TDPFedError(f"checkpoint: its members or ledger cannot be read ({error!r})") from None
        self.round, self.starts = round_, (*self.starts[:-1], round_)


def _with_client(client: int, refusal: Rejected) -> Rejected:
    """Return a refusal with the client that sent the message according to Flower, whatever the message claims."""
    if refusal.client == client:
        return refusal
    return Rejected(refusal.rule, refusal.reason, client=client, tensor=refusal.tensor)
