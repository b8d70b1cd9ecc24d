"""Checksums inside JSON text: an object whose last item is the SHA-256 sum of the rest, and files of linked lines.

Each line of a file also holds the sum of the line before it, so that a line that was changed, removed or moved is
noticed, and the last sum stands for the whole file. Sums notice damage and edits of one file, not a forger who
recomputes all of them.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SEAL, PREVIOUS = "sha256", "previous"
_SEALED = re.compile(r'(.+),\s*"sha256": "([0-9a-f]{64})"\s*}\s*', re.DOTALL)
_LINK = re.compile(r'"previous": "((?:[0-9a-f]{64})?)", "sha256": "([0-9a-f]{64})"}')
_LINK_CHARACTERS = 200
"""More than the length of the two sums at the end of a line."""


@dataclass(frozen=True)
class Tail:
    """The end of a file of linked lines: the number of lines, and the sum of the last; empty without a sum."""

    lines: int = 0
    sha256: str = ""


def sealed(text: str) -> str:
    """Return the text of a JSON object, which is not empty, with its own sum appended as the last item."""
    inside = text.rstrip().removesuffix("}").rstrip()
    space, end = ("\n  ", "\n}\n") if "\n" in inside else (" ", "}")
    return f'{inside},{space}"{SEAL}": "{_sum(inside + "}")}"{end}'


def is_sealed(text: str) -> bool | None:
    """Whether the sum at the end of a JSON object is right; None if it has none."""
    found = _SEALED.fullmatch(text)
    return None if found is None else _sum(found[1] + "}") == found[2]


def linked(values: Mapping[str, Any], tail: Tail) -> tuple[str, Tail]:
    """Return a line that follows ``tail``, and the new tail."""
    text = sealed(json.dumps({**values, PREVIOUS: tail.sha256}))
    return text, Tail(tail.lines + 1, link_of(text)[1])


def link_of(text: str) -> tuple[str, str]:
    """Return the sums at the end of a line: of the line before it, and its own; both empty if it has none."""
    found = _LINK.search(text[-_LINK_CHARACTERS:])
    return (found[1], found[2]) if found else ("", "")


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file with their numbers; the last line may be incomplete."""
    yield from enumerate(text.removesuffix("\n").split("\n") if text else (), 1)


class Chain:
    """Follows the sums of a file's lines; :meth:`gap` says what is wrong before a line that is itself sound."""

    def __init__(self) -> None:
        self.tail = Tail()

    def gap(self, text: str) -> str | None:
        """Add a line, and say if it does not follow the line before it."""
        before, (previous, own) = self.tail, link_of(text)
        self.tail = Tail(before.lines + 1, own)
        if not own:
            return "has no checksum, unlike the lines before it" if before.sha256 else None
        if previous == before.sha256:
            return None
        return "does not follow the line before it: lines are missing, or in another order"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
