"""Reading of run folders for a report: strict about types, tolerant of damage, which becomes a note.

A folder is a run if it contains ``config.toml`` and ``metrics.jsonl``; a folder of runs, such as the one that
``tdpfed compare`` writes, stands for all of them. A metrics file is read up to the first invalid line (the writer may
be in the middle of it); all other files may be missing or damaged. Only JSON and TOML are parsed, and no code is
imported.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tdpfed.algorithms import ALGORITHMS
from tdpfed.config.loading import parse_toml
from tdpfed.engine.attacks import attackers
from tdpfed.errors import TDPFedError
from tdpfed.files import read_file
from tdpfed.report import parse
from tdpfed.report.agreement import newest_checkpoint, with_checkpoint, with_summary
from tdpfed.report.parse import FIELDS, FIGURES, Number, Refusal, Summary
from tdpfed.runs.data_card import DataCard
from tdpfed.runs.folder import CONFIG, DONE, FEDERATION, METRICS, REFUSALS
from tdpfed.runs.folder import SUMMARY as SUMMARY
from tdpfed.runs.seals import Chain, lines_of
from tdpfed.server.records import worst_decile

IN_PROGRESS, FINISHED = "in progress", "finished"

Series = Mapping[str, list[Number]]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One run: its configuration, a series per quantity over the evaluated rounds, and its results so far."""

    path: Path
    config: Mapping[str, Any]
    toml: str
    series: Series
    clients: Sequence[Number]  # accuracy of each client at the last evaluated round; None for hostile ones
    diagnostics: Mapping[str, Series]  # by quantity: the rounds it was measured at, and its values
    refusals: Sequence[Refusal]
    figures: Mapping[str, Number]
    texts: Mapping[str, str]
    versions: Mapping[str, str]
    notes: Sequence[str]
    changed: datetime
    data: DataCard | None = None  # its clients and classes; None in a run of an older version

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    @property
    def status(self) -> str:
        """How the run ended, such as finished or failed; in progress if no summary covers the last round."""
        return self.texts.get("status", IN_PROGRESS)

    @property
    def rounds(self) -> int:
        """The last evaluated round; 0 if there is none yet."""
        return int(self.series["round"][-1] or 0) if self.series["round"] else 0

    @property
    def algorithm(self) -> str:
        """The method's name; for a user's own method its class, until a summary gives the name."""
        recorded = self.texts.get("algorithm")
        name = str(self.setting("algorithm.name", recorded or "unknown method"))
        return recorded or name.rpartition(":")[2] if ":" in name else name

    @property
    def method(self) -> str:
        """The method's name as people write it; a user's own method is called by its class, which is not imported."""
        name = str(self.setting("algorithm.name", self.algorithm))
        return ALGORITHMS[name].title if name in ALGORITHMS else name.rpartition(":")[2]

    @property
    def dataset(self) -> str:
        """The data set's name, with its options if any."""
        options = self.setting("data.options")
        given = ", ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, Mapping) else ""
        name = self.setting("data.name", self.texts.get("dataset", "unknown data"))
        return f"{name} ({given})" if given else str(name)

    def setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the configuration by its full key, such as ``run.seed``."""
        section, _, name = key.partition(".")
        table = self.config.get(section)
        return table.get(name, default) if isinstance(table, Mapping) else default


def find_runs(path: Path) -> list[Path]:
    """Return a run folder itself, or all runs of a folder of runs in the order in which they started."""
    if _is_run(path) or not path.is_dir():
        return [path]
    try:
        began = {one: (one / CONFIG).stat().st_mtime_ns for one in path.iterdir() if _is_run(one)}
    except OSError as error:
        raise TDPFedError(f"RUN: cannot read {str(path)!r} ({error.strerror})") from None
    return sorted(began, key=lambda one: (began[one], _natural(one.name))) or [path]


def read_runs(paths: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Read run folders and folders of runs, each run once; return the runs and all notes."""
    seen: dict[Path, Run] = {}
    notes = []
    for path in [run for given in paths for run in find_runs(given)]:
        if path.resolve() in seen:
            notes.append(f"{path}: given more than once, shown once")
        else:
            seen[path.resolve()] = run = read_run(path)
            notes += run.notes
    return list(seen.values()), notes


def read_run(path: Path) -> Run:
    """Read one run folder."""
    if not _is_run(path):
        raise TDPFedError(
            f"RUN: {str(path)!r} given, must be a run folder, with {CONFIG} and {METRICS}, or a folder of run folders"
        )
    notes: list[str] = []
    # A run may be writing: first what is written last, so that the lines it was written with are there.
    summary, saved = _summary(path / SUMMARY, notes), newest_checkpoint(path)
    toml = _text(path / CONFIG)
    records, cut, sums = _lines(path / METRICS, parse.record, lambda record: int(record["round"]), notes)
    refusals, cut_refusals, refusal_sums = _lines(path / REFUSALS, parse.refusal, lambda one: one.round, notes)
    ends = {n: own for n, own, bad in ((METRICS, sums, cut), (REFUSALS, refusal_sums, cut_refusals)) if not bad}
    config, card = _config(toml, notes), _card(path, notes)
    for record in records[-1:]:
        record["client_accuracy"] = _honest(record["client_accuracy"], config)
    last = records[-1] if records else {}
    if _is_current(summary, last, cut, sums):
        figures, texts = summary.figures, summary.texts
        notes += with_summary(path, summary, config, records, ends)
        if any(sums[-1:]) and not summary.whole:
            notes.append(f"{SUMMARY} has no checksums, unlike {METRICS}: it was changed")
        if not cut and last.get("round", 0) < (figures["rounds"] or 0) and texts["status"] == FINISHED:
            notes.append(f"{METRICS} ends at round {last.get('round', 0)} of {figures['rounds']:g}")
    else:
        figures, texts = _so_far(records), {k: v for k, v in summary.texts.items() if k != "status"}
        if summary.whole:  # a run that continues has none
            notes.append(f"{SUMMARY} is not of the last record in {METRICS}: one of them was changed")
    if saved is not None:
        notes += with_checkpoint(saved, config, records, figures, ends)
    return Run(
        path=path,
        config=config,
        toml=toml,
        series={field: [record[field] for record in records] for field in FIELDS},
        clients=last.get("client_accuracy", []),
        diagnostics=_diagnostics(records),
        refusals=refusals,
        figures={key: figures.get(key) for key in FIGURES},
        texts=texts,
        versions=summary.versions,
        notes=[f"{path}: {note}" for note in notes],
        changed=datetime.fromtimestamp((path / METRICS).stat().st_mtime).astimezone(),
        data=card,
    )


