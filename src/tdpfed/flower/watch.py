"""What is seen of a federation on this machine while it runs: rounds from a file, complaints and errors from logs."""

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
"""What ``flwr run --stream`` says: the log of the server app."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
SAID = re.compile(r"(\w+) *: +tdpfed: (.*)")
COMPLAINT = re.compile(rf"node (\d+) ({re.escape(SILENT)}|{re.escape(AWAY)}) (.*)")
COME = re.compile(r"client \d+ is node (\d+),")
LOST = re.compile(r"round \d+: client \d+: ")
RAISED = re.compile(r"[\w.]*\w(Error|Exception)\b.*")

Tell = Callable[[str], None]
OnRound = Callable[[Mapping[str, Any]], None]


class Complaints:
    """Says why nodes cannot take part, each reason once; gives up when every node has failed by its own doing."""

    def __init__(self, logs: Path, nodes: int, tell: Tell) -> None:
        self.logs, self.nodes, self.tell = logs, nodes, tell
        self.said: set[str] = set()
        self.failed: set[str] = set()
        self._at = 0

    def look(self) -> None:
        """Read what the log has more than at the last look."""
        for line in self._more():
            said = SAID.match(line)
            text = said[2] if said else ""
            if come := COME.match(text):
                self.failed.discard(come[1])
            if found := COMPLAINT.match(text):
                text = f"{self._name(found[1])} {found[2]} {found[3]}"
                if found[2] == AWAY or found[3].startswith(ITS_OWN):
                    self.failed.add(found[1])
            if (found or LOST.match(text)) and text not in self.said:
                self.said.add(text)
                self.tell(text)
            if len(self.failed) >= self.nodes:
                raise TDPFedError(f"no node can take part; the last: {text} (logs in {self.logs})")

    def _more(self) -> list[str]:
        with suppress(FileNotFoundError), (self.logs / RUN).open("rb") as file:
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
            self._at += len(whole) + 1 if whole else 0
            return lines_of(whole.decode(errors="replace"))
        return []

    def _name(self, node: str) -> str:
        """Return the name under which a node was started here."""
        for file in sorted(self.logs.glob("node-*.log")):
            if f"SuperNode ID: {node}" in file.read_text(encoding="utf-8", errors="replace"):
                return file.stem
        return f"node {node}"


def lines_of(log: str) -> list[str]:
    """Return the lines of one of Flower's logs, without colours and frames."""
    lines = COLOUR.sub("", log).splitlines()
    return [words for line in lines if (words := line.strip(" ╭─╮│╰╯"))]


def why(log: str) -> str:
    """Return why a run has left no summary: our own error, or the last one of the app, or Flower's last words."""
    lines = lines_of(log)
    errors = [said[2] for line in lines if (said := SAID.match(line)) and said[1] == "ERROR"]
    raised = [line for line in lines if RAISED.fullmatch(line)]
    if errors or raised:
        return f"the run failed: {(errors or raised)[-1]}"
    return f"the run did not start: {' '.join(lines[-6:]) or 'nothing was said'}"


def follow(file: Path, running: Callable[[], bool], on_round: OnRound) -> None:
    """Call ``on_round`` for each line that appears in a file while something runs."""
    seen, more = 0, True
    while more:
        more = running()  # before the look, so that the last lines are seen
        lines: list[str] = []
        with suppress(FileNotFoundError):
            lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[seen:]:
            on_round(json.loads(line))
        seen = max(seen, len(lines))
        if more:
            time.sleep(0.2)


def speed(rounds: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return rounds per minute, evaluations apart, and which part of that time is this package's own.

    That is what the server app did outside of calls to Flower, and the longest time that a node had a message in hand;
    imports, PyTorch's above all, come before that and are not in it.
    """
    whole = sum(line["train_seconds"] for line in rounds)
    own = sum(line["server_seconds"] + (line["client_seconds"] or 0.0) for line in rounds)
    return {
        "rounds_per_minute": 60 * len(rounds) / whole if whole else None,
        "own_share": own / whole if whole else None,
    }
