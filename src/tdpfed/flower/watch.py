"""Follow a federation on this machine while it runs: rounds from a file, complaints and errors from logs."""

import json
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tdpfed.errors import TDPFedError
from tdpfed.flower.exchange import ITS_OWN
from tdpfed.flower.strategy import AWAY, SILENT

RUN = "run.log"
"""The output of ``flwr run --stream``: the log of the server app."""

COLOR = re.compile(r"\x1b\[[0-9;]*m")
LOGGED = re.compile(r"(\w+) *: +tdpfed: (.*)")
COMPLAINT = re.compile(rf"node (\d+) ({re.escape(SILENT)}|{re.escape(AWAY)}) (.*)")
JOINED = re.compile(r"client \d+ is node (\d+),")
LOST = re.compile(r"round \d+: client \d+: ")
RAISED = re.compile(r"[\w.]*\w(Error|Exception)\b.*")

Notify = Callable[[str], None]
OnRound = Callable[[Mapping[str, Any]], None]


class Complaints:
    """Reports why nodes cannot take part, each reason once; raises an error when no node is left that can."""

    def __init__(self, logs: Path, nodes: int, notify: Notify) -> None:
        self.logs, self.nodes, self.notify = logs, nodes, notify
        self.reported: set[str] = set()
        self.failed: set[str] = set()
        self._position = 0

    def look(self) -> None:
        """Read the lines added to the log since the last call."""
        for line in self._new_lines():
            logged = LOGGED.match(line)
            text = logged[2] if logged else ""
            if joined := JOINED.match(text):
                self.failed.discard(joined[1])
            if found := COMPLAINT.match(text):
                text = f"{self._name(found[1])} {found[2]} {found[3]}"
                if found[2] == AWAY or found[3].startswith(ITS_OWN):
                    self.failed.add(found[1])
            if (found or LOST.match(text)) and text not in self.reported:
                self.reported.add(text)
                self.notify(text)
            if len(self.failed) >= self.nodes:
                raise TDPFedError(f"no node can take part; the last error: {text} (logs in {self.logs})")

    def _new_lines(self) -> list[str]:
        with suppress(FileNotFoundError), (self.logs / RUN).open("rb") as file:
            file.seek(self._position)
            complete = file.read().rpartition(b"\n")[0]
            self._position += len(complete) + 1 if complete else 0
            return lines_of(complete.decode(errors="replace"))
        return []

    def _name(self, node: str) -> str:
        """Return the name under which a node was started here."""
        for file in sorted(self.logs.glob("node-*.log")):
            if f"SuperNode ID: {node}" in file.read_text(encoding="utf-8", errors="replace"):
                return file.stem
        return f"node {node}"


def lines_of(log: str) -> list[str]:
    """Return the lines of one of Flower's logs, without colors and frames."""
    lines = COLOR.sub("", log).splitlines()
    return [words for line in lines if (words := line.strip(" ╭─╮│╰╯"))]


def failure_of(log: str) -> str:
    """Return why a run has no summary: this package's error, the app's last exception, or the end of Flower's log."""
    lines = lines_of(log)
    errors = [found[2] for line in lines if (found := LOGGED.match(line)) and found[1] == "ERROR"]
    raised = [line for line in lines if RAISED.fullmatch(line)]
    if errors or raised:
        return f"the run failed: {(errors or raised)[-1]}"
    return f"the run did not start: {' '.join(lines[-6:]) or 'its log is empty'}"


def follow(file: Path, running: Callable[[], bool], on_round: OnRound) -> None:
    """Call ``on_round`` for each line added to a file until ``running`` returns False."""
    seen, more = 0, True
    while more:
        more = running()  # asked before reading, so that the last lines are not missed
        lines: list[str] = []
        with suppress(FileNotFoundError):
            lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[seen:]:
            on_round(json.loads(line))
        seen = max(seen, len(lines))
        if more:
            time.sleep(0.2)


def speed(rounds: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return rounds per minute without evaluations, and the share of that time spent in this package's code.

    That is the time of the server app outside of calls to Flower, plus the longest time of a node between a message and
    its reply; imports, PyTorch's above all, happen before that and are not included.
    """
    whole = sum(line["train_seconds"] for line in rounds)
    own = sum(line["server_seconds"] + (line["client_seconds"] or 0.0) for line in rounds)
    return {
        "rounds_per_minute": 60 * len(rounds) / whole if whole else None,
        "own_share": own / whole if whole else None,
    }
