"""Values checked against a pydantic model, and what is wrong with them in this package's words: all of it at once."""

import difflib
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tdpfed.errors import TDPFedError, unknown

S = TypeVar("S", bound=BaseModel)


def checked(section: type[S], values: Any, where: str, errors: list[TDPFedError]) -> S | None:
    """Return a section, or None where something is wrong, which is then added to ``errors``."""
    try:
        return section.model_validate(values)
    except ValidationError as error:
        depth = 1 if where else 2
        # A value that may be one of several kinds has an error for each, under the same key.
        found: dict[tuple[Any, ...], list[Any]] = {}
        for one in error.errors():
            strange = one["type"] == "extra_forbidden"
            found.setdefault(one["loc"] if strange else one["loc"][:depth], []).append(one)
        errors += [_told(section, where, [str(part) for part in path], group) for path, group in found.items()]
        return None


def _told(section: type[BaseModel], where: str, path: list[str], found: list[Any]) -> TDPFedError:
    """Return in one line what pydantic says of a key."""
    if found[0]["type"] == "extra_forbidden":
        *above, name = path
        return unknown(".".join([where, *above]).strip(".") or "section", name, _keys(section, above))
    reasons = " or ".join(one["msg"].removeprefix("Input should be ") for one in found)
    given, near = found[0]["input"], ""
    if isinstance(given, str):
        words = [word for one in found if one["type"] == "literal_error" for word in re.findall("'(.*?)'", one["msg"])]
        near = "".join(f"; did you mean {word!r}?" for word in difflib.get_close_matches(given, words, n=1))
    return TDPFedError(f"{'.'.join([where, *path]).strip('.')}: {given!r} given, must be {reasons}{near}")


def _keys(section: type[BaseModel], above: list[str]) -> list[str]:
    """Return the keys of the section that lies at ``above``."""
    for part in above:
        inner = section.model_fields[part].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            section = inner
    return list(section.model_fields)
