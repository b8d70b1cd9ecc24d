"""No method is known by name outside ``algorithms/``: the rest of the package asks a method what it can do."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tdpfed.algorithms import ALGORITHMS

ROOT = Path(__file__).parents[1] / "src" / "tdpfed"
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))

NAMES = set(ALGORITHMS)
CLASSES = {method.__name__ for method in ALGORITHMS.values()}
FILES = {method.__module__ for method in ALGORITHMS.values()}

ALLOWED = ("algorithms/", "paper/", "__init__.py")
"""The methods themselves, the paper's experiments with them, and the names the package exports."""


def known(source: str) -> Iterator[str]:
    """Yield where ``source`` knows a built-in method: its module, its class, or its name in a comparison.

    ``Local`` and ``"local"`` are also words for a client's own work and model: the class counts only where it comes
    from ``tdpfed.algorithms``, and names only where something is compared with them or looked up by them.
    """
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                package = name.name.partition(".")[0]
                aliases[name.asname or package] = name.name if name.asname else package
                yield from [name.name] if name.name in FILES else []
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                full = f"{node.module}.{name.name}"
                aliases[name.asname or name.name] = full
                yield from [full] if is_method(full) or full in FILES or node.module in FILES else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_method(dotted(node, aliases)):
            yield dotted(node, aliases)
        elif isinstance(node, ast.Compare):
            yield from words_in(node.left, *node.comparators)
        elif isinstance(node, ast.MatchValue):
            yield from words_in(node.value)
        elif isinstance(node, ast.Subscript):
            yield from words_in(node.slice)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            yield from words_in(*node.args)


def is_method(name: str) -> bool:
    """Whether a dotted name is that of a method's class: ``tdpfed.FedAvg``, ``tdpfed.algorithms.local.Local``."""
    module, _, last = name.rpartition(".")
    return last in CLASSES and (module in ("tdpfed", "tdpfed.algorithms") or module in FILES)


def words_in(*nodes: ast.expr) -> Iterator[str]:
    """Yield the methods' names, and those of their classes, among constants and collections of them."""
    for node in nodes:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from words_in(*node.elts)
        elif isinstance(node, ast.Constant) and node.value in NAMES | CLASSES:
            yield str(node.value)


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


@pytest.mark.parametrize("module", [module for module in MODULES if not module.startswith(ALLOWED)])
def test_a_module_knows_no_method(module: str) -> None:
    assert not list(known((ROOT / module).read_text()))


def test_what_is_allowed_is_needed() -> None:
    for start in ALLOWED:
        assert any(list(known((ROOT / module).read_text())) for module in MODULES if module.startswith(start)), start


@pytest.mark.parametrize(
    "source",
    [
        "if algorithm.name == 'fedavg': pass",
        "if 'local' != method['name']: pass",
        "x = name in ('fedavg_sar', 'local')",
        "x = name not in {'pfedme'}",
        "match name:\n    case 'tdpfed': pass",
        "match name:\n    case 'perfedavg' | 'other': pass",
        "make = ALGORITHMS['tdpfed']",
        "x = type(a).__name__ == 'TDPFed'",
        "x = name.startswith('fedavg')",
        "from tdpfed.algorithms import TDPFed",
        "from tdpfed.algorithms import Local as Alone",
        "from tdpfed import FedAvg",
        "from tdpfed.algorithms.fedavg import anything",
        "from tdpfed.algorithms import pfedme",
        "import tdpfed.algorithms.local",
        "import tdpfed.algorithms.local as alone\nisinstance(a, alone.Local)",
        "import tdpfed\nisinstance(a, tdpfed.FedAvg)",
        "import tdpfed.algorithms\nissubclass(a, (int, tdpfed.algorithms.PFedMe))",
        "from tdpfed import algorithms\nx = type(a) is algorithms.FedAvgSAR",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(known(source))


@pytest.mark.parametrize(
    "source",
    [
        "score('local', theta)",
        "names = {'global': 1, 'local': 2}",
        "algorithm: str = 'tdpfed'",
        "name = table.get('name', 'tdpfed')",
        "from tdpfed.core.local import Local\nisinstance(a, LocalWork)",
        "from tdpfed.algorithms import ALGORITHMS, Algorithm\nisinstance(a, Algorithm)",
        "from tdpfed.algorithms.base import Algorithm",
        "x = local == 'locally'",
        "make = ALGORITHMS[name]",
        "local = runner.local(turn)",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not list(known(source))
