"""Every key of the configuration with its allowed values, default and meaning, taken from its declaration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from tdpfed.algorithms import ALGORITHMS, find
from tdpfed.config.sections import ALGORITHM, SECTIONS
from tdpfed.core.setting import Range, default_of, doc_of, hints_of, range_of, settings_of
from tdpfed.errors import TDPFedError

KINDS: Mapping[Any, str] = {int: "whole number", float: "number", str: "text", Any: "any value"}
SIGNS = {"above": ">", "least": "≥", "most": "≤", "below": "<"}


@dataclass(frozen=True)
class Key:
    """A key by its full name, its allowed values in words, its default and its meaning."""

    name: str
    allowed: str
    default: Any
    meaning: str


def describe(algorithm: str, word: str = "{}") -> list[Key]:
    """Return every key of a configuration with the given algorithm; ``word`` is the format of literal values."""
    try:
        find(algorithm)
    except TDPFedError as error:
        raise error.at(ALGORITHM) from error.__cause__
    return [key for section in SECTIONS for key in section_keys(section, algorithm, word)]


def section_keys(section: str, algorithm: str, word: str = "{}") -> list[Key]:
    """Return the keys of one section; for ``algorithm``, the method's name and its hyper-parameters."""
    owner, found = SECTIONS[section], []
    if section == ALGORITHM:
        owner = find(algorithm)
        names = f"{_words(list(ALGORITHMS), word)}, or your own as {word.format('package.module:Class')}"
        found = [Key("algorithm.name", names, algorithm, "the method")]
    hints = hints_of(owner)
    return found + [
        Key(f"{section}.{x.name}", _allowed(hints[x.name], range_of(x), word), default_of(x), doc_of(x))
        for x in settings_of(owner)
    ]


def _allowed(hint: Any, limits: Range, word: str) -> str:
    """Return the allowed values in words."""
    kind, parts = get_origin(hint), [part for part in get_args(hint) if part is not NoneType]
    if kind is Literal:
        return _words(parts, word)
    if hint is bool:
        return _words(["true", "false"], word)
    if kind in (list, tuple):
        return f"list of {_allowed(parts[0], limits, word)}"
    if hint in KINDS:
        return f"{KINDS[hint]} {limits.text('{} {}', ', ', SIGNS)}".strip()
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "table"
    return " or ".join(_allowed(part, limits, word) for part in parts) or getattr(hint, "__name__", str(hint))


def _words(names: Sequence[Any], word: str) -> str:
    return ", ".join(word.format(name) for name in names)
