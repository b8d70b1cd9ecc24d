"""Settings declared once: default, range and meaning are next to the code that uses the value.

A setting is a field of a frozen dataclass, made by :func:`setting`, with its type as annotation. Everything else is
derived: ``__post_init__`` calls :func:`check`, values of a file are read by :func:`build`, and
:func:`words` says what is allowed. All errors of a class are reported together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tdpfed.errors import TDPFedError, each, raise_all, unknown, wrong

T = TypeVar("T")

INVALID = object()
"""The result of :func:`fit` for an invalid value."""


@dataclass(frozen=True)
class Range:
    """The limits of a number; None is no limit."""

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: Any) -> bool:
        return (
            (self.above is None or value > self.above)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def text(self, form: str, between: str, names: Mapping[str, str]) -> str:
        """Return the limits as text; ``names`` has a word or sign for each kind of limit."""
        given = [(names[kind], getattr(self, kind)) for kind in ("above", "least", "most", "below")]
        return between.join(form.format(name, number(limit)) for name, limit in given if limit is not None)

    def __str__(self) -> str:
        words = {"above": "above", "least": "at least", "most": "at most", "below": "below"}
        return self.text("{} {}", " and ", words)


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a setting: its default (without one it is required), its meaning and its range."""
    return _field(default, {"doc": doc, "range": Range(above, least, most, below)})


def same(owner: type, name: str, default: Any = MISSING) -> Any:
    """Declare the same setting as in another class, with another default if one is given."""
    item = next(item for item in settings_of(owner) if item.name == name)
    return _field(item.default if default is MISSING else default, item.metadata)


def settings_of(owner: type) -> list[Field[Any]]:
    """Return the fields of a dataclass that a user sets; those marked ``bound`` are set by the program."""
    return [item for item in fields(owner) if item.init and "bound" not in item.metadata]


def plain(settings: Any) -> dict[str, Any]:
    """Return settings as plain values by name."""
    return {item.name: getattr(settings, item.name) for item in settings_of(type(settings))}


def default_of(item: Field[Any]) -> Any:
    """Return a setting's default; None if it has none."""
    if item.default_factory is not MISSING:
        return item.default_factory()
    return None if item.default is MISSING else item.default


def doc_of(item: Field[Any]) -> str:
    """Return the meaning of a setting."""
    return str(item.metadata.get("doc", ""))


def range_of(item: Field[Any]) -> Range:
    """Return the range of a setting."""
    limits = item.metadata.get("range", Range())
    assert isinstance(limits, Range)
    return limits


def hints_of(owner: type) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return get_type_hints(owner)


def check(settings: Any) -> None:
    """Refuse values of a wrong type or out of range; all errors are reported together."""
    hints = hints_of(type(settings))
    pairs = [(item, getattr(settings, item.name)) for item in settings_of(type(settings))]
    raise_all(
        [_error(item, hints[item.name], value) for item, value in pairs if _fitted(item, hints, value) is INVALID]
    )


def read(owner: type, values: Any, where: str, errors: list[TDPFedError]) -> dict[str, Any]:
    """Return the valid values of a table for the settings of a class; errors are added to ``errors``.

    Numbers and lists are converted to the settings' types. A single string is accepted for a list of one.
    """
    if not isinstance(values, Mapping):
        errors.append(wrong(where, values, "a table"))
        return {}
    hints, known = hints_of(owner), {item.name: item for item in settings_of(owner)}
    found: dict[str, Any] = {}
    for name, given in values.items():
        if name not in known:
            errors.append(unknown(where, name, known))
            continue
        listed = get_origin(hints[name]) is tuple and isinstance(given, str)
        value = _fitted(known[name], hints, [given] if listed else given)
        if value is INVALID:
            errors.append(_error(known[name], hints[name], given).within(where))
        else:
            found[name] = value
    return found


