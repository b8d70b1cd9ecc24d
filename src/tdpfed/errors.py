"""The exception this package raises for bad input.

Its message names the field, the given value and what is allowed; its attributes hold the same, so that no program has
to parse the message. The command line prints the message and exits with 2. Any other exception that reaches the command
line is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import Self

MOST_SHOWN = 300
"""Most characters of a value that an error message shows."""


class TDPFedError(ValueError):
    """Bad input: ``reason`` says what is wrong with ``field``; None if no single field is at fault."""

    def __init__(
        self, reason: str, *, field: str | None = None, value: object = None, allowed: Sequence[str] | str = ()
    ) -> None:
        super().__init__(reason if field is None else f"{field}: {reason}")
        self.reason, self.field, self.value, self.allowed = reason, field, value, allowed

    def at(self, field: str | None) -> Self:
        """Return the same error for another field name."""
        return self._like(field, self.reason)

    def within(self, section: str) -> Self:
        """Return the same error with the field qualified by a section: ``algorithm.tau`` for ``tau``."""
        return self.at(section if self.field is None else f"{section}.{self.field}")

    def noting(self, note: str) -> Self:
        """Return the same error with a note in parentheses after it."""
        return self._like(self.field, f"{self.reason} ({note})")

    def _like(self, field: str | None, reason: str) -> Self:
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__, field=field, reason=reason)
        other.args = (reason if field is None else f"{field}: {reason}",)
        return other


class UnknownError(TDPFedError):
    """An unknown name: ``value`` was given, ``allowed`` are the known names."""


class CombinedError(TDPFedError):
    """Several errors reported together: the ``errors``, and their messages as ``lines``."""

    def __init__(self, errors: Sequence[TDPFedError]) -> None:
        self.errors = list(errors)
        self.lines = [str(error) for error in errors]
        super().__init__("; ".join(self.lines))

    def within(self, section: str) -> Self:
        """Return the same errors with their fields qualified by a section."""
        return type(self)([error.within(section) for error in self.errors])

    def noting(self, note: str) -> Self:
        """Return the same errors with a note after each."""
        return type(self)([error.noting(note) for error in self.errors])


class QuorumError(TDPFedError):
    """A round had too few accepted uploads in every attempt."""


class RankError(TDPFedError):
    """A process of a run in several processes has ended."""


def each(error: TDPFedError) -> list[TDPFedError]:
    """Return the individual errors of one that may combine several."""
    return error.errors if isinstance(error, CombinedError) else [error]


def raise_all(errors: Sequence[TDPFedError]) -> None:
    """Raise the errors, if any: a single one as it is, several combined."""
    if errors:
        raise errors[0] if len(errors) == 1 else CombinedError(errors)


def wrong(field: str, value: object, allowed: str, words: Iterable[str] = ()) -> TDPFedError:
    """Return the error for a value that is not ``allowed``; suggests the nearest of ``words``."""
    near = nearest(value, words)
    hint = f"; did you mean {near!r}?" if near else ""
    return TDPFedError(f"{shown(value)} given, must be {allowed}{hint}", field=field, value=value, allowed=allowed)


def unknown(field: str, value: object, allowed: Iterable[str]) -> UnknownError:
    """Return the error for a name outside ``allowed``, with the nearest name as a suggestion."""
    names = sorted(allowed)
    near = nearest(value, names)
    hint = f", did you mean {near!r}?" if near else ";"
    reason = f"unknown {shown(value)}{hint} Allowed: {', '.join(names)}"
    return UnknownError(reason, field=field, value=value, allowed=names)


def nearest(value: object, words: Iterable[str]) -> str | None:
    """Return the word most similar to a value, or None."""
    text = value if isinstance(value, str) else shown(value)
    return next(iter(difflib.get_close_matches(text[:MOST_SHOWN], list(words), n=1)), None)


def shown(value: object) -> str:
    """Return a value as an error message shows it: shortened, and by its type if it cannot be written at all."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists without end
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}... ({len(text):,} characters)"
