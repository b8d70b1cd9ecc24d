"""Messages out, replies back: each reply is fetched by itself, so that one that cannot be read costs only itself.

Flower's own ``send_and_receive`` looks every three seconds and returns all or nothing; this one looks more often,
hands replies on as they come, and stops at the deadline.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

LOOK = 0.1
"""Seconds between two looks for replies; with many nodes longer."""

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
        end = time.monotonic() + deadline
        while waiting and time.monotonic() < end:
            for number, client in list(waiting.items()):
                answer = self._fetch(number)
                if answer is not None:
                    del waiting[number]
                    yield client, answer
            if waiting:
                self.pause(max(LOOK, 0.01 * len(waiting)))
        for client in waiting.values():
            yield client, f"no reply within {deadline:g} seconds"

    def _push(self, message: Message) -> str | None:
        try:
            sent = list(self._timed(lambda: self.grid.push_messages([message])))
        except Exception as error:  # whatever Flower raises, the other clients go on
            log.warning("tdpfed: a message could not be sent (%s: %s)", type(error).__name__, error)
            return None
        return sent[0] if sent and sent[0] else None

    def _fetch(self, number: str) -> Message | str | None:
        try:
            found = list(self._timed(lambda: self.grid.pull_messages([number])))
        except Exception as error:  # a reply that Flower itself cannot read
            return f"the reply cannot be read: {type(error).__name__}: {plain(str(error))}"
        if not found:
            return None
        if found[0].has_error():
            return "failed: " + plain(found[0].error.reason or "no reason given")
        return found[0]

    def _timed(self, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        try:
            return call()
        finally:
            self.waited += time.perf_counter() - began


def plain(text: str, most: int = 400) -> str:
    """Return a text that may come from anyone as a bounded number of characters that do nothing to a terminal."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:most])