def _natural(name: str) -> list[str | int]:
    """Return a sort key for a name, so that seed 10 comes after seed 9."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / METRICS).is_file()


def _honest(accuracies: Sequence[Number], config: Mapping[str, Any]) -> list[Number]:
    """Return clients' accuracies, with None for the hostile clients of a simulated attack."""
    robust, run = (config.get(section) for section in ("robust", "run"))
    if not isinstance(robust, Mapping) or not isinstance(run, Mapping) or not robust.get("attack"):
        return list(accuracies)
    seed, fraction = run.get("seed"), robust.get("attack_fraction")
    if type(seed) is not int or not isinstance(fraction, int | float) or not (0 <= seed < 2**63 and 0 <= fraction <= 1):
        return list(accuracies)
    hostile = attackers(seed, len(accuracies), fraction).tolist()
    return [None if bad else accuracy for accuracy, bad in zip(accuracies, hostile, strict=True)]


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8", "replace")
    except OSError as error:
        raise TDPFedError(f"RUN: cannot read {str(path)!r} ({error.strerror})") from None


def _config(toml: str, notes: list[str]) -> dict[str, Any]:
    try:
        found = parse_toml(toml)
        if not _is_short(found):
            raise TDPFedError("a number of too many digits")
        return found
    except RecursionError:
        notes.append(f"{CONFIG} is nested too deeply; its values are ignored")
        return {}
    except TDPFedError as error:
        notes.append(f"{CONFIG} is not valid TOML ({error}); its values are ignored")
        return {}


def _is_short(value: Any) -> bool:
    """Whether all whole numbers are so short that they can be shown."""
    if isinstance(value, Mapping | list):
        return all(_is_short(one) for one in (value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, int) or value.bit_length() <= 64


def _card(path: Path, notes: list[str]) -> DataCard | None:
    if not (path / FEDERATION).exists():
        return None
    try:
        return DataCard.read(path)
    except TDPFedError as error:
        notes.append(f"{FEDERATION} is ignored: {error.reason}")
        return None


def _lines(
    path: Path, read: Callable[[str], T], round_of: Callable[[T], int], notes: list[str]
) -> tuple[list[T], bool, list[str]]:
    """Return the parsed lines of a file up to the first invalid one, whether there was one, and their checksums."""
    found: list[T] = []
    sums: list[str] = []
    before, chain = 0, Chain()
    if not path.exists():
        return found, False, sums
    for number, text in lines_of(_text(path)):
        try:
            one = read(text)
            # Rounds of records increase strictly; several refusals may share a round.
            if round_of(one) < before + (path.name == METRICS):
                raise ValueError(f"round {round_of(one)} after round {before}")
        except ValueError as error:
            notes.append(f"{path.name} is truncated or damaged at line {number} ({error}); read up to round {before}")
            return found, True, sums
        if gap := chain.gap(text):
            notes.append(f"{path.name}: line {number} {gap}")
        found.append(one)
        sums.append(chain.tail.sha256)
        before = round_of(one)
    return found, False, sums


def _summary(path: Path, notes: list[str]) -> Summary:
    try:
        return parse.summary(_text(path)) if path.exists() else Summary({}, {}, {})
    except ValueError as error:
        if isinstance(error, TDPFedError):
            raise
        notes.append(f"{path.name} is damaged ({error}); ignored")
        return Summary({}, {}, {})


def _is_current(summary: Summary, last: Mapping[str, Any], cut: bool, sums: Sequence[str]) -> bool:
    """Whether the summary describes the last record; it does not if the run was stopped and later resumed."""
    status = summary.texts.get("status")
    if status is None or status in DONE or cut:
        return status is not None
    if METRICS in summary.tails:
        return summary.tails[METRICS].sha256 == (sums[-1] if sums else "")
    return summary.figures["seconds"] == last.get("seconds")


def _so_far(records: Sequence[Mapping[str, Any]]) -> dict[str, Number]:
    """Return the numbers of a summary that can be computed from the records."""
    if not records:
        return {}
    last = records[-1]
    personal = [record["personalized_accuracy"] for record in records if record["personalized_accuracy"] is not None]
    return {
        **{key: last[key] for key in FIGURES if key in last},
        "best_personalized_accuracy": max(personal, default=None),
        "worst_decile_accuracy": worst_decile(last["client_accuracy"]),
        "minibatch_loss": last["minibatch_loss"],
        "rounds": last["round"],
        "rejected_uploads": last["rejected"],
    }


def _diagnostics(records: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    names = {name: None for record in records for name in record["diagnostics"]}
    measured = {name: [record for record in records if name in record["diagnostics"]] for name in names}
    return {
        name: {"round": [record["round"] for record in at], "value": [record["diagnostics"][name] for record in at]}
        for name, at in measured.items()
    }
