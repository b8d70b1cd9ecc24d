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

from tdpfed.core.state import State
from tdpfed.errors import TDPFedError
from tdpfed.flower import envelope
from tdpfed.flower.delivery import RECENT, Delivery, stacked, with_client
from tdpfed.flower.exchange import Exchange
from tdpfed.flower.node import Metrics, Side
from tdpfed.flower.settings import Flower, rule_of
from tdpfed.server.records import Ledger
from tdpfed.server.round import ServerRound
from tdpfed.wire import Rejected

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
    """A federation in progress: the server's state and its members; ``step`` runs one round.

    ``starts`` are the rounds after which its sessions started: one for each start of the server, and one for each
    repeated round, of which nodes must forget the first try. ``write`` makes a change of them permanent.
    """

    def __init__(
        self,
        side: Side,
        flower: Flower,
        run: str,
        starts: Sequence[int],
        notify: Callable[[str], None],
        write: Callable[[Sequence[int]], None],
    ) -> None:
        self.side, self.flower, self.run, self.starts = side, flower, run, tuple(starts)
        self.notify, self.write = notify, write
        self.round, self.settled = 0, 0
        self.members: dict[int, Member] = {}
        self.ledger, self.delivery = Ledger(), Delivery(side)
        config = side.config
        self.participation = config.participation
        self.needed = max(1, self.participation.quorum)
        participation = replace(self.participation, quorum=self.needed)
        self.server_round = ServerRound(
            side.algorithm, config.run.seed, participation, rule_of(config), step=config.server
        )
        self.server: State = side.server | self.server_round.start(side.server)
        self.refused: list[Rejected] = []  # in the current round
        self._rejected: set[int] = set()
        self._silent: dict[int, tuple[int, float]] = {}  # by node: failed requests, time of the next one
        self._last_error = ""  # of a node that could not join
        self._resumed = False
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
        if self._resumed and claims and connected < self.needed:
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
        self.delivery.begin(self.server, self.round + 1)
        for attempt in range(self.participation.attempts):
            if attempt:
                self.starts = (*self.starts, self.round)
                self.write(self.starts)
                exchange.pause(RETRY)
            self._await(exchange, attempt)
            replies, uploads, result = self._attempt(exchange, attempt, evaluate)
            self.refused += result.refused
            count = len(uploads) if self.side.algorithm.communicates else len(replies)
            if self.server_round.enough(count):
                self.server_round.watch(self.ledger, self.round + 1, count, result.refused)
                self._aggregate(uploads)
                replied = {*replies, *(one.client for one in result.refused if one.client is not None)}
                self.server = self.delivery.complete(self.server, replied, uploads)
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
        chosen, _ = self.participation.draw(seed, self.round + 1, self.flower.nodes, attempt, self.flower.sizes)
        self.greet(exchange)
        while len(self._present(exchange, chosen.tolist())) < min(self.needed, len(chosen)) and time.monotonic() < end:
            exchange.pause(RETRY)
            self.greet(exchange)

    def evaluate(self, exchange: Exchange) -> dict[int, Metrics]:
        """Let all connected clients evaluate their own model and the global model."""
        fields, shipped = {"round": self.round}, self.delivery.shipped(self.server, self.round)
        messages = {
            client: self._request("evaluate", member.node, fields, shipped and shipped(client))
            for client, member in self._present(exchange, self.members).items()
        }
        answers = exchange.ask(messages, self.flower.deadline)
        return {client: self._metrics(client, answer) for client, answer in answers if not isinstance(answer, str)}

    def _attempt(
        self, exchange: Exchange, attempt: int, evaluate: bool
    ) -> tuple[dict[int, Metrics], dict[int, State], RoundResult]:
        """Try a round: return the metrics of clients that replied, the accepted uploads and the result."""
        number, seed = self.round + 1, self.side.config.run.seed
        chosen, trained = self.participation.draw(seed, number, self.flower.nodes, attempt, self.flower.sizes)
        reporting = set(chosen.tolist())
        messages = {}
        for client, member in self._present(exchange, trained.tolist()).items():
            fields = {
                "round": number, "settled": self.settled, "evaluate": evaluate, "report": client in reporting,
                "counted": self.delivery.counted.get(client, 0),
            }  # fmt: skip
            wire = self.delivery.down(client)
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
                if self.delivery.lacks_copy(client, answer):
                    lost[client] = (
                        "has no copy of the model to which changes could be added; is sent the model next time"
                    )
                    continue
                if client in reporting and self.side.algorithm.communicates:
                    uploads[client] = self._accept(client, answer, uploads)
                metrics[client] = self._metrics(client, answer)
            except Rejected as refusal:
                refused.append(with_client(client, refusal))
        refused += self._refused_by_gate(uploads)
        self.ledger.rejected += len(refused)
        return metrics, uploads, RoundResult(metrics, lost, refused, self.ledger.uplink - before)

    def _accept(self, client: int, answer: Message, seen: Mapping[int, State]) -> State:
        """Return the validated upload in a reply."""
        member = self.members[client]
        self.ledger.uplink += envelope.wire_size(answer)
        self.ledger.uploads += 1
        if answer.metadata.src_node_id != member.node:
            raise Rejected("client", f"from node {answer.metadata.src_node_id}", client=client)
        return self.delivery.up(client, answer, member.samples, seen)

    def _refused_by_gate(self, uploads: dict[int, State]) -> list[Rejected]:
        """Remove uploads that the server's gate refuses, and return the refusals."""
        if not uploads:
            return []
        together, turn = stacked(uploads, self.side.config.run.seed, self.round + 1)
        _, kept, refused = self.server_round.admitted(together, self.server, turn)
        for client in set(uploads) - set(kept.clients.tolist()):
            del uploads[client]
        return refused

    def _aggregate(self, uploads: dict[int, State]) -> None:
        if not uploads:
            return
        together, turn = stacked(uploads, self.side.config.run.seed, self.round + 1)
        samples = torch.tensor([self.members[client].samples for client in turn.clients.tolist()])
        self.server = self.server_round.aggregate(self.server, together, samples, turn)

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

    def _request(self, kind: str, node: int, fields: Mapping[str, envelope.Plain], wire: bytes | None) -> Message:
        starts = ",".join(map(str, self.starts))
        content = {"run": self.run, "session": len(self.starts), "starts": starts, **fields}
        return envelope.request(kind, node, content, wire, self.flower.deadline + LATE)

    def state(self) -> tuple[State, dict[str, Any]]:
        """Return what a restarted server needs, tensors and plain values."""
        members = {str(client): asdict(member) for client, member in sorted(self.members.items())}
        tensors, told = self.delivery.saved()
        own = {"members": members, "ledger": asdict(self.ledger), "run": self.run, "nodes": self.flower.nodes}
        return self.server | tensors, own | told

    def restore(self, round_: int, server: State, meta: Mapping[str, Any]) -> None:
        """Resume from a checkpoint of the same run."""
        for name, mine in (("run", self.run), ("nodes", self.flower.nodes)):
            if meta.get(name) != mine:
                raise TDPFedError(f"checkpoint: {name} {meta.get(name)!r} saved, must be {mine!r}")
        server = dict(server)
        recent = server.pop(RECENT, None)
        shapes = [{name: value.shape for name, value in state.items()} for state in (server, self.server)]
        if shapes[0] != shapes[1]:
            raise TDPFedError(f"checkpoint: server state {shapes[0]} saved, must be {shapes[1]} as in this run")
        self.server = {name: value.clone() for name, value in server.items()}
        try:
            self.members = {int(client): Member(**member) for client, member in meta["members"].items()}
            self.ledger = Ledger(**meta["ledger"])
            self.delivery.restore(round_, recent, meta)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TDPFedError(f"checkpoint: its members, ledger or uploads cannot be read ({error!r})") from None
        self.round, self.starts, self._resumed = round_, (*self.starts[:-1], round_), round_ > 0
