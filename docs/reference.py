"""The reference of the Python names, from their docstrings: what the package exports, for readers on GitHub.

The website replaces each entry, between its two comments, by a longer one that mkdocstrings makes of the same source.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from griffe_settings import Settings

import tdpfed

Thing = Any  # what griffe finds: a function, a class, an attribute
SECTIONS = {
    "Run": ("engine", "runs"),
    "Data": ("data",),
    "What travels, who takes part, how clients step": ("wire", "server", "core.recipe", "core.optimizer"),
    "Methods": ("algorithms", "core"),
    "Compressed models": ("cp",),
    "Errors": ("errors",),
}
"""Headings, and the modules whose names they are for; the longest match counts."""


def reference() -> Iterator[str]:
    """Yield the sections with an entry for every name in ``tdpfed.__all__``."""
    source = Path(tdpfed.__file__).parents[1]
    package = griffe.load("tdpfed", search_paths=[source], extensions=griffe.load_extensions(Settings))
    names = [str(name) for name in package.exports or ()]
    places = {name: section_of(package[name].target_path) for name in names}
    for section in SECTIONS:
        yield f"\n## {section}\n"
        for name in sorted((name for name in names if places[name] == section), key=str.lower):
            yield f"\n<!-- ::: tdpfed.{name} -->\n### {name}\n\n{entry(package[name].final_target)}<!-- / -->\n"


def section_of(path: str) -> str:
    """Return the heading for a name, given where it is defined."""
    module = path.removeprefix("tdpfed.")
    prefixes = [(prefix, title) for title, names in SECTIONS.items() for prefix in names]
    fitting = [(len(prefix), title) for prefix, title in prefixes if f"{module}.".startswith(f"{prefix}.")]
    if not fitting:
        raise SystemExit(f"docs/reference.py: no section for {path}")
    return max(fitting)[1]


def entry(thing: Thing) -> str:
    """Return the signature and the docstring of a function; of a class also its settings and methods."""
    text = plain(thing.docstring.value) + "\n\n" if thing.docstring else ""
    if thing.is_function:
        return f"```py\n{signature(thing)}\n```\n\n{text}"
    if not thing.is_class:
        return f"```py\n{thing.name} = {thing.value}\n```\n\n{text}"
    rows = []
    for name, member in thing.members.items():
        if not name.startswith("_") and not member.is_alias and member.docstring:
            default = "" if member.is_function or getattr(member, "value", None) is None else f" = {member.value}"
            call = f"({', '.join(arguments(member))})" if member.is_function else ""
            first = plain(member.docstring.value).partition("\n\n")[0].replace("\n", " ")
            rows.append(f"- `{name}{call}{default}`: {first}\n")
    return text + ("".join(rows) + "\n" if rows else "")


def signature(function: Thing) -> str:
    """Return a function's signature, with an argument on each line if it is long."""
    given, returns = arguments(function, types=True), f" -> {function.returns}" if function.returns else ""
    line = f"{function.name}({', '.join(given)}){returns}"
    return line if len(line) <= 100 else f"{function.name}(\n    " + ",\n    ".join(given) + f",\n){returns}"


def arguments(function: Thing, *, types: bool = False) -> list[str]:
    """Return the arguments of a function as they are written."""
    found: list[str] = []
    for one in function.parameters:
        if one.name in ("self", "cls"):
            continue
        if one.kind is griffe.ParameterKind.keyword_only and not any(part.startswith("*") for part in found):
            found.append("*")
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(one.kind, "")
        typed = f": {one.annotation}" if types and one.annotation else ""
        default = "" if one.default is None or stars else f" = {one.default}" if typed else f"={one.default}"
        found.append(f"{stars}{one.name}{typed}{default}")
    return found


def plain(text: str) -> str:
    """Return a docstring as Markdown: without roles, and with code in single backticks."""
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
