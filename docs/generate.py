"""Write what the code and the result files know best into the pages.

``python docs/generate.py`` renews the reference of every configuration key, every command and every Python name, below
the mark in ``configuration.md``, ``command-line.md`` and ``python.md``, the tables of ``what-works.md``, the measured
numbers of README, docs and results (``figures.py``), and the page of the GPU benchmark (``gpu_table.py``), if there is
a record of it. ``python docs/generate.py --check`` changes nothing and exits with 1 if a page is out of date.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import figures
import gpu_table
import typer
import works
from reference import reference
from sources import FigureError, Sources

from tdpfed.algorithms import ALGORITHMS, DEFAULT
from tdpfed.cli import app
from tdpfed.config.keys import section_keys
from tdpfed.config.sections import ALGORITHM, SECTIONS

SEARCHED, END = "<!-- Made by docs/generate.py: the keys that methods declare with search= -->\n", "<!-- end -->\n"
"""Between these lines of ``tuning.md`` is the table of ranges that tuning searches."""

MARK = "<!-- Everything below is made by docs/generate.py: change the code and run it again. -->\n"


def configuration() -> Iterator[str]:
    """Yield the sections of the configuration with their keys; in ``algorithm`` a table for each method."""
    for section, owner in SECTIONS.items():
        if section == ALGORITHM:
            yield f"\n## algorithm\n\nThe method, and its hyper-parameters.\n\n{_keys(section, DEFAULT, slice(1))}"
            for name in ALGORITHMS:
                table = _keys(section, name, slice(1, None))
                yield f"\n### {name}\n\nWhat it does: [{name}](algorithms/{name}.md).\n\n{table}"
            continue
        yield f"\n## {section}\n\n{owner.__doc__}\n\n{_keys(section, DEFAULT)}"


def command_line(command: Any, path: str = "tdpfed") -> Iterator[str]:
    """Yield the commands with their arguments and options, those of a group one by one."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from command_line(inner, f"{path} {name}")
    if not hasattr(command, "commands"):
        context = typer.Context(command, info_name=path)
        arguments = [(x.metavar, x.help or "") for x in command.params if x.param_type_name == "argument"]
        options = [x.get_help_record(context) for x in command.params if x.param_type_name == "option" and not x.hidden]
        usage = " ".join([path, *(name for name, _ in arguments), "[OPTIONS]"])
        plain = [(name, help_.replace("\\[", "[")) for name, help_ in options]  # some versions of typer mark brackets
        rows = [(re.sub("<?(integer|int|float)>?$", "NUMBER", name, flags=re.I), help_) for name, help_ in plain]
        yield f"\n## {path}\n\n{command.help}\n\n```text\n{usage}\n```\n\n{_table('option', [*arguments, *rows])}"


def what_works() -> Iterator[str]:
    """Yield the tables of what can be trained, each row with the tests that show it."""
    for table in works.tables():
        yield f"\n## {table.title}\n\n| {table.first} | works | tests |\n| --- | --- | --- |\n"
        for row in table.rows:
            yield f"| {row.what} | {row.how} | {', '.join(f'`{name}`' for name in row.short)} |\n"


def searched() -> str:
    """Return a table row for each method that declares ranges for tuning."""
    lines = []
    for name, method in ALGORITHMS.items():
        found = {item.name: item.metadata.get("search") for item in method.hyper_parameters()}
        ranges = ", ".join(f"`{key}` {low:g} to {high:g}" for key, (low, high) in _given(found))
        lines += [f"| [{name}](algorithms/{name}.md) | {ranges} |\n"] if ranges else []
    return "".join(lines)


def _given(found: dict[str, Any]) -> list[tuple[str, tuple[float, float]]]:
    return [(key, limits) for key, limits in found.items() if limits]


def _keys(section: str, algorithm: str, which: slice = slice(None)) -> str:
    found = section_keys(section, algorithm, "`{}`")[which]
    return _table("key", [(key.name, key.allowed, key.default, key.meaning) for key in found])


def _table(first: str, rows: Sequence[Sequence[Any]]) -> str:
    titles = [first, "allowed", "default", "meaning"] if first == "key" else [first, "meaning"]
    lines = [titles, ["---"] * len(titles)]
    for name, *middle, meaning in rows:
        if middle:
            middle[1] = "not set" if middle[1] is None else f"`{json.dumps(middle[1])}`"
        lines.append([f"`{name}`", *middle, re.sub(r"([*<$])", r"\\\1", " ".join(meaning.split()))])
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def pages() -> dict[Path, str]:
    """Return each page as it should be: its own text, what is generated below a mark, and its numbers renewed."""
    made = {"configuration.md": configuration(), "command-line.md": command_line(typer.main.get_command(app))}
    made |= {"python.md": reference(), "what-works.md": what_works()}
    paths = {Path(__file__).parent / name: parts for name, parts in made.items()}
    texts = {path: path.read_text(encoding="utf-8").partition(MARK)[0] + MARK + "".join(paths[path]) for path in paths}
    tuning = Path(__file__).parent / "tuning.md"
    before, mark, rest = tuning.read_text(encoding="utf-8").partition(SEARCHED)
    texts[tuning] = before + mark + searched() + END + rest.partition(END)[2]
    root = Path(__file__).parents[1]
    sources = Sources(root)
    measured = root / gpu_table.SOURCE
    if measured.exists():
        texts[root / gpu_table.PAGE] = gpu_table.page(json.loads(measured.read_text(encoding="utf-8")))
    for path in figures.pages(root):
        try:
            text = texts[path] if path in texts else path.read_text(encoding="utf-8")
            texts[path] = figures.filled(text, sources)
        except FigureError as error:
            raise SystemExit(f"{path.relative_to(root)}: {error}") from error
    return texts


def main(arguments: Sequence[str]) -> int:
    """Renew the pages, or with ``--check`` name those that are out of date; return the exit status."""
    found = pages().items()
    changed = {path: text for path, text in found if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in changed.items():
        name = path.relative_to(Path(__file__).parents[1])
        sys.stdout.write(f"{name}: {'out of date' if '--check' in arguments else 'written'}\n")
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    return int("--check" in arguments and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
