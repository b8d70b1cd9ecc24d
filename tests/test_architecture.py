"""The tree shows the architecture: packages depend on those above them in this list, and on nothing below."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "tdpfed"

ORDER = (
    "errors", "files", "core", "cp", "algorithms", "wire", "server", "models", "data", "fast", "engine", "config",
    "runs", "report", "studies", "paper", "flower", "cli",
)  # fmt: skip
"""From what everything stands on to what stands on everything."""

ONLY_ENGINE = "fast"
"""The package of speed: only the engine imports it, so that nothing else depends on how fast things are made."""

LIGHT = ("pydantic", "typer", "rich", "sklearn", "pooch", "plotly", "matplotlib", "flwr", "pandas")
"""What a method must run without."""


def imports(path: Path, root: Path = SOURCE) -> Iterator[str]:
    """Yield the modules a file imports, by their full names; those that only a type checker reads are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == root.name:
            yield from (f"{root.name}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def edges(root: Path = SOURCE) -> Iterator[tuple[str, str, str]]:
    """Yield each import between parts of the package: the file, its part, and the imported part."""
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        part = place.parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        for module in imports(path, root):
            _, _, rest = module.partition(f"{root.name}.")
            other = rest.partition(".")[0]
            if module.startswith(f"{root.name}.") and other != part and not other.startswith("__"):
                yield str(place), part, other


def wrong(root: Path = SOURCE, order: tuple[str, ...] = ORDER) -> list[str]:
    """Return the imports that point the wrong way."""
    rank = {name: number for number, name in enumerate(order)}
    return [f"{file}: {part} imports {other}" for file, part, other in edges(root) if rank[other] >= rank[part]]


def test_every_package_has_its_place() -> None:
    parts = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert parts - {"__init__", "__main__", "__pycache__", "py.typed"} == set(ORDER)


def test_dependencies_point_one_way() -> None:
    assert not wrong()


def test_only_the_engine_knows_of_speed() -> None:
    assert {part for _, part, other in edges() if other == ONLY_ENGINE} == {"engine"}


@pytest.mark.parametrize("package", ["core", "cp", "algorithms", "wire", "server"])
def test_methods_need_no_heavy_package(package: str) -> None:
    for path in (SOURCE / package).rglob("*.py"):
        assert not {module.partition(".")[0] for module in imports(path)} & set(LIGHT), path


def test_the_check_sees_a_wrong_direction(tmp_path: Path) -> None:
    root = tmp_path / "demo"
    for name, text in {"low": "from demo.high import x\n", "high": "import demo.low.a\nfrom demo import low\n"}.items():
        (root / name).mkdir(parents=True)
        (root / name / "a.py").write_text(text, encoding="utf-8")
    assert wrong(root, ("low", "high")) == ["low/a.py: low imports high"]
