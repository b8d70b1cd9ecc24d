"""Send messages and collect replies: each reply is fetched separately, so that an unreadable one affects no other.

Flower's own ``send_and_receive`` polls every three seconds and returns all replies or none; this one polls more often,
yields replies as they arrive, and stops at the deadline. Flower may wait for the parts of one reply for hours: each
fetch therefore has its own thread, does not delay the others, and is abandoned at the deadline.

A SuperNode of Flower 1.41 can fall one message behind: it receives a message of a run that ends at the same moment,
keeps the reply to it, and from then on sends the reply to message n only when message n + 1 arrives. Nodes that do not
answer are therefore nudged: a message without work makes such a node send the reply that it holds. Two nudges that are
answered at the same moment end the delay, because the node then sends both replies together. A nudge expires after a
few seconds, and a node that trains does not poll for messages: only idle nodes receive it. Its reply is ignored.
"""

import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from tdpfed.errors import TDPFedError
from tdpfed.flower import envelope

POLL = 0.1
"""Seconds between two polls for replies; longer with many nodes."""

FETCH_WAIT = 2.0
"""Seconds to wait for a fetch before the next one starts in parallel; less where several are slow."""

NUDGE_AFTER = 30.0
"""Seconds until a silent node is nudged, at most half of the deadline; the interval then doubles each time, and the
last nudge is sent when a tenth of the deadline is left."""

NUDGE_TTL = 5.0
"""Seconds until a nudge expires: an idle node polls every three."""

ITS_OWN = "its app failed: "
"""Prefix of an error that the node's app raised; other errors are Flower's."""

T = TypeVar("T")

log = logging.getLogger("flwr")


class Exchange:
    """The connection to the nodes, and the seconds spent waiting for it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waited = 0.0

    def online(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self._timed(self.grid.get_node_ids))

    def pause(self, seconds: float) -> None:
        """Wait."""
        self._timed(lambda: time.sleep(seconds))

    def ask(self, messages: Mapping[int, Message], deadline: float) -> Iterator[tuple[int, Message | str]]:
        """Send a message to each client; yield its reply, or the reason why there is none."""
        waiting: dict[str, int] = {}
        for client, message in messages.items():
            number = self._push(message)
            if number is None:
                yield client, "not sent: the SuperLink did not accept the message"
            else:
                waiting[number] = client
        began, nudge = time.monotonic(), min(NUDGE_AFTER, deadline / 2)
        end = began + deadline
        fetches: dict[str, _Fetch] = {}  # those still in progress
        more = True
        while waiting and more:
            more = time.monotonic() < end  # read before polling: one more short poll follows the deadline
            for number, client in list(waiting.items()):
                left = end + FETCH_WAIT - time.monotonic()
                answer = self._fetch(number, fetches, min(FETCH_WAIT / (1 + len(fetches)), left)) if left > 0 else None
                if answer is not None:
                    del waiting[number]
                    yield client, answer
            if more and time.monotonic() - began > nudge:
                nudge = min(2 * nudge, 0.9 * deadline) if nudge < 0.9 * deadline else math.inf
                for client in waiting.values():
                    self._nudge(messages[client].metadata.dst_node_id)
            if waiting and more:
                self.pause(min(max(POLL, 0.01 * len(waiting)), max(0.0, end - time.monotonic())))
        for client in waiting.values():
            yield client, f"no reply within {deadline:g} seconds"

    def _nudge(self, node: int) -> None:
        for _ in range(2):
            self._push(envelope.request("query", node, {envelope.NUDGE: True}, None, NUDGE_TTL))

    def _push(self, message: Message) -> str | None:
        try:
            sent = list(self._timed(lambda: self.grid.push_messages([message])))
        except Exception as error:  # whatever Flower raises must not affect the other clients
            log.warning("tdpfed: a message could not be sent (%s: %s)", type(error).__name__, error)
            return None
        return sent[0] if sent and sent[0] else None

    def _fetch(self, number: str, fetches: "dict[str, _Fetch]", wait: float) -> Message | str | None:
        """Return a reply or what is wrong with it; None if it has not arrived yet or is still being fetched."""
        if number not in fetches:
            fetches[number] = _Fetch(self.grid, number)
            self._timed(lambda: fetches[number].join(wait))
        if fetches[number].is_alive():
            return None
        done = fetches.pop(number)
        if done.error is not None:  # a reply that Flower itself cannot read
            return f"the reply cannot be read: {type(done.error).__name__}: {plain(str(done.error))}"
        if not done.found:
            return None
        if done.found[0].has_error():
            return _failure(done.found[0].error)
        return done.found[0]

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.waited += time.perf_counter() - began


class _Fetch(threading.Thread):
    """One attempt to fetch one reply, in a thread that may be abandoned."""

    def __init__(self, grid: Grid, number: str) -> None:
        super().__init__(daemon=True)
        self.grid, self.number = grid, number
        self.found: list[Message] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Pull the reply, if it has arrived."""
        try:
            self.found = list(self.grid.pull_messages([self.number]))
        except Exception as error:  # whatever Flower raises
            self.error = error


def _failure(error: Error) -> str:
    """Return the error in a reply as text, without what Flower wraps around an exception of the app."""
    reason = error.reason or "no reason given"
    by_app = error.code in (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
    if raised := re.fullmatch(r"<class '(?:\w+\.)*(\w+)'>:<'(.*)'>", reason, re.DOTALL):
        reason = raised[2] if raised[1] == TDPFedError.__name__ else f"{raised[1]}: {raised[2]}"
    return (ITS_OWN if by_app else "failed: ") + plain(reason)


def plain(text: str, most: int = 400) -> str:
    """Return an untrusted text with bounded length and without characters that could control a terminal."""
    return "".join(char if char.isprintable() else " " for char in text[:most])
