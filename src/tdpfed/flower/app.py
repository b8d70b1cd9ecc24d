"""Create a new Flower app on disk: the template files with a name and a configuration filled in."""

import re
from collections.abc import Mapping
from importlib import resources
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any

from tdpfed.algorithms import ALGORITHMS, DEFAULT
from tdpfed.config import toml_value
from tdpfed.config.sections import SECTIONS
from tdpfed.core.setting import default_of, settings_of
from tdpfed.errors import TDPFedError
from tdpfed.files import write_folder
from tdpfed.flower.settings import REFUSED, Flower

NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
LEFT_OUT = {key for key, _, _ in REFUSED} | {"run.runner", "run.chunk", "flower.secure_aggregation"}
DEPLOYED: dict[str, Any] = {"run.rounds": 10, "run.evaluate_every": 5, "checkpoint.every": 1, "flower.nodes": 3}
"""Where a new app differs from the defaults of a simulation: evaluations cost messages, and a lost round is costly."""

IGNORED = "__pycache__/\nruns/\nkeys/\n*.key\n*.npz\n"
"""Patterns of files that Flower leaves out when it sends the folder to nodes."""

Tables = Mapping[str, Mapping[str, Any]]


def init_app(folder: Path, tables: Tables | None = None) -> list[Path]:
    """Write a new app, named after its folder, into a new or empty folder; return its files."""
    folder = folder.expanduser().resolve()
    if not NAME.fullmatch(folder.name):
        raise TDPFedError(
            f"DIR: folder name {folder.name!r} given, which names the app, must be letters, digits and hyphens, "
            "begin with a letter and have at most 32 characters"
        )
    package = folder.name.replace("-", "_").lower()
    _check_package(folder.name, package)
    words = {"NAME": folder.name, "PACKAGE": package, "CONFIG": _config(tables or default_tables())}
    source = resources.files("tdpfed.flower") / "template"
    files = {".gitignore": IGNORED, f"{package}/__init__.py": f'"""The app {folder.name}."""\n'}
    for name in ("pyproject.toml", "README.md", "task.py", "client_app.py", "server_app.py"):
        text = (source / f"{name}.in").read_text(encoding="utf-8")
        place = f"{package}/{name}" if name.endswith(".py") else name
        files[place] = re.sub(r"@([A-Z]+)@", lambda match: words[match[1]], text)
    return write_folder(folder, {place: text.encode() for place, text in files.items()}, field="DIR")


def _check_package(name: str, package: str) -> None:
    """Reject a name that is not a valid package name, or that would shadow an installed module."""
    if iskeyword(package):
        raise TDPFedError(f"DIR: folder name {name!r} given, which names the app, must not be a Python keyword")
    found = find_spec(package)
    if found is not None and found.origin is not None:  # None: only a folder in the working directory
        raise TDPFedError(
            f"DIR: folder name {name!r} given, which names the app, must not be that of a module: {package!r} is one"
        )


def default_tables() -> dict[str, dict[str, Any]]:
    """Return every key of a deployment with its value in a new app; each method has a separate table."""
    sections = {
        name: SECTIONS[name] for name in ("run", "optimizer", "participation", "wire", "server", "robust", "checkpoint")
    }
    tables: dict[str, dict[str, Any]] = {"algorithm": {"name": DEFAULT}}
    for section, owner in (sections | {"flower": Flower}).items():
        tables[section] = {
            key: DEPLOYED.get(f"{section}.{key}", value)
            for key, value in _defaults(owner).items()
            if f"{section}.{key}" not in LEFT_OUT and not key.startswith("attack")
        }
    return tables | {f"algorithms.{name}": _defaults(method) for name, method in ALGORITHMS.items()}


def _defaults(owner: type) -> dict[str, Any]:
    """Return the settings of a class that have a default."""
    found = {item.name: default_of(item) for item in settings_of(owner)}
    return {name: default for name, default in found.items() if default is not None}


def _config(tables: Tables) -> str:
    lines: list[str] = []
    for section, values in tables.items():
        lines.append(f"\n[tool.flwr.app.config.{section}]")
        lines += [f"{key} = {single(value)}" for key, value in values.items()]
    return "\n".join(lines).lstrip()


def single(value: Any) -> str:
    """Return a value in the form that Flower accepts: lists and tables as text."""
    return toml_value(toml_value(value)) if isinstance(value, list | tuple | dict) else toml_value(value)
