"""The code's own rules: module size, and what may not appear in the package. `.ci/run` runs ruff and mypy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "src").rglob("*.py"))

FORBIDDEN = {
    "pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve",  # execute code from files
    "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "numpy.load", "eval", "exec",
    "torch.manual_seed", "torch.seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.set_rng_state",
    "random.seed", "numpy.random.seed", "numpy.random.set_state",  # global randomness
    "numpy.random.rand", "numpy.random.randn", "numpy.random.randint", "numpy.random.permutation",
    "numpy.random.shuffle", "numpy.random.choice", "numpy.random.random", "numpy.random.normal",
    "random.random", "random.randint", "random.shuffle", "random.choice", "random.sample",
}  # fmt: skip
ALLOWED_WITH = {"numpy.load": "allow_pickle"}  # np.load(..., allow_pickle=False)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_stay_short(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= 350


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_loads_code_or_touches_global_randomness(module: Path) -> None:
    assert not list(forbidden(module.read_text()))


def forbidden(source: str) -> Iterator[str]:
    """Yield the forbidden names that ``source`` imports or reads, by their full dotted name."""
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
            yield from (a.name for a in node.names if a.name.partition(".")[0] in FORBIDDEN)
        elif isinstance(node, ast.ImportFrom):
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            yield from (f"{node.module}.{a.name}" for a in node.names if f"{node.module}.{a.name}" in FORBIDDEN)
            yield from ([node.module] if node.module in FORBIDDEN else [])
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield "allow_pickle"
        elif isinstance(node, ast.keyword) and node.arg == "weights_only":
            yield "weights_only"
        elif isinstance(node, ast.Attribute | ast.Name):
            name = dotted(node, aliases)
            if name in FORBIDDEN and not (
                name in ALLOWED_WITH
                and id(node) in calls
                and any(keyword.arg == ALLOWED_WITH[name] for keyword in calls[id(node)].keywords)
            ):
                yield name


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch as t\nt.manual_seed(0)",
        "import numpy as np\nnp.random.seed(0)",
        "import numpy as np\nnp.random.rand(3)",
        "from numpy import random\nrandom.shuffle([])",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load(f)",
        "import random\nrandom.seed(0)",
        "eval('1')",
    ],
)
def test_the_rule_sees(source: str) -> None:
    assert list(forbidden(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.default_generator.manual_seed(0)",
        "import torch\ntorch.Generator().manual_seed(0)",
        "import numpy as np\nnp.random.default_rng(0).permutation(3)",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from random import Random",
        "model.eval()",
    ],
)
def test_the_rule_lets_pass(source: str) -> None:
    assert not list(forbidden(source))
