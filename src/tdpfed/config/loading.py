"""Configuration files: TOML from a preset or a path, with single values overridden and everything checked.

An ``[algorithm]`` table names the method and sets its hyper-parameters. A file may also contain ``[algorithms.NAME]``
tables: settings that apply only if that method is chosen, so that one file can be used for several methods. A table
``[algorithms.NAME.server]`` holds settings of the section ``server`` in the same way.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from tdpfed.algorithms import DEFAULT, find
from tdpfed.config.sections import ALGORITHM, SECTIONS, Config
from tdpfed.core.setting import build, read
from tdpfed.engine.checks import check_numbers
from tdpfed.errors import TDPFedError, each, raise_all, unknown, wrong
from tdpfed.files import read_file

CONFIG_BYTES = 1 << 20
"""Most bytes of a configuration file."""
MOST_DEPTH, MOST_KEY = 16, 100
"""Most tables or lists in each other, and most characters of a key that an error shows."""

TABLES = "algorithms"
"""The table of tables ``[algorithms.NAME]``."""

SERVER = "server"
"""The section whose settings may also depend on the method."""

LENGTHS = ("tau", "epochs")
"""The two ways to say how long clients train in a round."""

QUOTED = r"\"[^\"]*\"|'[^']*'"
PART = re.compile(rf"{QUOTED}|[^.]+")
METHOD = re.compile(rf"{QUOTED}|[^.:]+(?:\.[^.:]+)*:[^.]+|[^.]+")
"""A method's name as part of a key: the dots of a user's own module belong to it."""


def presets() -> list[str]:
    """Return the names of the presets."""
    folder = resources.files("tdpfed.config") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """Return the text of a preset."""
    if name not in presets():
        raise unknown("preset", name, presets())
    return (resources.files("tdpfed.config") / "presets" / f"{name}.toml").read_text(encoding="utf-8")


def load_config(source: str = "digits", overrides: Sequence[str] | None = None) -> Config:
    """Read a preset by name or a TOML file by path, apply ``section.key=value`` overrides, and check it all."""
    return parse_config(raw_config(source, overrides))


def raw_config(source: str, overrides: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values of a preset or file with overrides applied, not checked."""
    values = overridden(_read(source), overrides)
    if source in presets() and values["data"].get("name") != _read(source)["data"]["name"]:
        # A preset's data settings do not apply to another data set.
        values = overridden({**_read(source), "data": {}}, overrides)
    elif source in presets() and values["data"].get("partition") != _read(source)["data"].get("partition"):
        data = {
            key: value for key, value in _read(source)["data"].items() if key != "per_client"
        }  # nor to another partition
        values = overridden({**_read(source), "data": data}, overrides)
    return values


def parse_config(values: Mapping[str, Any]) -> Config:
    """Check plain nested values, fill in every default, and return the resolved configuration.

    All errors are reported together.
    """
    errors: list[TDPFedError] = []
    config = checked_config(values, errors)
    raise_all(errors)
    assert config is not None
    return config


def checked_config(values: Mapping[str, Any], errors: list[TDPFedError]) -> Config | None:
    """Return the configuration, or None if it has errors, which are added to ``errors``."""
    before = len(errors)
    errors += _strange(values)
    if len(errors) > before:
        return None
    own_server: dict[str, Any] = {}
    made = _method(values, own_server, errors)
    errors += [unknown("section", name, SECTIONS) for name in values if name not in (*SECTIONS, TABLES)]
    for name, section in SECTIONS.items():
        if name != ALGORITHM:
            given = values.get(name, {})
            if name == SERVER and own_server and isinstance(given, Mapping):
                given = {**own_server, **given}
            made[name] = build(section, given, name, errors)
    for name, settings in made.items():
        if name != "method_name" and settings is not None:
            try:
                check_numbers(settings)
            except TDPFedError as error:
                errors += each(error.within(ALGORITHM if name == "method" else name))
    return None if len(errors) > before else Config(**made, given=frozenset(flat(values)))


def own_code(values: Mapping[str, Any]) -> list[str]:
    """Return the names ``module:name`` in unchecked values: the user's own code, which checking imports."""
    tables = [values.get(section) for section in (ALGORITHM, "model", TABLES)]
    algorithm, model, methods = (table if isinstance(table, Mapping) else {} for table in tables)
    names = (algorithm.get("name"), model.get("name"), *methods)
    return [name for name in names if isinstance(name, str) and ":" in name]


