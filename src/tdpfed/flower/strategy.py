"""The server's side of a federation: who is in it, and how a round goes, from any round on.

Aggregation is ``Algorithm.aggregate`` with the average of ``[robust]``, weights are the numbers of samples that nodes
gave when they first came, and every reply passes the gate of :mod:`tdpfed.wire` before any arithmetic.
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
"""Seconds between looks for nodes that are missing."""

HELLO = 120.0
"""Seconds that a node may take to say who it is, where ``flower.deadline`` is not shorter."""

AGAIN, SELDOM = 5.0, 600.0
"""Seconds until a node that did not answer is asked again: so long at first, then twice as long, at most the last."""

SILENT, AWAY = "does not say who it is, and will be asked again:", "is turned away:"
"""What is said of a node that cannot take part, before the reason; the demo looks for it."""

LATE = 10.0
"""Seconds that a message holds beyond the deadline: it is the deadline that ends the wait, not Flower's own clock."""

LARGEST = 1e30
"""Bound on a loss that a node reports: sums of it are finite."""

SLACK = 64
"""Bytes by which a header with wrong numbers may be longer than the right one: it is refused for the numbers."""


@dataclass(frozen=True)
class Member:
    """A client as it was when it first came; what it says later does not change that."""

    node: int
    samples: int
    tests: int


@dataclass(frozen=True)
class RoundResult:
    """The result of a round: replies, losses and refusals."""

    metrics: dict[int, Metrics]  # of each client that replied
    lost: dict[int, str]  # and why the others did not
    refused: list[Rejected]
    uplink: int  # bytes of this round's uploads


