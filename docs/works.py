"""What can be trained, and the tests that show it: the content of ``what-works.toml``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """Something that people train, whether it works, and the tests that show it."""

    what: str
    how: str
    tests: tuple[str, ...]  # as pytest names them

    @property
    def short(self) -> list[str]:
        """The files of the tests, with the cases that they are run for."""
        found: dict[str, list[str]] = {}
        for test in self.tests:
            file, _, rest = test.partition("::")
            found.setdefault(file, []).append(rest)
        return list(found)


@dataclass(frozen=True)
class Table:
    """Rows under one heading."""

    title: str
    first: str  # heading of the first column
    rows: tuple[Row, ...]


def tables() -> list[Table]:
    """Return the tables; a test's name may begin with a shorthand for what several have in common."""
    found = tomllib.loads(Path(__file__).with_name("what-works.toml").read_text(encoding="utf-8"))

    def whole(test: str) -> str:
        name, bracket, case = test.partition("[")
        return f"{found.get(name, name)}{bracket}{case}"

    return [
        Table(
            one["title"],
            one["first"],
            tuple(Row(what, how, tuple(map(whole, tests))) for what, how, *tests in one["rows"]),
        )
        for one in found["tables"]
    ]