def build(owner: type[T], values: Any, where: str, errors: list[TDPFedError]) -> T | None:
    """Return an instance with the values of a table; None if there are errors, which are added to ``errors``.

    The checks of the class across several settings run only if each setting is valid.
    """
    found: list[TDPFedError] = []
    given = read(owner, values, where, found)
    missing = [item for item in settings_of(owner) if _required(item) and item.name not in given]
    if not found:
        hints = hints_of(owner)
        for item in missing:
            allowed = words(hints[item.name], range_of(item))
            found.append(TDPFedError(f"none given, must be {allowed}", field=f"{where}.{item.name}", allowed=allowed))
    if not found:
        try:
            return owner(**given)
        except TDPFedError as error:
            found = [one.within(where) for one in each(error)]
    errors += found
    return None


def fit(hint: Any, value: Any, limits: Range) -> Any:
    """Return a value converted to its type (an integer to a float, a list to a tuple), or ``INVALID``."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return next((found for part in parts if (found := fit(part, value, limits)) is not INVALID), INVALID)
    if kind is Literal:
        return next((one for one in parts if type(one) is type(value) and one == value), INVALID)
    if kind in (tuple, list):
        return _sequence(kind, parts, value, limits)
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return _mapping(parts, value, limits)
    if hint in (int, float):
        return _number(hint, value, limits)
    if hint is NoneType:
        return value if value is None else INVALID
    return value if hint is Any or not isinstance(hint, type) or isinstance(value, hint) else INVALID


def words(hint: Any, limits: Range) -> str:
    """Return a description of the allowed values, such as ``a finite number above 0 or 'median'``."""
    names = list(_words(hint, limits))
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def literals(hint: Any) -> list[str]:
    """Return the strings among the literals of a type."""
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return [one for one in inner if isinstance(one, str)]
    return [word for part in inner for word in literals(part)]


def number(value: float) -> str:
    """Return a limit as text that is easy to read."""
    if abs(value) >= 1e9:
        return f"2^{value.bit_length() - 1}" if isinstance(value, int) else f"{value:g}"
    if isinstance(value, int) or value.is_integer():
        return f"{value:,.0f}"
    return f"{value:g}"


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(default, dict | list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def _required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _fitted(item: Field[Any], hints: Mapping[str, Any], value: Any) -> Any:
    return fit(hints[item.name], value, range_of(item))


def _error(item: Field[Any], hint: Any, value: Any) -> TDPFedError:
    return wrong(item.name, value, words(hint, range_of(item)), literals(hint))


def _number(kind: type, value: Any, limits: Range) -> Any:
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        return INVALID
    try:
        return kind(value) if math.isfinite(value) and value in limits else INVALID
    except OverflowError:  # an integer beyond the range of floats
        return INVALID


def _sequence(kind: type, parts: Sequence[Any], value: Any, limits: Range) -> Any:
    if not isinstance(value, list | tuple):
        return INVALID
    found = [fit(parts[0] if parts else Any, one, limits) for one in value]
    return INVALID if any(one is INVALID for one in found) else kind(found)


def _mapping(parts: Sequence[Any], value: Any, limits: Range) -> Any:
    if not isinstance(value, Mapping):
        return INVALID
    inner = parts[1] if parts else Any
    found = {key: fit(inner, one, limits) for key, one in value.items()}
    sound = all(isinstance(key, str) and one is not INVALID for key, one in found.items())
    return found if sound else INVALID


def _words(hint: Any, limits: Range) -> Iterator[str]:
    kind, parts = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        for part in parts:
            yield from _words(part, limits)
    elif kind is Literal:
        yield from map(repr, parts)
    elif kind in (tuple, list):
        yield f"a list of {_many(parts[0] if parts else Any, limits)}"
    elif isinstance(kind, type) and issubclass(kind, Mapping):
        inner = _many(parts[1] if parts else Any, limits)
        yield "a table" if inner == "values" else f"a table of {inner}"
    elif hint in (int, float):
        name, bounds = "a whole number" if hint is int else "a finite number", str(limits)
        yield f"{name} {'of ' if bounds.startswith('at') else ''}{bounds}".strip()
    elif hint is not NoneType:
        yield {bool: "true or false", str: "text", Any: "any value"}.get(hint, getattr(hint, "__name__", str(hint)))


def _many(hint: Any, limits: Range) -> str:
    """Return a description of the items of a list or table."""
    plural = {int: "whole numbers", float: "finite numbers", str: "text", Any: "values"}
    return f"{plural[hint]} {limits}".strip() if hint in plural else words(hint, limits)
