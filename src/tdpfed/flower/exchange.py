"""Messages out, replies back: each reply is fetched by itself, so that one that cannot be read costs only itself.

Flower's own ``send_and_receive`` looks every three seconds and returns all or nothing; this one looks more often,
hands replies on as they come, and stops at the deadline. Flower may wait for the parts of one reply for hours: a fetch
has a thread of its own, the others are not kept waiting, and at the deadline it is left to itself.

A SuperNode of Flower 1.41 can come to be one message behind: it got a message of a run that ended at that moment,
keeps the reply to it, and from then on sends the reply to message n only when message n + 1 comes. So nodes that do not
answer are nudged: a message without work, upon which such a node sends what it holds. Two at once, answered at the same
moment, set it right, as it then sends both replies in one go. A nudge is void after a few seconds, and a node that
trains does not look for messages: it is those that wait which get it. Nobody reads its answer.
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

LOOK = 0.1
"""Seconds between two looks for replies; with many nodes longer."""

SLOW = 2.0
"""Seconds that a fetch is waited for before the next one is begun beside it; less where several take long."""

NUDGE, VOID = 30.0, 5.0
"""Seconds until a node that is silent is nudged, at most half of the deadline; then after twice as long, and so on,
the last time when a tenth of the deadline is left. And how long a nudge holds: a node that waits looks every three."""

ITS_OWN = "its app failed: "
"""How the error of a node's own app begins; others are Flower's."""

T = TypeVar("T")

log = logging.getLogger("flwr")


class Exchange:
    """The way to the nodes, and how long was spent on it."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waited = 0.0

    def online(self) -> set[int]:
        """Return the nodes that are there now."""
        return set(self._timed(self.grid.get_node_ids))

    def pause(self, seconds: float) -> None:
        """Wait."""
        self._timed(lambda: time.sleep(seconds))

    def ask(self, messages: Mapping[int, Message], deadline: float) -> Iterator[tuple[int, Message | str]]:
        """Send a message to each client; yield its reply, or in words why there is none."""
        waiting: dict[str, int] = {}
        for client, message in messages.items():
            number = self._push(message)
            if number is None:
                yield client, "not sent: the SuperLink does not take the message"
            else:
                waiting[number] = client
        began, nudge = time.monotonic(), min(NUDGE, deadline / 2)
        end = began + deadline
        fetches: dict[str, _Fetch] = {}  # those that take long
        more = True
        while waiting and more:
            more = time.monotonic() < end  # before the look: after the deadline there is one more, a short one
            for number, client in list(waiting.items()):
                left = end + SLOW - time.monotonic()
                answer = self._fetch(number, fetches, min(SLOW / (1 + len(fetches)), left)) if left > 0 else None
                if answer is not None:
                    del waiting[number]
                    yield client, answer
            if more and time.monotonic() - began > nudge:
                nudge = min(2 * nudge, 0.9 * deadline) if nudge < 0.9 * deadline else math.inf
                for client in waiting.values():
                    self._nudge(messages[client].metadata.dst_node_id)
            if waiting and more:
                self.pause(min(max(LOOK, 0.01 * len(waiting)), max(0.0, end - time.monotonic())))
        for client in waiting.values():
            yield client, f"no reply within {deadline:g} seconds"

    def _nudge(self, node: int) -> None:
        for _ in range(2):
            self._push(envelope.request("query", node, {envelope.NUDGE: True}, None, VOID))

    def _push(self, message: Message) -> str | None:
        try:
            sent = list(self._timed(lambda: self.grid.push_messages([message])))
        except Exception as error:  # whatever Flower raises, the other clients go on
            log.warning("tdpfed: a message could not be sent (%s: %s)", type(error).__name__, error)
            return None
        return sent[0] if sent and sent[0] else None

    def _fetch(self, number: str, fetches: "dict[str, _Fetch]", patience: float) -> Message | str | None:
        """Return a reply or what is wrong with it; None where it is not there, or still on its way."""
        if number not in fetches:
            fetches[number] = _Fetch(self.grid, number)
            self._timed(lambda: fetches[number].join(patience))
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
    """One look for one reply; nobody has to wait for its end."""

    def __init__(self, grid: Grid, number: str) -> None:
        super().__init__(daemon=True)
        self.grid, self.number = grid, number
        self.found: list[Message] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Pull the reply, if it is there."""
        try:
            self.found = list(self.grid.pull_messages([self.number]))
        except Exception as error:  # whatever Flower raises
            self.error = error


def _failure(error: Error) -> str:
    """Return the error in a reply in words; what Flower puts around an exception of the app is taken off."""
    reason = error.reason or "no reason given"
    whose = (
        ITS_OWN if error.code in (ErrorCode.CLIENT_APP_RAISED_EXCEPTION, ErrorCode.LOAD_CLIENT_APP_EXCEPTION) else ""
    )
    if raised := re.fullmatch(r"<class '(?:\w+\.)*(\w+)'>:<'(.*)'>", reason, re.DOTALL):
        reason = raised[2] if raised[1] == TDPFedError.__name__ else f"{raised[1]}: {raised[2]}"
    return (whose or "failed: ") + plain(reason)


def plain(text: str, most: int = 400) -> str:
    """Return a text that may come from anyone as a bounded number of characters that do nothing to a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:most])
