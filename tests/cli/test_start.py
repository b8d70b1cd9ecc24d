"""Start-up: PyTorch is imported where it is used and not before; every public name is there all the same."""

import os
import subprocess
import sys

import pytest

import tdpfed


def modules_after(code: str) -> set[str]:
    """The modules a fresh process has loaded after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules, file=sys.stderr)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "code",
    [
        "import tdpfed",
        "import tdpfed.cli",
        "from typer.testing import CliRunner\nfrom tdpfed.cli import app\n"
        "for words in (['--help'], ['run', '--help'], ['--version'], ['data', '--help']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0",
    ],
    ids=["package", "command line", "help"],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert not modules_after(code) & {"torch", "numpy", "sklearn", "safetensors", "plotly", "matplotlib"}


def test_training_needs_little_beside_torch() -> None:
    loaded = modules_after("from tdpfed import TDPFed, make_federation, simulate")
    assert "torch" in loaded
    assert not loaded & {"sklearn", "pydantic", "typer", "rich", "plotly", "matplotlib", "pandas", "pyarrow"}


def test_every_public_name_is_found_and_listed() -> None:
    aliases = {"Entries", "State", "Update"}  # of types
    for name in tdpfed.__all__:
        assert name in aliases or getattr(tdpfed, name).__name__ == name
        assert name in dir(tdpfed)
    done = subprocess.run(
        [sys.executable, "-c", "import tdpfed\nprint(tdpfed.models.build('dnn') is not None, 'core' in dir(tdpfed))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "True True\n"
    with pytest.raises(AttributeError, match="module 'tdpfed' has no attribute 'nothing'"):
        _ = tdpfed.nothing  # type: ignore[attr-defined]


def test_products_are_asked_to_repeat_before_torch_is_loaded() -> None:
    code = "import tdpfed, os, sys; print(os.environ['MKL_CBWR'], 'torch' in sys.modules)"
    env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == "AUTO,STRICT False\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tdpfed", "keys", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: algorithm: unknown 'nonsense'")
