"""The output of a run, simulated or deployed: records, refusals, checkpoints and a summary.

Finished rounds are always on disk: a line per evaluated round, regular checkpoints, and a summary at the end, even
after Ctrl-C or an error.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tdpfed.config import Config
from tdpfed.files import ctrl_c_waits
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.folder import RunFolder
from tdpfed.runs.loggers import Loggers
from tdpfed.runs.summary import Facts, summarize
from tdpfed.server.records import Record, due
from tdpfed.wire import Rejected


class Journal:
    """The records of a run so far, its clock, and where they are written: a run folder, checkpoints and loggers.

    With several processes only the one that ``leads`` uses loggers.
    """

    def __init__(self, config: Config, folder: RunFolder, *, leads: bool = True) -> None:
        self.config, self.folder, self.leads = config, folder, leads
        self.loggers = Loggers(config, folder.path)
        self.checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint.keep)
        self.records: list[Record] = []
        self.summary: dict[str, Any] = {}  # empty until the run has ended
        self.start_clock()

    def rewind(self, round_: int, *others: str, saved: Mapping[str, Any] | None = None) -> None:
        """Resume after a round: keep the records up to it, and remove later lines from the folder's files.

        ``saved`` are the checksums in the checkpoint of that round (:attr:`RunFolder.sums`).
        """
        self.records = self.folder.rewind(round_, *others, saved=saved)
        self.start_clock()

    def start_clock(self) -> None:
        """Start the clock, at the seconds of the last record."""
        self._began = time.perf_counter() - (self.records[-1].seconds if self.records else 0.0)

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, without the time between a stop and a resume."""
        return time.perf_counter() - self._began

    def after_round(
        self,
        round_: int,
        *,
        last: bool,
        record: Callable[[], Record] | None,
        refused: Sequence[Rejected],
        save: Callable[[], None],
    ) -> None:
        """Write the results of a round: its record, its refused uploads, and a checkpoint if one is due.

        ``record`` evaluates the round, None if that is not due; ``save`` saves a checkpoint.
        """
        if record is not None:
            new = record()
            with ctrl_c_waits():  # the summary must match the last line
                self.folder.append(new)
                self.records.append(new)
            if self.leads:
                self.loggers.record(new)
        self.folder.refuse(round_, refused)
        if due(round_, self.config.checkpoint.every, last):
            save()

    def end(self, facts: Facts, status: str, *, refused: Sequence[Rejected] = (), **more: Any) -> dict[str, Any]:
        """Write the summary, with ``more`` values, and return it.

        ``refused`` are the uploads refused in a last round that failed for lack of uploads.
        """
        self.folder.refuse(facts.rounds + 1, refused)
        self.summary = summarize(facts, self.records, status) | more
        self.folder.finish(self.summary)
        if self.leads:
            self.loggers.end(self.summary)
        return self.summary
