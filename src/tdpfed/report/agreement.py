"""Whether the files of a run folder agree with each other: what differs becomes a note in a report.

Every number of a report is known to two files at least. Records are in ``metrics.jsonl``, and their checksums in the
summary and in the newest checkpoint, which holds the configuration and the privacy that was spent, too. A single file
that was edited, even with its own checksums computed again, therefore contradicts another one.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdpfed.config.loading import flat
from tdpfed.config.resume import MAY_DIFFER
from tdpfed.files import read_file
from tdpfed.report.parse import Number, Summary
from tdpfed.runs.checkpoints import Checkpoints
from tdpfed.runs.folder import CONFIG, CONFIGURATION, FILES, METRICS, SUMMARY
from tdpfed.runs.seals import Tail

MOST_KEYS = 3
"""The most keys that a note names."""

Sums = Mapping[str, Sequence[str]]
"""By file: the checksum of each of its lines; without the files that are damaged."""


@dataclass(frozen=True)
class Saved:
    """The round and the metadata of a checkpoint."""

    round: int
    meta: Mapping[str, Any]


def newest_checkpoint(path: Path) -> Saved | None:
    """Return the newest checkpoint of a run folder with an intact manifest; its tensors are not read."""
    found = Checkpoints(path / "checkpoints").newest()
    return None if found is None else Saved(*found)


def with_summary(
    path: Path, summary: Summary, config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], sums: Sums
) -> list[str]:
    """Return what contradicts a summary that describes the last record; little if it has no checksums."""
    notes = [*_whole(path, summary), *_lines(summary.tails, sums, SUMMARY)]
    last, figures = records[-1] if records else {}, summary.figures
    recorded = last.get("epsilon")
    if METRICS in sums and recorded is not None:
        spent = figures["epsilon"] or 0
        if spent < recorded or (figures["rounds"] == last["round"] and spent != recorded):
            notes.append(f"{SUMMARY} gives epsilon {figures['epsilon']}, the last record {recorded}")
    if METRICS in sums and summary.whole and not _plausible(figures["rounds"], last, config):
        notes.append(f"{SUMMARY} gives {figures['rounds']} rounds, the last record is of round {last.get('round', 0)}")
    privacy = config.get("privacy")
    delta = privacy.get("delta") if isinstance(privacy, Mapping) and privacy.get("clip") is not None else None
    if summary.whole and figures["delta"] != delta:
        notes.append(f"{SUMMARY} gives delta {figures['delta']}, {CONFIG} {delta}")
    return notes


def _plausible(rounds: Number, last: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return whether a run can have had so many rounds: no fewer than its last record, no more than it was to have."""
    run = config.get("run")
    most = run.get("rounds") if isinstance(run, Mapping) else None
    return rounds is not None and last.get("round", 0) <= rounds <= (most if isinstance(most, int) else rounds)


def with_checkpoint(
    saved: Saved, config: Mapping[str, Any], records: Sequence[Mapping[str, Any]], figures: Mapping[str, Number],
    sums: Sums,
) -> list[str]:  # fmt: skip
    """Return what contradicts the newest checkpoint; nothing if it is of a version that did not save it."""
    where = f"the checkpoint of round {saved.round}"
    try:
        tails = {str(n): Tail(int(one["lines"]), str(one["sha256"])) for n, one in saved.meta.get(FILES, {}).items()}
        settings, privacy = dict(saved.meta.get(CONFIGURATION, {})), saved.meta.get("privacy") or {}
        spent = privacy.get("epsilon")
    except (AttributeError, KeyError, TypeError, ValueError):
        return [f"{where} is damaged: its metadata have another form"]
    notes = _lines(tails, sums, where, whole=False)
    given = flat(config)
    other = [
        f"{key} = {given.get(key)!r}, {where} {value!r}"
        for key, value in sorted(settings.items())
        if key not in MAY_DIFFER and (given.get(key) or None) != (value or None)
    ]
    if other:
        more = f" and {len(other) - MOST_KEYS} more" if len(other) > MOST_KEYS else ""
        notes.append(f"{CONFIG} gives {'; '.join(other[:MOST_KEYS])}{more}")
    known = {record["round"]: record["epsilon"] for record in records}
    if figures.get("rounds") is not None:
        known[figures["rounds"]] = figures["epsilon"]
    if METRICS in sums and known.get(saved.round, spent) != spent:
        notes.append(f"round {saved.round} ended with epsilon {known[saved.round]}, by {where} with {spent}")
    return notes


def _whole(path: Path, summary: Summary) -> list[str]:
    notes = []
    for name, sha256 in summary.whole.items():
        try:
            same = hashlib.sha256(read_file(path / name)).hexdigest() == sha256
        except OSError as error:
            notes.append(f"{name} cannot be read ({error.strerror}), {SUMMARY} was written with it")
        else:
            notes += [] if same else [f"{name} was changed since {SUMMARY} was written"]
    return notes


def _lines(tails: Mapping[str, Tail], sums: Sums, where: str, whole: bool = True) -> list[str]:
    """Return the files whose lines are not those of ``tails``; with ``whole`` no line may follow them."""
    notes = []
    for name in sums if tails else ():
        known, own = tails.get(name, Tail()), sums[name]
        there = Tail(len(own), own[-1] if own else "")
        if not whole and known.lines <= len(own):
            there = Tail(known.lines, own[known.lines - 1] if known.lines else "")
        if there != known:
            notes.append(f"{name} was changed: {len(own)} lines, {where} was written with {known.lines}")
    return notes
