"""Every key of the configuration: what it may be, its default and its meaning, read off the code that checks it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tdpfed.algorithms import ALGORITHMS
from tdpfed.config.loading import Config
from tdpfed.errors import unknown

KINDS: Mapping[Any, str] = {int: "whole number", float: "number", str: "text"}
SIGNS = {"ge": "≥", "least": "≥", "gt": ">", "above": ">", "le": "≤", "most": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """A key by its full name, and in words what it may be."""

    name: str
    allowed: str
    default: Any
    meaning: str


def describe(algorithm: str, word: str = "{}") -> list[Key]:
    """Return every key of a configuration with the given algorithm; ``word`` is how a value to be typed is set."""
    if algorithm not in ALGORITHMS:
        raise unknown("algorithm", algorithm, ALGORITHMS)
    return [key for section in Config.model_fields for key in section_keys(section, algorithm, word)]


def section_keys(section: str, algorithm: str, word: str = "{}") -> list[Key]:
    """Return the keys of one section; those of ``algorithm`` are the method's name and its hyper-parameters."""
    if section == "algorithm":
        method = ALGORITHMS[algorithm]
        hints = get_type_hints(method)
        found = [Key("algorithm.name", _words(list(ALGORITHMS), word), algorithm, "the method")]
        return found + [
            Key(f"algorithm.{x.name}", _allowed(hints[x.name], x.metadata, word), x.default, x.metadata["doc"])
            for x in method.hyper_parameters()
        ]
    model: Any = Config.model_fields[section].annotation
    return [
        Key(f"{section}.{name}", _allowed(x.annotation, _bounds(x), word), x.default, x.description)
        for name, x in model.model_fields.items()
    ]


def _allowed(hint: Any, bounds: Mapping[str, Any], word: str) -> str:
    """Return in words what a value may be."""
    kind, parts = get_origin(hint), [part for part in get_args(hint) if part is not type(None)]
    if kind is Literal:
        return _words(parts, word)
    if hint is bool:
        return _words(["true", "false"], word)
    if kind is Annotated:
        return _allowed(parts[0], _bounds(parts[1]), word)
    if kind in (list, tuple):
        return f"list of {_allowed(parts[0], {}, word)}"
    if hint in KINDS:
        given = [f"{SIGNS[name]} {_number(bounds[name])}" for name in SIGNS if bounds.get(name) is not None]
        return " ".join([KINDS[hint], ", ".join(given)]).strip()
    return "table" if kind in (dict, Mapping) else " or ".join(_allowed(part, bounds, word) for part in parts)


def _bounds(field: Any) -> dict[str, Any]:
    return {name: getattr(one, name) for one in field.metadata for name in SIGNS if hasattr(one, name)}


def _number(value: float) -> str:
    if value > 1e9:
        return f"2^{value.bit_length() - 1}" if isinstance(value, int) else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) or not value.is_integer() else f"{value:,.0f}"


def _words(names: Sequence[str], word: str) -> str:
    return ", ".join(word.format(name) for name in names)
