"""What goes to a package index: a wheel and a source distribution that hold what they should, and nothing else."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source distribution has no list of files")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return {path.suffix: path for path in folder.iterdir()}


def files(*folders: str) -> set[str]:
    """Return the files of the repository, those not committed yet included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


@needs_git
def test_a_wheel_is_the_package_and_its_license(built: dict[str, Path]) -> None:
    names = zipfile.ZipFile(built[".whl"]).namelist()
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == {name.removeprefix("src/") for name in files("src/tdpfed")}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@needs_git
def test_a_source_distribution_has_code_tests_and_docs_but_no_results(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("src", "tests", "docs", "examples", "benchmarks")
    assert names - files() == {"PKG-INFO"}
    assert names > files(*folders) | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "mkdocs.yml"}
    assert not [name for name in names if name.startswith("results/")]
    assert built[".gz"].stat().st_size < 3e6


def test_an_index_would_take_them(built: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2