class Strategy:
    """A federation in progress: the server's state, its members, and what advances it by a round."""

    def __init__(
        self, side: Side, flower: Flower, run: str, starts: Sequence[int], tell: Callable[[str], None]
    ) -> None:
        self.side, self.flower, self.run, self.starts, self.tell = side, flower, run, tuple(starts), tell
        self.server: State = side.server
        self.round, self.settled = 0, 0
        self.members: dict[int, Member] = {}
        self.ledger = Ledger()
        config = side.config
        self.participation = config.participation
        self.needed = max(1, self.participation.quorum)
        asked = replace(self.participation, quorum=self.needed)
        self.server_round = ServerRound(side.algorithm, config.run.seed, asked, rule_of(config))
        check_gauge(side.algorithm, self.server_round.rule)
        self.refused: list[Rejected] = []  # in the round that is tried
        self._turned_away: set[int] = set()
        self._silent: dict[int, tuple[int, float]] = {}  # of nodes that did not answer: how often, when to ask again
        self._why = ""  # the last node that was not let in
        self._claims: dict[int, int] = {}  # by nodes turned away: which client, whose own node is not there

    def gather(self, exchange: Exchange) -> None:
        """Wait until all clients have come; when the time is up, as many as a round needs will do."""
        end = time.monotonic() + self.flower.wait
        self.greet(exchange)
        while len(self.members) < self.flower.nodes and time.monotonic() < end:
            exchange.pause(RETRY / 3)
            self.greet(exchange)
        if len(self.members) < self.needed:
            raise TDPFedError(
                f"flower.nodes: {len(self.members)} of {self.flower.nodes} clients came within "
                f"{self.flower.wait:g} seconds, at least {self.needed} must"
                + (self._why and f"; the last: {self._why}")
            )

    def greet(self, exchange: Exchange) -> None:
        """Ask nodes that have not been met who they are."""
        online = exchange.online()
        self._turned_away &= online  # one that was restarted may try again
        self._silent = {node: told for node, told in self._silent.items() if node in online}
        late = {node for node, (_, when) in self._silent.items() if time.monotonic() < when}
        known = {member.node for member in self.members.values()} | self._turned_away | late
        new = {node: self._request("query", node, {}, None) for node in online - known}
        for node, answer in exchange.ask(new, min(HELLO, self.flower.deadline)):
            if isinstance(answer, str):
                times = self._silent.get(node, (0, 0.0))[0] + 1
                self._silent[node] = times, time.monotonic() + min(SELDOM, AGAIN * 2 ** min(times - 1, 10))
                self._complain(f"node {node} {SILENT} {answer}")
                continue
            self._silent.pop(node, None)
            try:
                self._admit(node, answer, online)
            except TDPFedError as error:
                self._turned_away.add(node)
                self._complain(f"node {node} {AWAY} {error}")
        self._check_claims(online)

    def _complain(self, text: str) -> None:
        self._why = text
        self.tell(text)

    def _check_claims(self, online: set[int]) -> None:
        """Stop where a run that goes on cannot: its clients are there, but as nodes that are not those of before."""
        here = sum(member.node in online for member in self.members.values())
        claims = {k: node for k, node in self._claims.items() if node in online and self.members[k].node not in online}
        if self.starts[-1] and claims and here < self.needed:
            told = ", ".join(f"{k} (was {self.members[k].node}, now {node})" for k, node in sorted(claims.items()))
            raise TDPFedError(
                f"flower.out: the run was begun with other nodes; clients have new node ids: {told}. A node has the id "
                "of before with its key of before and the SuperLink's --database of before; or give another folder"
            )

    def _admit(self, node: int, answer: Message, online: set[int]) -> None:
        fields = envelope.fields_of(answer)
        numbers = [fields.get(name) for name in ("client", "samples", "tests")]
        client, samples, tests = (value if type(value) is int else -1 for value in numbers)
        most, known = self.flower.max_samples, self.flower.samples
        if not 0 <= client < self.flower.nodes or not 0 < samples <= most or not 0 <= tests <= most:
            raise TDPFedError(
                f"client, samples, tests: {numbers} given, must be whole numbers, a client below {self.flower.nodes} "
                f"and samples up to {most}, which is flower.max_samples"
            )
        if known is not None and samples != known[client]:
            raise TDPFedError(f"samples: {samples} given, must be {known[client]} as in flower.samples")
        model = self.side.objective.layout.hash
        if fields.get("model") != model:
            given = str(fields.get("model"))[:64]
            raise TDPFedError(f"model: layout {given!r} given, must be {model!r} as the server's task.py has it")
        before = self.members.get(client)
        moved = before is not None and self.flower.insecure and before.node not in online
        if before is not None and (not moved or (before.samples, before.tests) != (samples, tests)):
            if before.node not in online:
                self._claims[client] = node
            raise TDPFedError(f"partition-id: {client} given, which node {before.node} has already")
        self.members[client] = Member(node, samples, tests)
        self.tell(f"client {client} is node {node}, with {samples} samples")

    def step(self, exchange: Exchange, evaluate: bool) -> RoundResult:
        """Run one round; it counts when enough uploads were accepted, and is repeated or stops the run otherwise."""
        self.refused = []
        uploads: dict[int, State] = {}
        for attempt in range(self.participation.attempts):
            if attempt:
                exchange.pause(RETRY)
            self._await(exchange, attempt)
            replies, uploads, outcome = self._attempt(exchange, attempt, evaluate)
            self.refused += outcome.refused
            count = len(uploads) if self.side.algorithm.communicates else len(replies)
            if self.server_round.enough(count):
                self._aggregate(uploads)
                self.round += 1
                return replace(outcome, refused=self.refused)
            for client, reason in outcome.lost.items():
                self.tell(f"round {self.round + 1}: client {client}: {reason}")
            if self.participation.below_quorum == "stop":
                break
        raise self.server_round.below_quorum(self.round + 1, attempt + 1, count, self.refused)

    def _await(self, exchange: Exchange, attempt: int) -> None:
        """Wait where too few nodes are there for the round: nobody trains in vain. After a while try all the same."""
        end, seed = time.monotonic() + self.flower.wait, self.side.config.run.seed
        chosen, _ = self.participation.draw(seed, self.round + 1, self.flower.nodes, attempt)
        self.greet(exchange)
        while len(self._present(exchange, chosen.tolist())) < min(self.needed, len(chosen)) and time.monotonic() < end:
            exchange.pause(RETRY)
            self.greet(exchange)

    def evaluate(self, exchange: Exchange) -> dict[int, Metrics]:
        """Let all clients that are there score their own model and the global one."""
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
        """Try a round: return the metrics of those who replied, and the uploads that were accepted."""
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
        lost = {client: "not there" for client in trained.tolist() if client not in messages}
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
                refused.append(_of(client, refusal))
        refused += self._outside_gauge(uploads)
        self.ledger.rejected += len(refused)
        return metrics, uploads, RoundResult(metrics, lost, refused, self.ledger.uplink - before)

    def _accept(self, client: int, answer: Message, seen: Mapping[int, State]) -> State:
        """Return the upload in a reply, if the gate lets it through."""
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

    def _outside_gauge(self, uploads: dict[int, State]) -> list[Rejected]:
        """Take uploads out that the gauge refuses, and return the refusals."""
        if not uploads:
            return []
        together, turn = self._together(uploads)
        _, kept, refused = self.server_round.admitted(together, self.server, turn)
        for client in set(uploads) - set(kept.clients.tolist()):
            del uploads[client]
        return refused

    def _aggregate(self, uploads: dict[int, State]) -> None:
        if not uploads:
            return
        together, turn = self._together(uploads)
        samples = torch.tensor([self.members[client].samples for client in turn.clients.tolist()])
        self.server = self.server_round.aggregate(self.server, together, samples, turn)

    def _together(self, uploads: Mapping[int, State]) -> tuple[State, Turn]:
        """Return uploads with a client axis, in the order of the clients and not in that of their arrival."""
        clients = sorted(uploads)
        names = uploads[clients[0]]
        state = {name: torch.stack([uploads[client][name] for client in clients]) for name in names}
        return state, Turn(self.side.config.run.seed, self.round + 1, torch.tensor(clients))

    def _metrics(self, client: int, answer: Message) -> Metrics:
        """Return a client's metrics within bounds: right answers are at most its test samples."""
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
        told = {"run": self.run, "session": len(self.starts), "starts": starts, **fields}
        return envelope.request(kind, node, told, wire, self.flower.deadline + LATE)

    def state(self) -> dict[str, Any]:
        """Return what a restarted server needs beside the tensors, as plain values."""
        members = {str(client): asdict(member) for client, member in sorted(self.members.items())}
        return {"members": members, "ledger": asdict(self.ledger), "run": self.run, "nodes": self.flower.nodes}

    def restore(self, round_: int, server: State, meta: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of the same run."""
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


def _of(client: int, refusal: Rejected) -> Rejected:
    """Return a refusal with the client that Flower says has sent the message, whatever the message says."""
    if refusal.client == client:
        return refusal
    return Rejected(refusal.rule, refusal.reason, client=client, tensor=refusal.tensor)
