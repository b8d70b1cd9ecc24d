"""Methods of the user's own by name: found, or refused with the reason."""

from pathlib import Path

import pytest

import my_own_method
from tdpfed.algorithms import ALGORITHMS, COMPARED, DEFAULT, find
from tdpfed.errors import TDPFedError, UnknownError


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return my_own_method.write(tmp_path, monkeypatch)


def test_built_in_names_and_own_classes_are_found() -> None:
    assert all(find(name) is method for name, method in ALGORITHMS.items())
    assert {DEFAULT, *COMPARED} <= set(ALGORITHMS)
    method = find(my_own_method.NAME)
    assert (method.name, method.__name__) == ("ditto", "Ditto")
    assert find(my_own_method.NAME) is method
    assert [item.name for item in method.hyper_parameters()][-4:] == ["lam", "bound", "kind", "extra"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedvg", ["unknown 'fedvg'", "did you mean 'fedavg'", "package.module:Class"]),
        (3, ["unknown 3", "fedavg"]),
        ("users_methods:Dito", ["no 'Dito'", "did you mean 'Ditto'"]),
        ("users_methods:Zebra", ["no 'Zebra'"]),
        ("own_methodz:Ditto", ["no module 'own_methodz'", "working directory"]),
        ("users_methods.deep:Ditto", ["no module 'users_methods.deep'"]),
        ("users_methods:Other", ["subclass"]),
        ("users_methods:number", ["int", "subclass"]),
        ("users_methods:Algorithm", ["subclass"]),
        ("users_methods:Abstract", ["abstract", "aggregate", "update"]),
        ("users_methods:Bare", ["lam", "hyper"]),
        ("users_methods:Nameless", ["its own name"]),
        ("users_methods:", ["package.module:Class"]),
        (":Ditto", ["package.module:Class"]),
        ("own methods:Ditto", ["package.module:Class"]),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(name: object, words: list[str]) -> None:
    with pytest.raises(TDPFedError) as error:
        find(name)
    assert (error.value.field, error.value.value) == ("name", name)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert isinstance(error.value, UnknownError) == (":" not in str(name))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def broken(:\n", "SyntaxError"),
        ("import sys\nsys.exit('no')\n", "SystemExit: no"),
    ],
)
def test_a_module_whose_import_fails_says_how(source: str, words: str, module: Path) -> None:
    module.write_text(source)
    with pytest.raises(TDPFedError) as error:
        find(my_own_method.NAME)
    assert "the import of 'users_methods' failed" in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
