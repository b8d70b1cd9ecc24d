"""Fill the measured numbers of README, docs and results pages from the files under results and benchmarks/results.

A number stands between two comments that GitHub hides, ``<!--=KEY-->99.05 ± 0.08<!--/-->``, and a table between the
same two on lines of their own. A key is a path, ``SOURCE/NAME/.../NAME``, and may end in ``:DECIMALS`` (2 if not
given). ``KEY - KEY`` is a difference. The sources:

- a folder of results: ``mnist/RUN/QUANTITY`` for the paper's experiments, ``mnist-s/ROW/COLUMN/QUANTITY`` for a study
  of rows and columns, ``settings/SETTING/METHOD/QUANTITY``, ``mnist-paper-60-rounds/METHOD/QUANTITY``;
- a file of benchmarks/results: ``flower/seconds_per_round``, the path inside the JSON file;
- ``curve/FOLDER/RUN/QUANTITY[/ROUND]``: ``at``, ``late`` or ``best`` accuracy of packed runs, up to a round;
- another function of ``derived.py``, see ``FUNCTIONS`` there.

Accuracies are in percent. A mean with its deviation is ``mean ± sd``; ``/mean`` takes the mean alone.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from derived import FUNCTIONS
from sources import FigureError, Sources, as_text, walk

MARK = re.compile(r"<!--=(.+?)-->(.*?)<!--/-->", re.DOTALL)


def value_of(key: str, sources: Sources) -> str:
    """Return the text that a key stands for."""
    path, _, decimals = key.partition(":")
    try:
        found = [_value(one, sources) for one in path.split(" - ")]
        result = found[0] if len(found) == 1 else found[0] - found[1]
        return as_text(result, int(decimals or 2))
    except (KeyError, IndexError, TypeError, ValueError, StopIteration) as error:
        raise FigureError(f"{key!r}: no such figure ({error})") from error


def _value(path: str, sources: Sources) -> Any:
    first, *rest = path.split("/")
    if first not in FUNCTIONS:
        return walk(sources.tree(first), rest)
    part = [rest.pop()] if rest[-1:] == ["mean"] else []
    return walk(FUNCTIONS[first](sources, *rest), part)


def filled(text: str, sources: Sources) -> str:
    """Return a page with every number between markers as its key says."""
    if len(MARK.findall(text)) != text.count("<!--=") or text.count("<!--=") != text.count("<!--/-->"):
        raise FigureError("a marker is not closed")

    def fill(found: re.Match[str]) -> str:
        value = value_of(found[1], sources)
        if "\n" in value:
            return f"<!--={found[1]}-->\n{value}\n<!--/-->"
        if not text[text.rfind("\n", 0, found.start()) + 1 : found.start()].strip():
            raise FigureError(f"{found[1]!r}: a comment at the start of a line ends the paragraph before it")
        same = value.split() == found[2].split()  # a line may be broken between a mean and its deviation
        return f"<!--={found[1]}-->{found[2] if same else value}<!--/-->"

    return MARK.sub(fill, text)


def pages(root: Path) -> Iterator[Path]:
    """Yield the pages that may hold figures."""
    yield from (path for path in (root / "README.md", root / "CONTRIBUTING.md") if path.is_file())
    for folder in ("docs", "results"):
        yield from sorted((root / folder).rglob("*.md"))
    yield from sorted((root / "results").glob("*/study.toml"))  # whose text is part of a page