def flat(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by full keys, such as ``algorithm.tau`` and ``algorithms.fedavg.tau``; values stay as is."""
    found: dict[str, Any] = {}
    for section, table in tables.items():
        if not isinstance(table, Mapping):
            found[section] = table
            continue
        inner = flat(table) if section == TABLES else table
        found |= {f"{section}.{key}": value for key, value in inner.items()}
    return found


def put(values: dict[str, Any], key: str, value: Any, whose: str) -> None:
    """Set a full key in nested values; ``whose`` is the origin that an error names, such as ``--set``."""
    *sections, name = _parts(key)
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise TDPFedError(f"{key!r} is inside a single value, must be section.key=value", field=whose)
    values[name] = value


def take_back(values: dict[str, Any], key: str) -> None:
    """Remove a full key from nested values, so that its default holds."""
    *sections, name = _parts(key)
    table: Any = values
    for section in sections:
        table = table.get(section) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(name, None)


def value_of(text: str) -> Any:
    """Parse a value written as TOML; a bare word is a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except TDPFedError:
        return text.strip()


MOST_PARTS = 100
"""Most parts of a dotted key: Python's parser takes memory and time for the square of their number."""

_TOKEN = re.compile(
    r"""
    \#[^\n]*+ | \"{3}(?:[^"\\]|\\.|"{1,2}(?!"))*+(?:"{3,5}|\Z) | '{3}(?:[^']|'{1,2}(?!'))*+(?:'{3,5}|\Z)
    | (?P<part>"(?:[^"\\\n]|\\[^\n])*+"? | '[^'\n]*+'? | [\w-]++)
    | (?P<dot>\.) | (?P<gap>[ \t]++) | .
    """,
    re.DOTALL | re.VERBOSE,
)
"""Comments, texts of several lines, parts of keys (and one-line texts), dots, blanks; and any other character."""


def _longest_key(text: str) -> int:
    """Return the most parts that a dotted key in a TOML file has, in time that grows with the text only."""
    most = parts = 0
    after_dot = False
    for token in _TOKEN.finditer(text) if text.count(".") >= MOST_PARTS else ():
        kind = token.lastgroup
        if kind == "part":
            parts = parts + 1 if after_dot else 1
            most = max(most, parts)
        elif kind not in ("dot", "gap"):
            parts = 0
        after_dot = parts > 0 if kind == "dot" else after_dot and kind == "gap"
    return most


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML; whatever is wrong with it, also depth and length of numbers, is a :class:`TDPFedError`."""
    if _longest_key(text) > MOST_PARTS:
        raise TDPFedError(f"a key of more than {MOST_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TDPFedError("nested too deeply") from None
    except ValueError as error:  # also an integer of thousands of digits
        raise TDPFedError(" ".join(str(error).split())) from None


def to_toml(config: Config) -> str:
    """Return the resolved configuration as TOML; keys without a value are omitted."""
    lines: list[str] = []
    for section, values in config.as_dict().items():
        given = {key: value for key, value in values.items() if value is not None}
        lines += [f"[{section}]", *(f"{key} = {toml_value(value)}" for key, value in given.items()), ""]
    return "\n".join(lines)


def toml_value(value: Any) -> str:
    """Return a value as TOML on one line."""
    if isinstance(value, Mapping):
        inner = ", ".join(f"{toml_value(key)} = {toml_value(item)}" for key, item in value.items() if item is not None)
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    # The one character that TOML escapes and JSON does not.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _strange(values: Mapping[str, Any]) -> Iterator[TDPFedError]:
    """Yield errors for values that no setting has: dates, tables in tables without end, integers of many digits."""
    left: list[tuple[str, Any, int]] = [(str(key), value, 1) for key, value in values.items()]
    while left:
        key, value, depth = left.pop()
        if depth > MOST_DEPTH:
            yield TDPFedError(f"nested more than {MOST_DEPTH} deep", field=key[:MOST_KEY])
        elif isinstance(value, Mapping):
            left += [(f"{key}.{name}", inner, depth + 1) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(key, inner, depth + 1) for inner in value]
        elif isinstance(value, str):
            if any("\ud800" <= letter <= "\udfff" for letter in value):
                yield wrong(key[:MOST_KEY], value, "text that can be written as UTF-8")
        elif isinstance(value, int):
            if value.bit_length() > 64:
                yield wrong(key[:MOST_KEY], value, "a number below 2^64")
        elif value is not None and not (isinstance(value, float) and math.isfinite(value)):
            yield wrong(key[:MOST_KEY], value, "a finite number, text, true or false, a list or a table")


def _method(values: Mapping[str, Any], server: dict[str, Any], errors: list[TDPFedError]) -> dict[str, Any]:
    """Return the method's name and the method; nothing if it cannot be found. Its ``server`` settings are added."""
    given, tables = values.get(ALGORITHM, {}), values.get(TABLES, {})
    name: Any = given.get("name", DEFAULT) if isinstance(given, Mapping) else DEFAULT
    hyper: dict[str, Any] = {}
    if not isinstance(given, Mapping):
        errors.append(wrong(ALGORITHM, given, "a table with a name and hyper-parameters"))
    else:
        hyper = _one_length({key: value for key, value in given.items() if key != "name"}, ALGORITHM, errors)
    if not isinstance(tables, Mapping):
        errors.append(wrong(TABLES, tables, "tables of hyper-parameters by method"))
        tables = {}
    for other, table in tables.items():
        try:
            method = find(other)
        except TDPFedError as error:
            if other != name:  # the chosen one is reported below
                errors.append(error.at(TABLES))
            continue
        where, own = f"{TABLES}.{other}", table
        if isinstance(table, Mapping) and SERVER in table:
            beside = read(SECTIONS[SERVER], table[SERVER], f"{where}.{SERVER}", errors)
            server |= beside if other == name else {}
            own = {key: value for key, value in table.items() if key != SERVER}
        own = _one_length(read(method, own, where, errors), where, errors)
        if other == name:
            replaced = LENGTHS if any(hyper.get(key) is not None for key in LENGTHS) else ()
            hyper = {**{key: value for key, value in own.items() if key not in replaced}, **hyper}
    try:
        return {"method_name": name, "method": build(find(name), hyper, ALGORITHM, errors)}
    except TDPFedError as error:
        errors.append(error.within(ALGORITHM))
        return {}


def _one_length(table: dict[str, Any], where: str, errors: list[TDPFedError]) -> dict[str, Any]:
    """Return a table of hyper-parameters that says only once how long clients train; twice is an error."""
    if any(table.get(key) is None for key in LENGTHS):
        return table
    tau, epochs = (table[key] for key in LENGTHS)
    errors.append(wrong(f"{where}.epochs", epochs, f"left out if tau is given (here {tau!r}): one of the two"))
    return {key: value for key, value in table.items() if key != "tau"}


def _read(source: str) -> dict[str, Any]:
    names = presets()
    if source in names:
        return tomllib.loads(preset_text(source))
    try:
        path = Path(source)
        text = read_file(path, most=CONFIG_BYTES).decode() if path.suffix == ".toml" else ""
    except OSError as error:
        raise TDPFedError(f"cannot read {source!r} ({error.strerror})", field="configuration") from None
    except ValueError as error:  # not UTF-8, or a name with a zero byte
        raise TDPFedError(f"{source!r} is not valid TOML ({error})", field="configuration") from None
    if path.suffix != ".toml":
        raise unknown("preset", source, [*names, "a path ending in .toml"])
    try:
        return parse_toml(text)
    except TDPFedError as error:
        raise TDPFedError(f"{source!r} is not valid TOML ({error})", field="configuration") from None


def overridden(values: dict[str, Any], overrides: Sequence[str] | None) -> dict[str, Any]:
    """Return nested values with ``section.key=value`` overrides applied, in place."""
    errors: list[TDPFedError] = []
    for text in overrides or []:
        key, equals, raw = text.partition("=")
        try:
            if not equals or len(list(_parts(key))) < 2:
                raise wrong("--set", text, "section.key=value, as in run.rounds=60")
            if raw.strip(" "):
                put(values, key.strip(), value_of(raw), "--set")
            else:
                take_back(values, key.strip())
        except TDPFedError as error:
            errors.append(error)
    raise_all(errors)
    return values


def _parts(key: str) -> list[str]:
    """Return the parts of a full key; none if one is empty. Quotes and a module's dots do not separate parts."""
    section, dot, rest = key.strip().partition(".")
    if section == TABLES and dot:
        name = METHOD.match(rest)
        found = [section, *([name[0], *_split(rest[name.end() + 1 :])] if name else [])]
    else:
        found = _split(key.strip())
    whole = ".".join(found) == key.strip() and len(found) > 0
    return [part[1:-1] if part[:1] in "\"'" else part for part in found] if whole else []


def _split(key: str) -> list[str]:
    return PART.findall(key)
